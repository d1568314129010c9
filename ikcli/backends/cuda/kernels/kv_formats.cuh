// Rows of the KV cache on the device: where the bytes of a type lie, and 16 elements of a row as f16 or f32.
//
// f32, f16 and bf16 rows are plain. Quantized types are planar over the whole tensor, with the bytes of the blocks in
// ggml-common.h regrouped so that codes are aligned to 16 bytes: first all codes [cell][block][16 or 32], then all high
// bits [cell][block][4 or 8], then all scales [cell][block][2 or 4] (q8_KV: one header of 8 bytes per cell).
// A slice of a head begins at a multiple of 16 columns: half a block.
#pragma once
#include "common.cuh"

enum KvType { KT_F32, KT_F16, KT_BF16, KT_Q8_0, KT_Q8_KV, KT_Q6_0, KT_Q5_1, KT_Q5_0, KT_Q4_1, KT_Q4_0, KT_IQ4_NL };

DI bool kv_is_float(int type) { return type <= KT_BF16; }
DI bool kv_is_int8(int type) { return type == KT_Q8_0 || type == KT_Q8_KV; }
DI int kv_code_bytes(int type) { return kv_is_int8(type) ? 32 : 16; }
DI int kv_high_bytes(int type) { return type == KT_Q6_0 ? 8 : type == KT_Q5_0 || type == KT_Q5_1 ? 4 : 0; }
DI bool kv_has_minimum(int type) { return type == KT_Q5_1 || type == KT_Q4_1; }
DI int kv_float_bytes(int type) { return type == KT_F32 ? 4 : 2; }

// A cache tensor: `blocks` of 32 per row (float types: elements of a row).
struct KvTensor {
  const u8* codes;
  const u8* high;
  const u8* scale;
  int type, blocks;
};
DI KvTensor kv_tensor(const u8* data, i64 n_cells, int blocks, int type) {
  const u8* high = data + n_cells * blocks * kv_code_bytes(type);
  return {data, high, high + n_cells * blocks * kv_high_bytes(type), type, blocks};
}

// 16 elements as they lie in memory: codes in w[0..3], high bits in w[4..5], scale (and minimum) in w[6]; floats as
// eight pairs.
struct Raw16 {
  u32 w[8];
};
DI void kv_clear(Raw16& r) {
#pragma unroll
  for (int i = 0; i < 8; i++) r.w[i] = 0;
}
DI void kv_load_codes(Raw16& r, const KvTensor& t, i64 cell, int group) {
  const i64 block = cell * t.blocks + (group >> 1);
  const uint4 v = *(const uint4*)(kv_is_int8(t.type) ? t.codes + (block * 2 + (group & 1)) * 16 : t.codes + block * 16);
  r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  if (t.type == KT_Q6_0) {
    const uint2 h = *(const uint2*)(t.high + block * 8);
    r.w[4] = h.x, r.w[5] = h.y;
  } else if (kv_high_bytes(t.type)) {
    r.w[4] = *(const u32*)(t.high + block * 4);
  }
  if (t.type == KT_Q8_KV) r.w[6] = *(const u32*)(t.scale + cell * 8);
  else if (kv_has_minimum(t.type)) r.w[6] = *(const u32*)(t.scale + block * 4);
  else r.w[6] = *(const u16*)(t.scale + block * 2);
}
// Columns 16*group.. of a row of any type.
DI void kv_load(Raw16& r, const KvTensor& t, i64 cell, int group) {
  if (!kv_is_float(t.type)) {
    kv_load_codes(r, t, cell, group);
    return;
  }
  const u8* row = t.codes + (cell * t.blocks + group * 16) * kv_float_bytes(t.type);
  if (t.type == KT_F32) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 v = *(const float4*)(row + 16 * i);
      r.w[2 * i] = pack2<false>(v.x, v.y), r.w[2 * i + 1] = pack2<false>(v.z, v.w);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 v = *(const uint4*)(row + 16 * i);
    r.w[4 * i] = v.x, r.w[4 * i + 1] = v.y, r.w[4 * i + 2] = v.z, r.w[4 * i + 3] = v.w;
  }
}

