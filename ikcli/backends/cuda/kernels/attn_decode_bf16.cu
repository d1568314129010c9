// Decode kernels over bf16 caches.
#include "attn_decode.cuh"

ATTN_DECODE(attn_decode_64_bf16, 64, 64, KT_BF16)
ATTN_DECODE(attn_decode_80_bf16, 80, 80, KT_BF16)
ATTN_DECODE(attn_decode_96_bf16, 96, 96, KT_BF16)
ATTN_DECODE(attn_decode_128_bf16, 128, 128, KT_BF16)
ATTN_DECODE(attn_decode_192_bf16, 192, 128, KT_BF16)
ATTN_DECODE(attn_decode_256_bf16, 256, 256, KT_BF16)
