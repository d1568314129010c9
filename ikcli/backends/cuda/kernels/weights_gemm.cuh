// Many activation rows times a matrix: tiles of 64 weight rows by 64 activation rows, 128 columns per step.
// Weights are decoded once per tile into int8 in shared memory (two stages: the raw bytes of the next step are on the way
// while tensor cores work), activations come by cp.async. Integer products of 32 (or 16) columns are exact and scaled in
// f32, the arithmetic of the matrix-vector kernels. Warps: 2 x 2, each 32 weight rows by 32 activation rows. Parts of 16
// activation rows that a tile does not have are skipped. 36.9 KB of codes, 4..12 KB of scales.
#pragma once
#include "weights_matvec.cuh"

constexpr int MM_THREADS = 128, MM_M = 64, MM_N = 64, MM_KB = 4, MM_STRIDE = 32 * MM_KB + 16;
constexpr int MM_CODES = MM_M * MM_STRIDE, MM_SCALES = MM_KB * MM_M;  // bytes, floats

// Sums that start here are floats in disguise: an addition converts them, which is faster than a conversion. |sum| < 2^22.
constexpr int MM_ZERO = 0x4b400000;
DI float sum_of(int disguised) { return __int_as_float(disguised) - 12582912.f; }

// Products with few tiles: `n` blocks share one, each a part of the columns; weights_add_parts adds what they leave in `sums`,
// `stride` floats apart. n = 1: no parts.
struct Parts { int n; float* sums; i64 stride; };
struct Share {
  int part, head, from, to;  // steps from .. to - 1 of the columns
  __device__ __forceinline__ float* out(const Parts& parts, float* y) const {
    return parts.n > 1 ? parts.sums + part * parts.stride : y;
  }
};
DI Share share_of(const Parts& parts, int n_steps) {
  const int z = (int)blockIdx.z, head = z / parts.n, part = z - head * parts.n;
  return {part, head, n_steps * part / parts.n, n_steps * (part + 1) / parts.n};
}

// Blocks run in the order of their number. Those of MM_GROUP tiles of activation rows come together, weight rows slower: a
// matrix larger than L2 is read once per group, not once per tile of activation rows, and the rows of a group stay in L2.
constexpr int MM_GROUP = 16;
struct Place { int weights, tokens; };  // tiles
DI Place place_of() {
  const u32 block = blockIdx.y * gridDim.x + blockIdx.x, group = block / (MM_GROUP * gridDim.x);
  const u32 first = group * MM_GROUP, in = block - first * gridDim.x, n = min(gridDim.y - first, (u32)MM_GROUP);
  return {(int)(in / n), (int)(first + in % n)};
}

template <class W> struct GemmShared {
  static constexpr int KINDS = (W::HALVES ? 2 : 1) * (W::MINIMA ? 2 : 1);  // s0 [s1] [m0 [m1]] of a weight row
  static constexpr int MORE = W::MINIMA ? 1 : 0;                            // beside d: s, or sums of halves
  static constexpr int BYTES = 4 * MM_CODES + 2 * 4 * MM_SCALES * (KINDS + 1 + MORE);
};

