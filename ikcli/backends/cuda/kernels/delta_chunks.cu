// The gated delta rule by chunks, what does not read the state: a block per chunk and head.
#include "delta_chunks.cuh"
#include "layer_common.cuh"

constexpr int WARPS = THREADS / 32, PAIRS = 10;  // pairs of blocks of 16 tokens, the second not after the first

struct Rows {
  const float* at;
  i64 row;   // floats between tokens
  int head;  // ... between heads
};

DI float4 times(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }
DI float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// Row and first column of the i-th four numbers that a thread has of 64 rows of 128: a warp has a row.
DI int row_of(int i) { return (threadIdx.x >> 5) + WARPS * i; }
DI float4 four_of(const Rows& x, int t, int n, int width) {
  const int col = 4 * (threadIdx.x & 31);
  return t < n && col < width ? ld_f4(x.at + (i64)t * x.row + col) : make_float4(0.f, 0.f, 0.f, 0.f);
}
DI void store_four(u8* tiles, int row, float4 v) {
  const int col = 4 * (threadIdx.x & 31), at = (col >> 6) * TILE + pair_place(row, col & 63);
  uint2 hi, lo;
  split2(v.x, v.y, hi.x, lo.x);
  split2(v.z, v.w, hi.y, lo.y);
  *(uint2*)(tiles + at) = hi, *(uint2*)(tiles + at + PLANE) = lo;
}
DI void copy_out(u8* to, const u8* from, int size) {
  for (int i = threadIdx.x * 16; i < size; i += THREADS * 16) *(uint4*)(to + i) = *(const uint4*)(from + i);
}
// ... with a factor per block of 16 rows and column.
template <class F> DI void copy_scaled(u8* to, const u8* from, F factor) {
#pragma unroll 1
  for (int i = threadIdx.x; i < 64 * 16; i += THREADS) {
    // 16-byte pieces are swizzled in tiles, so rows are read piece by piece, not as they lie.
    const int row = i >> 4, piece = i & 15, at = (piece >> 3) * TILE + place(row, piece & 7);
    u32 hi[4], lo[4];
    *(uint4*)hi = *(const uint4*)(from + at), *(uint4*)lo = *(const uint4*)(from + at + PLANE);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 v = join2(hi[j], lo[j]);
      const int col = 8 * piece + 2 * j;
      split2(v.x * factor(row >> 4, col), v.y * factor(row >> 4, col + 1), hi[j], lo[j]);
    }
    *(uint4*)(to + at) = *(const uint4*)hi, *(uint4*)(to + at + PLANE) = *(const uint4*)lo;
  }
}

// (diag(1 / beta) + M)^-1 of 16 tokens, M below the diagonal: a column per lane, from one row to the next.
DI void invert16(u8* inverse, const u8* m, int block, const float* beta) {
  const int col = threadIdx.x & 15;
  float x[16];
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const int row = 16 * block + t;
    // Two sums, so that the additions of a row make a chain of half the length.
    float sum = t == col ? 1.f : 0.f, more = 0.f;
#pragma unroll
    for (int i = 0; i < t; i += 2) {
      const int at = pair_place(row, 16 * block + i);
      const float2 v = join2(*(const u32*)(m + at), *(const u32*)(m + at + PLANE));
      sum = fmaf(-v.x, x[i], sum);
      if (i + 1 < t) more = fmaf(-v.y, x[i + 1], more);
    }
    x[t] = beta[row] * (sum + more);
    // Both halves of the warp compute the same columns; one stores them.
    if ((threadIdx.x & 31) < 16) {
      const int at = pair_place(row, 16 * block + col);
      const u16 hi = f2h(x[t]);
      *(u16*)(inverse + at) = hi, *(u16*)(inverse + at + PLANE) = f2h(x[t] - f16f(hi));
    }
  }
}
// Block (i, j) below the diagonal, from those nearer to it: -(sum over k = j + 1 .. i of T_ik M_kj) T_jj.
DI void invert_below(u8* inverse, const u8* m, int i, int j) {
  Sums c;
  Split4 a, b;
  float x[2][4];
  clear(c);
#pragma unroll 1
  for (int k = j + 1; k <= i; k++) {
    load_a(a, inverse, 16 * i, 2 * k);
    load_bt(b, m, 16 * k, 2 * j);
    multiply(c, a, b);
  }
#pragma unroll
  for (int e = 0; e < 8; e++) x[e >> 2][e & 3] = -total(c, e >> 2, e & 3);
  // The sum goes from accumulators to an operand in registers, as the layouts agree.
  as_a(a, x);
  load_bt(b, inverse, 16 * j, 2 * j);
  clear(c);
  multiply(c, a, b);
#pragma unroll
  for (int e = 0; e < 8; e++) x[e >> 2][e & 3] = total(c, e >> 2, e & 3);
  store16(inverse, 16 * i, 16 * j, x);
}

