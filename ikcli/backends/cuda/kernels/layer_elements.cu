// Element-wise kernels of single architectures. Memory-bound: every value is read and written once.
#include "layer_common.cuh"

// x times a number. grid (rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_scale(const i64* st, int symbol, int factor, const float* x, float* out, int cols, float by) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols;
  out += row * cols;
  if (cols % 4 == 0) {
    const float4 v = ld_f4(x + i);
    st_f4(out + i, make_float4(v.x * by, v.y * by, v.z * by, v.w * by));
  } else {
    for (int j = i; j < min(i + 4, cols); j++) out[j] = x[j] * by;
  }
}

// x times sigmoid(gate), a column of which is for `width` columns of x. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_gate(const i64* st, int symbol, int factor, const float* x, const float* gate, float* out, int cols, int width) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols;
  gate += row * (cols / width);
  out += row * cols;
  for (int j = i; j < min(i + 4, cols); j++) out[j] = x[j] / (1.f + expf(-gate[j / width]));
}

// Row r times 1 + by * ln(1 + floor((position + shift) / length)). Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_pos_scale(const i64* st, int symbol, int factor, const float* x, float* out, int cols, float by, int length, int shift) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  const float f = 1.f + by * logf(1.f + (float)((step_pos(st)[row] + shift) / length));
  x += row * cols;
  out += row * cols;
  for (int j = i; j < min(i + 4, cols); j++) out[j] = x[j] * f;
}
