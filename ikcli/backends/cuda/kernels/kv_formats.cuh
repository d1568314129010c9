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
  const u32 low = prmt(0x3f2d1801u, 0x766a5d4fu - 0u, s), high = prmt(0x00000000u, 0x00000000u, s);
  const u32 mask = ((codes >> 3) & 0x01010101u) * 255u;
  return (low & ~mask) | (high & mask);
}
