// Absorbed attention of MLA: a cache row is [64 rope | 512 latent], keys are whole rows, values are the last 512 columns
// of the same tile in shared memory. Rows are (token, head) pairs of one segment, ROWS per block, 256 threads.
//
// Warp w: k-split w & 3 (144 of the 576 columns) and half w >> 2 of the BN positions for Q*K, so that every element of K
// is read from shared memory once; 64 of the 512 output columns for all rows in P*V. Tiles are f16 or bf16, chunks of
// 16 bytes XOR-swizzled so that both kinds of ldmatrix are free of conflicts. KVT: KT_F16 and KT_BF16 go straight into
// the tile (cp.async, ST stages), KT_Q8_0 through ST stages of bytes, KT_ANY through registers, one tile ahead.
// Traffic: 1152 bytes per position and tile of rows (f16), 612 (q8_0); 2176 flops per head and position.
#pragma once
#include "attn_tiles.cuh"

constexpr int KT_ANY = -1;
constexpr int MLA_DK = 576, MLA_DV = 512, MLA_ROPE = 64, MLA_THREADS = 256, MLA_CHUNKS = MLA_DK / 8;
DI int mla_at(int row, int chunk) { return (row * MLA_CHUNKS + ((chunk & ~7) | ((chunk ^ row) & 7))) * 8; }

template <int ROWS, int BN, int ST, int KVT> struct MlaLayout {
  static constexpr bool q_shared = ROWS > 32;  // Q in shared memory instead of registers
  static constexpr int tile = BN * MLA_DK * 2;
  static constexpr int stages = KVT == KT_ANY ? 1 : ST;
  static constexpr int stage = KVT == KT_Q8_0 ? BN * MLA_DK : tile;
  static constexpr int scales = KVT == KT_Q8_0 ? BN * 18 * 2 : 0;
  static constexpr int at_scale = stages * stage;
  static constexpr int at_tile = (at_scale + stages * scales + 127) / 128 * 128;
  static constexpr int at_score = at_tile + (KVT == KT_Q8_0 ? tile : 0);
  static constexpr int score_row = BN + 4, p_row = BN + 8;  // elements
  static constexpr int at_p = at_score + 4 * ROWS * score_row * 4;
  static constexpr int at_alpha = at_p + ROWS * p_row * 2;
  static constexpr int at_q = (at_alpha + ROWS * 4 + 127) / 128 * 128;
  static constexpr int bytes = q_shared ? at_q + ROWS * MLA_DK * 2 : at_alpha + ROWS * 4;
};

// Sixteen int8 with one f16 scale -> f16.
DI void q8_to_f16(u16* tile, int row, int group, const uint4& v, u32 d) {
  const u32 x[4] = {v.x ^ 0x80808080u, v.y ^ 0x80808080u, v.z ^ 0x80808080u, v.w ^ 0x80808080u};
  u32 y[8];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    y[2 * e] = hmul2(hsub2(prmt(x[e], 0x64646464u, 0x4140), 0x64806480u), d);
    y[2 * e + 1] = hmul2(hsub2(prmt(x[e], 0x64646464u, 0x4342), 0x64806480u), d);
  }
  *(uint4*)(tile + mla_at(row, 2 * group)) = make_uint4(y[0], y[1], y[2], y[3]);
  *(uint4*)(tile + mla_at(row, 2 * group + 1)) = make_uint4(y[4], y[5], y[6], y[7]);
}

