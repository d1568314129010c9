// Element-wise kernels and copies of rows. Memory-bound: every value is read and written once, 16 bytes per thread.
#include "layer_common.cuh"

// grid (rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_add(const i64* st, int symbol, int factor, const float* x, const float* y, i64 y_cols, float* out, int cols) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols;
  y += row * y_cols;  // 0: one row (a bias) for all
  out += row * cols;
  if (cols % 4 == 0 && aligned16(y)) {
    const float4 a = ld_f4(x + i), b = ld_f4(y + i);
    st_f4(out + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
  } else {
    for (int j = i; j < min(i + 4, cols); j++) out[j] = x[j] + y[j];
  }
}

// silu(gate) * up, and the activation rows of the product that follows. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_swiglu(const i64* st, int symbol, int factor, const float* gate, const float* up, float* out, int cols, u8* q8, i64 q8_bytes,
             u8* bf16, i64 bf16_bytes, int wanted) {
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  const bool in = i < cols;
  gate += row * cols;
  up += row * cols;
  out += row * cols;
  if (cols % 4) {
    for (int j = i; j < min(i + 4, cols); j++) out[j] = silu(gate[j]) * up[j];
    return;
  }
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (in) {
    const float4 g = ld_f4(gate + i), u = ld_f4(up + i);
    v = make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
    st_f4(out + i, v);
  }
  if (wanted) store_wanted(v, q8, q8_bytes, bf16, bf16_bytes, wanted, row, cols, i, in);
}

// Two parts side by side per head: columns [0, n0) from a, [n0, n0+n1) from b; strides in floats between rows and heads.
// `unit` is 4 where all widths, strides and addresses are multiples of 4 floats, else 1. grid (rows, units per row / 256)
extern "C" __global__ void __launch_bounds__(256)
layer_concat(const i64* st, int symbol, int factor, const float* a, i64 a_cols, int a_head, int n0, const float* b, i64 b_cols,
             int b_head, int n1, float* out, i64 out_cols, int out_head, int heads, int unit) {
  const i64 row = blockIdx.x;
  const int item = (blockIdx.y * blockDim.x + threadIdx.x) * unit, width = n0 + n1;
  if (row >= step_rows(st, symbol, factor) || item >= heads * width) return;
  const int h = item / width, i = item - h * width;
  const float* src = i < n0 ? a + row * a_cols + (i64)h * a_head + i : b + row * b_cols + (i64)h * b_head + (i - n0);
  float* dst = out + row * out_cols + (i64)h * out_head + i;
  if (unit == 4) st_f4(dst, ld_f4(src));
  else *dst = *src;
}

// Means of n adjacent rows of x. Same grid as layer_add.
extern "C" __global__ void __launch_bounds__(256)
layer_mean_rows(const i64* st, int symbol, int factor, const float* x, float* out, int cols, int n) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  for (int j = i; j < min(i + 4, cols); j++) {
    float sum = 0.f;
    for (int k = 0; k < n; k++) sum += x[(row * n + k) * cols + j];
    out[row * cols + j] = sum / (float)n;
  }
}

// Rows listed in the step block. grid (rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_get_rows(const i64* st, int symbol, int factor, const float* x, float* out, int cols) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += step_out_ids(st)[row] * cols;
  out += row * cols;
  if (cols % 4 == 0) st_f4(out + i, ld_f4(x + i));
  else
    for (int j = i; j < min(i + 4, cols); j++) out[j] = x[j];
}

// f32 rows to activation rows: row r * heads + h of the result is columns h * head_stride .. +k of row r.
// grid (rows, parts of 4 * blockDim.x values of a row)
extern "C" __global__ void __launch_bounds__(256)
layer_to_q8(const i64* st, int symbol, int factor, const float* x, i64 x_cols, int heads, i64 head_stride, int k, u8* out,
            i64 out_bytes) {
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const i64 item = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * 4;
  const bool in = item < (i64)heads * k;
  const int h = in ? (int)(item / k) : 0, i = in ? (int)(item - (i64)h * k) : 0;
  const float* src = x + row * x_cols + h * head_stride + i;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (in) v = aligned16(src) ? ld_f4(src) : make_float4(src[0], src[1], src[2], src[3]);
  store_q8(v, out + (row * heads + h) * out_bytes, k, i, in);
}