template <class W>
DI void gemm(const i64* st, int symbol, int factor, const u8* w, i64 row_bytes, i64 matrix_bytes, int n_rows, int nb,
             const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles, const int* n_tiles,
             const int* order, int divisor, const u8* table, const Parts& parts) {
  SMEM_DECL
  using S = GemmShared<W>;
  const Share share = share_of(parts, (nb + MM_KB - 1) / MM_KB);
  const Place place = place_of();
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, MM_N, place.tokens, share.head);
  if (!span.rows) return;
  u8* const w_codes = smem_raw;                                     // [2][MM_M][MM_STRIDE]
  u8* const x_codes = smem_raw + 2 * MM_CODES;                      // [2][MM_N][MM_STRIDE]
  float* const w_scales = (float*)(smem_raw + 4 * MM_CODES);        // [2][KINDS][MM_KB][MM_M]
  float* const x_scales = w_scales + 2 * S::KINDS * MM_SCALES;      // [2][1 + MORE][MM_KB][MM_N]
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  x += share.head * x_head;

  // What this thread fetches: weight blocks 2 * (tid & 1) + {0, 1} of row tid / 2; 16 bytes of four activation rows; scales.
  const int my_row = place.weights * MM_M + (tid >> 1), my_block = 2 * (tid & 1);
  const u8* const w_row = w + span.matrix * matrix_bytes + min(my_row, n_rows - 1) * row_bytes;
  const u8* x_at[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int t = (tid >> 3) + 16 * i;
    x_at[i] = t < span.rows ? x + source_row(order, divisor, span.first + t) * x_row : nullptr;
  }
  const int scale_token = tid & 63;
  const u8* const d_at =
      scale_token < span.rows ? x + source_row(order, divisor, span.first + scale_token) * x_row + 32 * nb : nullptr;
  u32 raw[2][W::N];

  auto fetch_activations = [&](int step, int stage) {
    u8* const codes = x_codes + stage * MM_CODES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int chunk = tid & 7;
      const bool there = x_at[i] && MM_KB * step + (chunk >> 1) < nb;
      cp16(codes + ((tid >> 3) + 16 * i) * MM_STRIDE + 16 * chunk, there ? x_at[i] + 128 * step + 16 * chunk : x, there);
    }
    float* const scales = x_scales + stage * (1 + S::MORE) * MM_SCALES;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int kb = (tid >> 6) + 2 * i, b = MM_KB * step + kb;
      const bool there = d_at && b < nb;
      cp4(scales + kb * MM_N + scale_token, there ? d_at + 4 * b : x, there);
      if constexpr (W::MINIMA)
        cp4(scales + MM_SCALES + kb * MM_N + scale_token, there ? d_at + (W::HALVES ? 8 : 4) * nb + 4 * b : x, there);
    }
    cp_commit();
  };
  auto fetch_weights = [&](int step) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int b = MM_KB * step + my_block + i;
      if (my_row < n_rows && b < nb) W::load(raw[i], w_row, nb, b, table);
    }
  };
  auto store_weights = [&](int step, int stage) {
    float* const scales = w_scales + stage * S::KINDS * MM_SCALES;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int b = MM_KB * step + my_block + i;
      Block o;
      if (my_row < n_rows && b < nb) {
        W::decode(o, raw[i], b, table);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j++) o.q[j] = 0;
        o.s0 = o.s1 = o.m0 = o.m1 = 0.f;
      }
      uint4* const to = (uint4*)(w_codes + stage * MM_CODES + (tid >> 1) * MM_STRIDE + 32 * (my_block + i));
      to[0] = make_uint4(o.q[0], o.q[1], o.q[2], o.q[3]);
      to[1] = make_uint4(o.q[4], o.q[5], o.q[6], o.q[7]);
      float* const at = scales + (my_block + i) * MM_M + (tid >> 1);
      at[0] = o.s0;
      if constexpr (W::HALVES) at[MM_SCALES] = o.s1;
      if constexpr (W::MINIMA) at[(W::HALVES ? 2 : 1) * MM_SCALES] = o.m0;
      if constexpr (W::HALVES && W::MINIMA) at[3 * MM_SCALES] = o.m1;
    }
  };

  float acc[2][4][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] = 0.f;
  const int m0 = 32 * (warp & 1), n0 = 32 * (warp >> 1), g = lane >> 2, pair = 2 * (lane & 3);

  auto multiply = [&](int stage) {
    const u8* const a_at = w_codes + stage * MM_CODES + (m0 + (lane & 15)) * MM_STRIDE + 16 * (lane >> 4);
    const u8* const b_at = x_codes + stage * MM_CODES + (n0 + (lane & 7) + 8 * (lane >> 4)) * MM_STRIDE + 16 * (lane >> 3 & 1);
    const float* const ws = w_scales + stage * S::KINDS * MM_SCALES + m0 + g;
    const float* const xs = x_scales + stage * (1 + S::MORE) * MM_SCALES + n0 + pair;
#pragma unroll
    for (int kb = 0; kb < MM_KB; kb++) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ldsm4(a[m], a_at + 16 * m * MM_STRIDE + 32 * kb);
#pragma unroll
      for (int np = 0; np < 2; np++) {
        if (n0 + 16 * np >= span.rows) continue;  // the same for all lanes
        u32 b[4];
        ldsm4(b, b_at + 16 * np * MM_STRIDE + 32 * kb);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = 2 * np + h;
          const float2 d = *(const float2*)(xs + kb * MM_N + 8 * n);
          float2 s = make_float2(0.f, 0.f), s1 = s;
          if constexpr (W::MINIMA) {
            const float* const more = xs + MM_SCALES + kb * MM_N + 8 * n;
            if constexpr (W::HALVES) {
              const uint2 sums = *(const uint2*)more;
              s = make_float2(d.x * (float)(short)(sums.x & 0xffffu), d.y * (float)(short)(sums.y & 0xffffu));
              s1 = make_float2(d.x * (float)((int)sums.x >> 16), d.y * (float)((int)sums.y >> 16));
            } else {
              s = *(const float2*)more;
            }
          }
#pragma unroll
          for (int m = 0; m < 2; m++) {
            const float* const row = ws + kb * MM_M + 16 * m;
            float(&c)[4] = acc[m][n];
            int first[4] = {MM_ZERO, MM_ZERO, MM_ZERO, MM_ZERO};
            if constexpr (W::HALVES) {
              int last[4] = {MM_ZERO, MM_ZERO, MM_ZERO, MM_ZERO};
              mma16816i(first, a[m][0], a[m][1], b[2 * h]);
              mma16816i(last, a[m][2], a[m][3], b[2 * h + 1]);
#pragma unroll
              for (int e = 0; e < 4; e++)
                c[e] = fmaf(row[MM_SCALES + 8 * (e >> 1)] * (e & 1 ? d.y : d.x), sum_of(last[e]), c[e]);
            } else {
              mma16832(first, a[m], b[2 * h], b[2 * h + 1]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
              c[e] = fmaf(row[8 * (e >> 1)] * (e & 1 ? d.y : d.x), sum_of(first[e]), c[e]);
              if constexpr (W::MINIMA) c[e] = fmaf(row[(W::HALVES ? 2 : 1) * MM_SCALES + 8 * (e >> 1)], e & 1 ? s.y : s.x, c[e]);
              if constexpr (W::HALVES && W::MINIMA) c[e] = fmaf(row[3 * MM_SCALES + 8 * (e >> 1)], e & 1 ? s1.y : s1.x, c[e]);
            }
          }
        }
      }
    }
  };

  fetch_activations(share.from, 0);
  fetch_weights(share.from);
  store_weights(share.from, 0);
  for (int step = share.from; step < share.to; step++) {
    const int stage = step - share.from & 1;
    cp_wait<0>();
    __syncthreads();  // this stage is there; nobody reads the other one any more
    if (step + 1 < share.to) {
      fetch_activations(step + 1, stage ^ 1);
      fetch_weights(step + 1);
    }
    multiply(stage);
    if (step + 1 < share.to) store_weights(step + 1, stage ^ 1);
  }

  float* const out = share.out(parts, y) + (i64)span.first * y_row + share.head * y_head;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = place.weights * MM_M + m0 + 16 * m + g + 8 * (e >> 1), t = n0 + 8 * n + pair + (e & 1);
        if (row < n_rows && t < span.rows) out[t * y_row + row] = acc[m][n][e];
      }
}

