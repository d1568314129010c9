// Hyper-connections (graph/ops_streams.py): a residual of n streams, rows of which lie one after the other. Numbers of the
// n-grams that such streams read (graph/ops_ngrams.py); and attention of rows to earlier ones.
#include "layer_common.cuh"
#include "states.cuh"

DI float stream_gate(float x) {
  const float e = expf(-fabsf(x));
  return x < 0.f ? e / (1.f + e) : 1.f / (1.f + e);
}

// Weights of the streams of a row: [before: n | after: n | mixing: n x n], or less of it. A warp per row; its matrix is in
// shared memory, a lane per column or row of it.
extern "C" __global__ void __launch_bounds__(32)
layer_stream_weights(const i64* st, int symbol, int factor, const float* x, const float* scale, const float* base, float* out,
                     int cols, int n, int n_iter, float eps, float most) {
  SMEM_DECL
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  const int lane = threadIdx.x;
  float* m = (float*)smem_raw;
  x += row * cols, out += row * cols;
  for (int i = lane; i < n; i += 32) out[i] = stream_gate(x[i] * scale[0] + base[i]) + eps;
  if (cols == n) return;
  for (int i = lane + n; i < 2 * n; i += 32) out[i] = most * stream_gate(x[i] * scale[1] + base[i]) + (cols == 2 * n ? eps : 0.f);
  if (cols == 2 * n) return;
  for (int i = lane; i < n * n; i += 32) m[i] = x[2 * n + i] * scale[2] + base[2 * n + i];
  warp_sync();
  for (int i = lane; i < n; i += 32) {
    float top = m[i * n], sum = 0.f;
    for (int j = 1; j < n; j++) top = fmaxf(top, m[i * n + j]);
    for (int j = 0; j < n; j++) sum += m[i * n + j] = expf(m[i * n + j] - top);
    for (int j = 0; j < n; j++) m[i * n + j] = m[i * n + j] / sum + eps;
  }
#pragma unroll 1
  for (int turn = 1; turn < 2 * n_iter; turn++) {  // columns first, then rows and columns in turns
    const int along = turn & 1 ? n : 1, across = turn & 1 ? 1 : n;
    warp_sync();
    for (int i = lane; i < n; i += 32) {
      float sum = 0.f;
      for (int j = 0; j < n; j++) sum += m[i * across + j * along];
      for (int j = 0; j < n; j++) m[i * across + j * along] /= sum + eps;
    }
  }
  warp_sync();
  for (int i = lane; i < n * n; i += 32) out[2 * n + i] = m[i];
}

// The sum of the streams, each times its weight before a layer. grid (rows, parts of 4 * blockDim.x columns of a stream)
extern "C" __global__ void __launch_bounds__(256)
layer_stream_sum(const i64* st, int symbol, int factor, const float* x, const float* weights, int weight_cols, float* out,
                 int cols, int n) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols * n, weights += row * weight_cols, out += row * cols;
  if (cols % 4 == 0) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < n; s++) {
      const float4 v = ld_f4(x + (i64)s * cols + i);
      const float w = weights[s];
      sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
    }
    st_f4(out + i, sum);
  } else {
    for (int j = i; j < min(i + 4, cols); j++) {
      float sum = 0.f;
      for (int s = 0; s < n; s++) sum = fmaf(weights[s], x[(i64)s * cols + j], sum);
      out[j] = sum;
    }
  }
}

