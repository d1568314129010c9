// Attention of many query rows: rows are (token, head of the group) pairs of one KV head, 16*M per warp; Q in shared
// memory, scores and probabilities in registers (the accumulators of Q*K are the A operand of P*V). M 1: one K and one V
// tile; V is on its way during Q*K, K of the next positions during P*V; two block barriers per tile. M 2: two of each, half
// as high, one barrier per tile.
//
// The D0 + D1 columns of a key come from two places (the rotated part that all heads share and the expanded latent), as
// do those of a query; D1 may be 0. K and V are 16-bit rows of a cache or compact ones (kv_rows_f16, kv_rows_bf16).
// Traffic per tile of rows: K and V once, from L2 as long as tiles of one head run together; 2*(DK+DV) flops per
// (row, position) pair. With 16 rows per warp shared memory limits to half of the tensor rate; with 32 it does not, and two
// blocks of four warps share an SM, so that one's soft-max runs beside the other's products.
#pragma once
#include "attn_heads.cuh"
#include "attn_seen.cuh"

template <int ROWS, int DK, int DV, int BN> struct PrefillLayout {
  static constexpr int at_k = ROWS * tile_row<DK>(), k_tile = BN * tile_row<DK>(), stage = k_tile + BN * tile_row<DV>();
};  // elements

