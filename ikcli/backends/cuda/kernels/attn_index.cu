// The indexer of sparse attention: scores of cached positions, and the choice of the largest for every token.
//
// index_scores: the score of a position is the sum over heads of weight * max(q . k, 0). A block has 256 positions, 32 per
// warp, whose keys stay in registers while it goes through up to 16 tokens. Queries are sums of two f16 (22 bits), so that
// the choice is that of f32 products up to rounding; keys are f16, as exact as their cache. A token's scores do not depend
// on what is beside it.
// index_choose: a block per token. Three counts of digits (11, 11, 10 bits) of the scores as ordered integers find the
// smallest chosen one; of equal scores the earlier position is chosen. The result does not depend on the order of threads.
//
// index_block_scores, index_choose_blocks: scores of positions for every head by itself, and for every head the blocks of
// positions with the largest score in them.
#include "attn_tiles.cuh"

constexpr int INDEX_WIDTH = 128, INDEX_ROW = INDEX_WIDTH + 8, INDEX_TILE = 256, INDEX_HEADS = 64, INDEX_TOKENS = 16;

// Scores of tokens first.. of the micro-batch, a row of `score_row` per token; blockIdx: positions, tokens. Tokens that see
// at most `most` positions have none. Without `weights` each is 1. `ratio`: entries of so many positions are scored, whose keys are in their last cells.
extern "C" __global__ void __launch_bounds__(256, 2)
index_scores(const i64* st, const float* q, i64 q_row, int q_head, const float* weights, const u8* k, i64 n_cells, int type,
             int width, float* scores, i64 score_row, int heads, int most, int first, int ratio) {
  SMEM_DECL
  u16* shared = (u16*)smem_raw;
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, begin = blockIdx.x * INDEX_TILE;
  const i64 start = first + (i64)blockIdx.y * INDEX_TOKENS, stop = min(start + INDEX_TOKENS, st[ST_TOKENS]);
  if (start >= stop) return;
  const KvTensor tensor = kv_tensor(k, n_cells, kv_is_float(type) ? width : width / 32, type);
  const i64 *segment = segment_of(st, start), *loaded = nullptr;
  u32 b[8][2][4];  // keys of 16 columns and 2 x 8 positions
  for (i64 token = start; token < stop; token++) {
    while (token >= segment[SEG_START] + segment[SEG_TOKENS]) segment += SEG_WORDS;
    const int n = ((int)(segment[SEG_POS] + token - segment[SEG_START]) + 1) / ratio;
    if (n <= most || begin >= n) continue;
    if (loaded != segment) {
      loaded = segment;
      __syncthreads();  // no thread reads queries any more
      u16* own = shared + w * 16 * INDEX_ROW;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int pos = begin + w * 32 + h * 16;
        for (int i = lane; i < width; i += 32) {  // 16 positions, groups of 16 columns
          const int row = i & 15, g = i >> 4;
          Raw16 r;
          kv_clear(r);
          u32 y[8];
          if (pos + row < (int)segment[SEG_KV] / ratio) {
            kv_load(r, tensor, segment[SEG_CELL] + (i64)(pos + row + 1) * ratio - 1, g);
            kv_f16(y, r, type, g & 1);
          } else {
#pragma unroll
            for (int e = 0; e < 8; e++) y[e] = 0;
          }
          *(uint4*)(own + row * INDEX_ROW + g * 16) = make_uint4(y[0], y[1], y[2], y[3]);
          *(uint4*)(own + row * INDEX_ROW + g * 16 + 8) = make_uint4(y[4], y[5], y[6], y[7]);
        }
        warp_sync();
#pragma unroll
        for (int c = 0; c < 8; c++)
          if (c * 16 < width)
            ldsm4(b[c][h], own + ((lane & 7) + ((lane >> 4) << 3)) * INDEX_ROW + c * 16 + ((lane >> 3) & 1) * 8);
        warp_sync();
      }
    }
    float sum[4][2];
#pragma unroll
    for (int p = 0; p < 4; p++) sum[p][0] = sum[p][1] = 0.f;
    for (int h0 = 0; h0 < heads; h0 += INDEX_HEADS) {
      const int n_heads = min(heads - h0, INDEX_HEADS), n_rows = (n_heads + 15) / 16 * 16;
      u16 *high = shared, *low = shared + INDEX_HEADS * INDEX_ROW;
      __syncthreads();  // no thread reads the queries before, or stages keys, any more
      for (int i = tid; i < n_rows * (width / 4); i += 256) {
        const int h = i / (width / 4), c = i % (width / 4) * 4;
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (h < n_heads) x = *(const float4*)(q + token * q_row + (i64)(h0 + h) * q_head + c);
        const uint2 a = make_uint2(pack2<false>(x.x, x.y), pack2<false>(x.z, x.w));
        const float2 a0 = unpack_f16(a.x), a1 = unpack_f16(a.y);
        *(uint2*)(high + h * INDEX_ROW + c) = a;
        *(uint2*)(low + h * INDEX_ROW + c) =
            make_uint2(pack2<false>(x.x - a0.x, x.y - a0.y), pack2<false>(x.z - a1.x, x.w - a1.y));
      }
      __syncthreads();
      for (int m = 0; m < n_rows; m += 16) {
        float s[4][4];
#pragma unroll
        for (int p = 0; p < 4; p++) s[p][0] = s[p][1] = s[p][2] = s[p][3] = 0.f;
#pragma unroll
        for (int c = 0; c < 8; c++) {
          if (c * 16 >= width) break;
          u32 a[4], rest[4];
          const int at = (m + (lane & 15)) * INDEX_ROW + c * 16 + (lane >> 4) * 8;
          ldsm4(a, high + at);
          ldsm4(rest, low + at);
#pragma unroll
          for (int p = 0; p < 4; p++) {
            mma16816<false>(s[p], a, b[c][p >> 1][(p & 1) * 2], b[c][p >> 1][(p & 1) * 2 + 1]);
            mma16816<false>(s[p], rest, b[c][p >> 1][(p & 1) * 2], b[c][p >> 1][(p & 1) * 2 + 1]);
          }
        }
        const int head = h0 + m + lane / 4;
        const float w0 = head < heads ? weights ? weights[token * heads + head] : 1.f : 0.f;
        const float w1 = head + 8 < heads ? weights ? weights[token * heads + head + 8] : 1.f : 0.f;
#pragma unroll
        for (int p = 0; p < 4; p++)
#pragma unroll
          for (int e = 0; e < 2; e++) {  // a NaN stays one
            const float x = s[p][e] < 0.f ? 0.f : s[p][e], y = s[p][2 + e] < 0.f ? 0.f : s[p][2 + e];
            sum[p][e] = fmaf(w1, y, fmaf(w0, x, sum[p][e]));
          }
      }
    }
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum[p][e] += shx(sum[p][e], d);
        const int pos = begin + w * 32 + p * 8 + lane * 2 + e;
        if (lane < 4 && pos < n) scores[(token - first) * score_row + pos] = sum[p][e];
      }
  }
}

