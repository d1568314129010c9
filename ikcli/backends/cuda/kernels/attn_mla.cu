// Absorbed MLA over f16 caches (64 rows need 190 KB of shared memory), and the kernel that merges the parts of any
// attention.
#include "attn_mla.cuh"

ATTN_MLA(attn_mla_f16_r16, 16, 32, 2, KT_F16, 2)
ATTN_MLA(attn_mla_f16_r32, 32, 32, 2, KT_F16, 1)
ATTN_MLA(attn_mla_f16_r64, 64, 32, 2, KT_F16, 1)

// out = sum of parts * 2^(m - max m) over the common denominator; one block per row, columns over the threads. Parts
// without positions (maximum -inf) are not read.
extern "C" __global__ void __launch_bounds__(128)
attn_combine(const i64* st, const float* parts, const float* stats, float* out, int heads, int n_split, int width) {
  const i64 n_rows = st[ST_TOKENS] * heads, row = blockIdx.x;
  if (row >= n_rows) return;
  float top = -INFINITY;
  for (int s = 0; s < n_split; s++) top = fmaxf(top, stats[(s * n_rows + row) * 2]);
  const float used = top == -INFINITY ? 0.f : top;
  for (int c = threadIdx.x * 4; c < width; c += 512) {
    float sum = 0.f;
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < n_split; s++) {
      const i64 i = s * n_rows + row;
      const float2 ml = *(const float2*)(stats + i * 2);
      const float f = ex2(ml.x - used);
      if (f == 0.f) continue;
      sum += f * ml.y;
      const float4 v = *(const float4*)(parts + i * width + c);
      a.x += f * v.x, a.y += f * v.y, a.z += f * v.z, a.w += f * v.w;
    }
    const float i = sum > 0.f ? 1.f / sum : 0.f;
    *(float4*)(out + row * width + c) = make_float4(a.x * i, a.y * i, a.z * i, a.w * i);
  }
}
