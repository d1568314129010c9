// Decode kernels for heads of 64, 96 and 128 columns.
#include "attn_decode.cuh"

ATTN_DECODE(attn_decode_64_f16, 64, 64, KT_F16)
ATTN_DECODE(attn_decode_64_q8, 64, 64, KT_Q8_0)
ATTN_DECODE(attn_decode_64_any, 64, 64, KT_ANY)
ATTN_DECODE(attn_decode_96_f16, 96, 96, KT_F16)
ATTN_DECODE(attn_decode_96_q8, 96, 96, KT_Q8_0)
ATTN_DECODE(attn_decode_96_any, 96, 96, KT_ANY)
ATTN_DECODE(attn_decode_128_f16, 128, 128, KT_F16)
ATTN_DECODE(attn_decode_128_q8, 128, 128, KT_Q8_0)
ATTN_DECODE(attn_decode_128_any, 128, 128, KT_ANY)
