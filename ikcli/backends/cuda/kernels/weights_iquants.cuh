// Grid types: a group of 8 (4 in IQ3) columns is a point of a grid, times signs: IQ1_S .. IQ3_S (ggml-quants.c).
// `table` holds the points as bytes, first column lowest (upload.py makes it); the magnitudes are 1..62, and 8 * {-1, 0, 1}
// in the IQ1 types, whose points are shifted by an eighth up or down.
#pragma once
#include "weights.cuh"

// Groups 2i and 2i + 1 of four columns with the signs of `bits`.
DI void point8(Block& o, int i, const u8* table, u32 index, u32 bits) {
  const uint2 p = *(const uint2*)(table + 8 * index);
  o.q[2 * i] = negate_bytes(p.x, spread4(bits));
  o.q[2 * i + 1] = negate_bytes(p.y, spread4(bits >> 4));
}
DI void point4x2(Block& o, int i, const u8* table, u32 a, u32 b, u32 bits) {
  o.q[2 * i] = negate_bytes(*(const u32*)(table + 4 * a), spread4(bits));
  o.q[2 * i + 1] = negate_bytes(*(const u32*)(table + 4 * b), spread4(bits >> 4));
}
// Eight signs from seven: their number is even.
DI u32 even_signs(u32 x) { return (x & 127u) | parity(x) << 7; }
DI float quarter(float d, u32 ls) { return d * (0.5f + (float)ls) * 0.25f; }

// (grid index[4], u32: four 7-bit sign codes, 4-bit scale)[8] | d f16
struct IQ2_XXS : Sym32 {
  static constexpr int N = 3;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = ldg2(row + 8 * nb + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
#pragma unroll
    for (int i = 0; i < 4; i++) point8(o, i, table, w[0] >> (8 * i) & 255u, even_signs(w[1] >> (7 * i)));
    o.s0 = quarter(lo_half(w[2]), w[1] >> 28);
  }
};

// (9-bit index, 7-bit signs) u16[32] | scales 8 | d f16
struct IQ2_XS : Sym16 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = row[8 * nb + b];
    w[3] = ldg2(row + 8 * nb + al16(nb) + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 x = w[i >> 1] >> (16 * (i & 1));
      point8(o, i, table, x & 511u, even_signs(x >> 9));
    }
    const float d = lo_half(w[3]);
    o.s0 = quarter(d, w[2] & 15u), o.s1 = quarter(d, w[2] >> 4);
  }
};

// indices 32 | signs 32 | two index bits per group 8 | scales 8 | d f16
struct IQ2_S : Sym16 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int n8 = al16(nb), signs = al16(4 * nb);
    w[0] = ldg4(row + 4 * b), w[1] = ldg4(row + signs + 4 * b);
    w[2] = row[2 * signs + b], w[3] = row[2 * signs + n8 + b];
    w[4] = ldg2(row + 2 * signs + 2 * n8 + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      point8(o, i, table, (w[0] >> (8 * i) & 255u) | (w[2] >> (2 * i) & 3u) << 8, w[1] >> (8 * i));
    const float d = lo_half(w[4]);
    o.s0 = quarter(d, w[3] & 15u), o.s1 = quarter(d, w[3] >> 4);
  }
};

// indices 64 | u32[8]: four 7-bit sign codes, 4-bit scale | d f16
struct IQ3_XXS : Sym32 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get8(w, row + 8 * b);
    w[2] = ldg4(row + 8 * nb + 4 * b);
    w[3] = ldg2(row + 8 * nb + al16(4 * nb) + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 x = w[i >> 1] >> (16 * (i & 1));
      point4x2(o, i, table, x & 255u, x >> 8 & 255u, even_signs(w[2] >> (7 * i)));
    }
    o.s0 = lo_half(w[3]) * (0.5f + (float)(w[2] >> 28)) * 0.5f;
  }
};

// indices 64 | ninth index bits 8 | signs 32 | scales 4 | d f16
struct IQ3_S : Sym32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int qh = 8 * nb, signs = qh + al16(nb), scales = signs + al16(4 * nb);
    get8(w, row + 8 * b);
    w[2] = row[qh + b];
    w[3] = ldg4(row + signs + 4 * b);
    w[4] = row[scales + (b >> 1)];
    w[5] = ldg2(row + scales + al16(nb >> 1) + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8* table) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 x = w[i >> 1] >> (16 * (i & 1)), high = w[2] >> (2 * i);
      point4x2(o, i, table, (x & 255u) | (high & 1u) << 8, (x >> 8 & 255u) | (high & 2u) << 7, w[3] >> (8 * i));
    }
    o.s0 = lo_half(w[5]) * (float)(1 + 2 * (int)(w[4] >> (4 * (b & 1)) & 15u));
  }
};

