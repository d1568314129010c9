// Few activation rows times a matrix: a warp per two weight rows (`split` > 0: 2^split warps; < 0: a part of a warp, for
// short rows), up to 8 activation rows. One row has separate kernels: they need fewer registers, so up to twice as many
// warps fit on an SM and as many loads are in flight.
// Every lane decodes one block of 32 columns of both rows and multiplies it by all activation rows, so weights are read
// once. Each activation row has its own sums, in an order that depends on the shape only: results are batch-invariant.
// Reads row_bytes * n_rows per matrix; at 4.5 bits and one row 60..90 instructions per block of 32, memory-bound.
#pragma once
#include "weights.cuh"

constexpr int MV_THREADS = 128, MV_ROWS = 8;
static_assert(MV_THREADS / 32 == 4, "shifts by 2 - split");

// Blocks per SM of the kernels for one row: as many as fit in registers without spills.
template <class W> constexpr int ONE_BLOCKS = W::N > 12 ? 5 : W::N > 6 ? 6 : 8;

// Where the work of a block lies: rows of activations (or of a tile of the plan of `moe_sort`), and which matrix.
struct Span { int first, rows, matrix; };
DI Span span_of(const i64* st, int symbol, int factor, const int* tiles, const int* n_tiles, int most, int y, int z) {
  if (tiles) {
    if (y >= *n_tiles) return {0, 0, 0};
    const int4 tile = ((const int4*)tiles)[y];
    return {tile.y, tile.z, tile.x};
  }
  const i64 first = (i64)most * y, left = step_rows(st, symbol, factor) - first;
  return {(int)first, left > most ? most : left > 0 ? (int)left : 0, z};
}
// Activation row of result row p: with `order` (pairs of the plan) that of the token, else p itself.
DI int source_row(const int* order, int divisor, int p) { return order ? order[2 * p] / divisor : p; }
// Where row t of a span begins, in units of 16 bytes; 0 beyond its last row.
DI u32 source_at(const Span& span, const int* order, int divisor, i64 x_row, int t) {
  return t < span.rows ? (u32)(source_row(order, divisor, span.first + t) * (x_row >> 4)) : 0;
}

// The lanes that share an item (two weight rows): a part of a warp, a warp, or several warps, this being number `part`.
struct Team { int item, part, lane, width, slot; };
DI Team team_of(int block, int split) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = block << (2 - split);
  if (split >= 0) return {first + (warp >> split), warp & ((1 << split) - 1), lane, 32, warp};
  const int bits = 5 + split, slot = (warp << -split) + (lane >> bits);
  return {first + slot, 0, lane & ((1 << bits) - 1), 1 << bits, slot};
}
DI float team_sum(float v, int width) {
#pragma unroll
  for (int d = 16; d; d >>= 1)
    if (d < width) v += shx(v, d);
  return v;
}
constexpr int MV_SUMS = MV_THREADS / 4 * 2;  // floats per activation row: teams of 4 lanes at least

// Adds the sums of a team's lanes and warps and writes them: y[.][row_a], y[.][row_b], or with `fused` silu(b) * a at row_a.
template <int ROWS>
DI void store_sums(float* sums, const Span& span, const float (&acc_a)[ROWS], const float (&acc_b)[ROWS], const Team& team,
                   int split, bool active, int row_a, int row_b, bool fused, float* y, i64 y_row) {
  float* const mine = sums + team.slot * 2 * ROWS;
#pragma unroll
  for (int t = 0; t < ROWS; t++)
    if (t < span.rows) {
      const float sum_a = team_sum(acc_a[t], team.width), sum_b = team_sum(acc_b[t], team.width);
      if (team.lane == 0) mine[t] = sum_a, mine[ROWS + t] = sum_b;
    }
  __syncthreads();
  if (!active || team.part) return;
  for (int t = team.lane; t < span.rows; t += team.width) {
    float total_a = mine[t], total_b = mine[ROWS + t];
    for (int p = 1; p < 1 << max(split, 0); p++) {
      total_a += mine[p * 2 * ROWS + t];
      total_b += mine[p * 2 * ROWS + ROWS + t];
    }
    float* out = y + (i64)(span.first + t) * y_row;
    if (fused) {
      out[row_a] = silu(total_b) * total_a;
    } else {
      out[row_a] = total_a;
      if (row_b != row_a) out[row_b] = total_b;
    }
  }
}

// acc += block . activations; d, s, sums as in layouts.py.
template <class W> DI void add_block(float& acc, const Block& o, const uint4& a, const uint4& b, float d, float s, u32 sums) {
  int first = dp4a(o.q[3], a.w, dp4a(o.q[2], a.z, dp4a(o.q[1], a.y, dp4a(o.q[0], a.x, 0))));
  int last = dp4a(o.q[7], b.w, dp4a(o.q[6], b.z, dp4a(o.q[5], b.y, dp4a(o.q[4], b.x, 0))));
  if constexpr (W::HALVES) {
    acc = fmaf(__fmul_rn(o.s0, d), (float)first, acc);
    acc = fmaf(__fmul_rn(o.s1, d), (float)last, acc);
    if constexpr (W::MINIMA) {
      acc = fmaf(__fmul_rn(o.m0, d), (float)(short)(sums & 0xffffu), acc);
      acc = fmaf(__fmul_rn(o.m1, d), (float)((int)sums >> 16), acc);
    }
  } else {
    acc = fmaf(__fmul_rn(o.s0, d), (float)(first + last), acc);
    if constexpr (W::MINIMA) acc = fmaf(o.m0, s, acc);
  }
}

