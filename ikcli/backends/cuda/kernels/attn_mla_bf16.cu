// Absorbed MLA over bf16 caches.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_bf16_r16, 16, 32, 2, KT_BF16, 2)
ATTN_MLA(attn_mla_bf16_r32, 32, 32, 2, KT_BF16, 1)
ATTN_MLA(attn_mla_bf16_r64, 64, 32, 2, KT_BF16, 1)
