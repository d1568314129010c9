// Many activation rows times a matrix: tiles of 128 weight rows by 128 or 64 activation rows, 128 columns per step.
// Weights are dequantized once per tile into int8 in shared memory: half of a tile while tensor cores multiply the first
// two blocks of 32 columns of the step before, the other half during the last two. Activations come by cp.async. Integer
// products of 32 (or 16) columns are exact and scaled in f32, as in the matrix-vector kernels. The 12 to 34 f32
// operations per lane for a tensor core product of 16 x 8 x 32 are the bottleneck. Warps: 4 x 2, each 32 weight rows by
// every other group of 16 activation rows. The loop has no branches: places outside the matrix are read from its last row
// or block, and have scales of 0 where they would be added.
#pragma once
#include "weights_matvec.cuh"

constexpr int MM_THREADS = 256, MM_M = 128, MM_KB = 4, MM_ROW = 32 * MM_KB;  // bytes of a row of codes
constexpr int MM_CODES = MM_M * MM_ROW, MM_STRIDE = MM_M + 8, MM_SCALES = MM_KB * MM_STRIDE;  // bytes; floats
static_assert(MM_KB == 4 && MM_THREADS == 2 * MM_M, "a thread fetches two blocks of 32 weights per step");

// Chunk of 16 bytes of a row of codes: neighbouring rows differ in banks, so that reading matrices needs no padding.
DI int mm_chunk(int row, int chunk) { return row * MM_ROW + ((chunk ^ (row & 7)) << 4); }

template <int N> DI void clear_sums(float (&acc)[2][N][4]) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] = 0.f;
}

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

// Shared memory of a tile of 32 * NG activation rows: two stages of each of
//   codes of weights [MM_M][MM_ROW], of activations [N][MM_ROW]; f32 scales of weights [KINDS][MM_KB][MM_STRIDE], of
//   activations [1 + MORE][MM_KB][N]
template <class W, int NG> struct GemmTile {
  static constexpr int N = 32 * NG, X_CODES = N * MM_ROW, X_SCALES = MM_KB * N;
  static constexpr int KINDS = (W::HALVES ? 2 : 1) * (W::MINIMA ? 2 : 1);  // s0 [s1] [m0 [m1]] of a weight row
  static constexpr int MORE = W::MINIMA ? 1 : 0;                            // beside d: s, or sums of halves
};

// acc += 32 weight rows times 16 activation rows, 32 columns: codes a and b, scales of weights and of activations.
template <class W, int NG>
DI void gemm_multiply(float (&acc)[2][2 * NG][4], int np, const u32 (&a)[2][4], const u32 (&b)[4],
                      const float (&ws)[GemmTile<W, NG>::KINDS][2][2], const float2 (&xs)[1 + GemmTile<W, NG>::MORE][2],
                      const int4& zero) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 d = xs[0][h];
    float2 s0 = make_float2(0.f, 0.f), s1 = s0;
    if constexpr (W::MINIMA) {
      s0 = xs[1][h];
      if constexpr (W::HALVES) {
        const u32 lo = __float_as_uint(s0.x), hi = __float_as_uint(s0.y);  // two sums of 16 columns each
        s0 = make_float2(d.x * (float)(short)(lo & 0xffffu), d.y * (float)(short)(hi & 0xffffu));
        s1 = make_float2(d.x * (float)((int)lo >> 16), d.y * (float)((int)hi >> 16));
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float(&c)[4] = acc[m][2 * np + h];
      int first[4];
      if constexpr (W::HALVES) {
        int last[4];
        mma16816i(first, a[m][0], a[m][1], b[2 * h], zero);
        mma16816i(last, a[m][2], a[m][3], b[2 * h + 1], zero);
#pragma unroll
        for (int e = 0; e < 4; e++) c[e] = fmaf(ws[1][m][e >> 1] * (e & 1 ? d.y : d.x), sum_of(last[e]), c[e]);
      } else {
        mma16832(first, a[m], b[2 * h], b[2 * h + 1], zero);
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        c[e] = fmaf(ws[0][m][e >> 1] * (e & 1 ? d.y : d.x), sum_of(first[e]), c[e]);
        if constexpr (W::MINIMA) c[e] = fmaf(ws[W::HALVES ? 2 : 1][m][e >> 1], e & 1 ? s0.y : s0.x, c[e]);
        if constexpr (W::HALVES && W::MINIMA) c[e] = fmaf(ws[3][m][e >> 1], e & 1 ? s1.y : s1.x, c[e]);
      }
    }
  }
}

