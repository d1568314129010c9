// Fill and sum: the smallest kernels; tests of driver, emulation and build tool use them, benchmarks warm up with them.
#include "common.cuh"

// y[i] = value, i < n. 4 bytes per element written.
extern "C" __global__ void __launch_bounds__(256) util_fill(float* y, i64 n, float value) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = value;
}

// y[row] = sum of x[row][0..n), one block per row; the order of additions is fixed.
extern "C" __global__ void __launch_bounds__(256) util_row_sum(const float* x, float* y, int n) {
  IK_SHARED(float, scratch, 32)
  const float* row = x + (i64)blockIdx.x * n;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += 256) sum += row[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
