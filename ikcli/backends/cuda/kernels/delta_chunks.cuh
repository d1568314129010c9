// The gated delta rule by chunks of 64 tokens: tiles of split numbers, and where the work of a chunk lies.
//
// With D(i, t) the product of the decays of tokens i+1 .. t, what token t of a chunk writes is
//     u_t = beta_t (v_t - k_t D(0, t) S - sum over i < t of M_ti u_i),   M_ti = sum over c of k_tc D_c(i, t) k_ic
// so with T = (diag(1 / beta) + M)^-1:   U = T V - W S,   W = T (k D(0, t)),   and of a chunk
//     O = (q D(0, t)) S + P U,   S' = D(0, 64) S + (k D(i, 64))' U,   P_ti = sum over c of q_tc D_c(i, t) k_ic, i <= t.
// `delta_chunks` makes what does not read the state, T V, W and P, for all chunks at once; `delta_scan` goes through
// the chunks of a sequence. Decays only ever multiply: no factor is above 1.
//
// Products are those of f16 tensor cores with both sides as sums of two f16 (22 bits; the product of the lower parts is
// left out). What depends on the size of values (v, u, S) is multiplied by a power of two first, so that it fits f16.
#pragma once
#include "states.cuh"

constexpr int CHUNK = 64, THREADS = 256, DK = 128;  // tokens, threads of a block, most columns of a key
// A tile: 64 rows of 64 columns, the upper parts, then the lower parts; 16-byte pieces of a row lie at piece ^ (row & 7).
constexpr int PLANE = 8192, TILE = 2 * PLANE;
constexpr int TERMS = 3 * TILE;            // of a chunk and head: -W (two tiles), P
constexpr int KEYS = 4 * TILE;             // of a chunk and head (of keys, where decays are per head): q, k
constexpr int FACTORS = 256;               // floats: decays of the chunk by column; D(0, t) and D(t, 64) by token

struct Work {
  u8 *terms, *keys;  // [slot][head]
  float *wanted, *factors;  // T V as [slot][head][dv][64]
  int slot0, n_slots;  // of this launch
};

// Segment i has the slots from start / 64 + i on; those of different segments differ.
DI i64 first_slot(const i64* segment, i64 i) { return segment[SEG_START] / CHUNK + i; }

DI void split2(float x, float y, u32& hi, u32& lo) {
  hi = pack2<false>(x, y);
  const float2 h = unpack_f16(hi);
  lo = pack2<false>(x - h.x, y - h.y);
}
DI float2 join2(u32 hi, u32 lo) {
  const float2 h = unpack_f16(hi), l = unpack_f16(lo);
  return make_float2(h.x + l.x, h.y + l.y);
}
// A power of two that brings numbers up to `most` below 2^13, and its inverse.
DI float2 power_for(float most) {
  const u32 e = max(min(__float_as_uint(most) >> 23, 254u), 13u);
  return make_float2(__uint_as_float((266u - e) << 23), __uint_as_float((e - 12u) << 23));
}

DI int place(int row, int piece) { return row * 128 + ((piece ^ row & 7) << 4); }
DI int pair_place(int row, int col) { return place(row, col >> 3) + (col & 7) * 2; }

struct Split4 {
  u32 hi[4], lo[4];
};
// 16 x 16 of a tile. rows_first: four 8 x 8 in the order (0, 0), (8, 0), (0, 8), (8, 8): what A wants, and, transposed, B
// (rows are k). Else (0, 0), (0, 8), (8, 0), (8, 8): B for two times 8 columns, which are rows of the tile.
template <bool TRANSPOSED, bool ROWS_FIRST> DI void load16(Split4& f, const u8* tile, int row, int piece) {
  const int lane = threadIdx.x & 31, m = lane >> 3;
  const u8* at = tile + place(row + (lane & 7) + 8 * (ROWS_FIRST ? m & 1 : m >> 1), piece + (ROWS_FIRST ? m >> 1 : m & 1));
  if constexpr (TRANSPOSED) ldsm4t(f.hi, at), ldsm4t(f.lo, at + PLANE);
  else ldsm4(f.hi, at), ldsm4(f.lo, at + PLANE);
}
DI void load_a(Split4& f, const u8* tile, int row, int piece) { load16<false, true>(f, tile, row, piece); }
DI void load_b(Split4& f, const u8* tile, int row, int piece) { load16<false, false>(f, tile, row, piece); }
DI void load_bt(Split4& f, const u8* tile, int row, int piece) { load16<true, true>(f, tile, row, piece); }

struct Sums {  // 16 x 16: products of upper parts, the others
  float main[2][4], rest[2][4];
};
DI void clear(Sums& c) {
#pragma unroll
  for (int i = 0; i < 8; i++) c.main[i >> 2][i & 3] = c.rest[i >> 2][i & 3] = 0.f;
}
DI void multiply(Sums& c, const Split4& a, const Split4& b) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    mma16816<false>(c.main[n], a.hi, b.hi[2 * n], b.hi[2 * n + 1]);
    mma16816<false>(c.rest[n], a.hi, b.lo[2 * n], b.lo[2 * n + 1]);
    mma16816<false>(c.rest[n], a.lo, b.hi[2 * n], b.hi[2 * n + 1]);
  }
}
DI float total(const Sums& c, int n, int i) { return c.main[n][i] + c.rest[n][i]; }
// Sums as the A of a further product.
DI void as_a(Split4& a, const float (&c)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) split2(c[i >> 1][2 * (i & 1)], c[i >> 1][2 * (i & 1) + 1], a.hi[i], a.lo[i]);
}
// 16 x 16 numbers as accumulators have them, into a tile.
DI void store16(u8* tile, int row, int col, const float (&c)[2][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = pair_place(row + (lane >> 2) + 8 * (i & 1), col + 8 * (i >> 1) + 2 * (lane & 3));
    split2(c[i >> 1][2 * (i & 1)], c[i >> 1][2 * (i & 1) + 1], *(u32*)(tile + at), *(u32*)(tile + at + PLANE));
  }
}