// Sums over the lanes of 16 numbers each; lane i gets that of number i / 2.
DI float sums16(float (&v)[16]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 8; d; d >>= 1)
#pragma unroll
    for (int i = 0; i < d; i++) {
      const bool upper = lane & 2 * d;
      v[i] = (upper ? v[i + d] : v[i]) + shx(upper ? v[i] : v[i + d], 2 * d);
    }
  return v[0] + shx(v[0], 1);
}

// With decays by column, products inside of blocks of 16 tokens: keys decay on from token to token. A warp has every other key
// of a block; lanes 4 i + 0 and + 1 get those of keys with key 2 i + (warp & 1), lanes 4 i + 2 and + 3 of queries with it.
DI void products_inside(float (&inside)[8], const float* k, const float* q, const float* decay, int n, int dk) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = warp >> 1, odd = warp & 1, col = 4 * lane;
  float4 key[8];
#pragma unroll
  for (int i = 0; i < 8; i++) key[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int t = 0; t < 16; t++) {
    const int row = 16 * block + t;
    const float4 now = ld_f4(k + row * DK + col), query = ld_f4(q + row * DK + col);
    const float4 a = row < n && col < dk ? ld_f4(decay + row * DK + col) : make_float4(1.f, 1.f, 1.f, 1.f);
    float sums[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int from = 2 * i + odd;
      sums[2 * i] = sums[2 * i + 1] = 0.f;
      if (from > t) continue;
      float4& x = key[i];
      // A key starts at its own token and decays with every token after it: factors are only ever multiplied.
      if (from == t) x = now;
      else x = make_float4(x.x * a.x, x.y * a.y, x.z * a.z, x.w * a.w);
      sums[2 * i] = (x.x * now.x + x.y * now.y) + (x.z * now.z + x.w * now.w);
      sums[2 * i + 1] = (x.x * query.x + x.y * query.y) + (x.z * query.z + x.w * query.w);
    }
    const float sum = sums16(sums);
#pragma unroll
    for (int j = 0; j < 8; j++) inside[j] = t == 2 * j + (lane & 1) ? sum : inside[j];
  }
}

