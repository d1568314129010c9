// Compressed attention (graph/ops_pooled.py): entries of several positions, lists of the rows that a query sees, and attention
// to the rows of such a list, which all heads share.
#include "attn_tiles.cuh"

constexpr int KT_ANY = -1;

// Entries that tokens complete: sums of rows [values | logits] of `parts` x `ratio` positions, weighted column by column.
// Rows of other tokens are 0. grid (tokens, parts of 128 columns); a thread has a column.
extern "C" __global__ void __launch_bounds__(128)
pool_entries(const i64* st, const float* cache, int place, const float* bias, int bias_row, float* out, int width, int parts,
             int ratio) {
  const i64 token = blockIdx.x;
  const int col = blockIdx.y * 128 + threadIdx.x;
  if (token >= st[ST_TOKENS] || col >= width) return;
  const i64* segment = segment_of(st, token);
  const int pos = (int)(segment[SEG_POS] + token - segment[SEG_START]);
  float* to = out + token * width + col;
  if ((pos + 1) % ratio) {
    *to = 0.f;
    return;
  }
  const int first = max(pos + 1 - parts * ratio, 0), own = (parts - 1) * width + col, cols = parts * width;
  const float* rows = cache + (place == 2 ? step_windows(st)[(segment - step_segments(st)) / SEG_WORDS] : segment[SEG_CELL]) * 2 * cols;
  float top = -INFINITY;
  for (int p = first; p <= pos; p++) {
    const int c = p > pos - ratio ? own : col;
    top = fmaxf(top, rows[(i64)p * 2 * cols + cols + c] + bias[(i64)(p % ratio) * bias_row + c]);
  }
  float sum = 0.f, total = 0.f;
  for (int p = first; p <= pos; p++) {
    const int c = p > pos - ratio ? own : col;
    const float* row = rows + (i64)p * 2 * cols + c;
    const float e = expf(row[cols] + bias[(i64)(p % ratio) * bias_row + c] - top);
    total += e, sum = fmaf(e, row[0], sum);
  }
  *to = sum / total;
}

// What a token sees: its last positions, up to `window`, then entries of `ratio` positions, up to `most`.
struct Seen {
  int n, recent, entries;
};
DI Seen seen_by(int pos, int window, int ratio, int most) {
  const int n = pos + 1;
  return {n, min(n, window), min(n / ratio, most)};
}

// The list of every token: rows of its last positions, then entries, row r as -1 - r; then 0. grid (tokens)
extern "C" __global__ void __launch_bounds__(256)
pooled_cells(const i64* st, const int* chosen, int* out, int place, int window, int ratio, int most) {
  const i64 token = blockIdx.x;
  if (token >= st[ST_TOKENS]) return;
  const i64* segment = segment_of(st, token);
  const Seen seen = seen_by((int)(segment[SEG_POS] + token - segment[SEG_START]), window, ratio, most);
  const int cell = (int)segment[SEG_CELL];
  const int first = place == 2 ? (int)step_windows(st)[(segment - step_segments(st)) / SEG_WORDS] : cell;
  int* to = out + token * (window + most);
  for (int i = threadIdx.x; i < window + most; i += 256) {
    int row = 0;
    if (i < seen.recent) {
      row = first + seen.n - seen.recent + i;
    } else if (i < seen.recent + seen.entries) {
      const int e = i - seen.recent;
      row = -(cell + ratio * ((chosen ? chosen[token * most + e] - cell : e) + 1));
    }
    to[i] = row;
  }
}

