// Pieces shared by the kernels for heads of 64 to 256 columns (attn_decode.cuh, attn_prefill.cuh): tiles of 16-bit rows
// with one spare chunk of 16 bytes per row, which keeps ldmatrix free of bank conflicts, and the soft-max of 16 rows
// per warp whose scores stay in registers.
#pragma once
#include "attn_tiles.cuh"

// 16-bit elements between the rows of a tile; WIDTH is a multiple of 16, so the number of chunks becomes odd.
template <int WIDTH> DI constexpr int tile_row() { return WIDTH + 8; }

// ROWS rows of W 16-bit values, from position `pos` on, into a tile whose rows are STRIDE elements apart; positions that
// are not among lo..hi-1 become zero (lo exists). `data` points at the first column of position 0.
template <int W, int ROWS, int STRIDE, int THREADS>
DI void copy_rows(u16* tile, const u8* data, i64 row_bytes, int pos, int lo, int hi, int thread) {
  constexpr int CHUNKS = W / 8;
  if constexpr (THREADS % CHUNKS == 0 && ROWS % (THREADS / CHUNKS) == 0) {  // a column per thread
    constexpr int STEP = THREADS / CHUNKS;
    const int c = thread % CHUNKS;
    pos += thread / CHUNKS;
    tile += thread / CHUNKS * STRIDE + c * 8;
    const u8* from = data + pos * row_bytes + c * 16;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP, from += STEP * row_bytes) {
      const bool ok = pos + r >= lo && pos + r < hi;
      cp16(tile + r * STRIDE, ok ? from : data + c * 16 + lo * row_bytes, ok);
    }
  } else {
    for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
      const int r = i / CHUNKS, c = i % CHUNKS;
      const bool ok = pos + r >= lo && pos + r < hi;
      cp16(tile + r * STRIDE + c * 8, data + (ok ? pos + r : lo) * row_bytes + c * 16, ok);
    }
  }
}
// 16 rows of any type through the registers of a warp: 16 columns per lane and turn, turns FROM..TO-1 of (W + 31) / 32.
template <int W, int FROM, int TO>
DI void fetch_turns(Raw16* raw, const KvTensor& tensor, i64 base, int col, int pos, int lo, int hi) {
#pragma unroll
  for (int n = FROM; n < TO; n++) {
    const int i = (threadIdx.x & 31) + 32 * n, r = i / (W / 16), g = i % (W / 16);
    kv_clear(raw[n - FROM]);
    if (i < W && pos + r >= lo && pos + r < hi) kv_load(raw[n - FROM], tensor, base + pos + r, (col >> 4) + g);
  }
}
template <int W, int FROM, int TO> DI void unpack_turns(u16* tile, const Raw16* raw, int type, int col) {
#pragma unroll
  for (int n = FROM; n < TO; n++) {
    const int i = (threadIdx.x & 31) + 32 * n, r = i / (W / 16), g = i % (W / 16);
    if (i < W) {
      u32 y[8];
      kv_f16(y, raw[n - FROM], type, ((col >> 4) + g) & 1);
      u16* to = tile + r * tile_row<W>() + g * 16;
      *(uint4*)to = make_uint4(y[0], y[1], y[2], y[3]);
      *(uint4*)(to + 8) = make_uint4(y[4], y[5], y[6], y[7]);
    }
  }
}
// Turns that are fetched ahead; rows of 256 columns would not fit into registers beside their sums (ANY: of any type).
template <int W> DI constexpr int turns() { return (W + 31) / 32; }
template <int W, bool ANY> DI constexpr int turns_ahead() { return W <= 192 ? turns<W>() : ANY ? 1 : 2; }
template <int W, bool ANY> DI void fetch_rows(Raw16* raw, const KvTensor& tensor, i64 base, int col, int pos, int lo, int hi) {
  fetch_turns<W, 0, turns_ahead<W, ANY>()>(raw, tensor, base, col, pos, lo, hi);
}
template <int W, bool ANY, int FROM>
DI void unpack_rest(u16* tile, Raw16* raw, const KvTensor& tensor, i64 base, int col, int pos, int lo, int hi) {
  if constexpr (FROM < turns<W>()) {
    constexpr int TO = FROM + turns_ahead<W, ANY>() < turns<W>() ? FROM + turns_ahead<W, ANY>() : turns<W>();
    fetch_turns<W, FROM, TO>(raw, tensor, base, col, pos, lo, hi);
    unpack_turns<W, FROM, TO>(tile, raw, tensor.type, col);
    unpack_rest<W, ANY, TO>(tile, raw, tensor, base, col, pos, lo, hi);
  }
}
// The rows that were fetched, from position `pos` on, into a tile.
template <int W, bool ANY>
DI void unpack_rows(u16* tile, Raw16* raw, const KvTensor& tensor, i64 base, int col, int pos, int lo, int hi) {
  unpack_turns<W, 0, turns_ahead<W, ANY>()>(tile, raw, tensor.type, col);
  unpack_rest<W, ANY, turns_ahead<W, ANY>()>(tile, raw, tensor, base, col, pos, lo, hi);
}