// SEEN: queries see what the bits of `seen` say, not only positions before them.
template <int WARPS, int M, int D0, int D1, int DV, int BN, bool BF, bool SEEN>
DI void prefill_body(const i64* st, const float* q0, i64 q0_row, int q0_head, const float* q1, i64 q1_row, int q1_head,
                     const u8* k0, i64 k0_row, int k0_head, int k0_place, const u8* k1, i64 k1_row, int k1_head,
                     int k1_place, const u8* v, i64 v_row, int v_head, int v_place, float* out, float* parts,
                     float* stats, int n_head, int n_head_kv, const Split& split, float scale, const View& view,
                     const float* sinks, float softcap, int seen) {
  constexpr int DK = D0 + D1, ROWS = 16 * M * WARPS, NT = 32 * WARPS;
  using L = PrefillLayout<ROWS, DK, DV, BN>;
  SMEM_DECL
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, kv_head = blockIdx.x, part = blockIdx.z;
  const int group = n_head / n_head_kv;
  Tile t;
  // The last tiles of a segment see most positions, so they start first, for all heads.
  if (!find_tile(st, gridDim.y - 1 - blockIdx.y, ROWS, group, view, split, t)) return;
  if constexpr (SEEN) {
    const Limits all = limits_of(st, t, view, seen, t.row0, ROWS, group);
    t.kv_first = all.oldest, t.kv_end = all.farthest + 1;
  }
  const Range range = part_range(t, view, split, part, group);
  const int start = range.start, lo = range.lo, hi = range.hi;
  const int n_rows = min(ROWS, t.n_rows - t.row0);
  auto result_row = [&](int r) {
    return (t.token0 + (t.row0 + r) / group) * n_head + kv_head * group + (t.row0 + r) % group;
  };
  const i64 slot = part * st[ST_TOKENS] * n_head;
  if (lo >= hi && split.n_split > 1) {
    if (tid < n_rows) *(float2*)(stats + (slot + result_row(tid)) * 2) = make_float2(-INFINITY, 0.f);
    return;
  }

  u16* sq = (u16*)smem_raw;
  u16* sk = sq + L::at_k;
  u16* sv = sk + L::k_tile;
  const u8* k0_rows = k0 + row_base(st, t, k0_place) * k0_row + (i64)kv_head * k0_head;
  const u8* k1_rows = k1 + row_base(st, t, k1_place) * k1_row + (i64)kv_head * k1_head;
  const u8* v_rows = v + row_base(st, t, v_place) * v_row + (i64)kv_head * v_head;
  auto load_k = [&](u16* to, int pos) {
    copy_rows<D0, BN, tile_row<DK>(), NT>(to, k0_rows, k0_row, pos, lo, hi, tid);
    if constexpr (D1 > 0) copy_rows<D1, BN, tile_row<DK>(), NT>(to + D0, k1_rows, k1_row, pos, lo, hi, tid);
  };
  auto load_v = [&](u16* to, int pos) { copy_rows<DV, BN, tile_row<DV>(), NT>(to, v_rows, v_row, pos, lo, hi, tid); };
  load_queries<BF, ROWS, DK, WARPS>(
      t, group, kv_head * group, scale,
      [&](i64 token, int head, int c) {
        return D1 == 0 || c < D0 ? q0 + token * q0_row + (i64)head * q0_head + c
                                 : q1 + token * q1_row + (i64)head * q1_head + (c - D0);
      },
      [&](int r, int c, uint2 x) { *(uint2*)(sq + r * tile_row<DK>() + c) = x; },
      [&] {
        load_k(sk, start);
        if constexpr (M > 1) load_v(sv, start);
        cp_commit();
      });

  const int wr = w * 16 * M, first = t.row0 + wr;  // of the warp's rows inside the tile, of the segment
  // Positions oldest .. farthest are visible to a row of the warp, newest .. nearest to all of them.
  int nearest = row_pos(t, first, group);
  int farthest = first < t.n_rows ? row_pos(t, min(first + 16 * M - 1, t.n_rows - 1), group) : -1;
  int oldest = first_seen(view, nearest), newest = first_seen(view, farthest);
  if constexpr (SEEN) {
    const Limits mine = limits_of(st, t, view, seen, first, 16 * M, group);
    oldest = mine.oldest, newest = mine.newest, nearest = mine.nearest, farthest = mine.farthest;
  }
  const Cap cap = cap_of(softcap * LOG2E);
  SoftMax m[M];
  float o[M][DV / 8][4];
#pragma unroll
  for (int x = 0; x < M; x++) {
    m[x] = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[x][n][e] = 0.f;
  }

  float s[M][BN / 8][4];
  auto add = [&](int pos, const u16* values) {
    u32 p[M][BN / 16][4];
    const bool masked = pos + BN - 1 > nearest || pos < newest;
#pragma unroll
    for (int x = 0; x < M; x++) {
      auto sight = [&](int r) {
        const int row = first + x * 16 + lane / 4 + 8 * r;
        if constexpr (SEEN) return row_sight(st, t, view, seen, row, group);
        else return row_sight(t, view, row, group);
      };
      soft_max_step<BF>(s[x], m[x], o[x], p[x], masked, pos, sight, cap);
    }
    add_values<BF, DV>(o, p, values);
  };
  if constexpr (M == 1) {
    for (int pos = start; pos < hi; pos += BN) {
      const bool active = pos <= farthest && pos + BN > oldest;
      cp_wait<0>();
      __syncthreads();  // K has arrived (and Q); no thread reads V of the tile before any more
      load_v(sv, pos);
      cp_commit();
      if (active) scores<BF, DK>(s, sq + wr * tile_row<DK>(), sk);
      cp_wait<0>();
      __syncthreads();  // V has arrived; no thread reads K any more
      if (pos + BN < hi) load_k(sk, pos + BN);
      cp_commit();
      if (active) add(pos, sv);
    }
  } else {
    int at = 0;  // of the stage
    for (int pos = start; pos < hi; pos += BN, at ^= L::stage) {
      cp_wait<0>();
      __syncthreads();  // K and V have arrived (and Q); no thread reads the tile before any more
      if (pos + BN < hi) load_k(sk + (at ^ L::stage), pos + BN), load_v(sv + (at ^ L::stage), pos + BN);
      cp_commit();
      if (pos > farthest || pos + BN <= oldest) continue;
      scores<BF, DK>(s, sq + wr * tile_row<DK>(), sk + at);
      add(pos, sv + at);
    }
  }
  float* to = split.n_split == 1 ? out : parts + slot * DV;
#pragma unroll
  for (int x = 0; x < M; x++) {
    soft_max_end(m[x]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = wr + x * 16 + lane / 4 + 8 * h;
      if (r >= n_rows) continue;
      const i64 row = result_row(r);
      const int head = kv_head * group + (t.row0 + r) % group;
      const float f = split.n_split > 1 ? 1.f : row_factor(m[x].top[h], m[x].sum[h], sinks, head);
      float* p = to + row * DV + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < DV / 8; n++) *(float2*)(p + n * 8) = make_float2(o[x][n][2 * h] * f, o[x][n][2 * h + 1] * f);
      if (split.n_split > 1 && (lane & 3) == 0) *(float2*)(stats + (slot + row) * 2) = make_float2(m[x].top[h], m[x].sum[h]);
    }
  }
}
// M * 16 rows per warp. ATTN_PREFILL_SEEN: with the bits `seen` behind the other parameters.
#define ATTN_PREFILL_ARGS                                                                                              \
  const i64* st, const float* q0, i64 q0_row, int q0_head, const float* q1, i64 q1_row, int q1_head, const u8* k0,     \
      i64 k0_row, int k0_head, int k0_place, const u8* k1, i64 k1_row, int k1_head, int k1_place, const u8* v,         \
      i64 v_row, int v_head, int v_place, float* out, float* parts, float* stats, int n_head, int n_head_kv,           \
      int n_split, int fixed, float scale, int window, int chunk, const float* sinks, float softcap
#define ATTN_PREFILL_BODY(WARPS, M, D0, D1, DV, BN, BF, WITH, SEEN)                                                    \
  prefill_body<WARPS, M, D0, D1, DV, BN, BF, WITH>(                                                                    \
      st, q0, q0_row, q0_head, q1, q1_row, q1_head, k0, k0_row, k0_head, k0_place, k1, k1_row, k1_head, k1_place, v,   \
      v_row, v_head, v_place, out, parts, stats, n_head, n_head_kv, {n_split, fixed, BN}, scale, {window, chunk},      \
      sinks, softcap, SEEN)
#define ATTN_PREFILL(NAME, WARPS, M, D0, D1, DV, BN, BF)                                                               \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) NAME(ATTN_PREFILL_ARGS) {                        \
    ATTN_PREFILL_BODY(WARPS, M, D0, D1, DV, BN, BF, false, 0);                                                         \
  }
#define ATTN_PREFILL_SEEN(NAME, WARPS, M, D, BN, BF)                                                                   \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) NAME(ATTN_PREFILL_ARGS, int seen) {              \
    ATTN_PREFILL_BODY(WARPS, M, D, 0, D, BN, BF, true, seen);                                                          \
  }
