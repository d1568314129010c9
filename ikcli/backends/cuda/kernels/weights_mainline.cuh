// Formats of llama.cpp alone: ternary ones with a scale per 256, bits, two bits, and NVFP4 (ggml-quants.c).
#pragma once
#include "weights.cuh"

// 3^n, n in 0..4
DI u32 power3(int n) { return (u32)(0x511b090301ull >> (8 * n)) & 255u; }
// A base-3 digit of four bytes, which are fractions: the one that `power` brings to the top.
DI u32 digits3(u32 w, u32 power) {
  const u32 even = (w & 0x00ff00ffu) * power & 0x00ff00ffu, odd = (w >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
  return (even * 3u >> 8 & 0x00030003u) | (odd * 3u & 0x03000300u);
}

// 256 columns: five digits per byte: 160 columns in 32 bytes, 32 apart, 80 in 16 bytes, 16 apart; 48 | four digits of the
// last 16 columns, 4 apart, 4 | d f16
struct TQ1_0 : Sym32 {
  static constexpr int N = 9;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const u8 *digits = row + 48 * (b >> 3), *last = row + 6 * nb;
    const int s = b & 7;
    get16(w, digits + (s < 5 ? 0 : 32));
    if (s < 5) {
      get16(w + 4, digits + 16);
    } else {
      const u32 high = s == 7 ? ldg4(last + 4 * (b >> 3)) : 0;
#pragma unroll
      for (int i = 0; i < 4; i++) w[4 + i] = s == 7 ? high : w[i];
    }
    w[8] = ldg2(last + al16(4 * (nb >> 3)) + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const int s = b & 7;
    const u32 first = power3(s < 5 ? s : 2 * (s - 5)), second = power3(s < 5 ? s : 2 * (s - 5) + 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      o.q[i] = minus(digits3(w[i], first), 1);
      o.q[4 + i] = minus(digits3(w[4 + i], s == 7 ? power3(i) : second), 1);
    }
    o.s0 = lo_half(w[8]);
  }
};

// 256 columns: 2 bits of columns 32 apart per byte, 64 | d f16
struct TQ2_0 : Sym32 {
  static constexpr int N = 9;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get32(w, row + 32 * (b >> 2));
    w[8] = ldg2(row + 8 * nb + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(two(w[i], 2 * (b & 3)), 1);
    o.s0 = lo_half(w[8]);
  }
};

// 128 columns: bits, 16: d or -d | d f16
struct Q1_0_G128 : Sym32 {
  static constexpr int N = 2;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    w[0] = ldg4(row + 4 * b);
    w[1] = ldg2(row + 4 * nb + 2 * (b >> 2));
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = ~spread4(w[0] >> (4 * i)) | 0x01010101u;
    o.s0 = lo_half(w[1]);
  }
};

// 64 columns: 2 bits of adjacent columns, 16 | d f16
struct Q2_0 : Sym32 {
  static constexpr int N = 3;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = ldg2(row + 8 * nb + 2 * (b >> 1));
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 v = w[i >> 2] >> (8 * (i & 3)) & 255u;
      o.q[i] = minus((v | v << 6 | v << 12 | v << 18) & 0x03030303u, 1);
    }
    o.s0 = lo_half(w[2]);
  }
};

// 64 columns: 16 columns in 8 bytes, the first 8 in the low nibbles, 32 | scales of 16 columns, E4M3 without sign, 4
struct NVFP4 : Sym16 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg2(row + 16 * nb + 2 * b);
  }
  SI float scale(u32 x) {  // half of it, because the table holds doubled values; 127 (NaN) is 0
    const u32 exponent = x >> 3 & 15u, fraction = x & 7u;
    const float v = exponent ? __uint_as_float((exponent + 119u) << 23 | fraction << 20) : (float)fraction * 0x1p-10f;
    return x == 127u ? 0.f : v;
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    const u32 t[4] = {IK_BYTES(0, 1, 2, 3), IK_BYTES(4, 6, 8, 12), IK_BYTES(0, -1, -2, -3), IK_BYTES(-4, -6, -8, -12)};
#pragma unroll
    for (int i = 0; i < 4; i++) pick_packed(t, w[i], o.q[(i & 2) * 2 + (i & 1)], o.q[(i & 2) * 2 + (i & 1) + 2]);
    o.s0 = scale(w[4] & 255u), o.s1 = scale(w[4] >> 8);
  }
};
