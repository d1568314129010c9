// Attention of few query rows with grouped heads: rows are (token, head of the group) pairs of one KV head, 16 per block
// of four warps. Each warp reads and uses its own 16 positions of every 64 with its own soft-max and sums, so that the
// loop has no block barriers; the four results are merged at the end.
//
// FORMAT KT_F16, KT_BF16: rows go straight into tiles (cp.async); K of the next positions is on its way during P*V, V
// during Q*K. KT_Q8_0, and KT_ANY for K and V of any types each: through registers, one step ahead.
// LISTED: rows are those of one token, which sees the entries of a list of cells per KV head (attn_blocks.cu); the 16
// entries that a warp takes at once are adjacent cells.
// Traffic: the bytes of K and V once per tile of rows; 4*D flops per head and position, so memory decides.
#pragma once
#include "attn_heads.cuh"
#include "attn_lists.cuh"

constexpr int KT_ANY = -1, DECODE_THREADS = 128, DECODE_STEP = 64;
template <int DK, int DV> struct DecodeLayout {
  static constexpr int k_tile = 16 * tile_row<DK>(), v_tile = 16 * tile_row<DV>();  // elements, per warp
  static constexpr int at_k = 16 * tile_row<DK>(), at_v = at_k + 4 * k_tile;        // behind the queries
  static constexpr int bytes = (at_v + 4 * v_tile) * 2;
  static constexpr int at_stats = 4 * 16 * DV * 4;  // merging: sums [4][16][DV], (maximum, denominator) [4][16][2]
};

