// Super-blocks of 256 columns with f16 scales over sub-blocks of 16 or 32: Q2_K .. Q6_K, IQ4_XS (ggml-quants.c).
#pragma once
#include "weights.cuh"

// 2-bit codes: each half of 128 columns is four planes over the same 32 bytes.
DI void load_2bit(u32* w, const u8* plane, int b) { get32(w, plane + 64 * (b >> 3) + 32 * (b >> 2 & 1)); }
// 4-bit codes: 32 low nibbles, then the 32 high nibbles of the same bytes.
DI void load_4bit(u32* w, const u8* plane, int b) { get32(w, plane + 128 * (b >> 3) + 32 * (b >> 1 & 3)); }
// Bit j of 32 bytes belongs to sub-block j.
DI void load_1bit(u32* w, const u8* plane, int b) { get32(w, plane + 32 * (b >> 3)); }

// codes 64 | (scale, minimum) nibbles 16 | d, dmin f16
struct Q2_K : Min16 {
  static constexpr int N = 10;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_2bit(w, row, b);
    w[8] = ldg2(row + 8 * nb + 2 * b);
    w[9] = ldg4(row + 8 * nb + 2 * nb + 4 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const float d = lo_half(w[9]), low = -hi_half(w[9]);
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = two(w[i], 2 * (b & 3));
    o.s0 = d * (float)(w[8] & 15), o.s1 = d * (float)(w[8] >> 8 & 15);
    o.m0 = low * (float)(w[8] >> 4 & 15), o.m1 = low * (float)(w[8] >> 12);
  }
};

// codes 64 | third bits 32 | scales 12 | d f16
struct Q3_K : Sym16 {
  static constexpr int N = 20;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int ns = nb >> 3;
    load_2bit(w, row, b);
    load_1bit(w + 8, row + 8 * nb, b);
    const u8* scales = row + 12 * nb + 12 * (b >> 3);
    w[16] = ldg4(scales), w[17] = ldg4(scales + 4), w[18] = ldg4(scales + 8);
    w[19] = ldg2(row + 12 * nb + al16(12 * ns) + 2 * (b >> 3));
  }
  SI float scale(const u32* w, int k) {
    const u32 low = byte_of(w[16], w[17], k & 7) >> (4 * (k >> 3)) & 15u;
    const u32 high = byte_of(w[18], 0, k & 3) >> (2 * (k >> 2)) & 3u;
    return lo_half(w[19]) * (float)((int)(low | high << 4) - 32);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(two(w[i], 2 * (b & 3)) | one(w[8 + i], b & 7) << 2, 4);
    o.s0 = scale(w, 2 * (b & 7)), o.s1 = scale(w, 2 * (b & 7) + 1);
  }
};

// Scale and minimum j of the 16 bytes d, dmin, scales[12].
DI void scale_6bit(Block& o, const u32* h, int j) {
  const u32 a = byte_of(h[1], 0, j & 3), b = byte_of(h[2], 0, j & 3), c = byte_of(h[3], 0, j & 3);
  const u32 sc = j < 4 ? a & 63u : (c & 15u) | a >> 6 << 4;
  const u32 mn = j < 4 ? b & 63u : c >> 4 | b >> 6 << 4;
  o.s0 = lo_half(h[0]) * (float)sc, o.m0 = -(hi_half(h[0]) * (float)mn);
}

// codes 128 | d, dmin f16, scales 12
struct Q4_K : Min32 {
  static constexpr int N = 12;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_4bit(w, row, b);
    get16(w + 8, row + 16 * nb + 16 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = nib(w[i], 4 * (b & 1));
    scale_6bit(o, w + 8, b & 7);
  }
};

// codes 128 | fifth bits 32 | d, dmin f16, scales 12
struct Q5_K : Min32 {
  static constexpr int N = 20;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_4bit(w, row, b);
    load_1bit(w + 8, row + 16 * nb, b);
    get16(w + 16, row + 20 * nb + 16 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = nib(w[i], 4 * (b & 1)) | one(w[8 + i], b & 7) << 4;
    scale_6bit(o, w + 16, b & 7);
  }
};

// low nibbles 128 (halves of 128 columns: low nibbles are the first 64) | high bits 64 | scales i8 16 | d f16
struct Q6_K : Sym16 {
  static constexpr int N = 18;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get32(w, row + 128 * (b >> 3) + 64 * (b >> 2 & 1) + 32 * (b & 1));
    load_2bit(w + 8, row + 16 * nb, b);
    w[16] = ldg2(row + 24 * nb + 2 * b);
    w[17] = ldg2(row + 26 * nb + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(nib(w[i], 4 * (b >> 1 & 1)) | two(w[8 + i], 2 * (b & 3)) << 4, 32);
    const float d = lo_half(w[17]);
    o.s0 = d * (float)(i8)w[16], o.s1 = d * (float)(i8)(w[16] >> 8);
  }
};

// codes 128 | d f16, scales_h u16, scales_l 4
struct IQ4_XS : Sym32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    get8(w + 4, row + 16 * nb + 8 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t[4];
    table16(t, false);
    values32(o, w, t);
    const int j = b & 7;
    const u32 ls = (w[5] >> (4 * j) & 15u) | (w[4] >> (16 + 2 * j) & 3u) << 4;
    o.s0 = lo_half(w[4]) * (float)((int)ls - 32);
  }
};
