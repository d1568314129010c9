// Products of float weights with f32 activations, and embeddings: F32, F16, BF16. Any number of columns: rows of weights
// end with zeros up to 16 bytes.
// mv_*: as weights_matvec.cuh, f32 throughout. mm_f16, mm_bf16: weights_half.cuh. mm_f32: tf32 tensor cores, f32 sums; both
// sides are split in two parts and three products are added, which leaves errors near those of f32.
#include "weights_half.cuh"

struct F32 {
  static constexpr int N = 4;  // columns in 16 bytes
  SI void values(float* v, const uint4& w) {
    v[0] = __uint_as_float(w.x), v[1] = __uint_as_float(w.y), v[2] = __uint_as_float(w.z), v[3] = __uint_as_float(w.w);
  }
};
template <bool BF> struct Half {
  static constexpr int N = 8;
  SI void values(float* v, const uint4& w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = BF ? unpack_bf16(words[i]) : unpack_f16(words[i]);
      v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
  }
};

// Columns c .. c+3 of a row of k; zeros behind it. `whole`: rows are 16-byte aligned and k is a multiple of 4.
DI float4 columns4(const float* x, int c, int k, bool whole) {
  if (whole) return c < k ? *(const float4*)(x + c) : make_float4(0.f, 0.f, 0.f, 0.f);
  return make_float4(c < k ? x[c] : 0.f, c + 1 < k ? x[c + 1] : 0.f, c + 2 < k ? x[c + 2] : 0.f, c + 3 < k ? x[c + 3] : 0.f);
}
DI bool whole_rows(const u8* x, i64 x_row, i64 x_head, int k) { return !(((i64)x | x_row | x_head) & 15) && !(k & 3); }

template <class W, int ROWS>
DI void float_matvec(const i64* st, int symbol, int factor, const u8* w, const u8* gate, i64 row_bytes, i64 matrix_bytes,
                     int n_rows, int k, const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles,
                     const int* n_tiles, const int* order, int divisor, int split, const More& one, const More& two) {
  IK_SHARED(float, sums, MV_SUMS * ROWS)
  const Team team = team_of(pick_matrix(one, two, 2 - split, w, n_rows, y, y_row), split);
  const int item = team.item;
  const bool active = item < (gate ? n_rows : (n_rows + 1) >> 1), whole = whole_rows(x, x_row, x_head, k);
  const int row_a = gate ? item : 2 * item, row_b = gate ? item : min(2 * item + 1, n_rows - 1);
  const u8* a = w + row_a * row_bytes;
  const u8* b = (gate ? gate : w) + row_b * row_bytes;
  const int n = (k + W::N - 1) / W::N;
  const int first = team.part * 32 + team.lane, step = split > 0 ? 32 << split : team.width;
  uint4 raw_a = make_uint4(0, 0, 0, 0), raw_b = raw_a;
  if (!tiles) {  // start loading weights before the number of activation rows is known
    a += blockIdx.z * matrix_bytes, b += blockIdx.z * matrix_bytes;
    if (active && first < n) raw_a = ldg16(a + 16 * first), raw_b = ldg16(b + 16 * first);
  }
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, ROWS, blockIdx.y, blockIdx.z);
  if (!span.rows) return;
  if (tiles) {
    a += span.matrix * matrix_bytes, b += span.matrix * matrix_bytes;
    if (active && first < n) raw_a = ldg16(a + 16 * first), raw_b = ldg16(b + 16 * first);
  }
  x += blockIdx.z * x_head;
  int from[ROWS];
  float acc_a[ROWS], acc_b[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    from[t] = t < span.rows ? source_row(order, divisor, span.first + t) : 0;
    acc_a[t] = acc_b[t] = 0.f;
  }
  if (active) {
    for (int i = first; i < n; i += step) {
      float va[W::N], vb[W::N];
      W::values(va, raw_a);
      W::values(vb, raw_b);
      if (i + step < n) {
        raw_a = ldg16(a + 16 * (i + step));
        raw_b = ldg16(b + 16 * (i + step));
      }
#pragma unroll
      for (int t = 0; t < ROWS; t++)
        if (t < span.rows) {
          const float* row = (const float*)(x + from[t] * x_row);
#pragma unroll
          for (int j = 0; j < W::N; j += 4) {
            const float4 v = columns4(row, i * W::N + j, k, whole);
            acc_a[t] = fmaf(va[j], v.x, acc_a[t]), acc_b[t] = fmaf(vb[j], v.x, acc_b[t]);
            acc_a[t] = fmaf(va[j + 1], v.y, acc_a[t]), acc_b[t] = fmaf(vb[j + 1], v.y, acc_b[t]);
            acc_a[t] = fmaf(va[j + 2], v.z, acc_a[t]), acc_b[t] = fmaf(vb[j + 2], v.z, acc_b[t]);
            acc_a[t] = fmaf(va[j + 3], v.w, acc_a[t]), acc_b[t] = fmaf(vb[j + 3], v.w, acc_b[t]);
          }
        }
    }
  }
  store_sums(sums, span, acc_a, acc_b, team, split, active, row_a, row_b, gate != nullptr, y + blockIdx.z * y_head, y_row);
}

