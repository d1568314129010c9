// AltUp (graph/ops_streams.py): a residual of n streams, rows of which lie one after the other, predicted and corrected around
// every layer. Memory-bound: a thread has one column of all streams. And the cut of gates of the same models.
#include "layer_common.cuh"

// Streams plus sums of all of them. grid (rows, parts of blockDim.x columns of a stream)
extern "C" __global__ void __launch_bounds__(256)
layer_stream_predict(const i64* st, int symbol, int factor, const float* x, const float* weights, float* out, int cols, int n) {
  const i64 row = blockIdx.x;
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || c >= cols) return;
  x += row * n * cols + c, out += row * n * cols + c, weights += row * n * n;
  for (int j = 0; j < n; j++) {
    float sum = x[(i64)j * cols];
    for (int i = 0; i < n; i++) sum = fmaf(weights[j * n + i], x[(i64)i * cols], sum);
    out[(i64)j * cols] = sum;
  }
}

// Streams from `first` on plus a row, by their shares of it: 1, or 1 + weights. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_stream_add(const i64* st, int symbol, int factor, const float* x, const float* add, const float* weights, float* out,
                 int cols, int n, int first) {
  const i64 row = blockIdx.x;
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || c >= cols) return;
  x += row * n * cols + c, out += row * n * cols + c;
  const float a = add[row * cols + c];
  for (int j = 0; j < n; j++) {
    const float v = x[(i64)j * cols];
    out[(i64)j * cols] = j < first ? v : fmaf(a, weights ? 1.f + weights[row * n + j] : 1.f, v);
  }
}

// Streams scaled to the mean square of the first; their own counts as `least` or more. grid (rows, streams)
extern "C" __global__ void __launch_bounds__(512)
layer_stream_level(const i64* st, int symbol, int factor, const float* x, float* out, int cols, int n, float least) {
  IK_SHARED(float, scratch, 32)
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const float* first = x + row * n * cols;
  const float* own = first + (i64)blockIdx.y * cols;
  out += (row * n + blockIdx.y) * cols;
  float f = 0.f, s = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) f += first[c] * first[c], s += own[c] * own[c];
  f = block_sum(f, scratch) / (float)cols;
  s = block_sum(s, scratch) / (float)cols;
  s = s < least ? least : s;  // NaN stays
  const float scale = blockIdx.y ? sqrtf(f / s) : 1.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) out[c] = own[c] * scale;
}

// What is above the mean of a row plus z standard deviations. grid (rows)
extern "C" __global__ void __launch_bounds__(512)
layer_cut(const i64* st, int symbol, int factor, const float* x, float* out, int cols, float z) {
  IK_SHARED(float, scratch, 32)
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  x += row * cols, out += row * cols;
  float sum = 0.f, squares = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c];
  const float middle = block_sum(sum, scratch) / (float)cols;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) squares += (x[c] - middle) * (x[c] - middle);
  const float least = middle + z * sqrtf(block_sum(squares, scratch) / (float)cols);
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    const float v = x[c] - least;
    out[c] = v < 0.f ? 0.f : v;  // NaN stays
  }
}
