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

// cap * tanh(x / cap). Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_softcap(const i64* st, int symbol, int factor, const float* x, float* out, int cols, float cap) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  for (int j = i; j < min(i + 4, cols); j++) out[row * cols + j] = cap * tanhf(x[row * cols + j] / cap);
}

// x times sigmoid(gate), or with kind 1 times ln(1 + exp(gate)), with kind 2 times the gate itself; a column of gate is for
// `width` columns of x. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_gate(const i64* st, int symbol, int factor, const float* x, const float* gate, float* out, int cols, int width, int kind) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols;
  gate += row * (cols / width);
  out += row * cols;
  for (int j = i; j < min(i + 4, cols); j++) {
    // log(u) * e / (u - 1) cancels the rounding error of u = 1 + e; above 20 the result is g itself.
    const float g = gate[j / width], e = expf(kind ? g : -g), u = 1.f + e;
    // ln(1 + e), exact for small e as well.
    out[j] = kind == 2 ? x[j] * g : kind ? x[j] * (g > 20.f ? g : u == 1.f ? e : logf(u) * (e / (u - 1.f))) : x[j] / u;
  }
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

DI float sigmoid_times(float x, float y) { return x / (1.f + expf(-fminf(fmaxf(y, -100.f), 100.f))); }
// y, or NaN where x is NaN or without end: minimum and maximum lose it.
DI float kept(float x, float y) { return y + (x - x) * 0.f; }
DI float clamped(float x, float limit) { return kept(x, fminf(fmaxf(x, -limit), limit)); }

// The kinds of graph/activations.py, in their order.
enum Act {
  ACT_SILU, ACT_GELU, ACT_GELU_QUICK, ACT_RELU, ACT_RELU_SQR, ACT_SWIGLU_OAI, ACT_GELU_ERF, ACT_ELU_REST, ACT_SILU_OF_CAPPED,
  ACT_SITU
};
DI float activation(float x, int kind) {
  switch (kind) {
    case ACT_GELU: return sigmoid_times(x, x * (1.5957691216057308f + 0.07135481627260025f * x * x));
    case ACT_GELU_QUICK: return sigmoid_times(x, 1.702f * x);
    case ACT_GELU_ERF: return 0.5f * x * erfcf(x * -0.70710678118654752f);
    case ACT_ELU_REST: return kept(x, expm1f(fminf(x, 0.f)) - fminf(x, 0.f));
    case ACT_RELU: return kept(x, fmaxf(x, 0.f));
    case ACT_RELU_SQR: {
      const float r = kept(x, fmaxf(x, 0.f));
      return r * r;
    }
    default: return silu(x);
  }
}
DI float glu(float gate, float up, int kind, float limit, float alpha) {
  if (kind == ACT_SITU) {
    if (limit > 0.f) up = limit * tanhf(up / limit);
    return sigmoid_times(alpha * tanhf(gate / alpha), gate) * up;
  }
  if (limit > 0.f) up = clamped(up, limit);
  if (kind == ACT_SWIGLU_OAI || kind == ACT_SILU_OF_CAPPED) {
    if (limit > 0.f) gate = kept(gate, fminf(gate, limit));
    return kind == ACT_SWIGLU_OAI ? sigmoid_times(gate, alpha * gate) * (up + 1.f) : silu(gate) * up;
  }
  const float v = activation(gate, kind);
  return (limit > 0.f ? kept(v, fminf(v, limit)) : v) * up;
}

// An activation of `gate`, with `up` if that is not null, and the activation rows of the product that follows. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_glu(const i64* st, int symbol, int factor, const float* gate, const float* up, float* out, int cols, int kind, float limit,
          float alpha, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes, int wanted) {
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  gate += row * cols;
  up = up ? up + row * cols : nullptr;
  out += row * cols;
  float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + j < cols) {
      // Both the values and the rows of the next product are written: a launch and a read are saved.
      v[j] = up ? glu(gate[i + j], up[i + j], kind, limit, alpha) : activation(gate[i + j], kind);
      out[i + j] = v[j];
    }
  if (wanted) store_wanted(make_float4(v[0], v[1], v[2], v[3]), q8, q8_bytes, bf16, bf16_bytes, wanted, row, cols, i, i < cols);
}

// x held between -limit and limit. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_clamp(const i64* st, int symbol, int factor, const float* x, float* out, int cols, float limit) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor)) return;
  for (int j = i; j < min(i + 4, cols); j++) out[row * cols + j] = clamped(x[row * cols + j], limit);
}

// Columns of queries (slopes) or of keys (null) whose product is a slope times a position: graph/ops_alibi.py. One warp per head
// writes `width` columns; grid (rows, heads).
extern "C" __global__ void __launch_bounds__(32)
layer_alibi(const i64* st, int symbol, int factor, const float* slopes, float* out, int width) {
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int p = step_pos(st)[row], first = width - 32;
  out += (row * gridDim.y + blockIdx.y) * width;
  for (int i = threadIdx.x; i < width; i += 32) {
    const int j = i - first;
    float v = 0.f;
    // Digits to the base of 127: a block of 8-bit codes holds them exactly.
    if (j == 0) v = slopes ? 0.f : 127.f;
    else if (j == 1) v = slopes ? slopes[blockIdx.y] : (float)(p % 127);
    else if (j > 1) v = slopes ? 127.f * slopes[blockIdx.y] : (float)min(max(p / 127 - 127 * (j - 2), 0), 127);
    out[i] = v;
  }
}
