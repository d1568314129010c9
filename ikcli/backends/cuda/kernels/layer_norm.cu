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

// v[i] = x[i] (+ y[i]) (+ z[i]), sums stored where asked for.
DI float4 added4(float4 v, const float* y, const float* z, float* sum1, float* sum2, int i) {
  if (y) {
    const float4 a = ld_f4(y + i);
    v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
    if (sum1) st_f4(sum1 + i, v);
  }
  if (z) {
    const float4 a = ld_f4(z + i);
    v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
    st_f4(sum2 + i, v);
  }
  return v;
}
DI float added1(float v, const float* y, const float* z, float* sum1, float* sum2, int i) {
  if (y) {
    v += y[i];
    if (sum1) sum1[i] = v;
  }
  if (z) {
    v += z[i];
    sum2[i] = v;
  }
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

// One block per row; x, y, z, sums and out are contiguous rows of `width`. y, z may be null; sum1 is stored if not null.
extern "C" __global__ void __launch_bounds__(512, 2)
layer_norm_rows(const i64* st, int symbol, int factor, const float* x, i64 x_cols, const float* y, const float* z, float* sum1,
                float* sum2, const float* w, float* out, int width, float eps, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes,
                int wanted) {
  IK_SHARED(float, scratch, 32)
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int t = threadIdx.x, n = blockDim.x;
  const i64 at = row * width;
  const float* src = x + row * x_cols;
  if (y) y += at;
  if (z) z += at;
  if (sum1) sum1 += at;
  if (sum2) sum2 += at;
  out += at;
  const bool vec = width % 4 == 0 && aligned16(src) && aligned16(w);
  float acc = 0.f;
  if (vec)
    for (int i = 4 * t; i < width; i += 4 * n) {
      const float4 v = added4(ld_f4(src + i), y, z, sum1, sum2, i);
      acc += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
  else
    for (int i = t; i < width; i += n) {
      const float v = added1(src[i], y, z, sum1, sum2, i);
      acc += v * v;
    }
  const float scale = 1.f / sqrtf(block_sum(acc, scratch) / (float)width + eps);
  // Every thread reads back what it stored itself.
  normalize(z ? sum2 : y ? sum1 : src, scale, {w, out, q8, bf16, q8_bytes, bf16_bytes, wanted, width}, row, vec, t, n);
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