// Four codes of iq4_nl as values + 128.
DI u32 iq4_bytes(u32 codes) {
  u32 s = (codes | codes >> 4) & 0x00ff00ffu;
  s = (s | s >> 8) & 0x7777u;
  const u32 low = prmt(0x3f2d1801u, 0x766a5d4fu, s), high = prmt(0xa6998d81u, 0xf1d9c5b5u, s);
  const u32 mask = ((codes >> 3) & 0x01010101u) * 255u;
  return (low & ~mask) | (high & mask);
}
// Elements 4e..4e+3 as bytes, each a level plus the zero of `kv_zero`.
DI u32 kv_bytes(const Raw16& r, int type, int half, int e) {
  if (kv_is_int8(type)) return r.w[e] ^ 0x80808080u;
  const u32 codes = (r.w[e] >> (4 * half)) & 0x0f0f0f0fu;
  if (type == KT_IQ4_NL) return iq4_bytes(codes);
  if (type == KT_Q6_0) return codes | ((r.w[4 + (e & 1)] >> (4 * (e >> 1) + 2 * half)) & 0x03030303u) << 4;
  if (type == KT_Q5_0 || type == KT_Q5_1) {
    const u32 bits = (r.w[4] >> (16 * half + 4 * e)) & 15u;
    return codes | ((bits * 0x00204081u) & 0x01010101u) << 4;
  }
  return codes;
}
// 1024 + zero as a pair of f16: bytes become f16 by putting 0x64 above them.
DI u32 kv_zero(int type) {
  return kv_is_int8(type) || type == KT_IQ4_NL ? 0x64806480u
         : type == KT_Q6_0                     ? 0x64206420u
         : type == KT_Q5_0                     ? 0x64106410u
         : type == KT_Q4_0                     ? 0x64086408u
                                               : 0x64006400u;
}
// Levels as pairs of f16, exact.
DI void kv_levels(u32 (&y)[8], const Raw16& r, int type, int half) {
  const u32 zero = kv_zero(type);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const u32 b = kv_bytes(r, type, half, e);
    y[2 * e] = hsub2(prmt(b, 0x64646464u, 0x4140), zero);
    y[2 * e + 1] = hsub2(prmt(b, 0x64646464u, 0x4342), zero);
  }
}
// 16 elements of a quantized row as pairs of f16; `half` of the block.
DI void kv_codes_f16(u32 (&y)[8], const Raw16& r, int type, int half) {
  kv_levels(y, r, type, half);
  if (type == KT_Q8_KV) {  // a scale of 32 bits, once per row
    const float d = __uint_as_float(r.w[6]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 v = unpack_f16(y[i]);
      y[i] = pack2<false>(v.x * d, v.y * d);
    }
    return;
  }
  const u32 d = prmt(r.w[6], 0, 0x1010), m = kv_has_minimum(type) ? prmt(r.w[6], 0, 0x3232) : 0x80008000u;
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = hfma2(y[i], d, m);
}
DI void kv_f16(u32 (&y)[8], const Raw16& r, int type, int half) {
  if (!kv_is_float(type)) {
    kv_codes_f16(y, r, type, half);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 v = unpack_bf16(r.w[i]);
    y[i] = type == KT_BF16 ? pack2<false>(v.x, v.y) : r.w[i];
  }
}
// 16 elements of a quantized row as f32.
DI void kv_codes_f32(float (&y)[16], const Raw16& r, int type, int half) {
  u32 levels[8];
  kv_levels(levels, r, type, half);
  const float d = type == KT_Q8_KV ? __uint_as_float(r.w[6]) : f16f((u16)r.w[6]);
  const float m = kv_has_minimum(type) ? f16f((u16)(r.w[6] >> 16)) : 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 v = unpack_f16(levels[i]);
    y[2 * i] = fmaf(v.x, d, m), y[2 * i + 1] = fmaf(v.y, d, m);
  }
}
// One element of a float row.
DI float kv_element(const u8* p, int type) {
  return type == KT_F32 ? *(const float*)p : type == KT_F16 ? f16f(*(const u16*)p) : bf16f(*(const u16*)p);
}