// Eight columns of a ternary grid: 8 * {-1, 0, 1} + 1, or - 1.
DI void ternary8(Block& o, int i, const u8* table, u32 index, bool down) {
  const uint2 p = *(const uint2*)(table + 8 * index);
  const u32 delta = down ? 0xffffffffu : 0x01010101u;
  o.q[2 * i] = add_bytes(p.x, delta), o.q[2 * i + 1] = add_bytes(p.y, delta);
}
DI void ternary32(Block& o, u32 qs, u32 qh, const u8* table) {
#pragma unroll
  for (int i = 0; i < 4; i++) ternary8(o, i, table, (qs >> (8 * i) & 255u) | (qh >> (3 * i) & 7u) << 8, qh >> 15 & 1u);
}
// Every group with a nibble: three index bits and the direction.
DI void ternary32_nibbles(Block& o, u32 qs, u32 qh, const u8* table) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 h = qh >> (4 * i) & 15u;
    ternary8(o, i, table, (qs >> (8 * i) & 255u) | (h & 7u) << 8, h >> 3);
  }
}
DI float odd_eighth(float d, u32 ls) { return d * (float)(2 * (int)ls + 1) * 0.125f; }

// indices 32 | u16[8]: four times three index bits, 3-bit scale, direction | d f16
struct IQ1_S : Sym32 {
  static constexpr int N = 3;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int qh = al16(4 * nb);
    w[0] = ldg4(row + 4 * b), w[1] = ldg2(row + qh + 2 * b);
    w[2] = ldg2(row + qh + al16(2 * nb) + 2 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
    ternary32(o, w[0], w[1], table);
    o.s0 = odd_eighth(lo_half(w[2]), w[1] >> 12 & 7u);
  }
};

// indices 32 | nibbles 16 | scales u16[4]: four times three bits; the top nibbles are d
struct IQ1_M : Sym16 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int qh = al16(4 * nb);
    w[0] = ldg4(row + 4 * b), w[1] = ldg2(row + qh + 2 * b);
    get8(w + 2, row + qh + al16(2 * nb) + 8 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8* table) {
    ternary32_nibbles(o, w[0], w[1], table);
    const u32 bits = (w[2] >> 12 & 15u) | (w[2] >> 28) << 4 | (w[3] >> 12 & 15u) << 8 | (w[3] >> 28) << 12;
    const u32 sc = (b & 4 ? w[3] : w[2]) >> (16 * (b >> 1 & 1)) >> (6 * (b & 1));
    const float d = lo_half(bits);
    o.s0 = odd_eighth(d, sc & 7u), o.s1 = odd_eighth(d, sc >> 3 & 7u);
  }
};

// IQ1_S_R4, rows separated: indices 4 per block | u16 per block as in IQ1_S | scale of the row f16
struct IQ1_S_R : Sym32 {
  static constexpr int N = 3;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int qh = al16(4 * nb);
    w[0] = ldg4(row + 4 * b), w[1] = ldg2(row + qh + 2 * b), w[2] = ldg2(row + qh + al16(2 * nb));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) { IQ1_S::decode(o, w, 0, table); }
};

// IQ1_M_R4, rows separated: indices 4 per block | nibbles 2 per block | two scale nibbles | scale of the row f16
struct IQ1_M_R : Sym16 {
  static constexpr int N = 4;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    const int qh = al16(4 * nb), sc = qh + al16(2 * nb);
    w[0] = ldg4(row + 4 * b), w[1] = ldg2(row + qh + 2 * b), w[2] = row[sc + b], w[3] = ldg2(row + sc + al16(nb));
  }
  SI void decode(Block& o, const u32* w, int, const u8* table) {
    ternary32_nibbles(o, w[0], w[1], table);
    const float d = lo_half(w[3]);
    o.s0 = d * (float)(w[2] & 15u) * 0.125f, o.s1 = d * (float)(w[2] >> 4) * 0.125f;
  }
};