// An integer that is larger for larger scores; every NaN is the largest, so that it becomes visible.
DI u32 ordered(float score) {
  const u32 x = __float_as_uint(score + 0.f);  // -0 is 0
  if ((x & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return x >> 31 ? ~x : x | 0x80000000u;
}
// Sum of the values of the threads before this one, of up to 1024; `total`: of all. `scratch`: 32 numbers of shared memory
// that nobody else uses between the two barriers.
DI int block_before(int v, int& total, int* scratch) {
  const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, n = blockDim.x >> 5;
  int end = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = (int)shup_u32((u32)end, d);
    if (lane >= d) end += before;
  }
  if (lane == 31) scratch[w] = end;
  __syncthreads();
  const int x = lane < n ? scratch[lane] : 0, before = warp_sum_i32(lane < w ? x : 0);
  total = warp_sum_i32(x);
  __syncthreads();
  return before + end - v;
}

// Chosen cells of tokens first.. in ascending order, then -1; `scores` as index_scores leaves them. With `ratio` above 1,
// numbers of entries behind the first cell of the sequence.
extern "C" __global__ void __launch_bounds__(1024, 1)
index_choose(const i64* st, const float* scores, i64 score_row, int* chosen, int most, int first, int ratio) {
  constexpr int BUCKETS = 2048;
  IK_SHARED(int, counts, BUCKETS)
  IK_SHARED(int, scratch, 32)
  IK_SHARED(int, found, 2)
  const int tid = threadIdx.x;
  const i64 token = first + (i64)blockIdx.x;
  if (token >= st[ST_TOKENS]) return;
  const i64* segment = segment_of(st, token);
  const int n = ((int)(segment[SEG_POS] + token - segment[SEG_START]) + 1) / ratio, cell = (int)segment[SEG_CELL];
  int* to = chosen + token * most;
  if (n <= most) {
    for (int i = tid; i < most; i += 1024) to[i] = i < n ? cell + i : -1;
    return;
  }
  const float* from = scores + (i64)blockIdx.x * score_row;
  u32 least = 0;    // the digits found so far
  int left = most;  // how many scores with exactly them are chosen
#pragma unroll 1
  for (int digit = 0; digit < 3; digit++) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
    counts[tid] = counts[tid + 1024] = 0;
    __syncthreads();
    for (int i = tid; i < n; i += 1024) {
      const u32 x = ordered(from[i]) >> shift;
      if (x >> bits == least) atomicAdd(counts + (x & ((1u << bits) - 1)), 1);
    }
    __syncthreads();
    const int bucket = BUCKETS - 1 - 2 * tid, here = counts[bucket], next = counts[bucket - 1];  // from the largest on
    int total;
    const int before = block_before(here + next, total, scratch);
    if (before < left && left <= before + here + next) {
      const bool first_one = left <= before + here;
      found[0] = first_one ? bucket : bucket - 1;
      found[1] = left - before - (first_one ? 0 : here);
    }
    __syncthreads();
    least = least << bits | (u32)found[0], left = found[1];
    __syncthreads();
  }
  int n_more = 0, n_equal = 0;  // before this turn
#pragma unroll 1
  for (int turn = 0; turn < n; turn += 1024) {
    const int i = turn + tid;
    const u32 x = i < n ? ordered(from[i]) : 0;
    const bool more = i < n && x > least, equal = i < n && x == least;
    int total;
    const int before = block_before((more ? 1 << 16 : 0) | (equal ? 1 : 0), total, scratch);
    const int m = n_more + (before >> 16), e = n_equal + (before & 0xffff);
    if (more || (equal && e < left)) to[m + min(e, left)] = cell + i;
    n_more += total >> 16, n_equal += total & 0xffff;
  }
}

