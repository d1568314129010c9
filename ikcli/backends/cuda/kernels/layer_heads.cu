// Rotary positions and Walsh-Hadamard transforms of heads.
#include "layer_common.cuh"

// sin and cos of a double angle below 2^31, without libm's slow path: quarter turns taken off in three fused steps, then
// Taylor series on [-pi/4, pi/4]. Error about 1e-13, so the float32 results are the nearest ones but for halfway cases.
DI void sin_cos(double theta, double& s, double& c) {
  const double n = rint(theta * 0.63661977236758134308);
  double r = fma(-n, 1.57079632679489655800e+00, theta);
  r = fma(-n, 6.12323399573676603587e-17, r);
  const int quarter = (int)((i64)n & 3);
  const double z = r * r;
  double a = fma(z, 1.0 / 6227020800.0, -1.0 / 39916800.0), b = fma(z, -1.0 / 87178291200.0, 1.0 / 479001600.0);
  a = fma(z, a, 1.0 / 362880.0);
  b = fma(z, b, -1.0 / 3628800.0);
  a = fma(z, a, -1.0 / 5040.0);
  b = fma(z, b, 1.0 / 40320.0);
  a = fma(z, a, 1.0 / 120.0);
  b = fma(z, b, -1.0 / 720.0);
  a = fma(z, a, -1.0 / 6.0);
  b = fma(z, b, 1.0 / 24.0);
  b = fma(z, b, -0.5);
  a = fma(z * r, a, r);
  b = fma(z, b, 1.0);
  s = quarter & 1 ? b : a;
  c = quarter & 1 ? a : b;
  if (quarter & 2) s = -s;
  if ((quarter + 1) & 2) c = -c;
}

// cos, sin of position * freqs[pair], times mscale: 2 * pairs columns per token. One thread per pair.
extern "C" __global__ void __launch_bounds__(128)
layer_rope_table(const i64* st, float* out, const double* freqs, int pairs, float mscale) {
  const i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= st[ST_TOKENS] * pairs) return;
  const i64 row = item / pairs;
  double s, c;
  sin_cos((double)step_pos(st)[row] * freqs[item - row * pairs], s, c);
  *(float2*)(out + 2 * item) = make_float2((float)c * mscale, (float)s * mscale);
}

// Columns [offset, offset + n_rot) of every head are rotated in pairs (2i, 2i+1), or (i, i + n_rot/2) with neox; the
// others are copied. Every thread does one pair or copies two columns: n_rot/2 + ceil((dim-n_rot)/2) threads per head.
// grid (rows, threads per row / 256)
extern "C" __global__ void __launch_bounds__(256)
layer_rope(const i64* st, int symbol, int factor, const float* x, const float* table, float* out, int heads, int dim, int offset,
           int n_rot, int neox) {
  const i64 row = blockIdx.x;
  const int half = n_rot >> 1, kept = dim - n_rot, per_head = half + ((kept + 1) >> 1);
  const int item = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || item >= heads * per_head) return;
  const int h = item / per_head, i = item - h * per_head;
  const i64 at = (row * heads + h) * dim;
  x += at;
  out += at;
  if (i < half) {
    const float2 cs = *(const float2*)(table + row * n_rot + 2 * i);
    const int a = offset + (neox ? i : 2 * i), b = a + (neox ? half : 1);
    const float p = x[a], q = x[b];
    out[a] = p * cs.x - q * cs.y;
    out[b] = p * cs.y + q * cs.x;
  } else {
    for (int j = 2 * (i - half); j < min(2 * (i - half) + 2, kept); j++) {
      const int c = j < offset ? j : j + n_rot;
      out[c] = x[c];
    }
  }
}

// Blocks of powers of two from column `offset` on, sizes as 4-bit logarithms in `blocks` (lowest bits first); other
// columns are copied. One warp per head; its columns lie in shared memory, dim floats per warp.
extern "C" __global__ void __launch_bounds__(128)
layer_hadamard(const i64* st, int symbol, int factor, const float* x, float* out, int heads, int dim, int offset, i64 blocks,
               int n_blocks) {
  SMEM_DECL
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + warp;
  if (item >= step_rows(st, symbol, factor) * heads) return;
  float* v = (float*)smem_raw + warp * dim;
  x += item * dim;
  out += item * dim;
  for (int i = lane; i < dim; i += 32) v[i] = x[i];
  __syncwarp();
  int at = offset;
  for (int b = 0; b < n_blocks; b++) {
    const int log = (int)(blocks >> (4 * b)) & 15, n = 1 << log;
    const float scale = 1.f / sqrtf((float)n);
    for (int i = lane; i < n; i += 32) v[at + i] *= scale;
    __syncwarp();
    for (int half = 1; half < n; half <<= 1) {
      for (int p = lane; p < n >> 1; p += 32) {
        const int i = at + (((p & ~(half - 1)) << 1) | (p & (half - 1)));
        const float a = v[i], c = v[i + half];
        v[i] = a + c;
        v[i + half] = a - c;
      }
      __syncwarp();
    }
    at += n;
  }
  for (int i = lane; i < dim; i += 32) out[i] = v[i];
}
