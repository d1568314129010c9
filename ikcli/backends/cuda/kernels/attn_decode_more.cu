// Decode kernels for heads of 80, 192 (values of 128) and 256 columns.
#include "attn_decode.cuh"

ATTN_DECODE(attn_decode_80_f16, 80, 80, KT_F16)
ATTN_DECODE(attn_decode_80_q8, 80, 80, KT_Q8_0)
ATTN_DECODE(attn_decode_80_any, 80, 80, KT_ANY)
ATTN_DECODE(attn_decode_192_f16, 192, 128, KT_F16)
ATTN_DECODE(attn_decode_192_q8, 192, 128, KT_Q8_0)
ATTN_DECODE(attn_decode_192_any, 192, 128, KT_ANY)
ATTN_DECODE(attn_decode_256_f16, 256, 256, KT_F16)
ATTN_DECODE(attn_decode_256_q8, 256, 256, KT_Q8_0)
ATTN_DECODE(attn_decode_256_any, 256, 256, KT_ANY)
