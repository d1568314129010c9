// Absorbed MLA over bf16 caches.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_bf16_r16, 16, 32, 2, KT_BF16, 1)
ATTN_MLA(attn_mla_bf16_r32, 32, 32, 2, KT_BF16, 1)
ATTN_MLA(attn_mla_bf16s_r16, 16, 32, 4, KT_BF16, 1)
ATTN_MLA(attn_mla_bf16s_r32, 32, 32, 3, KT_BF16, 1)
