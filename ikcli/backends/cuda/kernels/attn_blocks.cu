// Grouped heads over blocks of cached positions that an indexer chose (attn_index.cu), for every KV head or for all.
#include "attn_decode.cuh"

// blockIdx: tiles of 16 heads of a group, tokens after each other; KV heads; parts of the list.
#define ATTN_BLOCKS(NAME, DK, DV, FORMAT)                                                                              \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                                 \
  NAME(const i64* st, const float* q, i64 q_row, int q_head, const u8* k, int k_blocks, int k_type, int k_first,       \
       int k_head, int k_place, i64 k_cells, const u8* v, int v_blocks, int v_type, int v_first, int v_head,           \
       int v_place, i64 v_cells, float* out, float* parts, float* stats, int n_head, int n_head_kv, int n_split,       \
       float scale, const int* chosen, int lists, int most, int span) {                                                \
    decode_body<DK, DV, FORMAT, true>(st, q, q_row, q_head, k, k_blocks, k_type, k_first, k_head, k_place, k_cells, v, \
                                      v_blocks, v_type, v_first, v_head, v_place, v_cells, out, parts, stats, n_head,  \
                                      n_head_kv, {n_split, 0, DECODE_STEP}, scale, {0, 0}, nullptr, 0.f,               \
                                      {chosen, lists, most, span});                                                    \
  }

ATTN_BLOCKS(attn_blocks_128_f16, 128, 128, KT_F16)
ATTN_BLOCKS(attn_blocks_128_bf16, 128, 128, KT_BF16)
ATTN_BLOCKS(attn_blocks_128_q8, 128, 128, KT_Q8_0)
ATTN_BLOCKS(attn_blocks_128_any, 128, 128, KT_ANY)
