// Many query rows, f16, heads of 64, 80 and 96 columns.
#include "attn_prefill.cuh"

ATTN_PREFILL(attn_prefill_64_f16_r64, 4, 1, 64, 0, 64, 64, false)
ATTN_PREFILL(attn_prefill_64_f16_r128, 8, 1, 64, 0, 64, 64, false)
ATTN_PREFILL(attn_prefill_64_f16_r128w, 4, 2, 64, 0, 64, 32, false)
ATTN_PREFILL(attn_prefill_80_f16_r64, 4, 1, 80, 0, 80, 64, false)
ATTN_PREFILL(attn_prefill_80_f16_r128, 8, 1, 80, 0, 80, 64, false)
ATTN_PREFILL(attn_prefill_80_f16_r128w, 4, 2, 80, 0, 80, 32, false)
ATTN_PREFILL(attn_prefill_96_f16_r64, 4, 1, 96, 0, 96, 64, false)
ATTN_PREFILL(attn_prefill_96_f16_r128, 8, 1, 96, 0, 96, 64, false)
ATTN_PREFILL(attn_prefill_96_f16_r128w, 4, 2, 96, 0, 96, 32, false)
