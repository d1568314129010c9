// Many query rows, bf16, heads of 128, 192 (values of 128) and 256 columns.
#include "attn_prefill.cuh"

ATTN_PREFILL(attn_prefill_128_bf16_r64, 4, 1, 128, 0, 128, 64, true)
ATTN_PREFILL(attn_prefill_128_bf16_r128, 8, 1, 128, 0, 128, 64, true)
ATTN_PREFILL(attn_prefill_128_bf16_r128w, 4, 2, 128, 0, 128, 32, true)
ATTN_PREFILL(attn_prefill_192_bf16_r64, 4, 1, 64, 128, 128, 64, true)
ATTN_PREFILL(attn_prefill_192_bf16_r128, 8, 1, 64, 128, 128, 64, true)
ATTN_PREFILL(attn_prefill_192_bf16_r128w, 4, 2, 64, 128, 128, 32, true)
ATTN_PREFILL(attn_prefill_256_bf16_r64, 4, 1, 256, 0, 256, 32, true)
ATTN_PREFILL(attn_prefill_256_bf16_r128, 8, 1, 256, 0, 256, 32, true)