// Running maximum and this lane's share of the denominator for rows lane/4 and lane/4 + 8 of a warp.
struct SoftMax {
  float top[2], sum[2];
};
// Scores s[n] of positions pos + 8n + 2(lane&3).. -> 2^(s - maximum), in place, and their 16-bit pairs as the A operand
// of P*V; `o` is rescaled. With `masked`, positions that rows do not see are -inf; `sight` (0 or 1): what the rows lane/4
// and lane/4 + 8 see.
template <bool BF, int N8, int NO, class Seen>
DI void soft_max_step(float (&s)[N8][4], SoftMax& m, float (&o)[NO][4], u32 (&p)[N8 / 2][4], bool masked, int pos,
                      Seen sight, const Cap& cap) {
  const int col = (threadIdx.x & 3) * 2;
  if (cap.cap > 0.f) {
#pragma unroll
    for (int n = 0; n < N8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = capped(cap, s[n][e]);
  }
  if (masked) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Sight seen = sight(r);
#pragma unroll
      for (int n = 0; n < N8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (seen.hides(pos + n * 8 + col + e)) s[n][2 * r + e] = -INFINITY;
        }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float peak = m.top[r];
#pragma unroll
    for (int n = 0; n < N8; n++) peak = fmaxf(peak, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    peak = fmaxf(peak, shx(peak, 1)), peak = fmaxf(peak, shx(peak, 2));
    const float used = peak == -INFINITY ? 0.f : peak, alpha = ex2(m.top[r] - used);
    float add = 0.f;
#pragma unroll
    for (int n = 0; n < N8; n++) {
      s[n][2 * r] = ex2(s[n][2 * r] - used), s[n][2 * r + 1] = ex2(s[n][2 * r + 1] - used);
      add += s[n][2 * r] + s[n][2 * r + 1];
    }
    m.top[r] = peak, m.sum[r] = m.sum[r] * alpha + add;
    if (ballot(alpha != 1.f)) {
#pragma unroll
      for (int n = 0; n < NO; n++) o[n][2 * r] *= alpha, o[n][2 * r + 1] *= alpha;
    }
  }
#pragma unroll
  for (int k = 0; k < N8 / 2; k++) {
    p[k][0] = pack2<BF>(s[2 * k][0], s[2 * k][1]), p[k][1] = pack2<BF>(s[2 * k][2], s[2 * k][3]);
    p[k][2] = pack2<BF>(s[2 * k + 1][0], s[2 * k + 1][1]), p[k][3] = pack2<BF>(s[2 * k + 1][2], s[2 * k + 1][3]);
  }
}
DI void soft_max_end(SoftMax& m) {
#pragma unroll
  for (int r = 0; r < 2; r++) m.sum[r] += shx(m.sum[r], 1), m.sum[r] += shx(m.sum[r], 2);
}
// s = Q K^T for 16*M rows of Q and 8*N8 rows of K; q and k point at the first row of tiles.
template <bool BF, int DK, int M, int N8> DI void scores(float (&s)[M][N8][4], const u16* q, const u16* k) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[m][n][e] = 0.f;
#pragma unroll
  for (int c = 0; c < DK / 16; c++) {
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) ldsm4(a[m], q + (m * 16 + (lane & 15)) * tile_row<DK>() + c * 16 + (lane >> 4) * 8);
#pragma unroll
    for (int n = 0; n < N8 / 2; n++) {
      u32 b[4];
      ldsm4(b, k + (n * 16 + (lane & 7) + ((lane >> 4) << 3)) * tile_row<DK>() + c * 16 + ((lane >> 3) & 1) * 8);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma16816<BF>(s[m][2 * n], a[m], b[0], b[1]);
        mma16816<BF>(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
// o += P V for 16*NK positions and 16*M rows.
template <bool BF, int DV, int M, int NK>
DI void add_values(float (&o)[M][DV / 8][4], const u32 (&p)[M][NK][4], const u16* v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < NK; k++)
#pragma unroll
    for (int n = 0; n < DV / 16; n++) {
      u32 b[4];
      ldsm4t(b, v + (k * 16 + (lane & 7) + (((lane >> 3) & 1) << 3)) * tile_row<DV>() + n * 16 + (lane >> 4) * 8);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma16816<BF>(o[m][2 * n], p[m][k], b[0], b[1]);
        mma16816<BF>(o[m][2 * n + 1], p[m][k], b[2], b[3]);
      }
    }
}
