// RMS norm of groups of columns, with what comes before and after it at generation: residual sums of up to three rows,
// and the activation rows that the next matrix product wants. One launch instead of up to four.
//
// Bytes per row: 4*width read per addend, 4*width written per sum and for the result, 1.4*width for q8. The second pass
// over a row hits L1 (28 KB at 7168 columns).
#include "layer_common.cuh"

struct NormOut {
  const float* w;
  float* out;
  u8 *q8, *bf16;
  i64 q8_bytes, bf16_bytes;
  int wanted, width;
};

DI float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The first addend: a row, or (MOE) the weighted sum of the experts' rows of a token, which is stored too.
struct Source {
  const float *x, *route;
  const int* position;
  float* moe;
  int n_used, cols;
};
template <bool MOE> DI float4 source4(const Source& s, int i) {
  if (!MOE) return ld_f4(s.x + i);
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int k = 0; k < s.n_used; k++) {
    const int p = s.position[k];
    if (p < 0) continue;
    const float w = s.route[k];
    const float4 v = ld_f4(s.x + (i64)p * s.cols + i);
    acc = make_float4(fmaf(v.x, w, acc.x), fmaf(v.y, w, acc.y), fmaf(v.z, w, acc.z), fmaf(v.w, w, acc.w));
  }
  st_f4(s.moe + i, acc);
  return acc;
}
template <bool MOE> DI float source1(const Source& s, int i) {
  if (!MOE) return s.x[i];
  float acc = 0.f;
  for (int k = 0; k < s.n_used; k++)
    if (s.position[k] >= 0) acc = fmaf(s.x[(i64)s.position[k] * s.cols + i], s.route[k], acc);
  return s.moe[i] = acc;
}

// Source (+ y) (+ z), sums stored where there is something to add.
struct Addends {
  const float *y, *z;
  float *sum1, *sum2;
};
DI float4 added4(float4 v, const Addends& a, int i) {
  if (a.y) st_f4(a.sum1 + i, v = add4(v, ld_f4(a.y + i)));
  if (a.z) st_f4(a.sum2 + i, v = add4(v, ld_f4(a.z + i)));
  return v;
}
DI float added1(float v, const Addends& a, int i) {
  if (a.y) a.sum1[i] = v += a.y[i];
  if (a.z) a.sum2[i] = v += a.z[i];
  return v;
}

// out = src * scale * w by n threads, this one being t; every lane of a warp runs every step (the formats need them).
DI void normalize(const float* src, float scale, const NormOut& o, i64 row, bool vec, int t, int n) {
  if (!vec) {
    for (int i = t; i < o.width; i += n) o.out[i] = src[i] * scale * o.w[i];
    return;
  }
  for (int base = 0; base < o.width; base += 4 * n) {
    const int i = base + 4 * t;
    const bool in = i < o.width;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (in) {
      const float4 x = ld_f4(src + i), w = ld_f4(o.w + i);
      v = make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w);
      st_f4(o.out + i, v);
    }
    if (o.wanted) store_wanted(v, o.q8, o.q8_bytes, o.bf16, o.bf16_bytes, o.wanted, row, o.width, i, in);
  }
}

