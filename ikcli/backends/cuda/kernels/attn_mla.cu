// Absorbed MLA over f16 caches (three and four stages need up to 157 KB of shared memory), and the kernel that merges the
// parts of any attention.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_f16_r16, 16, 32, 2, KT_F16, 1)
ATTN_MLA(attn_mla_f16_r32, 32, 32, 2, KT_F16, 1)
ATTN_MLA(attn_mla_f16s_r16, 16, 32, 4, KT_F16, 1)
ATTN_MLA(attn_mla_f16s_r32, 32, 32, 3, KT_F16, 1)

// out = sum of parts * 2^(m - max m) over the common denominator: a row and 64 columns per block. Group g of 16 lanes adds
// parts g, g + 16, ...; eight reads at a time, the first of them before the maximum is known. The 16 sums are added in
// order. Parts without positions (denominator 0) do not count, whatever is there.
extern "C" __global__ void __launch_bounds__(256)
attn_combine(const i64* st, const float* parts, const float* stats, float* out, int heads, int n_split, int width,
             const float* sinks) {
  constexpr int G = 16, AT_ONCE = 8;
  IK_SHARED(float, tops, G)
  IK_SHARED(float, totals, G)
  IK_SHARED(float4, sums, G * 16)
  const i64 n_rows = st[ST_TOKENS] * heads, row = blockIdx.x;
  if (row >= n_rows) return;
  const int g = threadIdx.x / 16, c = blockIdx.y * 64 + threadIdx.x % 16 * 4;
  const bool inside = c < width;
  float4 v[AT_ONCE];
  float2 ml[AT_ONCE];
  auto read = [&](int first) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int s = first + G * i;
      ml[i] = make_float2(-INFINITY, 0.f), v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (s < n_split) {
        ml[i] = *(const float2*)(stats + (s * n_rows + row) * 2);
        if (inside) v[i] = *(const float4*)(parts + (s * n_rows + row) * width + c);
      }
    }
  };
  read(g);
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) top = fmaxf(top, ml[i].x);
  for (int s = g + G * AT_ONCE; s < n_split; s += G) top = fmaxf(top, stats[(s * n_rows + row) * 2]);
  tops[g] = top;  // the same value from 16 lanes
  __syncthreads();
#pragma unroll
  for (int i = 0; i < G; i++) top = fmaxf(top, tops[i]);
  const float used = top == -INFINITY ? 0.f : top;
  float total = 0.f;
  float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = g; first < n_split; first += G * AT_ONCE) {
    if (first != g) read(first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (ml[i].y == 0.f) continue;
      const float f = ex2(ml[i].x - used);
      total += f * ml[i].y;
      a.x += f * v[i].x, a.y += f * v[i].y, a.z += f * v[i].z, a.w += f * v[i].w;
    }
  }
  sums[threadIdx.x] = a;
  totals[g] = total;
  __syncthreads();
  const int column = blockIdx.y * 64 + threadIdx.x;
  if (threadIdx.x >= 64 || column >= width) return;
  float sum = 0.f, value = 0.f;
#pragma unroll
  for (int i = 0; i < G; i++) sum += totals[i], value += ((const float*)sums)[i * 64 + threadIdx.x];
  out[row * width + column] = value * row_factor(top, sum, sinks, (int)(row % heads));
}