template <bool BY_COLUMN>
DI void chunk_terms(const i64* st, Work work, Rows q, Rows k, Rows v, const float* decay, const float* beta_rows, int n_head,
                     int n_head_k, int dk, int dv, int tiled) {
  SMEM_DECL
  u8 *s_k = smem_raw, *s_q = s_k + 2 * TILE, *s_x = s_q + 2 * TILE;
  float *beta = (float*)(s_x + 2 * TILE), *scratch = beta + CHUNK, *since = scratch + 32;
  float* decays = since + CHUNK;  // by token
  float* blocks = since;          // or [block][column]: decay of a block of 16 tokens
  const i64 slot = work.slot0 + blockIdx.x;
  const i64* segment = step_segments(st);
  i64 chunk = -1;
  for (i64 i = 0; i < st[ST_SEGMENTS]; i++, segment += SEG_WORDS) {
    chunk = slot - first_slot(segment, i);
    if (chunk < 0 || chunk * CHUNK < segment[SEG_TOKENS]) break;
    chunk = -1;
  }
  if (chunk < 0) return;
  const int n = (int)min(segment[SEG_TOKENS] - chunk * CHUNK, (i64)CHUNK), head = blockIdx.y;
  const int group = n_head / n_head_k, k_head = tiled ? head % n_head_k : head / group;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 start = segment[SEG_START] + chunk * CHUNK, item = (i64)blockIdx.x * n_head + head;
  q.at += start * q.row + (i64)k_head * q.head;
  k.at += start * k.row + (i64)k_head * k.head;
  v.at += start * v.row + (i64)head * v.head;
  decay += (start * n_head + head) * (BY_COLUMN ? dk : 1);
  const i64 decay_row = (i64)n_head * (BY_COLUMN ? dk : 1);
  u8* terms = work.terms + item * TERMS;
  u8* keys = work.keys + (BY_COLUMN ? item : (i64)blockIdx.x * n_head_k + k_head) * KEYS;
  float* factors = work.factors + item * FACTORS;

  // Keys and queries. By column: decayed since the beginning of their block of 16 tokens, and keys to its end.
  if (threadIdx.x < CHUNK) {
    const int t = threadIdx.x;
    beta[t] = t < n ? 1.f / (1.f + expf(-beta_rows[(start + t) * n_head + head])) : 0.f;
    if (!BY_COLUMN) decays[t] = t < n ? decay[t * decay_row] : 1.f;
  }
  float inside[8];  // products inside of blocks, by column: of tokens 2 j + (lane & 1)
  if (BY_COLUMN) {
    const float *raw_k = (const float*)s_k, *raw_q = (const float*)s_q, *raw_a = (const float*)s_x;
    for (int i = threadIdx.x; i < CHUNK * 32; i += THREADS) {
      const int row = i >> 5, col = 4 * (i & 31);
      const bool there = row < n && col < dk;
      // Raw rows lie where the tiles will be: shared memory has no room for both.
      cp16(s_k + 16 * i, there ? k.at + row * k.row + col : k.at, there);
      cp16(s_q + 16 * i, there ? q.at + row * q.row + col : q.at, there);
      cp16(s_x + 16 * i, there ? decay + row * decay_row + col : decay, there);
    }
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    products_inside(inside, raw_k, raw_q, raw_a, n, dk);
    const int col = 2 * (threadIdx.x & 63), block = threadIdx.x >> 6, at0 = (col >> 6) * TILE;
    float2 kept = make_float2(1.f, 1.f), x[16], a[16];
#pragma unroll
    for (int t = 0; t < 16; t++) {
      const int row = 16 * block + t;
      x[t] = *(const float2*)(raw_q + row * DK + col);
      a[t] = row < n && col < dk ? *(const float2*)(raw_a + row * DK + col) : make_float2(1.f, 1.f);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 16; t++) {
      const int at = at0 + pair_place(16 * block + t, col & 63);
      kept.x *= a[t].x, kept.y *= a[t].y;
      split2(x[t].x * kept.x, x[t].y * kept.y, *(u32*)(s_q + at), *(u32*)(s_q + at + PLANE));
      x[t] = *(const float2*)(raw_k + (16 * block + t) * DK + col);
    }
    *(float2*)(blocks + block * DK + col) = kept;
    __syncthreads();
    kept = make_float2(1.f, 1.f);
#pragma unroll
    for (int t = 0; t < 16; t++) {
      const int at = at0 + pair_place(16 * block + t, col & 63);
      kept.x *= a[t].x, kept.y *= a[t].y;
      split2(x[t].x * kept.x, x[t].y * kept.y, *(u32*)(s_k + at), *(u32*)(s_k + at + PLANE));
    }
    kept = make_float2(1.f, 1.f);
#pragma unroll
    for (int t = 15; t >= 0; t--) {
      const int at = at0 + pair_place(16 * block + t, col & 63);
      split2(x[t].x * kept.x, x[t].y * kept.y, *(u32*)(s_x + at), *(u32*)(s_x + at + PLANE));
      kept.x *= a[t].x, kept.y *= a[t].y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; i++) {
      store_four(s_k, row_of(i), four_of(k, row_of(i), n, dk));
      store_four(s_q, row_of(i), four_of(q, row_of(i), n, dk));
    }
  }
  __syncthreads();
  float* between = (float*)s_x;  // D(i, t) as [t][i], where decays are per head
  if (!BY_COLUMN && threadIdx.x >= CHUNK && threadIdx.x < 2 * CHUNK) {  // warps with one pair below
    const int i = threadIdx.x - CHUNK;
    float d = 1.f;
#pragma unroll 8
    for (int t = 0; t < CHUNK; t++) {
      if (t > i) d *= decays[t];
      // Rows are one word longer than 64, so that lanes that read different rows use different banks.
      between[t * (CHUNK + 1) + i] = d;
    }
    factors[DK + CHUNK + i] = d;
  }

  // Products of rows: block i of 16 tokens with block j <= i. Warps have one or two of the pairs.
  float pairs[2][2][2][4];  // of keys, of queries
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int pair = warp + WARPS * turn, i = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, j = pair - i * (i + 1) / 2;
    if (pair < PAIRS && !(BY_COLUMN && i == j)) {
      Sums c_k, c_q;
      clear(c_k), clear(c_q);
#pragma unroll 2
      for (int c = 0; c < 8; c++) {
        Split4 a, b;
        // One load of block j serves keys and queries of block i.
        load_b(b, (BY_COLUMN ? s_x : s_k) + (c >> 2) * TILE, 16 * j, 2 * (c & 3));
        if (BY_COLUMN && i > j + 1)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int col = 16 * c + 8 * (e & 1) + 2 * (lane & 3);
            float2 x = join2(b.hi[e], b.lo[e]), f = *(const float2*)(blocks + (j + 1) * DK + col);
            if (i > j + 2) {
              const float2 more = *(const float2*)(blocks + (j + 2) * DK + col);
              f.x *= more.x, f.y *= more.y;
            }
            split2(x.x * f.x, x.y * f.y, b.hi[e], b.lo[e]);
          }
        load_a(a, s_k + (c >> 2) * TILE, 16 * i, 2 * (c & 3));
        multiply(c_k, a, b);
        load_a(a, s_q + (c >> 2) * TILE, 16 * i, 2 * (c & 3));
        multiply(c_q, a, b);
      }
#pragma unroll
      for (int e = 0; e < 8; e++) {
        pairs[turn][0][e >> 2][e & 3] = total(c_k, e >> 2, e & 3);
        pairs[turn][1][e >> 2][e & 3] = total(c_q, e >> 2, e & 3);
      }
      if (BY_COLUMN) store16(terms + 2 * TILE, 16 * i, 16 * j, pairs[turn][1]);
    }
  }
  if (BY_COLUMN) {  // factors that are left: since the beginning of the chunk, to its end
    copy_scaled(keys, s_q, [&](int block, int col) {
      float f = 1.f;
      for (int b = 0; b < block; b++) f *= blocks[b * DK + col];
      return f;
    });
    copy_scaled(keys + 2 * TILE, s_x, [&](int block, int col) {
      float f = 1.f;
      for (int b = block + 1; b < 4; b++) f *= blocks[b * DK + col];
      return f;
    });
    if (threadIdx.x < DK) {
      const float* b = blocks + threadIdx.x;
      factors[threadIdx.x] = b[0] * b[DK] * b[2 * DK] * b[3 * DK];
    }
  } else if (tiled ? head < n_head_k : head % group == 0) {
    copy_out(keys, s_q, 2 * TILE);
    copy_out(keys + 2 * TILE, s_k, 2 * TILE);
  }
  float4 values[CHUNK / WARPS];
  auto load_values = [&]() {
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; i++) values[i] = four_of(v, row_of(i), n, dv);
  };
  if (!BY_COLUMN) load_values();
  __syncthreads();
  if (!BY_COLUMN && threadIdx.x < DK) {
    const int t = threadIdx.x & CHUNK - 1;
    factors[threadIdx.x] = between[(CHUNK - 1) * (CHUNK + 1)] * decays[0];
    if (threadIdx.x < CHUNK) since[t] = factors[DK + t] = between[t * (CHUNK + 1)] * decays[0];
  }

  // M and the inverse take the place of queries, P is done.
  u8 *s_m = s_q, *s_t = s_q + TILE;
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int pair = warp + WARPS * turn, i = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, j = pair - i * (i + 1) / 2;
    if (pair < PAIRS && !(BY_COLUMN && i == j)) {
      if (!BY_COLUMN)
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const int t = 16 * i + (lane >> 2) + 8 * (e >> 1 & 1), from = 16 * j + 8 * (e >> 2) + 2 * (lane & 3) + (e & 1);
          // Decays per head multiply finished products, which costs less than decaying every key for every block.
          const float d = from <= t ? between[t * (CHUNK + 1) + from] : 0.f;
          pairs[turn][0][e >> 2][e & 3] *= d;
          pairs[turn][1][e >> 2][e & 3] = from <= t ? pairs[turn][1][e >> 2][e & 3] * d : 0.f;
        }
      store16(s_m, 16 * i, 16 * j, pairs[turn][0]);
      if (!BY_COLUMN) store16(terms + 2 * TILE, 16 * i, 16 * j, pairs[turn][1]);
    }
  }
  if (BY_COLUMN) {
    const int block = warp >> 1, number = lane >> 1;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int row = 16 * block + 2 * j + (lane & 1), col = 16 * block + (number & ~1) + (warp & 1);
      u8* to = (number & 1 ? terms + 2 * TILE : s_m) + pair_place(row, col);
      const u16 hi = f2h(inside[j]);
      *(u16*)to = hi, *(u16*)(to + PLANE) = f2h(inside[j] - f16f(hi));
    }
  }
  if (BY_COLUMN) load_values();
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNK / WARPS; i++) most = fmaxf(most, largest(values[i]));
  const float2 power = power_for(block_max(most, scratch));  // has barriers
