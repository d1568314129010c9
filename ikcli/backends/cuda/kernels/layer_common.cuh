// Activation rows as matrix products want them (layouts.py), written by conversions and by kernels that make such rows.
#pragma once
#include "common.cuh"

constexpr float TINY_AMAX = 1e-36f;  // smaller maxima count as zero: 127 / them would overflow
constexpr int WANT_Q8 = 1, WANT_BF16 = 2;

DI bool aligned16(const void* p) { return ((u64)p & 15) == 0; }
DI float4 ld_f4(const float* p) { return *(const float4*)p; }
DI void st_f4(float* p, float4 v) { *(float4*)p = v; }

// One block of 32: 8 adjacent lanes hold 4 consecutive values each, from column `col` of the row on. All lanes of the
// warp must take part; those without `in` store nothing. k: columns of the row, `row`: its first byte.
DI void store_q8(float4 v, u8* row, int k, int col, bool in) {
  float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int d = 1; d < 8; d <<= 1) amax = fmaxf(amax, shx(amax, d));
  const float inv = amax > TINY_AMAX ? 127.f / amax : 0.f;
  const float q0 = rintf(v.x * inv), q1 = rintf(v.y * inv), q2 = rintf(v.z * inv), q3 = rintf(v.w * inv);
  float sum = (q0 + q1) + (q2 + q3);  // whole numbers, so exact, or NaN
  sum += shx(sum, 1);
  sum += shx(sum, 2);
  const float other = shx(sum, 4), total = sum + other;
  if (!in) return;
  const bool finite = total - total == 0.f;
  u32 codes = 0;
  if (finite) codes = ((u32)(int)q0 & 255) | ((u32)(int)q1 & 255) << 8 | ((u32)(int)q2 & 255) << 16 | (u32)(int)q3 << 24;
  *(u32*)(row + col) = codes;
  if ((threadIdx.x & 7) == 0) {
    const float d = amax / 127.f + (total - total);
    u8* at = row + k + (col >> 5) * 4;
    *(float*)at = d;
    *(float*)(at + (k >> 5) * 4) = d * total;
    *(u32*)(at + (k >> 5) * 8) = finite ? ((u32)(int)sum & 0xffff) | (u32)(int)other << 16 : 0u;
  }
}

// 4 consecutive values of a row as bf16.
DI void store_bf16(float4 v, u8* row, int col, bool in) {
  if (in) *(uint2*)(row + 2 * (i64)col) = make_uint2(pack2<true>(v.x, v.y), pack2<true>(v.z, v.w));
}

// The formats of `wanted` for 4 values per lane; rows of q8 need k % 32 == 0, of bf16 k % 8 == 0 (nothing to pad).
DI void store_wanted(float4 v, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes, int wanted, i64 row, int k, int col, bool in) {
  if (wanted & WANT_Q8) store_q8(v, q8 + row * q8_bytes, k, col, in);
  if (wanted & WANT_BF16) store_bf16(v, bf16 + row * bf16_bytes, col, in);
}