// NG: groups of 32 activation rows in a tile. AHEAD: a warp reads its next 32 columns while it multiplies, which takes more
// registers than half an SM has.
template <class W, int NG, bool AHEAD>
DI void gemm(const i64* st, int symbol, int factor, const u8* w, i64 row_bytes, i64 matrix_bytes, int n_rows, int nb,
             const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles, const int* n_tiles,
             const int* order, int divisor, const u8* table, const Parts& parts) {
  SMEM_DECL
  using T = GemmTile<W, NG>;
  const Share share = share_of(parts, (nb + MM_KB - 1) / MM_KB);
  const Place place = place_of();
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, T::N, place.tokens, share.head);
  if (!span.rows) return;
  u8* const w_codes = smem_raw;
  u8* const x_codes = w_codes + 2 * MM_CODES;
  float* const w_scales = (float*)(x_codes + 2 * T::X_CODES);
  float* const x_scales = w_scales + 2 * T::KINDS * MM_SCALES;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  x += share.head * x_head;

  // What this thread fetches: weight block tid & 3 of rows tid / 4 and 64 more.
  const int block = tid & 3, w_row = tid >> 2, row0 = place.weights * MM_M + w_row;
  const u8* const w_at = w + span.matrix * matrix_bytes + min(row0, n_rows - 1) * row_bytes;
  const u32 half_bytes = max(0, min(MM_M / 2, n_rows - 1 - row0)) * (u32)row_bytes;
  const u32 w_to = mm_chunk(w_row, 2 * block), ws_to = block * MM_STRIDE + w_row;
  // 16 bytes of activation rows tid / 8 and every 32 more.
  u32 x_at[NG];  // in units of 16 bytes
  const u32 x_to = mm_chunk(tid >> 3, tid & 7);
