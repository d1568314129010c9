// Query rows that see later positions: patches of an image, and images in texts (attn_seen.cuh).
#include "attn_prefill.cuh"

ATTN_PREFILL_SEEN(attn_prefill_64_f16_r64_seen, 4, 1, 64, 64, false)
ATTN_PREFILL_SEEN(attn_prefill_64_f16_r128w_seen, 4, 2, 64, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_80_f16_r64_seen, 4, 1, 80, 64, false)
ATTN_PREFILL_SEEN(attn_prefill_80_f16_r128w_seen, 4, 2, 80, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_96_f16_r64_seen, 4, 1, 96, 64, false)
ATTN_PREFILL_SEEN(attn_prefill_96_f16_r128w_seen, 4, 2, 96, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_128_f16_r64_seen, 4, 1, 128, 64, false)
ATTN_PREFILL_SEEN(attn_prefill_128_f16_r128w_seen, 4, 2, 128, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_256_f16_r64_seen, 4, 1, 256, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_256_f16_r128_seen, 8, 1, 256, 32, false)
ATTN_PREFILL_SEEN(attn_prefill_128_bf16_r64_seen, 4, 1, 128, 64, true)
ATTN_PREFILL_SEEN(attn_prefill_128_bf16_r128w_seen, 4, 2, 128, 32, true)
ATTN_PREFILL_SEEN(attn_prefill_256_bf16_r64_seen, 4, 1, 256, 32, true)
ATTN_PREFILL_SEEN(attn_prefill_256_bf16_r128_seen, 8, 1, 256, 32, true)
