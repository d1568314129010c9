// Absorbed MLA over f16 caches (64 rows need 190 KB of shared memory), and the kernel that merges the parts of any
// attention.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_f16_r16, 16, 32, 2, KT_F16, 2)
ATTN_MLA(attn_mla_f16_r32, 32, 32, 2, KT_F16, 1)
ATTN_MLA(attn_mla_f16_r64, 64, 32, 2, KT_F16, 1)

// out = sum of parts * 2^(m - max m) over the common denominator: a row and 128 columns per block. Warp w adds parts w,
// w + 8, ..., eight at a time because every read waits for L2; the eight sums are added in order. Parts without
// positions (denominator 0) are not read.
extern "C" __global__ void __launch_bounds__(256)
attn_combine(const i64* st, const float* parts, const float* stats, float* out, int heads, int n_split, int width,
             const float* sinks) {
  IK_SHARED(float, scratch, 32)
  IK_SHARED(float4, sums, 8 * 32)
  IK_SHARED(float, totals, 8)
  const i64 n_rows = st[ST_TOKENS] * heads, row = blockIdx.x;
  if (row >= n_rows) return;
  const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, c = blockIdx.y * 128 + lane * 4;
  float top = -INFINITY;
  for (int s = threadIdx.x; s < n_split; s += 256) top = fmaxf(top, stats[(s * n_rows + row) * 2]);
  top = block_max(top, scratch);
  const float used = top == -INFINITY ? 0.f : top;
  float total = 0.f;
  float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = w; first < n_split; first += 64) {
    float f[8];
    bool there[8];
    float4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int s = first + 8 * i;
      const float2 ml = s < n_split ? *(const float2*)(stats + (s * n_rows + row) * 2) : make_float2(-INFINITY, 0.f);
      f[i] = ex2(ml.x - used), there[i] = ml.y != 0.f && c < width;
      total += f[i] * ml.y;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (there[i]) v[i] = *(const float4*)(parts + ((first + 8 * i) * n_rows + row) * width + c);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) a.x += f[i] * v[i].x, a.y += f[i] * v[i].y, a.z += f[i] * v[i].z, a.w += f[i] * v[i].w;
  }
  sums[w * 32 + lane] = a;
  if (lane == 0) totals[w] = total;
  __syncthreads();
  const int column = blockIdx.y * 128 + threadIdx.x;
  if (threadIdx.x >= 128 || column >= width) return;
  float sum = 0.f, value = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += totals[i], value += ((const float*)sums)[i * 128 + threadIdx.x];
  out[row * width + column] = value * row_factor(top, sum, sinks, (int)(row % heads));
}
