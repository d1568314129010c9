// Absorbed attention of MLA: a cache row is [64 rope | 512 latent], keys are whole rows, values are the last 512 columns
// of the same tile in shared memory. Rows are (token, head) pairs of one segment, ROWS per block, 256 threads.
//
// Warp w: k-split w & 3 (144 of the 576 columns) and half w >> 2 of the BN positions for Q*K, so that an element of K is
// read from shared memory once; 64 of the 512 output columns for all rows in P*V. Every number of rows adds in the same
// order. More rows per block do not pay: they would share registers with their queries, and queries and partial results
// are read and written per block, which for 64 rows takes as long as seven tiles. KVT: KT_F16 and KT_BF16 go straight into
// tiles (cp.async, ST stages, chunks of 16 bytes XOR-swizzled so that both kinds of ldmatrix are free of bank conflicts),
// KT_Q8_0 as bytes that become f16 in registers, KT_ANY through registers, one tile ahead.
// With three stages, P*V of a tile runs beside Q*K of the next one: two block barriers per tile.
// Traffic: 1152 bytes per position and tile of rows (f16), 612 (q8_0); 2176 flops per head and position.
#pragma once
#include "attn_tiles.cuh"

constexpr int KT_ANY = -1;
constexpr int MLA_DK = 576, MLA_DV = 512, MLA_ROPE = 64, MLA_THREADS = 256, MLA_CHUNKS = MLA_DK / 8;
DI int mla_at(int row, int chunk) { return (row * MLA_CHUNKS + ((chunk & ~7) | ((chunk ^ row) & 7))) * 8; }
// Byte of chunk 0..35 of a row of q8_0 codes.
DI int mla_code(int row, int chunk) { return row * MLA_DK + (chunk ^ ((row >> 1) & 3)) * 16; }
// Element of a score: groups of four swizzled so that stores of accumulators and reads of rows are free of conflicts.
DI int mla_score(int row, int pos, int bn) { return row * bn + ((pos >> 2 ^ ((row & 3) << 1 | (row & 1))) << 2 | (pos & 3)); }

template <int ROWS, int BN, int ST, int KVT> struct MlaLayout {
  static constexpr int stages = KVT == KT_ANY ? 1 : ST;
  static constexpr int codes = KVT == KT_Q8_0 ? BN * MLA_DK : BN * MLA_DK * 2;
  static constexpr int stage = codes + (KVT == KT_Q8_0 ? BN * 36 : 0);  // q8_0: scales behind the codes
  static constexpr int at_score = stages * stage;
  static constexpr int p_row = BN + 8;  // elements
  static constexpr int at_p = at_score + 4 * ROWS * BN * 4;
  static constexpr int at_alpha = at_p + ROWS * p_row * 2;
  static constexpr int at_result = at_alpha + ROWS * 4, bytes = at_result + 16;
  static constexpr int at_q = KVT == KT_ANY ? 0 : (ST - 1) * stage;  // behind the tiles that are fetched before
  static_assert(at_q + ROWS * MLA_DK * 2 <= at_result, "room for queries");
};

// Four int8 (with their top bits flipped) times f16 scales -> two pairs of f16, bytes chosen by `low` and `high`.
DI void q8_pairs(u32& a, u32& b, u32 x, u32 low, u32 high, u32 d) {
  a = hmul2(hsub2(prmt(x, 0x64646464u, low), 0x64806480u), d);
  b = hmul2(hsub2(prmt(x, 0x64646464u, high), 0x64806480u), d);
}

