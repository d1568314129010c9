// The parts of weight formats. A format is described once, as a struct with
//   N                 32-bit words that `load` fetches for one block of 32 columns
//   HALVES, MINIMA    scales differ between the halves of 16; a minimum is added
//   load(w, row, nb, b, table)     the raw bytes of block b of a row of nb blocks (upload format: upload.py)
//   decode(o, w, b, table)         codes in the order of the columns, scales: value = s * code + m
// Matrix-vector products, matrix-matrix products and embeddings are generated from it (weights_matvec.cuh, ...).
// Rows are stored as planes: one field of all blocks after the other, each 16-byte aligned, so that neighbouring lanes
// read neighbouring bytes. The order of planes is the order of `PLANES` in upload.py.
#pragma once
#include "common.cuh"

#define SI static __device__ __forceinline__  // member functions of formats

struct Block {
  u32 q[8];      // signed bytes, column 4i + j in byte j of word i
  float s0, s1;  // scales of the halves (s1 only with HALVES)
  float m0, m1;  // minima, added (only with MINIMA; m1 only with both)
};

struct Sym32 { static constexpr bool HALVES = false, MINIMA = false; };
struct Min32 { static constexpr bool HALVES = false, MINIMA = true; };
struct Sym16 { static constexpr bool HALVES = true, MINIMA = false; };
struct Min16 { static constexpr bool HALVES = true, MINIMA = true; };

DI int al16(int n) { return (n + 15) & ~15; }