// Scores q . k of tokens first.. for every head, a row of `score_row` per token and head; blockIdx: positions, tokens. A
// thread has a position, whose key it reads once per four heads of a token. Tokens that see at most `most` positions have
// none.
extern "C" __global__ void __launch_bounds__(256, 2)
index_block_scores(const i64* st, const float* q, i64 q_row, int q_head, const u8* k, i64 n_cells, int type, int width,
                   float* scores, i64 score_row, int heads, int most, int first) {
  constexpr int AT_ONCE = 4;
  IK_SHARED(float4, queries_4, AT_ONCE * INDEX_WIDTH / 4)  // aligned for vectors
  float* const queries = (float*)queries_4;
  const int tid = threadIdx.x, pos = blockIdx.x * INDEX_TILE + tid;
  const i64 start = first + (i64)blockIdx.y * INDEX_TOKENS, stop = min(start + INDEX_TOKENS, st[ST_TOKENS]);
  if (start >= stop) return;
  const KvTensor tensor = kv_tensor(k, n_cells, kv_is_float(type) ? width : width / 32, type);
  for (i64 token = start; token < stop; token++) {
    const i64* segment = segment_of(st, token);
    const int n = (int)(segment[SEG_POS] + token - segment[SEG_START]) + 1;
    if (n <= most || (int)blockIdx.x * INDEX_TILE >= n) continue;
    for (int h0 = 0; h0 < heads; h0 += AT_ONCE) {
      __syncthreads();  // no thread reads the queries before any more
      for (int i = tid; i < AT_ONCE * width; i += 256) {
        const int h = i / width, c = i % width;
        queries[h * INDEX_WIDTH + c] = h0 + h < heads ? q[token * q_row + (i64)(h0 + h) * q_head + c] : 0.f;
      }
      __syncthreads();
      if (pos >= n) continue;
      float sum[AT_ONCE] = {0.f, 0.f, 0.f, 0.f};
      for (int g = 0; g < width / 16; g++) {
        Raw16 r;
        float y[16];
        kv_clear(r);
        kv_load(r, tensor, segment[SEG_CELL] + pos, g);
        if (kv_is_float(type)) {
#pragma unroll
          for (int e = 0; e < 8; e++) {
            const float2 v = type == KT_BF16 ? unpack_bf16(r.w[e]) : unpack_f16(r.w[e]);
            y[2 * e] = v.x, y[2 * e + 1] = v.y;
          }
        } else {
          kv_codes_f32(y, r, type, g & 1);
        }
#pragma unroll
        for (int h = 0; h < AT_ONCE; h++) {
          const float4* x = (const float4*)(queries + h * INDEX_WIDTH + g * 16);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float4 v = x[e];
            sum[h] = fmaf(v.x, y[4 * e], sum[h]), sum[h] = fmaf(v.y, y[4 * e + 1], sum[h]);
            sum[h] = fmaf(v.z, y[4 * e + 2], sum[h]), sum[h] = fmaf(v.w, y[4 * e + 3], sum[h]);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < AT_ONCE; h++)
        if (h0 + h < heads) scores[((token - first) * heads + h0 + h) * score_row + pos] = sum[h];
    }
  }
}

// Cells of the chosen blocks of `span` positions in ascending order, then -1: lists of `most` cells, for tokens first..
// (blockIdx.x) and heads (blockIdx.y). The last `local` blocks are chosen; of equal ones the earlier. A block's rank is
// how many are larger. Shared memory: a number per block, and one per chosen block.
extern "C" __global__ void __launch_bounds__(1024, 1)
index_choose_blocks(const i64* st, const float* scores, i64 score_row, int* chosen, int heads, int most, int span, int local,
                    int n_blocks, int first) {
  SMEM_DECL
  IK_SHARED(int, scratch, 32)
  u32* best = (u32*)smem_raw;
  int* list = (int*)(best + n_blocks);
  const int tid = threadIdx.x, head = blockIdx.y, top = most / span;
  const i64 token = first + (i64)blockIdx.x;
  if (token >= st[ST_TOKENS]) return;
  const i64* segment = segment_of(st, token);
  const int n = (int)(segment[SEG_POS] + token - segment[SEG_START]) + 1, cell = (int)segment[SEG_CELL];
  int* to = chosen + (token * heads + head) * most;
  if (n <= most) {
    for (int i = tid; i < most; i += 1024) to[i] = i < n ? cell + i : -1;
    return;
  }
  const int blocks = (n + span - 1) / span, lane = tid & 31;
  const float* from = scores + ((i64)blockIdx.x * heads + head) * score_row;
  for (int b = tid >> 5; b < blocks; b += 32) {  // a warp per block
    u32 x = 0;
    for (int i = b * span + lane; i < min((b + 1) * span, n); i += 32) x = max(x, ordered(from[i]));
#pragma unroll
    for (int d = 16; d; d /= 2) x = max(x, shx_u32(x, d));
    if (lane == 0) best[b] = b >= blocks - local ? 0xffffffffu : x;
  }
  __syncthreads();
  int n_chosen = 0;  // before this turn
#pragma unroll 1
  for (int turn = 0; turn < blocks; turn += 1024) {
    const int b = turn + tid;
    int rank = top;
    if (b < blocks && b >= blocks - local) {
      rank = 0;
    } else if (b < blocks) {
      const u32 x = best[b];
      rank = local;
      for (int i = 0; i < blocks - local && rank < top; i++) rank += best[i] > x || (best[i] == x && i < b);
    }
    int total;
    const int before = block_before(rank < top ? 1 : 0, total, scratch);
    if (rank < top) list[n_chosen + before] = b;
    n_chosen += total;
  }
  __syncthreads();
  for (int i = tid; i < most; i += 1024) {
    const int pos = list[i / span] * span + i % span;
    to[i] = pos < n ? cell + pos : -1;
  }
}

// The positions of the chosen entries of every token, of `ratio` positions each, then those that no entry has yet, then -1.
// `most`: entries. grid (tokens)
extern "C" __global__ void __launch_bounds__(256)
index_positions(const i64* st, const int* chosen, int* out, int ratio, int most) {
  const i64 token = blockIdx.x;
  if (token >= st[ST_TOKENS]) return;
  const i64* segment = segment_of(st, token);
  const int n = (int)(segment[SEG_POS] + token - segment[SEG_START]) + 1, cell = (int)segment[SEG_CELL];
  const int inside = min(n / ratio, most) * ratio, row = (most + 1) * ratio - 1;
  for (int i = threadIdx.x; i < row; i += 256) {
    int at = -1;
    if (i < inside) {
      at = cell + (chosen[token * most + i / ratio] - cell) * ratio + i % ratio;
    } else if (i < inside + n % ratio) {
      at = cell + n - n % ratio + i - inside;
    }
    out[token * row + i] = at;
  }
}