// SPARSE: the positions of a token are the entries of its row of `chosen`, cells of the cache, and a tile has rows of one
// token. Lists are divided into equal parts of `most` entries, whatever their lengths.
template <int ROWS, int BN, int ST, int KVT, bool SPARSE = false>
DI void mla_body(const i64* st, const float* q_rope, i64 rope_row, int rope_head, const float* q_latent, i64 latent_row,
                 int latent_head, const u8* kv, i64 n_cells, int type, int place, float* out, float* parts, float* stats,
                 int heads, const Split& split, float scale, const int* chosen = nullptr, int most = 0) {
  using L = MlaLayout<ROWS, BN, ST, KVT>;
  constexpr bool BF = KVT == KT_BF16, Q8 = KVT == KT_Q8_0, PIPE = L::stages >= 3;
  constexpr int MT = ROWS / 16, NT = MLA_THREADS;
  static_assert(BN == 32, "eight threads per row of a tile, 16 positions per warp");
  SMEM_DECL
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, ks = w & 3, p0 = (w >> 2) * (BN / 2);
  constexpr View view = {0, 0};
  Tile t;
  if (SPARSE ? !token_tile(st, blockIdx.x, ROWS, heads, most, t) : !find_tile(st, blockIdx.x, ROWS, heads, view, split, t))
    return;
  const Range range = SPARSE ? list_range(t, split, blockIdx.y, most) : part_range(t, view, split, blockIdx.y, heads);
  const int lo = range.lo, hi = range.hi;
  const int n_tiles = (hi - lo + BN - 1) / BN;
  // First row of the result, or of the partial one, and how many rows there are: not in registers during the loop.
  i64* result = (i64*)(smem_raw + L::at_result);
  {
    const i64 row = t.token0 * heads + t.row0, slot = split.n_split == 1 ? row : blockIdx.y * st[ST_TOKENS] * heads + row;
    const int n_rows = min(ROWS, t.n_rows - t.row0);
    if (n_tiles <= 0 && split.n_split > 1) {
      if (tid < n_rows) *(float2*)(stats + (slot + tid) * 2) = make_float2(-INFINITY, 0.f);
      return;
    }
    if (tid == 0) result[0] = slot, result[1] = n_rows;
  }
  const i64 base = SPARSE ? 0 : row_base(st, t, place);
  const int* const list = SPARSE ? chosen + t.token0 * most : nullptr;
  // The cell of this lane's row of the next tile, read a tile ahead.
  int cell = SPARSE && KVT != KT_ANY && n_tiles > 0 ? list[min(lo + (tid >> 3), hi - 1)] : 0;
  const KvTensor tensor = kv_tensor(kv, n_cells, MLA_DK / 32, type);

  // Turns of 256 lanes that read a tile; all are fetched ahead where registers allow it.
  constexpr int GROUPS = BN * (MLA_DK / 16), TURNS = (GROUPS + NT - 1) / NT, AHEAD = ROWS == 16 ? TURNS : 2;
  Raw16 raw[KVT == KT_ANY ? AHEAD : 1];
  auto fetch = [&](Raw16& r, int turn, int j) {
    const int i = tid + turn * NT, pos = lo + j * BN + i / (MLA_DK / 16);
    kv_clear(r);
    if (i < GROUPS && j < n_tiles && pos < hi)
      kv_load_codes(r, tensor, SPARSE ? (i64)list[pos] : base + pos, i % (MLA_DK / 16));
  };
  auto unpack = [&](const Raw16& r, int turn) {
    const int i = tid + turn * NT, row = i / (MLA_DK / 16), g = i % (MLA_DK / 16);
    if (i >= GROUPS) return;
    u16* tile = (u16*)smem_raw;
    u32 y[8];
    kv_codes_f16(y, r, type, g & 1);
    *(uint4*)(tile + mla_at(row, 2 * g)) = make_uint4(y[0], y[1], y[2], y[3]);
    *(uint4*)(tile + mla_at(row, 2 * g + 1)) = make_uint4(y[4], y[5], y[6], y[7]);
  };
  auto load = [&](int j) {  // global memory -> stage j % ST, or registers
    if constexpr (KVT == KT_ANY) {
#pragma unroll
      for (int n = 0; n < AHEAD; n++) fetch(raw[n], n, j);
    } else {
      if (j < n_tiles) {  // eight threads per position: steps of 128 bytes
        const int r = tid >> 3, c = tid & 7, pos = lo + j * BN + r;
        const bool ok = pos < hi;
        const i64 at = SPARSE ? (i64)cell : base + (ok ? pos : lo);
        if constexpr (SPARSE) cell = list[min(pos + BN, hi - 1)];
        u8* stage = smem_raw + j % ST * L::stage;
        if constexpr (Q8) {
          u8* to = stage + mla_code(r, c);
          const u8* from = kv + at * MLA_DK + c * 16;
#pragma unroll
          for (int n = 0; n < 4; n++) cp16(to + n * 128, from + n * 128, ok);
          if (c < 4) cp16(to + 512, from + 512, ok);
          cp4(stage + L::codes + r * 36 + c * 4, tensor.scale + at * 36 + c * 4, ok);
          if (c == 0) cp4(stage + L::codes + r * 36 + 32, tensor.scale + at * 36 + 32, ok);
        } else {
          u8* to = stage + 2 * mla_at(r, c);
          const u8* from = kv + at * (MLA_DK * 2) + c * 16;
#pragma unroll
          for (int n = 0; n < 9; n++) cp16(to + n * 128, from + n * 128, ok);
        }
      }
      cp_commit();
    }
  };

  // Queries: times the scale in f32, then 16 bit; in shared memory that is still free and from there into registers, 144
  // columns per warp. Only the first tile is on its way beside them: copies wait for each other at issue. For q8_0 in the order in which codes come from ldmatrix: 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15.
  u32 qf[MT][9][4];
  u16* sq = (u16*)(smem_raw + L::at_q);
  load_queries<BF, ROWS, MLA_DK, NT / 32>(
      t, heads, 0, scale,
      [&](i64 token, int head, int c) {
        return c < MLA_ROPE ? q_rope + token * rope_row + (i64)head * rope_head + c
                            : q_latent + token * latent_row + (i64)head * latent_head + (c - MLA_ROPE);
      },
      [&](int r, int c, uint2 x) {
        if constexpr (Q8) {
          *(u32*)(sq + mla_at(r, c / 16 * 2) + c % 16 / 2) = x.x;
          *(u32*)(sq + mla_at(r, c / 16 * 2 + 1) + c % 16 / 2) = x.y;
        } else {
          *(uint2*)(sq + mla_at(r, c / 8) + c % 8) = x;
        }
      },
      [&] { load(0); });
  if constexpr (KVT != KT_ANY)
    for (int s = 1; s < ST - 1; s++) load(s);
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int k = 0; k < 9; k++) ldsm4(qf[m][k], sq + mla_at(m * 16 + (lane & 15), ks * 18 + k * 2 + (lane >> 4)));

  float o[MT][8][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[m][n][e] = 0.f;
  constexpr int TPR = NT / ROWS, CPT = BN / TPR;  // soft-max: threads per row, columns per thread
  const int srow = tid / TPR, scol = tid % TPR * CPT;
  const int last = row_pos(t, t.row0 + srow, heads);
  float top = -INFINITY, sum = 0.f;
  float* ss = (float*)(smem_raw + L::at_score);
  u16* sp = (u16*)(smem_raw + L::at_p);
  float* sa = (float*)(smem_raw + L::at_alpha);

  auto add_scores = [&](const u8* stage) {  // partial Q*K of a tile -> ss
    float s[MT][2][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[m][0][e] = s[m][1][e] = 0.f;
    if constexpr (Q8) {
      const u16* ds = (const u16*)(stage + L::codes) + (p0 + lane / 4) * 18;
#pragma unroll
      for (int k = 0; k < 9; k += 2) {
        u32 x[4];  // positions 0 .. 7, 8 .. 15 of two steps
        const u8* from = stage + mla_code(p0 + (lane & 15), ks * 9 + min(k + (lane >> 4), 8));
        ldsm4(x, from);
#pragma unroll
        for (int i = 0; i < (k < 8 ? 2 : 1); i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            u32 b0, b1;
            const u32 d = prmt(ds[h * 8 * 18 + (ks * 9 + k + i) / 2], 0, 0x1010);
            q8_pairs(b0, b1, x[2 * i + h] ^ 0x80808080u, 0x4140, 0x4342, d);
#pragma unroll
            for (int m = 0; m < MT; m++) mma16816<false>(s[m][h], qf[m][k + i], b0, b1);
          }
      }
    } else {
      const u16* kt = (const u16*)stage;
#pragma unroll
      for (int k = 0; k < 9; k++) {
        u32 b[4];
        ldsm4(b, kt + mla_at(p0 + (lane & 7) + ((lane >> 4) << 3), ks * 18 + k * 2 + ((lane >> 3) & 1)));
#pragma unroll
        for (int m = 0; m < MT; m++) {
          mma16816<BF>(s[m][0], qf[m][k], b[0], b[1]);
          mma16816<BF>(s[m][1], qf[m][k], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = m * 16 + lane / 4, c = p0 + h * 8 + (lane & 3) * 2;
        float* to = ss + ks * ROWS * BN;
        *(float2*)(to + mla_score(r, c, BN)) = make_float2(s[m][h][0], s[m][h][1]);
        *(float2*)(to + mla_score(r + 8, c, BN)) = make_float2(s[m][h][2], s[m][h][3]);
      }
  };
  auto soft_max = [&](int j) {  // running soft-max in base 2; positions that a row may not see are -inf by index
    float v[CPT], peak = top;
    const int pos = lo + j * BN + scol;
#pragma unroll
    for (int c = 0; c < CPT; c++) v[c] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int c = 0; c < CPT; c += CPT < 4 ? 2 : 4) {
        const float* from = ss + k * ROWS * BN + mla_score(srow, scol + c, BN);
        if constexpr (CPT < 4) {
          const float2 x = *(const float2*)from;
          v[c] += x.x, v[c + 1] += x.y;
        } else {
          const float4 x = *(const float4*)from;
          v[c] += x.x, v[c + 1] += x.y, v[c + 2] += x.z, v[c + 3] += x.w;
        }
      }
#pragma unroll
    for (int c = 0; c < CPT; c++) {
      if (pos + c > last) v[c] = -INFINITY;
      peak = fmaxf(peak, v[c]);
    }
#pragma unroll
    for (int d = TPR / 2; d; d >>= 1) peak = fmaxf(peak, shx(peak, d));
    const float used = peak == -INFINITY ? 0.f : peak, alpha = ex2(top - used);
#pragma unroll
    for (int c = 0; c < CPT; c++) v[c] = ex2(v[c] - used);
#pragma unroll
    for (int c = 0; c < CPT; c += 2) *(u32*)(sp + srow * L::p_row + scol + c) = pack2<BF>(v[c], v[c + 1]);
    if (tid % TPR == 0) sa[srow] = alpha;
    // Neighbours first, whatever the number of threads per row: the same bits for any number of rows.
#pragma unroll
    for (int d = 1; d < CPT; d *= 2)
#pragma unroll
      for (int c = 0; c < CPT; c += 2 * d) v[c] += v[c + d];
#pragma unroll
    for (int d = 1; d < TPR; d *= 2) v[0] += shx(v[0], d);
    sum = sum * alpha + v[0], top = peak;
  };
  auto add_values = [&](const u8* stage) {  // o = o * alpha + P*V
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const float a0 = sa[m * 16 + lane / 4], a1 = sa[m * 16 + 8 + lane / 4];
      if (!ballot(a0 != 1.f || a1 != 1.f)) continue;
#pragma unroll
      for (int n = 0; n < 8; n++) o[m][n][0] *= a0, o[m][n][1] *= a0, o[m][n][2] *= a1, o[m][n][3] *= a1;
    }
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
      u32 p[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) ldsm4(p[m], sp + (m * 16 + (lane & 15)) * L::p_row + k * 16 + (lane >> 4) * 8);
      if constexpr (Q8) {
        // Scales of this warp's two blocks: of positions 2(lane&3), 2(lane&3)+1, and of those 8 further on.
        u32 d[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u8* ds = stage + L::codes + (k * 16 + h * 8 + (lane & 3) * 2) * 36 + 4 + 4 * w;
          const u32 x = *(const u32*)ds, y = *(const u32*)(ds + 36);
          d[0][h] = prmt(x, y, 0x5410), d[1][h] = prmt(x, y, 0x7632);
        }
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          u32 x[4];  // pairs of columns of pairs of positions: 16 columns each, positions 0 .. 7, 8 .. 15
          ldsm4t(x, stage + mla_code(k * 16 + (lane & 15), MLA_ROPE / 16 + w * 4 + n + (lane >> 4)));
#pragma unroll
          for (int i = 0; i < 2; i++) {
            u32 even[2], odd[2];
#pragma unroll
            for (int h = 0; h < 2; h++) q8_pairs(even[h], odd[h], x[2 * i + h] ^ 0x80808080u, 0x4240, 0x4341, d[n / 2][h]);
#pragma unroll
            for (int m = 0; m < MT; m++) {
              mma16816<false>(o[m][2 * (n + i)], p[m], even[0], even[1]);
              mma16816<false>(o[m][2 * (n + i) + 1], p[m], odd[0], odd[1]);
            }
          }
        }
      } else {
        const u16* kt = (const u16*)stage;
#pragma unroll
        for (int n = 0; n < 4; n++) {
          u32 b[4];
          const int row = k * 16 + (lane & 7) + (((lane >> 3) & 1) << 3);
          ldsm4t(b, kt + mla_at(row, MLA_ROPE / 8 + w * 8 + n * 2 + (lane >> 4)));
#pragma unroll
          for (int m = 0; m < MT; m++) {
            mma16816<BF>(o[m][2 * n], p[m], b[0], b[1]);
            mma16816<BF>(o[m][2 * n + 1], p[m], b[2], b[3]);
          }
        }
      }
    }
  };

  for (int j = 0; j < n_tiles; j++) {
    const u8* stage = smem_raw + (KVT == KT_ANY ? 0 : j % ST * L::stage);
    if constexpr (KVT != KT_ANY) cp_wait<ST - 2>();
    __syncthreads();  // stage j and P of tile j-1 have arrived; without PIPE no thread reads tile j-1 any more
    if constexpr (KVT == KT_ANY) {
#pragma unroll
      for (int n = 0; n < AHEAD; n++) unpack(raw[n], n);
#pragma unroll 1
      for (int n = AHEAD; n < TURNS; n++) {
        Raw16 r;
        fetch(r, n, j);
        unpack(r, n);
      }
      __syncthreads();
    }
    if constexpr (!PIPE) load(j + L::stages - (KVT != KT_ANY ? 1 : 0));
    add_scores(stage);
    if constexpr (PIPE) {
      if (j) add_values(smem_raw + (j - 1) % ST * L::stage);
    }
    __syncthreads();  // scores have arrived; with PIPE no thread reads tile j-1 any more
    if constexpr (PIPE) load(j + ST - 1);
    soft_max(j);
    if constexpr (!PIPE) {
      __syncthreads();
      add_values(stage);
    }
  }
  if constexpr (PIPE) {
    __syncthreads();
    if (n_tiles > 0) add_values(smem_raw + (n_tiles - 1) % ST * L::stage);
  }

  // One part: the result. Several: un-normalised sums with (maximum, denominator), for attn_combine.
  const i64 slot = result[0];
  const int n_rows = (int)result[1];
  if (split.n_split == 1) {
    __syncthreads();
    if (tid % TPR == 0) sa[srow] = row_factor(top, sum, nullptr, 0);
    __syncthreads();
  } else if (tid % TPR == 0 && srow < n_rows) {
    *(float2*)(stats + (slot + srow) * 2) = make_float2(top, sum);
  }
  float* to = (split.n_split == 1 ? out : parts) + slot * MLA_DV;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = m * 16 + h * 8 + lane / 4;
      if (r >= n_rows) continue;
      const float a = split.n_split == 1 ? sa[r] : 1.f;
      float* p = to + (i64)r * MLA_DV + w * 64;
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const float x0 = o[m][n][2 * h] * a, x1 = o[m][n][2 * h + 1] * a;
        const float y0 = o[m][n + 1][2 * h] * a, y1 = o[m][n + 1][2 * h + 1] * a;
        if constexpr (Q8) {  // even columns, odd columns
          *(float4*)(p + n * 8 + (lane & 3) * 4) = make_float4(x0, y0, x1, y1);
        } else {
          *(float2*)(p + n * 8 + (lane & 3) * 2) = make_float2(x0, x1);
          *(float2*)(p + n * 8 + 8 + (lane & 3) * 2) = make_float2(y0, y1);
        }
      }
    }
}
// BLOCKS: how many an SM holds at a time.
#define ATTN_MLA(NAME, ROWS, BN, ST, KVT, BLOCKS)                                                                      \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                            \
  NAME(const i64* st, const float* q_rope, i64 rope_row, int rope_head, const float* q_latent, i64 latent_row,         \
       int latent_head, const u8* kv, i64 n_cells, int type, int place, float* out, float* parts, float* stats,        \
       int heads, int n_split, int fixed, float scale) {                                                               \
    mla_body<ROWS, BN, ST, KVT>(st, q_rope, rope_row, rope_head, q_latent, latent_row, latent_head, kv, n_cells, type, \
                                place, out, parts, stats, heads, {n_split, fixed, BN}, scale);                         \
  }
#define ATTN_MLA_SPARSE(NAME, ROWS, BN, ST, KVT)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                                 \
  NAME(const i64* st, const float* q_rope, i64 rope_row, int rope_head, const float* q_latent, i64 latent_row,         \
       int latent_head, const u8* kv, i64 n_cells, int type, float* out, float* parts, float* stats, int heads,        \
       int n_split, float scale, const int* chosen, int most) {                                                        \
    mla_body<ROWS, BN, ST, KVT, true>(st, q_rope, rope_row, rope_head, q_latent, latent_row, latent_head, kv, n_cells, \
                                      type, 0, out, parts, stats, heads, {n_split, 0, BN}, scale, chosen, most);       \
  }
