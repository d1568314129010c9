// Trellis types: an index seeds a multiplicative generator; value n is the sum of the low six bits of the four bytes of
// (index + offset) * KA^n, less 126. And ternary types. One scale per row. (iqk_quantize.cpp, ik_llama.cpp PR 113)
#pragma once
#include "weights_iqk.cuh"

constexpr u32 KA = 0xcbac1fedu;

DI u32 next4(u32& state) {
  u32 v = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    state *= KA;
    v |= ((u32)dp4a(state & 0x3f3f3f3fu, 0x01010101u, -126) & 255u) << (8 * i);
  }
  return v;
}
// Eight columns from an index.
DI void trellis8(Block& o, int i, u32 index) {
  u32 state = index + 4096u;
  o.q[2 * i] = next4(state), o.q[2 * i + 1] = next4(state);
}

// low index bits 32 | nibbles of the index 16 | scale nibble and four thirteenth bits 8 | scale of the row f32
struct IQ1_KT : Sym32 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    w[0] = ldg4(row + 4 * b);
    w[1] = ldg4(row + 4 * nb + 16 * (b >> 3) + 4 * (b & 3));
    w[2] = row[6 * nb + b];
    w[3] = ldg4(row + 6 * nb + al16(nb));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const u32 high = nib(w[1], b & 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
      trellis8(o, i, (w[0] >> (8 * i) & 255u) | (high >> (8 * i) & 15u) << 8 | (w[2] >> (4 + i) & 1u) << 12);
    o.s0 = __uint_as_float(w[3]) * value16(w[2]);
  }
};

// indices u16[32] | scale nibbles 4 | scale of the row f32
struct IQ2_KT : Sym32 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = ldg4(row + 8 * nb + 4 * (b >> 3));
    w[3] = ldg4(row + 8 * nb + al16(4 * (nb >> 3)));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 4; i++) trellis8(o, i, w[i >> 1] >> (16 * (i & 1)) & 0xffffu);
    o.s0 = __uint_as_float(w[3]) * value16(crossed(w[2], b & 7));
  }
};

// indices u16[32] | signs 32 | scale nibbles 4 | scale of the row f32; values are magnitudes
struct IQ3_KT : Sym32 {
  static constexpr int N = 12;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = ldg4(row + 12 * nb + 4 * (b >> 3));
    w[3] = ldg4(row + 12 * nb + al16(4 * (nb >> 3)));
    load_1bit(w + 4, row + 8 * nb, b);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 4; i++) trellis8(o, i, w[i >> 1] >> (16 * (i & 1)) & 0xffffu);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 v = o.q[i], flip = (one(v, 7) ^ one(w[4 + i], b & 7)) * 255u;  // sign of the value, sign that is wanted
      o.q[i] = add_bytes(v ^ flip, flip & 0x01010101u);
    }
    o.s0 = __uint_as_float(w[3]) * (float)crossed(w[2], b & 7);
  }
};

// low index bits 64 | nibbles of the index 32 | u32[8]: table bit, 7-bit scale, eight times three index bits |
// scale of the row f32; four columns per index
struct IQ4_KT : Sym32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    get8(w + 2, row + 8 * nb + 32 * (b >> 3) + 8 * (b & 3));
    w[4] = ldg4(row + 12 * nb + 4 * b);
    w[5] = ldg4(row + 16 * nb);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const u32 offset = 4096u + (w[4] & 1u) * 32768u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 low = w[i >> 2] >> (8 * (i & 3)) & 255u, high = w[2 + (i >> 2)] >> (8 * (i & 3) + (b & 4)) & 15u;
      u32 state = (low | high << 8 | (w[4] >> (8 + 3 * i) & 7u) << 12) + offset;
      o.q[i] = next4(state);
    }
    o.s0 = __uint_as_float(w[5]) * (float)((int)(w[4] >> 1 & 127u) - 64);
  }
};

// 64 columns: base-3 digits, 15 columns of each run of 16 in three bytes, 12 | digit of the last column of each run 1 |
// scale of the row f16
struct IQ1_BN : Sym32 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int n64 = nb >> 1;
    const u8* runs = row + 6 * b;
    w[0] = ldg2(runs) | (u32)ldg2(runs + 2) << 16;
    w[1] = ldg2(runs + 4);
    w[2] = row[al16(12 * n64) + (b >> 1)];
    w[3] = ldg2(row + al16(12 * n64) + al16(n64));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = 0;
#pragma unroll
    for (int c = 0; c < 32; c++) {
      const int run = c >> 4, p = c & 15;
      const int byte = 3 * run + p / 5, digit = p < 15 ? p % 5 : 0;
      const u32 from = p < 15 ? (byte < 4 ? w[0] : w[1]) >> (8 * (byte & 3)) & 255u : w[2];
      u32 power = digit == 0 ? 81u : digit == 1 ? 27u : digit == 2 ? 9u : digit == 3 ? 3u : 1u;
      if (p == 15) {  // digits 0..3 belong to the runs of 64 columns
        const int d = 2 * (b & 1) + run;
        power = d == 0 ? 81u : d == 1 ? 27u : d == 2 ? 9u : 3u;
      }
      o.q[c >> 2] |= ((from * power & 255u) * 3u >> 8) << (8 * (c & 3));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = minus(o.q[i], 1);
    o.s0 = lo_half(w[3]);
  }
};

// 64 columns in 16 bytes: column 16g + i at bits 2g of byte i | scale of the row f32
struct IQ2_BN : Sym32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * (b >> 1));
    w[4] = ldg4(row + 8 * nb);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      o.q[i] = minus(two(w[i], 4 * (b & 1)), 1);
      o.q[i + 4] = minus(two(w[i], 4 * (b & 1) + 2), 1);
    }
    o.s0 = __uint_as_float(w[4]);
  }
};