// One row by one block.
template <bool MOE> DI void norm_row(const Source& s, const Addends& a, const NormOut& o, float eps, i64 row) {
  IK_SHARED(float, scratch, 32)
  const int t = threadIdx.x, n = blockDim.x;
  const bool vec = o.width % 4 == 0 && aligned16(s.x) && aligned16(o.w);
  float acc = 0.f;
  if (vec)
    for (int i = 4 * t; i < o.width; i += 4 * n) {
      const float4 v = added4(source4<MOE>(s, i), a, i);
      acc += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
  else
    for (int i = t; i < o.width; i += n) {
      const float v = added1(source1<MOE>(s, i), a, i);
      acc += v * v;
    }
  const float scale = 1.f / sqrtf(block_sum(acc, scratch) / (float)o.width + eps);
  // Every thread reads back what it stored itself.
  normalize(a.z ? a.sum2 : a.y ? a.sum1 : MOE ? s.moe : s.x, scale, o, row, vec, t, n);
}

// One block per row. y and z may be null; both, their sums and out are contiguous rows of `width`.
extern "C" __global__ void __launch_bounds__(512, 2)
layer_norm_rows(const i64* st, int symbol, int factor, const float* x, i64 x_cols, const float* y, float* sum1, const float* z,
                float* sum2, const float* w, float* out, int width, float eps, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes,
                int wanted) {
  const i64 row = blockIdx.x, at = row * width;
  if (row >= step_rows(st, symbol, factor)) return;
  norm_row<false>({x + row * x_cols, nullptr, nullptr, nullptr, 0, 0},
                  {y ? y + at : nullptr, z ? z + at : nullptr, sum1 + at, sum2 + at},
                  {w, out + at, q8, bf16, q8_bytes, bf16_bytes, wanted, width}, eps, row);
}

// The same with the weighted sum of experts (layer_moe_sum) as first addend.
extern "C" __global__ void __launch_bounds__(512, 2)
layer_norm_experts(const i64* st, int symbol, int factor, const float* experts, const float* route, const int* position, float* moe,
                   int n_used, const float* y, float* sum1, const float* z, float* sum2, const float* w, float* out, int width,
                   float eps, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes, int wanted) {
  const i64 row = blockIdx.x, at = row * width;
  if (row >= step_rows(st, symbol, factor)) return;
  norm_row<true>({experts, route + row * 2 * n_used, position + row * n_used, moe + at, n_used, width},
                 {y ? y + at : nullptr, z ? z + at : nullptr, sum1 + at, sum2 + at},
                 {w, out + at, q8, bf16, q8_bytes, bf16_bytes, wanted, width}, eps, row);
}

// One warp per group of `width` columns (heads): groups per row, x_cols columns between rows of x.
extern "C" __global__ void __launch_bounds__(128)
layer_norm_groups(const i64* st, int symbol, int factor, const float* x, i64 x_cols, const float* w, float* out, int groups,
                  int width, float eps) {
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const i64 row = item / groups;
  if (row >= step_rows(st, symbol, factor)) return;
  const int t = threadIdx.x & 31;
  const float* src = x + row * x_cols + (item - row * groups) * width;
  const bool vec = width % 4 == 0 && aligned16(src) && aligned16(w);
  float acc = 0.f;
  if (vec)
    for (int i = 4 * t; i < width; i += 128) {
      const float4 v = ld_f4(src + i);
      acc += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
  else
    for (int i = t; i < width; i += 32) acc += src[i] * src[i];
  const float scale = 1.f / sqrtf(warp_sum(acc) / (float)width + eps);
  normalize(src, scale, {w, out + item * width, nullptr, nullptr, 0, 0, 0, width}, row, vec, t, 32);
}

// Norm of groups of `width` columns by one block each: kind 0 around the mean, 1 by the root mean square, 2 by the root of the
// sum, 3 not at all. w and b may be null; they have w_rows, b_rows rows for groups, which repeat. grid (rows, groups)
extern "C" __global__ void __launch_bounds__(512, 2)
layer_norm_any(const i64* st, int symbol, int factor, const float* x, const float* w, int w_rows, int w_stride, const float* b,
               int b_rows, int b_stride, float* out, int cols, int width, float eps, int kind) {
  IK_SHARED(float, scratch, 32)
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int at = blockIdx.y * width, t = threadIdx.x, n = blockDim.x;
  x += row * cols + at;
  out += row * cols + at;
  if (w) w += (blockIdx.y % w_rows) * w_stride;
  if (b) b += (blockIdx.y % b_rows) * b_stride;
  float middle = 0.f;
  if (kind == 0) {
    float sum = 0.f;
    for (int i = t; i < width; i += n) sum += x[i];
    middle = block_sum(sum, scratch) / (float)width;
  }
  float squares = 0.f;
  for (int i = t; i < width; i += n) squares += (x[i] - middle) * (x[i] - middle);
  squares = block_sum(squares, scratch);
  const float root = kind == 2 ? sqrtf(squares) : sqrtf(squares / (float)width + eps);
  const float scale = kind == 3 ? 1.f : 1.f / (kind == 2 && root < eps ? eps : root);
  for (int i = t; i < width; i += n) {
    float v = (x[i] - middle) * scale;
    if (w) v *= w[i];
    if (b) v += b[i];
    out[i] = v;
  }
}
