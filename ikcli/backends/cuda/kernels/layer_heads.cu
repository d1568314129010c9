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

// cos, sin of (position - lag) * freqs[pair], times mscale: 2 * pairs columns per token. One thread per pair.
extern "C" __global__ void __launch_bounds__(128)
layer_rope_table(const i64* st, float* out, const double* freqs, int pairs, float mscale, int lag) {
  const i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= st[ST_TOKENS] * pairs) return;
  const i64 row = item / pairs;
  double s, c;
  sin_cos((double)(step_pos(st)[row] - lag) * freqs[item - row * pairs], s, c);
  *(float2*)(out + 2 * item) = make_float2((float)c * mscale, (float)s * mscale);
}

// Heads of one value: x with x_cols columns between rows; b: a bias for all heads, or null; w: weights of an RMS norm of
// each head, or null. `biased`, `normed` and out take the values after each step (heads * dim columns).
struct Heads {
  const float* x;
  i64 x_cols;
  const float* b;
  float* biased;
  const float* w;
  float *normed, *out;
  int heads;
  float eps;
};
// Columns [offset, offset + n_rot) are rotated in pairs (2i, 2i+1), or (i, i + n_rot/2) with neox; others are copied.
struct Rotation {
  const float* table;
  int dim, offset, n_rot, neox;
};

// One head: columns at x, biases at b, results from column `at` on.
struct Head {
  const float *x, *b;
  i64 at;
  float scale;
};
// Column i before rotation; stores what led to it.
DI float head_value(const Heads& v, const Head& head, int i) {
  float x = head.x[i];
  if (v.b) v.biased[head.at + i] = x += head.b[i];
  if (v.w) v.normed[head.at + i] = x = x * head.scale * v.w[i];
  return x;
}

// One head by one warp.
DI void rotate_head(const Heads& v, const Rotation& r, i64 row, int h) {
  const int lane = threadIdx.x & 31, half = r.n_rot >> 1;
  Head head = {v.x + row * v.x_cols + (i64)h * r.dim, v.b ? v.b + (i64)h * r.dim : nullptr, (row * v.heads + h) * r.dim, 1.f};
  float* out = v.out + head.at;
  if (v.w) {
    float acc = 0.f;
    for (int i = lane; i < r.dim; i += 32) {
      const float x = v.b ? head.x[i] + head.b[i] : head.x[i];
      acc += x * x;
    }
    head.scale = 1.f / sqrtf(warp_sum(acc) / (float)r.dim + v.eps);
  }
  const float* table = r.table + row * r.n_rot;
  for (int i = lane; i < half; i += 32) {
    const float2 cs = *(const float2*)(table + 2 * i);
    const int a = r.offset + (r.neox ? i : 2 * i), b = a + (r.neox ? half : 1);
    const float p = head_value(v, head, a), q = head_value(v, head, b);
    out[a] = p * cs.x - q * cs.y;
    out[b] = p * cs.y + q * cs.x;
  }
  for (int i = lane; i < r.dim - r.n_rot; i += 32) {
    const int c = i < r.offset ? i : i + r.n_rot;
    out[c] = head_value(v, head, c);
  }
}

// Bias, norm and rotation of the heads of one or two values (queries and keys), one warp per head: heads + heads2 per row.
extern "C" __global__ void __launch_bounds__(128)
layer_heads(const i64* st, int symbol, int factor, const float* table, int dim, int offset, int n_rot, int neox, const float* x,
            i64 x_cols, const float* b, float* biased, const float* w, float* normed, float* out, int heads, float eps, const float* x2,
            i64 x2_cols, const float* b2, float* biased2, const float* w2, float* normed2, float* out2, int heads2, float eps2) {
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const int per_row = heads + heads2;
  const i64 row = item / per_row;
  if (row >= step_rows(st, symbol, factor)) return;
  const int h = (int)(item - row * per_row);
  const Rotation r = {table, dim, offset, n_rot, neox};
  if (h < heads) rotate_head({x, x_cols, b, biased, w, normed, out, heads, eps}, r, row, h);
  else rotate_head({x2, x2_cols, b2, biased2, w2, normed2, out2, heads2, eps2}, r, row, h - heads);
}

// The cached row of DeepSeek's attention and its queries: kv has `rank` latent columns and n_rot key columns per row.
// latent = norm of the former; rotated = the row with its key columns rotated; kvr = rotated key | latent; queries as in
// layer_heads; the activation rows of their first `offset` columns, one row per head, as `wanted` says (offset % 32 == 0,
// no bias and no norm then). One warp per item, heads + 1 of them per row (the cached row first).
extern "C" __global__ void __launch_bounds__(128)
layer_latent(const i64* st, int symbol, int factor, const float* table, int dim, int offset, int n_rot, int neox, const float* x,
             i64 x_cols, const float* b, float* biased, const float* w, float* normed, float* out, int heads, float eps,
             const float* kv, const float* kv_w, float kv_eps, int rank, float* latent, float* rotated, float* kvr, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes,
             int wanted) {
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const i64 row = item / (heads + 1);
  if (row >= step_rows(st, symbol, factor)) return;
  const int h = (int)(item - row * (heads + 1)) - 1, lane = threadIdx.x & 31, half = n_rot >> 1, cols = rank + n_rot;
  if (h >= 0) {
    rotate_head({x, x_cols, b, biased, w, normed, out, heads, eps}, {table, dim, offset, n_rot, neox}, row, h);
    if (wanted) {
      const float* src = x + row * x_cols + (i64)h * dim;
      for (int base = 0; base < offset; base += 128) {
        const int i = base + 4 * lane;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < offset) v = aligned16(src) ? ld_f4(src + i) : make_float4(src[i], src[i + 1], src[i + 2], src[i + 3]);
        store_wanted(v, q8, q8_bytes, bf16, bf16_bytes, wanted, row * heads + h, offset, i, i < offset);
      }
    }
    return;
  }
  kv += row * cols;
  rotated += row * cols;
  kvr += row * cols;
  latent += row * rank;
  float acc = 0.f;
  for (int i = lane; i < rank; i += 32) acc += kv[i] * kv[i];
  const float scale = 1.f / sqrtf(warp_sum(acc) / (float)rank + kv_eps);
  for (int i = lane; i < half; i += 32) {
    const float2 cs = *(const float2*)(table + row * n_rot + 2 * i);
    const int a = neox ? i : 2 * i, b = a + (neox ? half : 1);
    const float p = kv[rank + a], q = kv[rank + b];
    const float ra = p * cs.x - q * cs.y, rb = p * cs.y + q * cs.x;
    rotated[rank + a] = kvr[a] = ra;
    rotated[rank + b] = kvr[b] = rb;
  }
  for (int i = lane; i < rank; i += 32) {
    const float v = kv[i], n = v * scale * kv_w[i];
    rotated[i] = v;
    latent[i] = kvr[n_rot + i] = n;
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
  // Blocks differ in size (a head of 192 is 128 + 64), and each is normalized by its own.
  int at = offset;
  for (int b = 0; b < n_blocks; b++) {
    const int log = (int)(blocks >> (4 * b)) & 15, n = 1 << log;
    const float scale = 1.f / sqrtf((float)n);
    for (int i = lane; i < n; i += 32) v[at + i] *= scale;
    __syncwarp();
    for (int half = 1; half < n; half <<= 1) {
      for (int p = lane; p < n >> 1; p += 32) {
        // Pair p of this stage: its number with a zero put in at the bit of the distance.
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
