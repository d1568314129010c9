// Non-linear types of iqk_quantize.cpp: a code picks a table entry, a bit per sub-block picks the base or the shifted row
// of the table. IQ*_K have one f16 scale per 256 and sub-blocks of 16; KS, KSS and KL one scale per row, sub-blocks of 32.
#pragma once
#include "weights_kquants.cuh"

// Four codes 0..3 (0..7), one per byte, through a table.
DI u32 value4(u32 t, u32 c) { return pick4(t, to_nibbles(c)); }
DI u32 value8(const u32* t, u32 c) { return pick8(t, to_nibbles(c)); }
// Table choice of half h of sub-block j from sixteen bits.
DI bool flag(u32 extra, int j, int h) { return extra >> (2 * j + h) & 1u; }

// codes 64 | scale nibbles 8 | d f16, table choice u16
struct IQ2_K : Sym16 {
  static constexpr int N = 10;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_2bit(w, row, b);
    w[8] = row[8 * nb + b];
    w[9] = ldg4(row + 8 * nb + al16(nb) + 4 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const u32 extra = w[9] >> 16;
    const u32 t0 = flag(extra, b & 7, 0) ? IK_TABLE4_SHIFTED : IK_TABLE4;
    const u32 t1 = flag(extra, b & 7, 1) ? IK_TABLE4_SHIFTED : IK_TABLE4;
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = value4(i < 4 ? t0 : t1, two(w[i], 2 * (b & 3)));
    const float d = lo_half(w[9]);
    o.s0 = d * (float)((int)(w[8] & 15u) - 8), o.s1 = d * (float)((int)(w[8] >> 4) - 8);
  }
};

// codes 64 | third bits 32 | scale nibbles 8 | d f16, table choice u16, scale signs u16
struct IQ3_K : Sym16 {
  static constexpr int N = 19;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_2bit(w, row, b);
    load_1bit(w + 8, row + 8 * nb, b);
    w[16] = row[12 * nb + b];
    const u8* head = row + 12 * nb + al16(nb) + 6 * (b >> 3);
    w[17] = ldg2(head);
    w[18] = ldg2(head + 2) | (u32)ldg2(head + 4) << 16;
  }
  SI float scale(const u32* w, int b, int h) {
    const int m = 2 * (int)(w[16] >> (4 * h) & 15u) + 1;
    return lo_half(w[17]) * (float)(flag(w[18] >> 16, b & 7, h) ? -m : m);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t0[2], t1[2];
    table8(t0, flag(w[18], b & 7, 0));
    table8(t1, flag(w[18], b & 7, 1));
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = value8(i < 4 ? t0 : t1, two(w[i], 2 * (b & 3)) | one(w[8 + i], b & 7) << 2);
    o.s0 = scale(w, b, 0), o.s1 = scale(w, b, 1);
  }
};

// Scales of IQ4_K and IQ5_K from d f16 and table choice (w[0]), scales_h[4] (w[1]) and the byte of scales_l (w[2]).
DI float scale_6bit_signed(const u32* w, int b, int h) {
  const u32 high = w[1] >> (4 * (b & 7) + 2 * h) & 3u;
  return lo_half(w[0]) * (float)((int)((w[2] >> (4 * h) & 15u) | high << 4) - 32);
}
DI void load_6bit_signed(u32* w, const u8* plane, int nb, int b) {
  get8(w, plane + 8 * (b >> 3));
  w[2] = plane[al16(nb) + b];
}

// codes 128 | d f16, table choice u16, scales_h 4 | scales_l 8
struct IQ4_K : Sym16 {
  static constexpr int N = 7;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    load_6bit_signed(w + 4, row + 16 * nb, nb, b);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t0[4], t1[4];
    table16(t0, flag(w[4] >> 16, b & 7, 0));
    table16(t1, flag(w[4] >> 16, b & 7, 1));
    values16(o, w, t0, t1);
    o.s0 = scale_6bit_signed(w + 4, b, 0), o.s1 = scale_6bit_signed(w + 4, b, 1);
  }
};

