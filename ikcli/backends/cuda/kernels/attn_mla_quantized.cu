// Absorbed MLA over quantized caches: q8_0 (bytes are staged in shared memory) and the other types.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_q8_r16, 16, 32, 4, KT_Q8_0, 1)
ATTN_MLA(attn_mla_q8_r32, 32, 32, 4, KT_Q8_0, 1)
ATTN_MLA(attn_mla_any_r16, 16, 32, 2, KT_ANY, 1)
ATTN_MLA(attn_mla_any_r32, 32, 32, 2, KT_ANY, 1)
