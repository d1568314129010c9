// Many activation rows times a matrix of f16 or bf16: tiles of 128 weight rows by 128 or 64 activation rows, 64 columns per
// step, two to four stages by cp.async, tensor cores with f32 sums.
// Weights are exact. Activations of f16 weights are f16 times a power of two per row (layouts.py: "scaled"), which the
// results are multiplied by; those of bf16 weights are two bf16, the rounded value and the rounding of the rest ("split"), so
// both keep 11 bits or more of every value and have no limit of range. Warps: 4 x 2, as in weights_gemm.cuh.
#pragma once
#include "weights_gemm.cuh"

template <bool BF, int NG> struct HalfTile {
  static constexpr int N = 32 * NG, HALVES = BF ? 2 : 1;  // activation rows; 16-bit rows of each
  static constexpr int X_BYTES = N * MM_ROW, BYTES = MM_CODES + HALVES * X_BYTES;  // of a stage
  static constexpr int STAGES = (BF ? 2 : 3) + (NG == 2);
};

template <bool BF, int NG>
DI void half_gemm(const i64* st, int symbol, int factor, const u8* w, i64 row_bytes, i64 matrix_bytes, int n_rows, int k,
                  const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles, const int* n_tiles,
                  const int* order, int divisor, const Parts& parts) {
  SMEM_DECL
  using T = HalfTile<BF, NG>;
  const int chunks = (k + 7) >> 3;  // of 16 bytes in a row
  const Share share = share_of(parts, (chunks + 7) >> 3);
  const Place place = place_of();
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, T::N, place.tokens, share.head);
  if (!span.rows) return;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  x += share.head * x_head;
  w += span.matrix * matrix_bytes;

  // What this thread fetches: chunk tid & 7 of rows tid / 8 and every 32 more.
  const int row = tid >> 3, to = mm_chunk(row, tid & 7);
  u32 w_at[4], x_at[NG];  // in units of 16 bytes
#pragma unroll
  for (int i = 0; i < 4; i++) w_at[i] = (u32)(min(place.weights * MM_M + row + 32 * i, n_rows - 1) * (row_bytes >> 4));
#pragma unroll
  for (int i = 0; i < NG; i++) x_at[i] = source_at(span, order, divisor, x_row, row + 32 * i);
  auto fetch = [&](int step, int stage) {
    const int chunk = 8 * step + (tid & 7);
    const bool there = chunk < chunks;
    u8* const at = smem_raw + stage * T::BYTES + to;
#pragma unroll
    for (int i = 0; i < 4; i++) cp16(at + 32 * i * MM_ROW, w + 16 * ((i64)w_at[i] + chunk), there);
#pragma unroll
    for (int i = 0; i < NG; i++)
      if (row + 32 * i < span.rows)
#pragma unroll
        for (int h = 0; h < T::HALVES; h++)
          cp16(at + MM_CODES + h * T::X_BYTES + 32 * i * MM_ROW, x + 16 * ((i64)x_at[i] + h * chunks + chunk), there);
  };

  float acc[2][2 * NG][4];
  clear_sums(acc);
  const int m0 = 32 * (warp & 3), n0 = 16 * (warp >> 2), g = lane >> 2, pair = 2 * (lane & 3);
  const u32 a_at = mm_chunk(m0 + (lane & 15), lane >> 4), b_at = mm_chunk(n0 + (lane & 7) + 8 * (lane >> 4), lane >> 3 & 1);

  auto multiply = [&](int stage) {
    const u8* const codes = smem_raw + stage * T::BYTES;
#pragma unroll
    for (int c = 0; c < 4; c++) {  // 16 columns
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ldsm4(a[m], codes + (a_at ^ 32 * c) + 16 * m * MM_ROW);
#pragma unroll
      for (int np = 0; np < NG; np++) {
        if (NG == 2 && n0 + 32 * np >= span.rows) break;
#pragma unroll
        for (int h = T::HALVES - 1; h >= 0; h--) {  // small values first
          u32 b[4];
          ldsm4(b, codes + MM_CODES + h * T::X_BYTES + (b_at ^ 32 * c) + 32 * np * MM_ROW);
#pragma unroll
          for (int n = 0; n < 2; n++)
#pragma unroll
            for (int m = 0; m < 2; m++) mma16816<BF>(acc[m][2 * np + n], a[m], b[2 * n], b[2 * n + 1]);
        }
      }
    }
  };

#pragma unroll
  for (int s = 0; s < T::STAGES - 1; s++) {
    if (share.from + s < share.to) fetch(share.from + s, s);
    cp_commit();
  }
  int stage = 0, free = T::STAGES - 1;
  for (int step = share.from; step < share.to; step++) {
    cp_wait<T::STAGES - 2>();
    __syncthreads();  // this stage has arrived; no thread reads the one before it any more
    if (step + T::STAGES - 1 < share.to) fetch(step + T::STAGES - 1, free);
    cp_commit();
    multiply(stage);
    free = stage;
    stage = stage + 1 == T::STAGES ? 0 : stage + 1;
  }

  float* const out = share.out(parts, y) + (i64)span.first * y_row + share.head * y_head;
#pragma unroll
  for (int n = 0; n < 2 * NG; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int t = n0 + 32 * (n >> 1) + 8 * (n & 1) + pair + e;
      if (t >= span.rows) continue;
      float scale = 1.f;
      if constexpr (!BF) scale = *(const float*)(x + source_row(order, divisor, span.first + t) * x_row + 16 * (i64)chunks);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = place.weights * MM_M + m0 + 8 * i + g;
        if (r < n_rows) out[t * y_row + r] = acc[i >> 1][n][2 * (i & 1) + e] * scale;
      }
    }
}
