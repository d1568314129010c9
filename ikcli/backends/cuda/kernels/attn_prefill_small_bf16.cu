// Many query rows, bf16, heads of 64, 80 and 96 columns.
#include "attn_prefill.cuh"

ATTN_PREFILL(attn_prefill_64_bf16_r64, 4, 1, 64, 0, 64, 64, true)
ATTN_PREFILL(attn_prefill_64_bf16_r128, 8, 1, 64, 0, 64, 64, true)
ATTN_PREFILL(attn_prefill_64_bf16_r128w, 4, 2, 64, 0, 64, 32, true)
ATTN_PREFILL(attn_prefill_80_bf16_r64, 4, 1, 80, 0, 80, 64, true)
ATTN_PREFILL(attn_prefill_80_bf16_r128, 8, 1, 80, 0, 80, 64, true)
ATTN_PREFILL(attn_prefill_80_bf16_r128w, 4, 2, 80, 0, 80, 32, true)
ATTN_PREFILL(attn_prefill_96_bf16_r64, 4, 1, 96, 0, 96, 64, true)
ATTN_PREFILL(attn_prefill_96_bf16_r128, 8, 1, 96, 0, 96, 64, true)
ATTN_PREFILL(attn_prefill_96_bf16_r128w, 4, 2, 96, 0, 96, 32, true)