#pragma unroll
  for (int i = 0; i < CHUNK / WARPS; i++) store_four(s_x, row_of(i), times(values[i], power.x));
  // Blocks of the diagonal first, all at once; then those below, one distance after the other.
  if (warp < 4) invert16(s_t, s_m, warp, beta);
  for (int d = 1; d < 4; d++) {
    __syncthreads();
    if (warp < 4 - d) invert_below(s_t, s_m, warp + d, warp);
  }
  __syncthreads();

  // W and T V: a warp has 16 columns of each.
  u8 *w_tile = s_k + (warp >> 2) * TILE, *v_tile = s_x + (warp >> 2) * TILE;
  const int piece = 2 * (warp & 3);
  Split4 b[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    load_bt(b[i], w_tile, 16 * i, piece);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float2 x = join2(b[i].hi[e], b[i].lo[e]), f;
      if (BY_COLUMN) {
        f.x = 1.f;
#pragma unroll
        for (int before = 0; before < i; before++) f.x *= blocks[before * DK + 16 * warp + 8 * (e >> 1) + (lane >> 2)];
        f.y = f.x;
      } else {
        f = *(const float2*)(since + 16 * i + 8 * (e & 1) + 2 * (lane & 3));
      }
      split2(-x.x * f.x, -x.y * f.y, b[i].hi[e], b[i].lo[e]);
    }
  }
  warp_sync();
  auto row_of_t = [&](Sums& c, int i) {  // rows 16 i .. 16 i + 15 of the inverse, times b
    clear(c);
#pragma unroll
    for (int j = 0; j <= i; j++) {
      Split4 a;
      load_a(a, s_t, 16 * i, 2 * j);
      multiply(c, a, b[j]);
    }
  };
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Sums c;
    row_of_t(c, i);
    float x[2][4];