template <class W> DI void float_embed(const i64* st, const u8* w, i64 row_bytes, int k, float* y) {
  if ((i64)blockIdx.x >= st[ST_TOKENS]) return;
  const u8* row = w + step_tokens(st)[blockIdx.x] * row_bytes;
  for (int i = threadIdx.x; i * W::N < k; i += MV_THREADS) {
    float v[W::N];
    W::values(v, ldg16(row + 16 * i));
#pragma unroll
    for (int j = 0; j < W::N; j++)
      if (i * W::N + j < k) y[(i64)blockIdx.x * k + i * W::N + j] = v[j];
  }
}

// Tiles of 64 weight rows by 64 activation rows, 32 columns per step, as 32-bit words; the next step is loaded into registers
// while this one is multiplied. Warps: 2 x 2, each 32 x 32.
constexpr int FM_STRIDE = 32 + 4, FM_TILE = 64 * FM_STRIDE;  // words

// v -> its rounding to tf32 and that of the rest.
DI void split_tf32(u32 (&v)[4], u32 (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 high = tf32(__uint_as_float(v[i]));
    low[i] = tf32(__uint_as_float(v[i]) - __uint_as_float(high));
    v[i] = high;
  }
}

DI void float_gemm(const i64* st, int symbol, int factor, const u8* w, i64 row_bytes, i64 matrix_bytes, int n_rows, int k,
                   const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles, const int* n_tiles,
                   const int* order, int divisor, const Parts& parts) {
  SMEM_DECL
  const Share share = share_of(parts, (k + 31) / 32);
  const Place place = place_of();
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, 64, place.tokens, share.head);
  if (!span.rows) return;
  u32* const w_tile = (u32*)smem_raw;            // [2][64][FM_STRIDE]
  u32* const x_tile = w_tile + 2 * FM_TILE;      // [2][64][FM_STRIDE]
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const bool whole = whole_rows(x, x_row, x_head, k);
  x += share.head * x_head;
  const int row = tid >> 1, half = 16 * (tid & 1);  // half a row of 32 columns of each tile
  const int my_row = place.weights * 64 + row;
  const u8* const w_at = my_row < n_rows ? w + span.matrix * matrix_bytes + my_row * row_bytes : nullptr;
  const float* const x_at = row < span.rows ? (const float*)(x + source_row(order, divisor, span.first + row) * x_row) : nullptr;
  float w_next[16], x_next[16];

  auto fetch = [&](int step) {
    const int c = 32 * step + half;
#pragma unroll
    for (int i = 0; i < 16; i += F32::N) {
      const bool there = w_at && c + i < k;
      F32::values(w_next + i, there ? ldg16(w_at + 4 * (c + i)) : make_uint4(0, 0, 0, 0));
    }
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const float4 v = x_at ? columns4(x_at, c + i, k, whole) : make_float4(0.f, 0.f, 0.f, 0.f);
      x_next[i] = v.x, x_next[i + 1] = v.y, x_next[i + 2] = v.z, x_next[i + 3] = v.w;
    }
  };
  auto store = [&](int stage) {
    const int at = stage * FM_TILE + row * FM_STRIDE + half;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      *(float4*)(w_tile + at + i) = make_float4(w_next[i], w_next[i + 1], w_next[i + 2], w_next[i + 3]);
      *(float4*)(x_tile + at + i) = make_float4(x_next[i], x_next[i + 1], x_next[i + 2], x_next[i + 3]);
    }
  };

  float acc[2][4][4];
  clear_sums(acc);
  const int m0 = 32 * (warp & 1), n0 = 32 * (warp >> 1), g = lane >> 2, pair = 2 * (lane & 3);

  auto multiply = [&](int stage) {
    const u32* const a_at = w_tile + stage * FM_TILE + (m0 + (lane & 15)) * FM_STRIDE + 4 * (lane >> 4);
    const u32* const b_at = x_tile + stage * FM_TILE + (n0 + (lane & 7) + 8 * (lane >> 4)) * FM_STRIDE + 4 * (lane >> 3 & 1);
#pragma unroll
    for (int c = 0; c < 32; c += 8) {
      u32 a[2][4], a_low[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        ldsm4(a[m], a_at + 16 * m * FM_STRIDE + c);
        split_tf32(a[m], a_low[m]);
      }
#pragma unroll
      for (int np = 0; np < 2; np++) {
        if (n0 + 16 * np >= span.rows) continue;
        u32 b[4], b_low[4];
        ldsm4(b, b_at + 16 * np * FM_STRIDE + c);
        split_tf32(b, b_low);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int m = 0; m < 2; m++) {
            float(&to)[4] = acc[m][2 * np + h];
            mma1688(to, a_low[m], b[2 * h], b[2 * h + 1]);
            mma1688(to, a[m], b_low[2 * h], b_low[2 * h + 1]);
            mma1688(to, a[m], b[2 * h], b[2 * h + 1]);
          }
      }
    }
  };

  fetch(share.from);
  store(0);
  for (int step = share.from; step < share.to; step++) {
    const int stage = step - share.from & 1;
    __syncthreads();  // this stage has arrived; no thread reads the other one any more
    if (step + 1 < share.to) fetch(step + 1);
    multiply(stage);
    if (step + 1 < share.to) store(stage ^ 1);
  }
  float* const out = share.out(parts, y) + (i64)span.first * y_row + share.head * y_head;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = place.weights * 64 + m0 + 16 * m + g + 8 * (e >> 1), t = n0 + 8 * n + pair + (e & 1);
        if (r < n_rows && t < span.rows) out[t * y_row + r] = acc[m][n][e];
      }
}