// Attention of 16 heads of one token to the rows in its list, keys of `width` columns of which `dv` from `first` on are
// values. Rows of caches of any type become f16, in registers, some of them a tile ahead; queries and probabilities are f16.
// Before the list come `n_prefix` float32 rows. `tail`: see Seen. `sinks`: logits of heads that have no value, or null.
//
// Warp w: positions 8 * (w & 3).. of 32 and every other 16 columns in Q*K; every eighth 8 columns in P*V. Parts are equal
// shares of a token's own list, so they depend on nothing beside it. blockIdx: tiles of heads by tokens, parts.
constexpr int ROWS_WIDTH = 576, ROWS_VALUES = 512, ROWS_TILE = 32, ROWS_THREADS = 256;
struct RowsArgs {
  const float *q0, *q1;
  i64 q0_row, q1_row;
  int q0_head, q0_width, q1_head;
  const u8 *recent, *pooled;
  i64 recent_cells, pooled_cells;
  int type;
  const float* prefix;
  int n_prefix, prefix_row, width, first, dv;
  const int* cells;
  int window, ratio, most;
  float *out, *parts, *stats;
  int heads, n_split;
  float scale;
  const float* sinks;
};
template <int FORMAT> DI void rows_attention(const i64* st, const RowsArgs& a) {
  constexpr int AHEAD = 2, P_ROW = ROWS_TILE + 8;  // all turns would not fit into registers beside the sums
  SMEM_DECL
  IK_SHARED(float, scores, 2 * 16 * (ROWS_TILE + 1))
  IK_SHARED(uint4, probs_16, 16 * P_ROW / 8)  // aligned for ldmatrix
  IK_SHARED(float, alpha, 16)
  IK_SHARED(float, tops, 16)
  IK_SHARED(float, sums, 16)
  u16* const probs = (u16*)probs_16;
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, tiles = (a.heads + 15) / 16, row = a.width + 8;
  const int type = FORMAT == KT_ANY ? a.type : FORMAT;
  const i64 token = blockIdx.x / tiles;
  if (token >= st[ST_TOKENS]) return;
  const int head0 = blockIdx.x % tiles * 16, n_heads = min(16, a.heads - head0), part = blockIdx.y;
  const i64* segment = segment_of(st, token);
  const Seen seen = seen_by((int)(segment[SEG_POS] + token - segment[SEG_START]), a.window, a.ratio, a.most);
  const int n = a.n_prefix + seen.recent + seen.entries;
  const int size = ((n + ROWS_TILE - 1) / ROWS_TILE + a.n_split - 1) / a.n_split * ROWS_TILE;
  const int lo = part * size, hi = min(lo + size, n);
  const i64 slot = a.n_split == 1 ? token * a.heads + head0 : ((i64)part * st[ST_TOKENS] + token) * a.heads + head0;
  if (lo >= hi) {
    if (a.n_split > 1 && tid < n_heads) *(float2*)(a.stats + (slot + tid) * 2) = make_float2(-INFINITY, 0.f);
    return;
  }
  const int* list = a.cells + token * (a.window + a.most) - a.n_prefix;
  const int blocks = kv_is_float(type) ? a.width : a.width / 32, groups = a.width / 16;
  const int turns = (ROWS_TILE * groups + ROWS_THREADS - 1) / ROWS_THREADS;
  const KvTensor recent = kv_tensor(a.recent, a.recent_cells, blocks, type);
  const KvTensor pooled = kv_tensor(a.pooled, a.pooled_cells, blocks, type);
  u16 *sq = (u16*)smem_raw, *tile = sq + 16 * row;

  Raw16 raw[AHEAD];
  auto fetch = [&](Raw16& r, int begin, int turn) {
    const int i = tid + turn * ROWS_THREADS, at = begin + i / groups, g = i % groups;
    kv_clear(r);
    if (i >= ROWS_TILE * groups || at >= hi) return;
    if (at < a.n_prefix) {
      const float* from = a.prefix + (i64)at * a.prefix_row + g * 16;
#pragma unroll
      for (int e = 0; e < 8; e++) r.w[e] = pack2<false>(from[2 * e], from[2 * e + 1]);
      return;
    }
    const int cell = list[at];
    kv_load(r, cell >= 0 ? recent : pooled, cell >= 0 ? cell : -1 - cell, g);
  };
  auto unpack = [&](const Raw16& raw, int begin, int turn) {
    const int i = tid + turn * ROWS_THREADS, r = i / groups, g = i % groups;
    if (i >= ROWS_TILE * groups) return;
    u32 y[8];
    kv_f16(y, raw, begin + r < a.n_prefix ? KT_F16 : type, g & 1);
    *(uint4*)(tile + r * row + g * 16) = make_uint4(y[0], y[1], y[2], y[3]);
    *(uint4*)(tile + r * row + g * 16 + 8) = make_uint4(y[4], y[5], y[6], y[7]);
  };
  auto fetch_ahead = [&](int begin) {
#pragma unroll
    for (int t = 0; t < AHEAD; t++) fetch(raw[t], begin, t);
  };
  fetch_ahead(lo);
  for (int i = tid; i < 16 * (a.width / 4); i += ROWS_THREADS) {
    const int r = i / (a.width / 4), c = i % (a.width / 4) * 4, head = head0 + r;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (r < n_heads)
      x = c < a.q0_width ? *(const float4*)(a.q0 + token * a.q0_row + (i64)head * a.q0_head + c)
                         : *(const float4*)(a.q1 + token * a.q1_row + (i64)head * a.q1_head + c - a.q0_width);
    *(uint2*)(sq + r * row + c) = make_uint2(pack2<false>(x.x * a.scale, x.y * a.scale), pack2<false>(x.z * a.scale, x.w * a.scale));
  }
  float o[ROWS_VALUES / 64][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < ROWS_VALUES / 64; t++) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.f;
#pragma unroll 1
  for (int begin = lo; begin < hi; begin += ROWS_TILE) {
    __syncthreads();  // queries are there, and no thread reads the tile before any more
#pragma unroll
    for (int t = 0; t < AHEAD; t++) unpack(raw[t], begin, t);
#pragma unroll 1
    for (int t = AHEAD; t < turns; t++) {
      Raw16 rest;
      fetch(rest, begin, t);
      unpack(rest, begin, t);
    }
    fetch_ahead(begin + ROWS_TILE);
    __syncthreads();
    {
      const int p0 = (w & 3) * 8, half = w >> 2;
      float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
      for (int c = half; c < groups; c += 2) {
        u32 x[4], y[2];
        ldsm4(x, sq + (lane & 15) * row + c * 16 + (lane >> 4) * 8);
        ldsm2(y, tile + (p0 + (lane & 7)) * row + c * 16 + ((lane >> 3) & 1) * 8);
        mma16816<false>(s, x, y[0], y[1]);
      }
      float* to = scores + (half * 16 + lane / 4) * (ROWS_TILE + 1) + p0 + (lane & 3) * 2;
      to[0] = s[0], to[1] = s[1], to[8 * (ROWS_TILE + 1)] = s[2], to[8 * (ROWS_TILE + 1) + 1] = s[3];
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 2; x++) {
      const int r = 2 * w + x;
      const float* from = scores + r * (ROWS_TILE + 1) + lane;
      const float s = begin + lane < hi ? from[0] + from[16 * (ROWS_TILE + 1)] : -INFINITY;
      const float peak = fmaxf(top[x], warp_max(s)), used = peak == -INFINITY ? 0.f : peak;
      const float f = ex2(top[x] - used), e = ex2(s - used);
      sum[x] = sum[x] * f + warp_sum(e), top[x] = peak;
      probs[r * P_ROW + lane] = f2h(e);
      if (lane == 0) alpha[r] = f;
    }
    __syncthreads();
    const float f0 = alpha[lane / 4], f1 = alpha[lane / 4 + 8];
    u32 p[2][4];
#pragma unroll
    for (int k = 0; k < 2; k++) ldsm4(p[k], probs + (lane & 15) * P_ROW + k * 16 + (lane >> 4) * 8);
#pragma unroll
    for (int t = 0; t < ROWS_VALUES / 64; t++) {
      const int c = (t * 8 + w) * 8;
      if (c >= a.dv) continue;
      o[t][0] *= f0, o[t][1] *= f0, o[t][2] *= f1, o[t][3] *= f1;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 v[2];
        ldsm2t(v, tile + (k * 16 + (lane & 15)) * row + a.first + c);
        mma16816<false>(o[t], p[k], v[0], v[1]);
      }
    }
  }
  if (lane < 2) tops[2 * w + lane] = lane ? top[1] : top[0], sums[2 * w + lane] = lane ? sum[1] : sum[0];
  __syncthreads();
  float* to = a.n_split == 1 ? a.out : a.parts;