#pragma unroll
    for (int e = 0; e < 8; e++) x[e >> 2][e & 3] = total(c, e >> 2, e & 3);
    // In place, as the operands of these columns are in registers already.
    store16(w_tile, 16 * i, 8 * piece, x);  // only this warp reads these columns
  }
  if (16 * warp < dv) {
    float* to = work.wanted + (item * dv + 16 * warp + 2 * (lane & 3)) * CHUNK + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 4; i++) load_bt(b[i], v_tile, 16 * i, piece);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Sums c;
      row_of_t(c, i);
#pragma unroll
      for (int e = 0; e < 8; e++)
        to[(8 * (e >> 2) + (e & 1)) * CHUNK + 16 * i + 8 * (e >> 1 & 1)] = total(c, e >> 2, e & 3) * power.y;
    }
  }
  __syncthreads();
  copy_out(terms, s_k, 2 * TILE);
}

// grid (slots, heads)
#define DELTA_CHUNKS(NAME, BY_COLUMN)                                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                    \
  NAME(const i64* st, u8* terms, u8* keys, float* wanted, float* factors, int slot0, const float* q, i64 q_row, int q_head,   \
       const float* k, i64 k_row, int k_head, const float* v, i64 v_row, int v_head, const float* decay, const float* beta,   \
       int n_head, int n_head_k, int dk, int dv, int tiled) {                                                                 \
    chunk_terms<BY_COLUMN>(st, {terms, keys, wanted, factors, slot0, 0}, {q, q_row, q_head}, {k, k_row, k_head},             \
                            {v, v_row, v_head}, decay, beta, n_head, n_head_k, dk, dv, tiled);                                \
  }
DELTA_CHUNKS(delta_chunks, false)
DELTA_CHUNKS(delta_chunks_columns, true)
