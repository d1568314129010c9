// Absorbed MLA: bf16 caches, the other quantized types, and 64 rows for GPUs with 227 KB of shared memory per block.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_bf16_r16, 16, 32, 2, KT_BF16)
ATTN_MLA(attn_mla_bf16_r32, 32, 32, 2, KT_BF16)
ATTN_MLA(attn_mla_any_r16, 16, 32, 2, KT_ANY)
ATTN_MLA(attn_mla_any_r32, 32, 32, 2, KT_ANY)
ATTN_MLA(attn_mla_f16_r64, 64, 32, 2, KT_F16)
ATTN_MLA(attn_mla_bf16_r64, 64, 32, 2, KT_BF16)