#pragma unroll
  for (int x = 0; x < 2; x++) {
    const int r = lane / 4 + 8 * x;
    if (r >= n_heads) continue;
    const float f = a.n_split == 1 ? row_factor(tops[r], sums[r], a.sinks, head0 + r) : 1.f;
#pragma unroll
    for (int t = 0; t < ROWS_VALUES / 64; t++) {
      const int c = (t * 8 + w) * 8 + (lane & 3) * 2;
      if (c < a.dv) *(float2*)(to + (slot + r) * a.dv + c) = make_float2(o[t][2 * x] * f, o[t][2 * x + 1] * f);
    }
  }
  if (a.n_split > 1 && tid < n_heads) *(float2*)(a.stats + (slot + tid) * 2) = make_float2(tops[tid], sums[tid]);
}
#define ATTN_ROWS(NAME, FORMAT)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                    \
  NAME(const i64* st, const float* q0, i64 q0_row, int q0_head, int q0_width, const float* q1, i64 q1_row, int q1_head,   \
       const u8* recent, i64 recent_cells, const u8* pooled, i64 pooled_cells, int type, const float* prefix,             \
       int n_prefix, int prefix_row, int width, int first, int dv, const int* cells, int window, int ratio, int most,     \
       float* out, float* parts, float* stats, int heads, int n_split, float scale, const float* sinks) {                 \
    rows_attention<FORMAT>(st, {q0, q1, q0_row, q1_row, q0_head, q0_width, q1_head, recent, pooled, recent_cells,         \
                                pooled_cells, type, prefix, n_prefix, prefix_row, width, first, dv, cells, window, ratio, \
                                most, out, parts, stats, heads, n_split, scale, sinks});                                  \
  }
ATTN_ROWS(attn_rows_f16, KT_F16)
ATTN_ROWS(attn_rows_any, KT_ANY)
