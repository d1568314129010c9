// Absorbed MLA over quantized caches: q8_0 (bytes staged in shared memory; four stages where a block can have 127 KB of
// it, because two are too few bytes on the way) and the other types.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_q8_r16, 16, 32, 2, KT_Q8_0, 1)
ATTN_MLA(attn_mla_q8_r32, 32, 32, 2, KT_Q8_0, 1)
ATTN_MLA(attn_mla_q8s4_r16, 16, 32, 4, KT_Q8_0, 1)
ATTN_MLA(attn_mla_q8s4_r32, 32, 32, 4, KT_Q8_0, 1)
ATTN_MLA(attn_mla_any_r16, 16, 32, 2, KT_ANY, 1)
ATTN_MLA(attn_mla_any_r32, 32, 32, 2, KT_ANY, 1)