// REST: a second row follows, of what rounding the first one left.
template <bool BF, bool REST>
DI void to_half(const i64* st, int symbol, int factor, const float* x, i64 x_cols, int heads, i64 head_stride, int k, u8* out,
                i64 out_bytes) {
  const i64 row = blockIdx.x;
  const int padded = (k + 7) & ~7;
  const i64 item = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (row >= step_rows(st, symbol, factor) || item >= (i64)heads * padded) return;
  const int h = (int)(item / padded), i = (int)(item - (i64)h * padded);
  const float* src = x + row * x_cols + h * head_stride;
  u32 r[4], rest[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int c = i + 2 * j;
    const float2 v = make_float2(c < k ? src[c] : 0.f, c + 1 < k ? src[c + 1] : 0.f);
    r[j] = pack2<BF>(v.x, v.y);
    const float2 rounded = BF ? unpack_bf16(r[j]) : unpack_f16(r[j]);
    rest[j] = pack2<BF>(v.x - rounded.x, v.y - rounded.y);  // NaN for Inf: Inf * w + NaN is NaN, as it should show
  }
  u8* const to = out + (row * heads + h) * out_bytes + 2 * (i64)i;
  *(uint4*)to = make_uint4(r[0], r[1], r[2], r[3]);
  if constexpr (REST) *(uint4*)(to + 2 * (i64)padded) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
}
// Likewise with 16-bit values, 8 per thread; zeros fill the row up to a multiple of 8.
#define IK_TO_HALF(NAME, BF, REST)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                                          \
  layer_to_##NAME(const i64* st, int symbol, int factor, const float* x, i64 x_cols, int heads, i64 head_stride, int k,      \
                  u8* out, i64 out_bytes) {                                                                                  \
    to_half<BF, REST>(st, symbol, factor, x, x_cols, heads, head_stride, k, out, out_bytes);                                 \
  }
IK_TO_HALF(bf16, true, false)
IK_TO_HALF(f16, false, false)
IK_TO_HALF(split, true, true)
// Likewise as f16 times a power of two that brings the largest value of a row to 2^13 .. 2^14; its inverse, f32, follows the
// values (NaN where one of them is NaN or Inf). grid (rows, heads)
extern "C" __global__ void __launch_bounds__(256)
layer_to_scaled(const i64* st, int symbol, int factor, const float* x, i64 x_cols, int heads, i64 head_stride, int k, u8* out,
                i64 out_bytes) {
  IK_SHARED(u32, tops, 8)
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const float* const src = x + row * x_cols + blockIdx.y * head_stride;
  u8* const to = out + (row * heads + blockIdx.y) * out_bytes;
  u32 top = 0;  // the bits of magnitudes are ordered as the magnitudes are, Inf and NaN above all
  for (int c = threadIdx.x; c < k; c += blockDim.x) top = max(top, __float_as_uint(src[c]) & 0x7fffffffu);
#pragma unroll
  for (int d = 16; d; d >>= 1) top = max(top, shx_u32(top, d));
  if (!(threadIdx.x & 31)) tops[threadIdx.x >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) top = max(top, tops[i]);
  const u32 exponent = max(top >> 23, 14u);
  const float scale = __uint_as_float((exponent < 255 ? min(267 - exponent, 254u) : 127u) << 23);
  const int padded = (k + 7) & ~7;
  for (int i = 8 * threadIdx.x; i < padded; i += 8 * blockDim.x) {
    u32 r[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int c = i + 2 * j;
      r[j] = pack2<false>(c < k ? src[c] * scale : 0.f, c + 1 < k ? src[c + 1] * scale : 0.f);
    }
    *(uint4*)(to + 2 * (i64)i) = make_uint4(r[0], r[1], r[2], r[3]);
  }
  if (!threadIdx.x) *(float*)(to + 2 * (i64)padded) = exponent < 255 ? 1.f / scale : __uint_as_float(0x7fc00000u);
}