// codes 128 | fifth bits 32 | d f16, table choice u16, scales_h 4 | scales_l 8
struct IQ5_K : Sym16 {
  static constexpr int N = 19;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_4bit(w, row, b);
    load_1bit(w + 8, row + 16 * nb, b);
    load_6bit_signed(w + 16, row + 20 * nb, nb, b);
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t[8];
    table32(t);
    const u32 up0 = flag(w[16] >> 16, b & 7, 0) ? 0x02020202u : 0u, up1 = flag(w[16] >> 16, b & 7, 1) ? 0x02020202u : 0u;
#pragma unroll
    for (int i = 0; i < 8; i++)
      o.q[i] = add_bytes(pick32(t, nib(w[i], 4 * (b & 1)) | one(w[8 + i], b & 7) << 4), i < 4 ? up0 : up1);
    o.s0 = scale_6bit_signed(w + 16, b, 0), o.s1 = scale_6bit_signed(w + 16, b, 1);
  }
};

// low nibbles 128 | high bits 64 | scales i8 16 | d f16, table choice u16
struct IQ6_K : Sym16 {
  static constexpr int N = 18;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_4bit(w, row, b);
    load_2bit(w + 8, row + 16 * nb, b);
    w[16] = ldg2(row + 24 * nb + 2 * b);
    w[17] = ldg4(row + 26 * nb + 4 * (b >> 3));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t[16];
    table64(t);
    const u32 up0 = flag(w[17] >> 16, b & 7, 0) ? 0x01010101u : 0u, up1 = flag(w[17] >> 16, b & 7, 1) ? 0x01010101u : 0u;
#pragma unroll
    for (int i = 0; i < 8; i++)
      o.q[i] = add_bytes(pick64(t, nib(w[i], 4 * (b & 1)) | two(w[8 + i], 2 * (b & 3)) << 4), i < 4 ? up0 : up1);
    const float d = lo_half(w[17]);
    o.s0 = d * (float)(i8)w[16], o.s1 = d * (float)(i8)(w[16] >> 8);
  }
};

// codes 64 | table choice and fifth scale bits u16, scale nibbles 4 | scale of the row f16
struct IQ2_KS : Sym32 {
  static constexpr int N = 11;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_2bit(w, row, b);
    const u8* head = row + 8 * nb + 6 * (b >> 3);
    w[8] = ldg2(head);
    w[9] = ldg2(head + 2) | (u32)ldg2(head + 4) << 16;
    w[10] = ldg2(row + 8 * nb + al16(6 * (nb >> 3)));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const int j = b & 7;
    const u32 t = w[8] >> j & 1u ? IK_TABLE4_SHIFTED : IK_TABLE4;
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = value4(t, two(w[i], 2 * (b & 3)));
    o.s0 = lo_half(w[10]) * (float)((int)((w[9] >> (4 * j) & 15u) | (w[8] >> (8 + j) & 1u) << 4) - 16);
  }
};

// Nibble j of four bytes that hold all low nibbles first.
DI u32 crossed(u32 w, int j) { return w >> (8 * (j & 3) + (j & 4)) & 15u; }

// codes 64 | third bits 32 | fifth scale bits and table choice u16, scale nibbles 4 | scale of the row f16
struct IQ3_KS : Sym32 {
  static constexpr int N = 19;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_2bit(w, row, b);
    load_1bit(w + 8, row + 8 * nb, b);
    const u8* head = row + 12 * nb + 6 * (b >> 3);
    w[16] = ldg2(head);
    w[17] = ldg2(head + 2) | (u32)ldg2(head + 4) << 16;
    w[18] = ldg2(row + 12 * nb + al16(6 * (nb >> 3)));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const int j = b & 7;
    u32 t[2];
    table8(t, w[16] >> (8 + j) & 1u);
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = value8(t, two(w[i], 2 * (b & 3)) | one(w[8 + i], j) << 2);
    o.s0 = lo_half(w[18]) * (float)((int)(crossed(w[17], j) | (w[16] >> j & 1u) << 4) - 16);
  }
};

// An odd multiplier -127..127 in bits 1..7; bit 0 chooses the table.
DI float odd_scale(u32 d, u32 s) { return __uint_as_float(d) * (float)((int)(s & 254u) - 127); }