// A decoded block stays decoded for all activation rows.
template <class W> DI void pin_block(Block& o) {
#pragma unroll
  for (int i = 0; i < 8; i++) pin(o.q[i]);
  pin(o.s0);
  if constexpr (W::HALVES) pin(o.s1);
  if constexpr (W::MINIMA) pin(o.m0);
  if constexpr (W::HALVES && W::MINIMA) pin(o.m1);
}

// More matrices with the same input in one launch: their blocks follow those of the first.
struct More { const u8* w; int n_rows; float* y; i64 y_row; };
// Which matrix block `b` belongs to, and which block of that matrix it is; `per_block` pairs of rows.
DI int pick_matrix(const More& one, const More& two, int shift, const u8*& w, int& n_rows, float*& y, i64& y_row) {
  int b = (int)blockIdx.x;
  const More* const more[2] = {&one, &two};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int blocks = (((n_rows + 1) >> 1) + (1 << shift) - 1) >> shift;
    if (!more[i]->n_rows || b < blocks) break;
    b -= blocks;
    w = more[i]->w, n_rows = more[i]->n_rows, y = more[i]->y, y_row = more[i]->y_row;
  }
  return b;
}

// y[row][r] = silu(gate[r] . x) * (w[r] . x) with `gate`, else w[r] . x; `one`, `two`: further matrices (not with a gate).
template <class W, int ROWS>
DI void matvec(const i64* st, int symbol, int factor, const u8* w, const u8* gate, i64 row_bytes, i64 matrix_bytes, int n_rows,
               int nb, const u8* x, i64 x_row, i64 x_head, float* y, i64 y_row, i64 y_head, const int* tiles,
               const int* n_tiles, const int* order, int divisor, const u8* table, int split, const More& one, const More& two) {
  IK_SHARED(float, sums, MV_SUMS * ROWS)
  const Team team = team_of(pick_matrix(one, two, 2 - split, w, n_rows, y, y_row), split);
  const int item = team.item, step = split > 0 ? 32 << split : team.width;
  const bool active = item < (gate ? n_rows : (n_rows + 1) >> 1);
  const int row_a = gate ? item : 2 * item, row_b = gate ? item : min(2 * item + 1, n_rows - 1);
  const u8* a = w + row_a * row_bytes;
  const u8* b = (gate ? gate : w) + row_b * row_bytes;
  u32 raw_a[W::N], raw_b[W::N];
  int i = team.part * 32 + team.lane;
  if (!tiles) {  // start loading weights before the number of activation rows is known
    a += blockIdx.z * matrix_bytes, b += blockIdx.z * matrix_bytes;
    if (active && i < nb) {
      W::load(raw_a, a, nb, i, table);
      W::load(raw_b, b, nb, i, table);
    }
  }
  const Span span = span_of(st, symbol, factor, tiles, n_tiles, ROWS, blockIdx.y, blockIdx.z);
  if (!span.rows) return;
  if (tiles) {
    a += span.matrix * matrix_bytes, b += span.matrix * matrix_bytes;
    if (active && i < nb) {
      W::load(raw_a, a, nb, i, table);
      W::load(raw_b, b, nb, i, table);
    }
  }
  x += blockIdx.z * x_head;
  u32 at[ROWS];  // activation rows, in units of 16 bytes
  float acc_a[ROWS], acc_b[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    at[t] = source_at(span, order, divisor, x_row, t);
    acc_a[t] = acc_b[t] = 0.f;
  }
  if (active) {
    for (; i < nb; i += step) {
      Block block_a, block_b;
      W::decode(block_a, raw_a, i, table);
      W::decode(block_b, raw_b, i, table);
      pin_block<W>(block_a);
      pin_block<W>(block_b);
      if (i + step < nb) {  // in flight while the activations are multiplied
        W::load(raw_a, a, nb, i + step, table);
        W::load(raw_b, b, nb, i + step, table);
      }
#pragma unroll
      for (int t = 0; t < ROWS; t++)
        if (t < span.rows) {
          const u8* row = x + 16 * (i64)at[t];
          const uint4 lo = *(const uint4*)(row + 32 * i), hi = *(const uint4*)(row + 32 * i + 16);
          const u8* scales = row + 32 * nb + 4 * i;
          const float d = *(const float*)scales;
          float s = 0.f;
          u32 halves = 0;
          if constexpr (W::MINIMA && !W::HALVES) s = *(const float*)(scales + 4 * nb);
          if constexpr (W::MINIMA && W::HALVES) halves = *(const u32*)(scales + 8 * nb);
          add_block<W>(acc_a[t], block_a, lo, hi, d, s, halves);
          add_block<W>(acc_b[t], block_b, lo, hi, d, s, halves);
        }
    }
  }
  store_sums(sums, span, acc_a, acc_b, team, split, active, row_a, row_b, gate != nullptr, y + blockIdx.z * y_head, y_row);
}

// y[row] = values of row tokens[row], as decoded: (scale * code) + minimum, each rounded.
template <class W> DI void embed_row(const i64* st, const u8* w, i64 row_bytes, int nb, float* y, const u8* table) {
  if ((i64)blockIdx.x >= st[ST_TOKENS]) return;
  const u8* row = w + step_tokens(st)[blockIdx.x] * row_bytes;
  for (int b = threadIdx.x; b < nb; b += MV_THREADS) {
    u32 raw[W::N];
    Block o;
    W::load(raw, row, nb, b, table);
    W::decode(o, raw, b, table);
    float4* out = (float4*)(y + 32 * ((i64)blockIdx.x * nb + b));
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float s = W::HALVES && i >= 4 ? o.s1 : o.s0;
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        v[j] = __fmul_rn(s, (float)(i8)(o.q[i] >> (8 * j)));
        if constexpr (W::MINIMA) v[j] = __fadd_rn(v[j], W::HALVES && i >= 4 ? o.m1 : o.m0);
      }
      out[i] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}
