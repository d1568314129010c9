// Absorbed MLA over the cached positions that an indexer chose (attn_index.cu).
#include "attn_mla.cuh"

ATTN_MLA_SPARSE(attn_mla_sparse_f16_r16, 16, 32, 2, KT_F16)
ATTN_MLA_SPARSE(attn_mla_sparse_f16_r32, 32, 32, 2, KT_F16)
ATTN_MLA_SPARSE(attn_mla_sparse_f16s_r16, 16, 32, 4, KT_F16)
ATTN_MLA_SPARSE(attn_mla_sparse_f16s_r32, 32, 32, 3, KT_F16)
ATTN_MLA_SPARSE(attn_mla_sparse_bf16_r16, 16, 32, 2, KT_BF16)
ATTN_MLA_SPARSE(attn_mla_sparse_bf16_r32, 32, 32, 2, KT_BF16)
ATTN_MLA_SPARSE(attn_mla_sparse_q8_r16, 16, 32, 4, KT_Q8_0)
ATTN_MLA_SPARSE(attn_mla_sparse_q8_r32, 32, 32, 4, KT_Q8_0)
ATTN_MLA_SPARSE(attn_mla_sparse_any_r16, 16, 32, 2, KT_ANY)
ATTN_MLA_SPARSE(attn_mla_sparse_any_r32, 32, 32, 2, KT_ANY)