// codes 128 | scales 8 | scale of the row f32
struct IQ4_KS : Sym32 {
  static constexpr int N = 6;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = row[16 * nb + b];
    w[5] = ldg4(row + 16 * nb + al16(nb));
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    u32 t[4];
    table16(t, w[4] & 1u);
    values32(o, w, t);
    o.s0 = odd_scale(w[5], w[4]);
  }
};

// codes 128 | fifth bits 32 | scales 8 | scale of the row f32
struct IQ5_KS : Sym32 {
  static constexpr int N = 18;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    load_4bit(w, row, b);
    load_1bit(w + 8, row + 16 * nb, b);
    w[16] = row[20 * nb + b];
    w[17] = ldg4(row + 20 * nb + al16(nb));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    u32 t[8];
    table32(t);
    const u32 up = w[16] & 1u ? 0x02020202u : 0u;
#pragma unroll
    for (int i = 0; i < 8; i++) o.q[i] = add_bytes(pick32(t, nib(w[i], 4 * (b & 1)) | one(w[8 + i], b & 7) << 4), up);
    o.s0 = odd_scale(w[17], w[16]);
  }
};

// 16-bit words with four codes and a bit of the scale each, 128 | scale of the row f32
struct IQ4_KSS : Sym32 {
  static constexpr int N = 5;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 16 * b);
    w[4] = ldg4(row + 16 * nb);
  }
  SI void decode(Block& o, const u32* w, int, const u8*) {
    u32 s = 0, q[4], t[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s |= ((w[i] & 1u) | (w[i] >> 15 & 2u)) << (2 * i);
      const u32 u = w[i] & 0xfffefffeu;
      q[i] = u ^ (u >> 1 & 0x7fff7fffu);
    }
    table16(t, s & 1u);
    values32(o, q, t);
    o.s0 = odd_scale(w[4], s);
  }
};

// low nibbles 64: sub-blocks 2i and 2i + 1 share 16 bytes, a code per pair of columns | fifth bits 16 |
// scales_h u16, scale nibbles 4 | scale of the row f16
struct IQ2_KL : Sym32 {
  static constexpr int N = 11;
  SI void load(u32* w, const u8* row, int nb, int b, const u8*) {
    get16(w, row + 64 * (b >> 3) + 16 * (b >> 1 & 3));
    get16(w + 4, row + 8 * nb + 16 * (b >> 3));
    const u8* head = row + 10 * nb + 6 * (b >> 3);
    w[8] = ldg2(head);
    w[9] = ldg2(head + 2) | (u32)ldg2(head + 4) << 16;
    w[10] = ldg2(row + 10 * nb + al16(6 * (nb >> 3)));
  }
  SI void decode(Block& o, const u32* w, int b, const u8*) {
    const u32 even[8] = {IK_BYTES(-63, -63, -40, -40), IK_BYTES(-40, -40, -23, -23), IK_BYTES(-23, -23, -23, -10),
                         IK_BYTES(-10, -10, -10, 1),   IK_BYTES(1, 1, 1, 1),         IK_BYTES(13, 13, 13, 13),
                         IK_BYTES(13, 28, 28, 28),     IK_BYTES(28, 28, 47, 47)};
    const u32 odd[8] = {IK_BYTES(-23, 13, -63, -10), IK_BYTES(13, 47, -40, -23), IK_BYTES(1, 13, 28, -63),
                        IK_BYTES(1, 13, 47, -23),    IK_BYTES(-10, 1, 13, 28),   IK_BYTES(-40, -23, -10, 1),
                        IK_BYTES(13, -63, -23, 1),   IK_BYTES(28, 47, -23, 13)};
    const int j = b & 7;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 code = nib(w[i], 4 * (j & 1)) | one(w[4 + i], j) << 4;
      const u32 e = pick32(even, code), f = pick32(odd, code);
      o.q[2 * i] = prmt(e, f, 0x5140), o.q[2 * i + 1] = prmt(e, f, 0x7362);
    }
    o.s0 = lo_half(w[10]) * (float)((int)(crossed(w[9], j) | (w[8] >> (2 * j) & 3u) << 4) - 32);
  }
};