// The streams mixed, or as they are where there are no weights for it, plus their shares of what a layer returned (`add`). Same
// grid; streams are read from memory once, and from L1 after that.
extern "C" __global__ void __launch_bounds__(256)
layer_stream_mix(const i64* st, int symbol, int factor, const float* x, const float* add, const float* weights,
                 int weight_cols, float* out, int cols, int n) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols * n, out += row * cols * n, add += row * cols, weights += row * weight_cols;
  const bool mixed = weight_cols > 2 * n;
  const float *after = weights + n, *mixing = weights + 2 * n;
  for (int k = 0; k < n; k++) {
    if (cols % 4 == 0) {
      const float4 a = ld_f4(add + i);
      const float by = after[k];
      float4 sum = make_float4(by * a.x, by * a.y, by * a.z, by * a.w);
      for (int s = mixed ? 0 : k; s < (mixed ? n : k + 1); s++) {
        const float4 v = ld_f4(x + (i64)s * cols + i);
        const float w = mixed ? mixing[s * n + k] : 1.f;
        sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
      }
      st_f4(out + (i64)k * cols + i, sum);
    } else {
      for (int j = i; j < min(i + 4, cols); j++) {
        float sum = after[k] * add[j];
        for (int s = mixed ? 0 : k; s < (mixed ? n : k + 1); s++)
          sum = fmaf(mixed ? mixing[s * n + k] : 1.f, x[(i64)s * cols + j], sum);
        out[(i64)k * cols + j] = sum;
      }
    }
  }
}

// The mean of the streams, each column times the sigmoid of its gate. grid (rows, parts of blockDim.x columns of a stream)
extern "C" __global__ void __launch_bounds__(256)
layer_gated_streams(const i64* st, int symbol, int factor, const float* x, const float* gate, float* out, int cols, int n) {
  const i64 row = blockIdx.x;
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  x += row * cols * n + i, gate += row * cols * n + i;
  float sum = 0.f;
  for (int s = 0; s < n; s++) sum = fmaf(x[(i64)s * cols], stream_gate(gate[(i64)s * cols]), sum);
  out[row * cols + i] = sum * (1.f / n);
}

// Streams from `first` on plus a row, by their shares of it: 1, with weights 1 + weight or 2 sigmoid(scale * weight).
// grid (rows, parts of blockDim.x columns of a stream)
extern "C" __global__ void __launch_bounds__(256)
layer_stream_add(const i64* st, int symbol, int factor, const float* x, const float* add, const float* weights, float* out,
                 int cols, int n, int first, float scale) {
  const i64 row = blockIdx.x;
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || c >= cols) return;
  x += row * n * cols + c, out += row * n * cols + c;
  const float a = add[row * cols + c];
  for (int j = 0; j < n; j++) {
    const float v = x[(i64)j * cols];
    float share = 1.f;
    if (weights) share = scale ? 2.f * stream_gate(scale * weights[row * n + j]) : 1.f + weights[row * n + j];
    out[(i64)j * cols] = j < first ? v : fmaf(a, share, v);
  }
}

// A value for every stream, times the sigmoid of the signed root of how well its key fits its query. grid (rows, streams)
extern "C" __global__ void __launch_bounds__(256)
layer_stream_match(const i64* st, int symbol, int factor, const float* key, const float* query, const float* value, float* out,
                   int cols, int n, float scale) {
  IK_SHARED(float, scratch, 32)
  const i64 row = blockIdx.x, at = (row * n + blockIdx.y) * cols;
  if (row >= step_rows(st, symbol, factor)) return;
  float sum = 0.f;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum = fmaf(key[at + i], query[at + i], sum);
  const float fit = block_sum(sum, scratch) * scale, root = sqrtf(fmaxf(fabsf(fit), 1e-6f));
  const float gate = stream_gate(fit == 0.f ? 0.f : fit > 0.f ? root : -root);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[at + i] = gate * value[row * cols + i];
}

// Token i of a segment; those before it (i < 0) are in the state, or `end` where the sequence begins.
DI i64 token_at(const int* tokens, const float* state, bool fresh, int i, int before, int end) {
  return i >= 0 ? tokens[i] : fresh ? end : (i64)state[before + i];
}