#pragma unroll
  for (int i = 0; i < NG; i++) x_at[i] = source_at(span, order, divisor, x_row, (tid >> 3) + 32 * i);
  // Four scales, or what goes with them, of one activation row.
  const int kind = tid / T::N, scale_row = tid & (T::N - 1);
  const bool scaling = kind <= T::MORE && scale_row < span.rows;
  const u32 scales_at =  // in floats
      (u32)((scaling ? source_row(order, divisor, span.first + scale_row) : 0) * (x_row >> 2)) + (kind ? W::HALVES ? 10 : 9 : 8) * nb;
  u32 raw[W::N];
  uint4 scales;

  auto fetch_activations = [&](int step, int stage) {
    const u8* const from = x + 32 * min(MM_KB * step + (tid >> 1 & 3), nb - 1) + 16 * (tid & 1);
#pragma unroll
    for (int i = 0; i < NG; i++)
      if ((tid >> 3) + 32 * i < span.rows)
        cp16(x_codes + stage * T::X_CODES + x_to + 32 * i * MM_ROW, from + 16 * (i64)x_at[i], true);
    cp_commit();
    if (!scaling) return;
    const u32* const at = (const u32*)x + scales_at + MM_KB * step;
    if (nb & 3) {
      const int left = nb - MM_KB * step;
      scales = make_uint4(at[0], left > 1 ? at[1] : 0, left > 2 ? at[2] : 0, left > 3 ? at[3] : 0);
    } else {
      scales = *(const uint4*)at;
    }
  };
  auto store_scales = [&](int stage) {
    if (!scaling) return;
    u32* const to = (u32*)x_scales + (stage * (1 + T::MORE) + kind) * T::X_SCALES + scale_row;
    to[0] = scales.x, to[T::N] = scales.y, to[2 * T::N] = scales.z, to[3 * T::N] = scales.w;
  };
  auto fetch_weights = [&](int half, int step) {
    W::load(raw, w_at + (half ? half_bytes : 0), nb, min(MM_KB * step + block, nb - 1), table);
  };
  auto store_weights = [&](int half, int step, int stage) {
    Block o;
    W::decode(o, raw, min(MM_KB * step + block, nb - 1), table);
    u8* const codes = w_codes + stage * MM_CODES + half * (MM_CODES / 2);
    *(uint4*)(codes + w_to) = make_uint4(o.q[0], o.q[1], o.q[2], o.q[3]);
    *(uint4*)(codes + (w_to ^ 16)) = make_uint4(o.q[4], o.q[5], o.q[6], o.q[7]);
    float* const to = w_scales + stage * T::KINDS * MM_SCALES + half * (MM_M / 2) + ws_to;
    to[0] = o.s0;
    if constexpr (W::HALVES) to[MM_SCALES] = o.s1;
    if constexpr (W::MINIMA) to[(W::HALVES ? 2 : 1) * MM_SCALES] = o.m0;
    if constexpr (W::HALVES && W::MINIMA) to[3 * MM_SCALES] = o.m1;
  };

  // The share of this warp: weight rows m0 .. m0 + 31 by groups n0, n0 + 32, ... of 16 activation rows. Plain numbers: as
  // members of a struct they cost registers (weights_half.cuh has the same).
  const int m0 = 32 * (warp & 3), n0 = 16 * (warp >> 2), g = lane >> 2, pair = 2 * (lane & 3);
  const u32 a_at = mm_chunk(m0 + (lane & 15), lane >> 4), b_at = mm_chunk(n0 + (lane & 7) + 8 * (lane >> 4), lane >> 3 & 1);
  const u32 ws_at = m0 + g, xs_at = n0 + pair;
  int4 zero = make_int4(MM_ZERO, MM_ZERO, MM_ZERO, MM_ZERO);
  pin(zero);
  auto read_weights = [&](u32 (&a)[2][4], int stage, int kb) {
#pragma unroll
    for (int m = 0; m < 2; m++) ldsm4(a[m], w_codes + stage * MM_CODES + (a_at ^ 32 * kb) + 16 * m * MM_ROW);
  };
  auto read_activations = [&](u32 (&b)[4], int stage, int kb, int np) {
    ldsm4(b, x_codes + stage * T::X_CODES + (b_at ^ 32 * kb) + 32 * np * MM_ROW);
  };

  float acc[2][2 * NG][4];
  clear_sums(acc);

  fetch_activations(share.from, 0);
  fetch_weights(0, share.from);
  store_scales(0);
  store_weights(0, share.from, 0);
  fetch_weights(1, share.from);
  store_weights(1, share.from, 0);
  fetch_weights(0, min(share.from + 1, share.to - 1));
  cp_wait<0>();
  __syncthreads();
  u32 a[2][2][4], b[2][4];
  if (AHEAD) read_weights(a[0], 0, 0), read_activations(b[0], 0, 0, 0);
  int stage = 0;
  for (int step = share.from; step < share.to; step++) {
    const int next = min(step + 1, share.to - 1), after = min(step + 2, share.to - 1);  // the last step is fetched again
#pragma unroll
    for (int kb = 0; kb < MM_KB; kb++) {
      float ws[T::KINDS][2][2];
#pragma unroll
      for (int i = 0; i < T::KINDS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          ws[i][j >> 1][j & 1] = w_scales[(stage * T::KINDS + i) * MM_SCALES + kb * MM_STRIDE + ws_at + 8 * j];
      if (!AHEAD) read_weights(a[kb & 1], stage, kb), read_activations(b[kb * NG & 1], stage, kb, 0);
      if (kb == 0) fetch_activations(next, stage ^ 1);
#pragma unroll
      for (int np = 0; np < NG; np++) {
        const int at = kb * NG + np & 1;
        if (!AHEAD && n0 + 32 * np >= span.rows) break;
        float2 xs[1 + T::MORE][2];
#pragma unroll
        for (int i = 0; i <= T::MORE; i++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            xs[i][h] = *(const float2*)(x_scales + (stage * (1 + T::MORE) + i) * T::X_SCALES + kb * T::N + xs_at + 32 * np + 8 * h);
        if (np < NG - 1) {
          read_activations(b[at ^ 1], stage, kb, np + 1);
        } else if (AHEAD) {
          if (kb == MM_KB - 1) {  // the next stage has arrived; no thread reads this one any more
            cp_wait<0>();
            __syncthreads();
          }
          read_weights(a[kb + 1 & 1], kb == MM_KB - 1 ? stage ^ 1 : stage, (kb + 1) % MM_KB);
          read_activations(b[at ^ 1], kb == MM_KB - 1 ? stage ^ 1 : stage, (kb + 1) % MM_KB, 0);
        }
        gemm_multiply<W, NG>(acc, np, a[kb & 1], b[at], ws, xs, zero);
      }
      if (kb == 0) {
        store_weights(0, next, stage ^ 1);
        fetch_weights(1, next);
      } else if (kb == 1) {
        store_scales(stage ^ 1);
      } else if (kb == 2) {
        store_weights(1, next, stage ^ 1);
        fetch_weights(0, after);
      }
    }
    if (!AHEAD) {
      cp_wait<0>();
      __syncthreads();
    }
    stage ^= 1;
  }

  float* const out = share.out(parts, y) + (i64)span.first * y_row + share.head * y_head;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 2 * NG; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = place.weights * MM_M + m0 + 16 * m + g + 8 * (e >> 1);
        const int t = n0 + 32 * (n >> 1) + 8 * (n & 1) + pair + (e & 1);
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
#define IK_MM_KERNEL(BLOCKS) extern "C" __global__ void __launch_bounds__(MM_THREADS, BLOCKS)

#define IK_MV(NAME, FORMAT, ROWS)                                                                                             \
  mv_##NAME(IK_MV_PARAMETERS) {                                                                                               \
    matvec<FORMAT, ROWS>(st, symbol, factor, w, gate, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row,        \
                         y_head, tiles, n_tiles, order, divisor, table, split, {w1, n_rows1, y1, y1_row},                     \
                         {w2, n_rows2, y2, y2_row});                                                                          \
  }

#define IK_WEIGHT_KERNELS(NAME, FORMAT)                                                                                       \
  IK_KERNEL(FORMAT::N > 12 ? 3 : 4) IK_MV(NAME, FORMAT, MV_ROWS)                                                              \
  IK_KERNEL(ONE_BLOCKS<FORMAT>) IK_MV(NAME##_one, FORMAT, 1)                                                                  \
  IK_MM_KERNEL(2) mm_##NAME(IK_MM_PARAMETERS) {                                                                               \
    gemm<FORMAT, 2, false>(st, symbol, factor, w, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head,    \
                           tiles, n_tiles, order, divisor, table, {n_parts, parts, part_stride});                             \
  }                                                                                                                           \
  IK_MM_KERNEL(1) mm_##NAME##_n128(IK_MM_PARAMETERS) {                                                                        \
    gemm<FORMAT, 4, true>(st, symbol, factor, w, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head,     \
                          tiles, n_tiles, order, divisor, table, {n_parts, parts, part_stride});                              \
  }                                                                                                                           \
  IK_KERNEL(8) embed_##NAME(IK_EMBED_PARAMETERS) { embed_row<FORMAT>(st, w, row_bytes, nb, y, table); }
