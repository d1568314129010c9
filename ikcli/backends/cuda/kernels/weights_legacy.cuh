// Blocks of 32 columns with an f16 scale (and minimum), and one byte per column with one scale per row or per 256.
// The formats of ggml-quants.c and, for Q6_0 and Q8_KV, of iqk_quantize.cpp.
#pragma once
#include "weights.cuh"

// codes 16 | d f16
struct Q4_0 : Sym32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg2(row + 16 * nb + 2 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    nibbles32(o, w);
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(o.q[i], 8);
    o.s0 = lo_half(w[4]);
  }
};

struct IQ4_NL : Sym32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) { Q4_0::load(w, row, nb, b, nullptr); }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    u32 t[4];
    table16(t, false);
    values32(o, w, t);
    o.s0 = lo_half(w[4]);
  }
};

// codes 16 | exponent u8: scale 2^(e - 128)
struct MXFP4 : Sym32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = row[16 * nb + b];
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    const u32 t[4] = {IK_BYTES(0, 1, 2, 3), IK_BYTES(4, 6, 8, 12), IK_BYTES(0, -1, -2, -3), IK_BYTES(-4, -6, -8, -12)};
    values32(o, w, t);
    const int e = (int)w[4] - 128;  // below -126 the float is denormal
    o.s0 = e >= -126 ? __uint_as_float((u32)(e + 127) << 23) : __uint_as_float(0x00400000u >> (-127 - e));
  }
};

// codes 16 | d, m f16
struct Q4_1 : Min32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg4(row + 16 * nb + 4 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    nibbles32(o, w);
    o.s0 = lo_half(w[4]), o.m0 = hi_half(w[4]);
  }
};

// Adds 32 fifth bits, least significant first.
DI void fifth_bits(Block& o, u32 bits) {
#pragma unroll
  for (int i = 0; i < 8; i++) o.q[i] |= spread4(bits >> (4 * i)) & 0x10101010u;
}

// codes 16 | fifth bits u32 | d f16
struct Q5_0 : Sym32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg4(row + 16 * nb + 4 * b);
    w[5] = ldg2(row + 16 * nb + al16(4 * nb) + 2 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    nibbles32(o, w);
    fifth_bits(o, w[4]);
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(o.q[i], 16);
    o.s0 = lo_half(w[5]);
  }
};

// codes 16 | fifth bits u32 | d, m f16
struct Q5_1 : Min32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg4(row + 16 * nb + 4 * b);
    w[5] = ldg4(row + 16 * nb + al16(4 * nb) + 4 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    nibbles32(o, w);
    fifth_bits(o, w[4]);
    o.s0 = lo_half(w[5]), o.m0 = hi_half(w[5]);
  }
};

// low nibbles 16 | fifth and sixth bits 8: byte i has columns i, i + 16, i + 8, i + 24 from its lowest bits up | d f16
struct Q6_0 : Sym32 {
  static constexpr int N = 7;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    get8(w + 4, row + 16 * nb + 8 * b);
    w[6] = ldg2(row + 16 * nb + al16(8 * nb) + 2 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    nibbles32(o, w);
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(o.q[i] | two(w[4 + i % 2], 4 * (i / 2 % 2) + 2 * (i / 4)) << 4, 32);
    o.s0 = lo_half(w[6]);
  }
};

// codes 32 | d f16
struct Q8_0 : Sym32 {
  static constexpr int N = 9;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get32(w, row + 32 * b);
    w[8] = ldg2(row + 32 * nb + 2 * b);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = w[i];
    o.s0 = lo_half(w[8]);
  }
};

// codes 32 | scale of the row f32
struct Q8_KV : Sym32 {
  static constexpr int N = 9;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get32(w, row + 32 * b);
    w[8] = ldg4(row + 32 * nb);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = w[i];
    o.s0 = __uint_as_float(w[8]);
  }
};

// codes 256 | d f16 per 256 (Q8_K_R8 and Q8_K_R16, rows separated)
struct Q8_K : Sym32 {
  static constexpr int N = 9;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get32(w, row + 32 * b);
    w[8] = ldg2(row + 32 * nb + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8*) { Q8_0::decode(o, w, 0, nullptr); }
};