// Rows of a table for the n-grams of every token: hashes of 2, 3.. tokens, `per` rows for each length. `state`: the last
// `before` tokens of every sequence, as floats. `numbers`: multipliers, then sizes and offsets of rows. grid (segments), as
// a block replaces the state when its threads have read it.
extern "C" __global__ void __launch_bounds__(256)
layer_ngram_ids(const i64* st, float* state, const i64* multipliers, const i64* sizes, const i64* offsets, int* out, int before,
                int end, int per) {
  const i64 i = blockIdx.x;
  if (i >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + i * SEG_WORDS;
  const int n = (int)segment[SEG_TOKENS];
  const int* tokens = step_tokens(st) + segment[SEG_START];
  const bool fresh = segment[SEG_POS] == 0;
  state = state_row(st, i, state, before);
  for (int t = threadIdx.x; t < n; t += 256) {
    int* to = out + (segment[SEG_START] + t) * per * before;
    u64 mixed = (u64)tokens[t] * (u64)multipliers[0];
    bool ended = false;
    for (int j = 1; j <= before; j++) {
      const i64 token = ended ? end : token_at(tokens, state, fresh, t - j, before, end);
      ended = token == end;
      mixed ^= (u64)token * (u64)multipliers[j];
      for (int k = per * (j - 1); k < per * j; k++) to[k] = (int)(mixed % (u64)sizes[k] + (u64)offsets[k]);
    }
  }
  __syncthreads();
  if (threadIdx.x) return;
  for (int j = 0; j < before; j++) state[j] = (float)token_at(tokens, state, fresh, n - before + j, before, end);
}

// Row x and n rows kept, one after the other, weighted by the soft-max of their scores: the product with w over the root mean
// square. A block per row, and a warp per score; scores and shares are in shared memory. Rows are read from memory once, and from
// L2 after that.
extern "C" __global__ void __launch_bounds__(512, 2)
layer_residual_attn(const i64* st, int symbol, int factor, const float* kept, const float* x, const float* w, float* out, int cols,
                    int n, float eps) {
  SMEM_DECL
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  float *score = (float*)smem_raw, *share = score + n + 1;
  kept += row * cols * n, x += row * cols, out += row * cols;
  const int lane = threadIdx.x & 31;
  const bool vec = cols % 4 == 0 && aligned16(w);
  for (int s = threadIdx.x >> 5; s <= n; s += blockDim.x >> 5) {
    const float* from = s < n ? kept + (i64)s * cols : x;
    float squares = 0.f, product = 0.f;
    if (vec)
      for (int i = 4 * lane; i < cols; i += 128) {
        const float4 v = ld_f4(from + i), u = ld_f4(w + i);
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        product += (v.x * u.x + v.y * u.y) + (v.z * u.z + v.w * u.w);
      }
    else
      for (int i = lane; i < cols; i += 32) squares = fmaf(from[i], from[i], squares), product = fmaf(from[i], w[i], product);
    squares = warp_sum(squares), product = warp_sum(product);
    if (lane == 0) score[s] = product / sqrtf(squares / (float)cols + eps);
  }
  __syncthreads();
  float top = score[0], total = 0.f;
  for (int s = 1; s <= n; s++) top = fmaxf(top, score[s]);
  for (int s = threadIdx.x; s <= n; s += blockDim.x) share[s] = expf(score[s] - top);
  __syncthreads();
  for (int s = 0; s <= n; s++) total += share[s];
  const float by = 1.f / total;
  if (vec)
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * blockDim.x) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int s = 0; s <= n; s++) {
        const float4 v = ld_f4((s < n ? kept + (i64)s * cols : x) + i);
        const float f = share[s];
        sum = make_float4(fmaf(f, v.x, sum.x), fmaf(f, v.y, sum.y), fmaf(f, v.z, sum.z), fmaf(f, v.w, sum.w));
      }
      st_f4(out + i, make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by));
    }
  else
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
      float sum = 0.f;
      for (int s = 0; s <= n; s++) sum = fmaf(share[s], s < n ? kept[(i64)s * cols + i] : x[i], sum);
      out[i] = sum * by;
    }
}