template <int ROWS, int BN, int ST, int KVT>
DI void mla_body(const i64* st, const float* q_rope, i64 rope_row, int rope_head, const float* q_latent, i64 latent_row,
                 int latent_head, const u8* kv, i64 n_cells, int type, int place, float* out, float* parts, float* stats,
                 int heads, const Split& split, float scale) {
  using L = MlaLayout<ROWS, BN, ST, KVT>;
  constexpr bool BF = KVT == KT_BF16, QS = L::q_shared;
  constexpr int MT = ROWS / 16, NQ = BN / 32, NT = MLA_THREADS;
  SMEM_DECL
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, ks = w & 3, half = w >> 2;
  constexpr View view = {0, 0};
  Tile t;
  if (!find_tile(st, blockIdx.x, ROWS, heads, view, split, t)) return;
  const Range range = part_range(t, view, split, blockIdx.y, heads);
  const int lo = range.lo, hi = range.hi;
  const int n_tiles = (hi - lo + BN - 1) / BN;
  const i64 row_out = t.token0 * heads + t.row0;                      // of the first row of the tile
  const i64 slot = blockIdx.y * st[ST_TOKENS] * heads + row_out;      // of its partial result
  const int n_rows = min(ROWS, t.n_rows - t.row0);
  if (n_tiles <= 0 && split.n_split > 1) {
    if (tid < n_rows) *(float2*)(stats + (slot + tid) * 2) = make_float2(-INFINITY, 0.f);
    return;
  }
  const i64 base = row_base(t, place);
  const KvTensor tensor = kv_tensor(kv, n_cells, MLA_DK / 32, type);

  // Turns of 256 lanes that read a tile; all are fetched ahead where registers allow it.
  constexpr int GROUPS = BN * (MLA_DK / 16), TURNS = (GROUPS + NT - 1) / NT, AHEAD = ROWS == 16 ? TURNS : 2;
  Raw16 raw[KVT == KT_ANY ? AHEAD : 1];
  auto fetch = [&](Raw16& r, int turn, int j) {
    const int i = tid + turn * NT, pos = lo + j * BN + i / (MLA_DK / 16);
    kv_clear(r);
    if (i < GROUPS && j < n_tiles && pos < hi) kv_load_codes(r, tensor, base + pos, i % (MLA_DK / 16));
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
      if (j < n_tiles) {
        u8* to = smem_raw + j % ST * L::stage;
        constexpr int per_row = KVT == KT_Q8_0 ? MLA_DK / 16 : MLA_CHUNKS, bytes = per_row * 16;
        for (int i = tid; i < BN * per_row; i += NT) {
          const int r = i / per_row, c = i % per_row, pos = lo + j * BN + r;
          const bool ok = pos < hi;
          const u8* from = kv + (base + (ok ? pos : lo)) * bytes + c * 16;
          cp16(KVT == KT_Q8_0 ? to + i * 16 : to + 2 * mla_at(r, c), from, ok);
        }
        if constexpr (KVT == KT_Q8_0) {
          u8* to_scale = smem_raw + L::at_scale + j % ST * L::scales;
          for (int i = tid; i < BN * 9; i += NT) {
            const int r = i / 9, c = i % 9, pos = lo + j * BN + r;
            const bool ok = pos < hi;
            cp4(to_scale + i * 4, tensor.scale + (base + (ok ? pos : lo)) * 36 + c * 4, ok);
          }
        }
      }
      cp_commit();
    }
  };

  if constexpr (KVT == KT_ANY) load(0);
  else
    for (int s = 0; s < ST - 1; s++) load(s);

  // Queries: times the scale in f32, then 16 bit; in shared memory (that of the last stage, or of the tile, is still free)
  // and from there into registers, 144 columns per warp.
  u32 qf[QS ? 1 : MT][9][4];
  u16* sq = (u16*)(smem_raw + (QS ? L::at_q : KVT == KT_Q8_0 ? L::at_tile : (L::stages - 1) * L::stage));
  load_queries<BF, ROWS, MLA_DK, NT / 32>(
      t, heads, 0, scale,
      [&](i64 token, int head, int c) {
        return c < MLA_ROPE ? q_rope + token * rope_row + (i64)head * rope_head + c
                            : q_latent + token * latent_row + (i64)head * latent_head + (c - MLA_ROPE);
      },
      [&](int r, int c, uint2 x) { *(uint2*)(sq + mla_at(r, c / 8) + c % 8) = x; });
  __syncthreads();
  if constexpr (!QS) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int k = 0; k < 9; k++) ldsm4(qf[m][k], sq + mla_at(m * 16 + (lane & 15), ks * 18 + k * 2 + (lane >> 4)));
  }

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

  for (int j = 0; j < n_tiles; j++) {
    if constexpr (KVT != KT_ANY) cp_wait<ST - 2>();
    __syncthreads();  // stage j is there; everyone has left tile j-1
    const u16* kt;
    if constexpr (KVT == KT_ANY) {
#pragma unroll
      for (int n = 0; n < AHEAD; n++) unpack(raw[n], n);
#pragma unroll 1
      for (int n = AHEAD; n < TURNS; n++) {
        Raw16 r;
        fetch(r, n, j);
        unpack(r, n);
      }
      load(j + 1);
      __syncthreads();
      kt = (const u16*)smem_raw;
    } else {
      load(j + ST - 1);
      const u8* stage = smem_raw + j % ST * L::stage;
      kt = (const u16*)stage;
      if constexpr (KVT == KT_Q8_0) {
        u16* tile = (u16*)(smem_raw + L::at_tile);
        const u16* ds = (const u16*)(smem_raw + L::at_scale + j % ST * L::scales);
        for (int i = tid; i < GROUPS; i += NT) {
          const int r = i / (MLA_DK / 16), g = i % (MLA_DK / 16);
          q8_to_f16(tile, r, g, *(const uint4*)(stage + i * 16), prmt(ds[r * 18 + g / 2], 0, 0x1010));
        }
        __syncthreads();
        kt = tile;
      }
    }

    float s[MT][NQ * 2][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NQ * 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[m][n][e] = 0.f;
#pragma unroll
    for (int k = 0; k < 9; k++)
#pragma unroll
      for (int n = 0; n < NQ; n++) {
        u32 b[4];
        const int row = half * (BN / 2) + n * 16 + (lane & 7) + ((lane >> 4) << 3);
        ldsm4(b, kt + mla_at(row, ks * 18 + k * 2 + ((lane >> 3) & 1)));
#pragma unroll
        for (int m = 0; m < MT; m++) {
          u32 a[4];
          if constexpr (QS) {
            ldsm4(a, sq + mla_at(m * 16 + (lane & 15), ks * 18 + k * 2 + (lane >> 4)));
          } else {
#pragma unroll
            for (int e = 0; e < 4; e++) a[e] = qf[m][k][e];
          }
          mma16816<BF>(s[m][2 * n], a, b[0], b[1]);
          mma16816<BF>(s[m][2 * n + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NQ * 2; n++) {
        float* p = ss + (ks * ROWS + m * 16 + lane / 4) * L::score_row + half * (BN / 2) + n * 8 + (lane & 3) * 2;
        *(float2*)p = make_float2(s[m][n][0], s[m][n][1]);
        *(float2*)(p + 8 * L::score_row) = make_float2(s[m][n][2], s[m][n][3]);
      }
    __syncthreads();

    {  // running soft-max in base 2; positions that a row may not see are -inf by index
      float v[CPT], peak = top;
      const int pos = lo + j * BN + scol;
#pragma unroll
      for (int c = 0; c < CPT; c++) {
        float x = 0.f;
#pragma unroll
        for (int k = 0; k < 4; k++) x += ss[(k * ROWS + srow) * L::score_row + scol + c];
        v[c] = pos + c > last ? -INFINITY : x;
        peak = fmaxf(peak, v[c]);
      }
#pragma unroll
      for (int d = TPR / 2; d; d >>= 1) peak = fmaxf(peak, shx(peak, d));
      const float used = peak == -INFINITY ? 0.f : peak, alpha = ex2(top - used);
#pragma unroll
      for (int c = 0; c < CPT; c++) v[c] = ex2(v[c] - used);
#pragma unroll
      for (int c = 0; c < CPT; c += 2) *(u32*)(sp + srow * L::p_row + scol + c) = pack2<BF>(v[c], v[c + 1]);
      // Neighbours first, whatever the number of threads per row: the same bits for any number of rows.
#pragma unroll
      for (int d = 1; d < CPT; d *= 2)
#pragma unroll
        for (int c = 0; c < CPT; c += 2 * d) v[c] += v[c + d];
#pragma unroll
      for (int d = 1; d < TPR; d *= 2) v[0] += shx(v[0], d);
      sum = sum * alpha + v[0], top = peak;
      if (tid % TPR == 0) sa[srow] = alpha;
    }
    __syncthreads();

#pragma unroll
    for (int m = 0; m < MT; m++) {
      const float a0 = sa[m * 16 + lane / 4], a1 = sa[m * 16 + 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < 8; n++) o[m][n][0] *= a0, o[m][n][1] *= a0, o[m][n][2] *= a1, o[m][n][3] *= a1;
    }
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
      u32 p[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) ldsm4(p[m], sp + (m * 16 + (lane & 15)) * L::p_row + k * 16 + (lane >> 4) * 8);
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

  // One part: the result. Several: un-normalised sums with (maximum, denominator), for attn_combine.
  if (split.n_split == 1) {
    __syncthreads();
    if (tid % TPR == 0) sa[srow] = row_factor(top, sum, nullptr, 0);
    __syncthreads();
  } else if (tid % TPR == 0 && srow < n_rows) {
    *(float2*)(stats + (slot + srow) * 2) = make_float2(top, sum);
  }
  float* to = split.n_split == 1 ? out + row_out * MLA_DV : parts + slot * MLA_DV;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int r = m * 16 + lane / 4;
    const float a0 = split.n_split == 1 ? sa[r] : 1.f, a1 = split.n_split == 1 ? sa[r + 8] : 1.f;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int c = w * 64 + n * 8 + (lane & 3) * 2;
      if (r < n_rows) *(float2*)(to + (i64)r * MLA_DV + c) = make_float2(o[m][n][0] * a0, o[m][n][1] * a0);
      if (r + 8 < n_rows) *(float2*)(to + (i64)(r + 8) * MLA_DV + c) = make_float2(o[m][n][2] * a1, o[m][n][3] * a1);
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