template <int DK, int DV, int FORMAT, bool LISTED = false>
DI void decode_body(const i64* st, const float* q, i64 q_row, int q_head, const u8* k, int k_blocks, int k_type,
                    int k_first, int k_head, int k_place, i64 k_cells, const u8* v, int v_blocks, int v_type,
                    int v_first, int v_head, int v_place, i64 v_cells, float* out, float* parts, float* stats, int n_head, int n_head_kv,
                    const Split& split, float scale, const View& view, const float* sinks, float softcap,
                    const Lists& lists = {}) {
  using L = DecodeLayout<DK, DV>;
  constexpr bool BF = FORMAT == KT_BF16, RAW = FORMAT == KT_ANY || FORMAT == KT_Q8_0;
  SMEM_DECL
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, kv_head = blockIdx.y, part = blockIdx.z;
  const int group = n_head / n_head_kv;
  Tile t;
  const int* cells = nullptr;
  if constexpr (LISTED) {
    if (!token_tile(st, blockIdx.x, 16, group, lists.most, t)) return;
    cells = list_of(st, lists, t.token0, kv_head, t.kv_end);
    t.pos = t.kv_end - 1;
  } else {
    if (!find_tile(st, blockIdx.x, 16, group, view, split, t)) return;
  }
  const Range range = LISTED ? list_range(t, split, part, lists.most) : part_range(t, view, split, part, group);
  const int start = range.start, lo = range.lo, hi = range.hi;
  const int n_rows = min(16, t.n_rows - t.row0);
  // Result row of a row of the tile: (token, head).
  auto result_row = [&](int r) {
    return (t.token0 + (t.row0 + r) / group) * n_head + kv_head * group + (t.row0 + r) % group;
  };
  const i64 slot = part * st[ST_TOKENS] * n_head;
  if (lo >= hi && split.n_split > 1) {
    if (tid < n_rows) *(float2*)(stats + (slot + result_row(tid)) * 2) = make_float2(-INFINITY, 0.f);
    return;
  }

  u16* sq = (u16*)smem_raw;
  u16* sk = sq + L::at_k + w * L::k_tile;
  u16* sv = sq + L::at_v + w * L::v_tile;
  const i64 k_base = LISTED ? 0 : row_base(st, t, k_place), v_base = LISTED ? 0 : row_base(st, t, v_place);
  // Where rows from an entry on are, as the distance to entry 0, and an entry that can be read.
  auto near = [&](int pos) { return LISTED && pos < hi ? pos : lo; };
  auto shift = [&](int pos) -> i64 {
    if constexpr (LISTED) return cells[near(pos)] - near(pos);
    else return 0;
  };
  const int k_col = k_first + kv_head * k_head, v_col = v_first + kv_head * v_head;
  const KvTensor kt = kv_tensor(k, k_cells, k_blocks, FORMAT == KT_ANY ? k_type : FORMAT);
  const KvTensor vt = kv_tensor(v, v_cells, v_blocks, FORMAT == KT_ANY ? v_type : FORMAT);
  const i64 k_row = (i64)k_blocks * 2, v_row = (i64)v_blocks * 2;  // bytes, of 16-bit caches
  const u8 *k_rows = k + k_base * k_row + k_col * 2, *v_rows = v + v_base * v_row + v_col * 2;
  constexpr bool ANY = FORMAT == KT_ANY;
  constexpr int NK = turns_ahead<DK, ANY>(), NV = turns_ahead<DV, ANY>();
  Raw16 raw[RAW ? (NK > NV ? NK : NV) : 1];

  const int first = start + w * 16;
  load_queries<BF, 16, DK, DECODE_THREADS / 32>(
      t, group, kv_head * group, scale,
      [&](i64 token, int head, int c) { return q + token * q_row + (i64)head * q_head + c; },
      [&](int r, int c, uint2 x) { *(uint2*)(sq + r * tile_row<DK>() + c) = x; },
      [&] {
        if constexpr (RAW) fetch_rows<DK, ANY>(raw, kt, k_base + shift(first), k_col, first, lo, hi);
        else {
          copy_rows<DK, 16, tile_row<DK>(), 32>(sk, k_rows + shift(first) * k_row, k_row, first, near(first), hi, lane);
          cp_commit();
        }
      });
  __syncthreads();

  const int r0 = lane / 4;
  const Sight sight[2] = {row_sight(t, view, t.row0 + r0, group), row_sight(t, view, t.row0 + r0 + 8, group)};
  const Cap cap = cap_of(softcap * LOG2E);
  SoftMax m = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
  float o[1][DV / 8][4];
#pragma unroll
  for (int n = 0; n < DV / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) o[0][n][e] = 0.f;

  for (int pos = first; pos < hi; pos += DECODE_STEP) {
    float s[1][2][4];
    u32 p[1][1][4];
    if constexpr (RAW) {
      unpack_rows<DK, ANY>(sk, raw, kt, k_base + shift(pos), k_col, pos, lo, hi);
      fetch_rows<DV, ANY>(raw, vt, v_base + shift(pos), v_col, pos, lo, hi);
    } else {
      copy_rows<DV, 16, tile_row<DV>(), 32>(sv, v_rows + shift(pos) * v_row, v_row, pos, near(pos), hi, lane);
      cp_commit();
      cp_wait<1>();
    }
    warp_sync();  // K is there
    scores<BF, DK>(s, sq, sk);
    warp_sync();  // every lane has read K
    if constexpr (RAW) {
      const int next = pos + DECODE_STEP;
      unpack_rows<DV, ANY>(sv, raw, vt, v_base + shift(pos), v_col, pos, lo, hi);
      fetch_rows<DK, ANY>(raw, kt, k_base + shift(next), k_col, next, lo, hi);
    } else {
      const int next = pos + DECODE_STEP;
      copy_rows<DK, 16, tile_row<DK>(), 32>(sk, k_rows + shift(next) * k_row, k_row, next, near(next), hi, lane);
      cp_commit();
    }
    soft_max_step<BF>(s[0], m, o[0], p[0], true, pos, [&](int r) { return sight[r]; }, cap);
    if constexpr (!RAW) cp_wait<1>();
    warp_sync();  // V is there
    add_values<BF, DV>(o, p, sv);
    warp_sync();
  }
  soft_max_end(m);
  if constexpr (!RAW) cp_wait<0>();
  __syncthreads();  // tiles are free: the warps' results go there

  float* so = (float*)smem_raw;
  float* sm = (float*)(smem_raw + L::at_stats);
#pragma unroll
  for (int n = 0; n < DV / 8; n++) {
    float* to = so + (w * 16 + r0) * DV + n * 8 + (lane & 3) * 2;
    *(float2*)to = make_float2(o[0][n][0], o[0][n][1]);
    *(float2*)(to + 8 * DV) = make_float2(o[0][n][2], o[0][n][3]);
  }
  if ((lane & 3) == 0) {
    *(float2*)(sm + (w * 16 + r0) * 2) = make_float2(m.top[0], m.sum[0]);
    *(float2*)(sm + (w * 16 + r0 + 8) * 2) = make_float2(m.top[1], m.sum[1]);
  }
  __syncthreads();
  for (int i = tid; i < n_rows * DV; i += DECODE_THREADS) {
    const int r = i / DV, c = i % DV;
    float top = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
    for (int x = 0; x < 4; x++) top = fmaxf(top, sm[(x * 16 + r) * 2]);
    const float used = top == -INFINITY ? 0.f : top;
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const float f = ex2(sm[(x * 16 + r) * 2] - used);
      sum += f * sm[(x * 16 + r) * 2 + 1], value += f * so[(x * 16 + r) * DV + c];
    }
    if (split.n_split == 1) {
      out[result_row(r) * DV + c] = value * row_factor(top, sum, sinks, kv_head * group + (t.row0 + r) % group);
    } else {
      parts[(slot + result_row(r)) * DV + c] = value;
      if (c == 0) *(float2*)(stats + (slot + result_row(r)) * 2) = make_float2(top, sum);
    }
  }
}
#define ATTN_DECODE(NAME, DK, DV, FORMAT)                                                                              \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                                 \
  NAME(const i64* st, const float* q, i64 q_row, int q_head, const u8* k, int k_blocks, int k_type, int k_first,       \
       int k_head, int k_place, i64 k_cells, const u8* v, int v_blocks, int v_type, int v_first, int v_head,           \
       int v_place, i64 v_cells, float* out, float* parts, float* stats, int n_head, int n_head_kv, int n_split,       \
       int fixed, float scale, int window, int chunk, const float* sinks, float softcap) {                             \
    decode_body<DK, DV, FORMAT>(st, q, q_row, q_head, k, k_blocks, k_type, k_first, k_head, k_place, k_cells, v,       \
                                v_blocks, v_type, v_first, v_head, v_place, v_cells, out, parts, stats, n_head,        \
                                n_head_kv, {n_split, fixed, DECODE_STEP}, scale, {window, chunk}, sinks, softcap);     \
  }