// Arguments of matrix-vector kernels; of float types, nb is the number of columns.
#define IK_MV_PARAMETERS                                                                                                      \
  const i64 *st, int symbol, int factor, const u8 *w, const u8 *gate, i64 row_bytes, i64 matrix_bytes, int n_rows, int nb,    \
      const u8 *x, i64 x_row, i64 x_head, float *y, i64 y_row, i64 y_head, const int *tiles, const int *n_tiles,              \
      const int *order, int divisor, const u8 *table, int split, const u8 *w1, int n_rows1, float *y1, i64 y1_row,            \
      const u8 *w2, int n_rows2, float *y2, i64 y2_row
#define IK_MM_PARAMETERS                                                                                                      \
  const i64 *st, int symbol, int factor, const u8 *w, i64 row_bytes, i64 matrix_bytes, int n_rows, int nb, const u8 *x,       \
      i64 x_row, i64 x_head, float *y, i64 y_row, i64 y_head, const int *tiles, const int *n_tiles, const int *order,         \
      int divisor, const u8 *table, int n_parts, float *parts, i64 part_stride
#define IK_EMBED_PARAMETERS const i64 *st, const u8 *w, i64 row_bytes, int nb, float *y, const u8 *table
#define IK_KERNEL(BLOCKS) extern "C" __global__ void __launch_bounds__(128, BLOCKS)  // blocks per SM: limits registers

#define IK_WEIGHT_KERNELS(NAME, FORMAT)                                                                                       \
  IK_KERNEL(FORMAT::N > 12 ? 3 : 4) mv_##NAME(IK_MV_PARAMETERS) {                                                             \
    matvec<FORMAT>(st, symbol, factor, w, gate, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head,      \
                   tiles, n_tiles, order, divisor, table, split, {w1, n_rows1, y1, y1_row}, {w2, n_rows2, y2, y2_row});       \
  }                                                                                                                           \
  IK_KERNEL(3) mm_##NAME(IK_MM_PARAMETERS) {                                                                                  \
    gemm<FORMAT>(st, symbol, factor, w, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head, tiles,       \
                 n_tiles, order, divisor, table, {n_parts, parts, part_stride});                                              \
  }                                                                                                                           \
  IK_KERNEL(8) embed_##NAME(IK_EMBED_PARAMETERS) { embed_row<FORMAT>(st, w, row_bytes, nb, y, table); }