// --- raw bytes into words --------------------------------------------------------------------------------------------
DI void get16(u32* w, const u8* p) {
  const uint4 v = ldg16(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
DI void get32(u32* w, const u8* p) {
  get16(w, p);
  get16(w + 4, p + 16);
}
DI void get8(u32* w, const u8* p) {
  const uint2 v = ldg8(p);
  w[0] = v.x, w[1] = v.y;
}
DI float lo_half(u32 w) { return f16f((u16)w); }
DI float hi_half(u32 w) { return f16f((u16)(w >> 16)); }

// --- bytes of a word ---------------------------------------------------------------------------------------------------
// Four bytes as a word.
#define IK_BYTES(a, b, c, d) ((u32)((a) & 255) | (u32)((b) & 255) << 8 | (u32)((c) & 255) << 16 | (u32)((d) & 255) << 24)
DI u32 nib(u32 w, int shift) { return (w >> shift) & 0x0f0f0f0fu; }
DI u32 two(u32 w, int shift) { return (w >> shift) & 0x03030303u; }
DI u32 one(u32 w, int shift) { return (w >> shift) & 0x01010101u; }
// a + b byte by byte, wrapping.
DI u32 add_bytes(u32 a, u32 b) { return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u); }
// a - c byte by byte for a in 0..127 and the same c in 0..127 everywhere.
DI u32 minus(u32 a, u32 c) { return ((a | 0x80808080u) - c * 0x01010101u) ^ 0x80808080u; }
// Byte i of two words.
DI u32 byte_of(u32 lo, u32 hi, int i) { return prmt(lo, hi, (u32)i) & 255u; }
// Bits 0..3 -> bytes of 0xff.
DI u32 spread4(u32 bits) { return ((bits & 15u) * 0x00204081u & 0x01010101u) * 255u; }
// -v where the mask byte is set; v in 1..127.
DI u32 negate_bytes(u32 v, u32 mask) { return (v ^ mask) + (mask & 0x01010101u); }
// Odd number of ones among 7 bits.
DI u32 parity(u32 x) { return (u32)__popc((int)(x & 127u)) & 1u; }

// --- tables of signed bytes in registers -------------------------------------------------------------------------------
// Four codes 0..15, one per byte -> one per nibble of the low half.
DI u32 to_nibbles(u32 c) {
  const u32 x = c | c >> 4;
  return prmt(x, 0, 0x4420);
}
// Four table entries for four nibbles.
DI u32 pick4(u32 t, u32 n) { return prmt(t, t, n & 0x3333u); }
DI u32 pick8(const u32* t, u32 n) { return prmt(t[0], t[1], n & 0x7777u); }
DI u32 pick16(const u32* t, u32 n) {
  return prmt(pick8(t, n), pick8(t + 2, n), 0x3210u | (n & 0x8888u) >> 1);
}
// The fifth (sixth) bits are in bit 4 (5) of the bytes of c.
DI u32 choose(u32 lo, u32 hi, u32 bits) { return prmt(lo, hi, 0x3210u | to_nibbles(bits << 2)); }
DI u32 pick32(const u32* t, u32 c) {
  const u32 n = to_nibbles(c & 0x0f0f0f0fu);
  return choose(pick16(t, n), pick16(t + 4, n), one(c, 4));
}
DI u32 pick64(const u32* t, u32 c) { return choose(pick32(t, c & 0x1f1f1f1fu), pick32(t + 8, c & 0x1f1f1f1fu), one(c, 5)); }
// 16 entries for a word of packed codes: low nibbles to lo, high nibbles to hi.
DI void pick_packed(const u32* t, u32 q, u32& lo, u32& hi) {
  const u32 a = pick16(t, q & 0xffffu), b = pick16(t, q >> 16);
  lo = prmt(a, b, 0x6420);
  hi = prmt(a, b, 0x7531);
}

#define IK_TABLE4 IK_BYTES(-31, -13, 1, 17)
#define IK_TABLE4_SHIFTED IK_BYTES(-26, -8, 6, 22)
// The values of the shifted row are `shift` larger.
DI void table8(u32* t, bool shifted) {
  t[0] = shifted ? IK_BYTES(-59, -36, -19, -6) : IK_BYTES(-63, -40, -23, -10);
  t[1] = shifted ? IK_BYTES(5, 17, 32, 51) : IK_BYTES(1, 13, 28, 47);
}
DI void table16(u32* t, bool shifted) {
  t[0] = shifted ? IK_BYTES(-123, -100, -79, -61) : IK_BYTES(-127, -104, -83, -65);
  t[1] = shifted ? IK_BYTES(-45, -31, -18, -6) : IK_BYTES(-49, -35, -22, -10);
  t[2] = shifted ? IK_BYTES(5, 17, 29, 42) : IK_BYTES(1, 13, 25, 38);
  t[3] = shifted ? IK_BYTES(57, 73, 93, 117) : IK_BYTES(53, 69, 89, 113);
}
DI void table32(u32* t) {
  t[0] = IK_BYTES(-126, -114, -103, -92), t[1] = IK_BYTES(-83, -74, -65, -57);
  t[2] = IK_BYTES(-50, -43, -36, -30), t[3] = IK_BYTES(-24, -18, -12, -6);
  t[4] = IK_BYTES(-1, 5, 11, 17), t[5] = IK_BYTES(23, 29, 36, 43);
  t[6] = IK_BYTES(51, 59, 68, 77), t[7] = IK_BYTES(87, 97, 109, 121);
}
DI void table64(u32* t) {
  t[0] = IK_BYTES(-127, -121, -115, -109), t[1] = IK_BYTES(-104, -98, -93, -88);
  t[2] = IK_BYTES(-84, -79, -74, -70), t[3] = IK_BYTES(-66, -62, -58, -54);
  t[4] = IK_BYTES(-51, -47, -44, -40), t[5] = IK_BYTES(-37, -34, -31, -28);
  t[6] = IK_BYTES(-25, -22, -19, -16), t[7] = IK_BYTES(-13, -11, -8, -5);
  t[8] = IK_BYTES(-2, 0, 3, 6), t[9] = IK_BYTES(9, 12, 14, 17);
  t[10] = IK_BYTES(20, 23, 27, 30), t[11] = IK_BYTES(33, 36, 40, 44);
  t[12] = IK_BYTES(47, 51, 55, 59), t[13] = IK_BYTES(63, 68, 72, 77);
  t[14] = IK_BYTES(82, 87, 92, 98), t[15] = IK_BYTES(103, 109, 115, 121);
}
// One entry of the 16 as a float.
DI float value16(u32 code) {
  u32 t[4];
  table16(t, false);
  return (float)(int)(i8)pick16(t, code & 15u);
}

// --- codes that several families share ---------------------------------------------------------------------------------
// 16 bytes hold 32 codes: low nibbles are the first 16 columns.
DI void nibbles32(Block& o, const u32* w) {
#pragma unroll
  for (int i = 0; i < 4; i++) o.q[i] = nib(w[i], 0), o.q[i + 4] = nib(w[i], 4);
}
DI void values32(Block& o, const u32* w, const u32* t) {
#pragma unroll
  for (int i = 0; i < 4; i++) pick_packed(t, w[i], o.q[i], o.q[i + 4]);
}
// With a table per half.
DI void values16(Block& o, const u32* w, const u32* t0, const u32* t1) {
  u32 unused;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pick_packed(t0, w[i], o.q[i], unused);
    pick_packed(t1, w[i], unused, o.q[i + 4]);
  }
}