#define IK_FLOAT_MV(NAME, FORMAT, ROWS)                                                                                       \
  mv_##NAME(IK_MV_PARAMETERS) {                                                                                               \
    float_matvec<FORMAT, ROWS>(st, symbol, factor, w, gate, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row,  \
                               y_head, tiles, n_tiles, order, divisor, split, {w1, n_rows1, y1, y1_row},                      \
                               {w2, n_rows2, y2, y2_row});                                                                    \
  }
#define IK_FLOAT_KERNELS(NAME, FORMAT)                                                                                        \
  IK_KERNEL(4) IK_FLOAT_MV(NAME, FORMAT, MV_ROWS)                                                                             \
  IK_KERNEL(8) IK_FLOAT_MV(NAME##_one, FORMAT, 1)                                                                             \
  IK_KERNEL(8) embed_##NAME(IK_EMBED_PARAMETERS) { float_embed<FORMAT>(st, w, row_bytes, nb, y); }

IK_FLOAT_KERNELS(f32, F32)
IK_FLOAT_KERNELS(f16, Half<false>)
IK_FLOAT_KERNELS(bf16, Half<true>)

IK_KERNEL(4) mm_f32(IK_MM_PARAMETERS) {
  float_gemm(st, symbol, factor, w, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head, tiles, n_tiles, order,
             divisor, {n_parts, parts, part_stride});
}
#define IK_HALF_KERNEL(NAME, BF, NG, BLOCKS)                                                                                  \
  IK_MM_KERNEL(BLOCKS) mm_##NAME(IK_MM_PARAMETERS) {                                                                          \
    half_gemm<BF, NG>(st, symbol, factor, w, row_bytes, matrix_bytes, n_rows, nb, x, x_row, x_head, y, y_row, y_head, tiles,  \
                      n_tiles, order, divisor, {n_parts, parts, part_stride});                                                \
  }
IK_HALF_KERNEL(f16, false, 2, 2)
IK_HALF_KERNEL(f16_n128, false, 4, 2)
IK_HALF_KERNEL(bf16, true, 2, 2)
IK_HALF_KERNEL(bf16_n128, true, 4, 2)

// y[row][c] = sum over parts of parts[.][row][c], in order: what several blocks of one tile left. grid (rows, columns / 256)
extern "C" __global__ void __launch_bounds__(256)
    weights_add_parts(const i64* st, int symbol, int factor, const float* parts, int n, i64 stride, float* y, int cols) {
  const i64 row = blockIdx.x;
  const int c = (int)blockIdx.y * 256 + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || c >= cols) return;
  float sum = parts[row * cols + c];
  for (int p = 1; p < n; p++) sum += parts[p * stride + row * cols + c];
  y[row * cols + c] = sum;
}
