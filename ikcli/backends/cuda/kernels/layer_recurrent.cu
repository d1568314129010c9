// What stands around the delta rule: short convolution, norm of heads, decays, gated norm. Memory-bound but for the
// convolution of prompts, whose columns are independent. The selective scan of Mamba.
#include "layer_common.cuh"
#include "states.cuh"

constexpr int CONV_TOKENS = 32;  // of a block
constexpr int MAX_TAPS = 16;

DI float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// silu (unless `linear`) of a causal convolution (with a bias, unless it is null), a thread per column; `state`: rows of state_cols floats per sequence, of which rows of
// `row_cols` floats are the last taps - 1 inputs. Blocks in x are CONV_TOKENS tokens of a segment; the first of a segment
// reads the state and writes the new one, so no other block may touch it. grid (tokens / CONV_TOKENS + segments, columns)
extern "C" __global__ void __launch_bounds__(128)
layer_short_conv(const i64* st, const float* x, int cols, const float* w, int w_row, int taps, const float* bias, float* state,
                 i64 state_cols, int row_cols, float* out, int linear) {
  const int c = blockIdx.y * blockDim.x + threadIdx.x, before = taps - 1;
  if (c >= cols) return;
  const i64* segment = step_segments(st);
  i64 block = blockIdx.x;
  int i = 0;
  for (; i < st[ST_SEGMENTS]; i++, segment += SEG_WORDS) {
    const i64 blocks = (segment[SEG_TOKENS] + CONV_TOKENS - 1) / CONV_TOKENS;
    if (block < blocks) break;
    block -= blocks;
  }
  if (i >= st[ST_SEGMENTS]) return;
  const int n = (int)segment[SEG_TOKENS], first = (int)block * CONV_TOKENS;
  const bool fresh = segment[SEG_POS] == 0;
  float* old = state_row(st, i, state, state_cols) + c;
  x += segment[SEG_START] * cols + c;
  out += segment[SEG_START] * row_cols + c;
  const float shift = bias ? bias[c] : 0.f;
  float tap[MAX_TAPS], past[MAX_TAPS];
#pragma unroll
  for (int j = 0; j < MAX_TAPS; j++) {
    tap[j] = j < taps ? w[(i64)c * w_row + j] : 0.f;
    const int t = first + j - before;
    past[j] = 0.f;
    if (j < before) past[j] = t >= 0 ? x[(i64)t * cols] : fresh ? 0.f : old[(i64)(t + before) * row_cols];
  }
  if (first == 0)
    for (int j = 0; j < before; j++) {
      const int t = n + j - before;
      old[(i64)j * row_cols] = t >= 0 ? x[(i64)t * cols] : fresh ? 0.f : old[(i64)(t + before) * row_cols];
    }
  for (int t = first; t < min(first + CONV_TOKENS, n); t++) {
    const float now = x[(i64)t * cols];
    float sum = shift;
#pragma unroll
    for (int j = 0; j < MAX_TAPS; j++)
      if (j < taps) sum = fmaf(tap[j], j < before ? past[j] : now, sum);
#pragma unroll
    for (int j = 0; j < MAX_TAPS - 1; j++)
      if (j < before) past[j] = j == before - 1 ? now : past[j + 1];
    out[(i64)t * row_cols] = linear ? sum : silu(sum);
  }
}

// A warp per group of `width` columns: each over sqrt(sum of squares + eps).
extern "C" __global__ void __launch_bounds__(128)
layer_l2_groups(const i64* st, int symbol, int factor, const float* x, i64 x_cols, float* out, int groups, int width, float eps) {
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = item / groups;
  if (row >= step_rows(st, symbol, factor)) return;
  const int lane = threadIdx.x & 31;
  const float* src = x + row * x_cols + (item - row * groups) * width;
  float acc = 0.f;
  for (int i = lane; i < width; i += 32) acc += src[i] * src[i];
  const float scale = 1.f / sqrtf(warp_sum(acc) + eps);
  for (int i = lane; i < width; i += 32) out[item * width + i] = src[i] * scale;
}

// exp(a * softplus(x + dt)), or with a bound below 0 exp(bound * sigmoid(|a| * (x + dt))); a is for `width` columns, its
// values are `a_step` floats apart. grid (rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_decay(const i64* st, int symbol, int factor, const float* x, const float* dt, const float* a, int a_step, float* out,
            int cols, int width, float bound) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  for (int j = i; j < min(i + 4, cols); j++) {
    const float v = x[row * cols + j] + dt[j], f = a[(j / width) * a_step];
    const float log_decay = bound != 0.f ? bound * sigmoid(fabsf(f) * v) : f * (fmaxf(v, 0.f) + log1pf(expf(-fabsf(v))));
    out[row * cols + j] = expf(log_decay);
  }
}

// RMS norm by a warp per group of `width` columns, times silu (kind 0) or sigmoid (kind 1) of the gate; also as rows for
// matrix products, if widths are multiples of 32.
extern "C" __global__ void __launch_bounds__(128)
layer_gated_norm(const i64* st, int symbol, int factor, const float* x, const float* w, const float* gate, float* out, int groups,
                 int width, float eps, int kind, u8* q8, i64 q8_bytes, u8* bf16, i64 bf16_bytes, int wanted) {
  const i64 item = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = item / groups;
  if (row >= step_rows(st, symbol, factor)) return;
  const int lane = threadIdx.x & 31, first = (int)(item - row * groups) * width;
  const float *src = x + item * width, *g = gate + item * width;
  float acc = 0.f;
  for (int i = lane; i < width; i += 32) acc += src[i] * src[i];
  const float scale = 1.f / sqrtf(warp_sum(acc) / (float)width + eps);
  if (width % 4) {
    for (int i = lane; i < width; i += 32)
      out[item * width + i] = src[i] * scale * w[i] * (kind ? sigmoid(g[i]) : silu(g[i]));
    return;
  }
  for (int base = 0; base < width; base += 128) {  // every lane takes part in every step: the formats need them
    const int i = base + 4 * lane;
    const bool in = i < width;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (in) {
      const float4 a = ld_f4(src + i), b = ld_f4(w + i), c = ld_f4(g + i);
      v = make_float4(a.x * scale * b.x * (kind ? sigmoid(c.x) : silu(c.x)), a.y * scale * b.y * (kind ? sigmoid(c.y) : silu(c.y)),
                      a.z * scale * b.z * (kind ? sigmoid(c.z) : silu(c.z)), a.w * scale * b.w * (kind ? sigmoid(c.w) : silu(c.w)));
      st_f4(out + item * width + i, v);
    }
    if (wanted) store_wanted(v, q8, q8_bytes, bf16, bf16_bytes, wanted, row, groups * width, first + i, in);
  }
}

constexpr int SCAN_STATE = 16, SCAN_TOKENS = 16;

// Mamba's scan, a thread per column with its numbers in registers; b and c of some tokens are staged in shared memory.
// A state holds blocks of 16 columns, [SCAN_STATE][16]. grid (segments, columns / 128)
extern "C" __global__ void __launch_bounds__(128)
layer_selective_scan(const i64* st, float* states, i64 state_cols, const float* x, const float* dt, const float* b, i64 b_cols,
                     const float* c, i64 c_cols, const float* a, int a_row, const float* d, const float* dt_bias, float* out,
                     int cols) {
  IK_SHARED(float, taken, SCAN_TOKENS * SCAN_STATE)
  IK_SHARED(float, read, SCAN_TOKENS * SCAN_STATE)
  if ((i64)blockIdx.x >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + (i64)blockIdx.x * SEG_WORDS;
  const int column = blockIdx.y * blockDim.x + threadIdx.x, n = (int)segment[SEG_TOKENS];
  const bool in = column < cols;  // all threads take part in barriers
  const i64 start = segment[SEG_START];
  float* state = state_row(st, blockIdx.x, states, state_cols) + (i64)(column >> 4) * SCAN_STATE * 16 + (column & 15);
  x += start * cols + column;
  dt += start * cols + column;
  out += start * cols + column;
  float h[SCAN_STATE], decay[SCAN_STATE];
#pragma unroll
  for (int i = 0; i < SCAN_STATE; i++) {
    h[i] = in && segment[SEG_POS] ? state[i * 16] : 0.f;
    decay[i] = in ? a[(i64)column * a_row + i] : 0.f;
  }
  const float bias = in ? dt_bias[column] : 0.f, through = in ? d[column] : 0.f;
  for (int first = 0; first < n; first += SCAN_TOKENS) {
    const int some = min(SCAN_TOKENS, n - first);
    __syncthreads();
    for (int i = threadIdx.x; i < some * SCAN_STATE; i += blockDim.x) {
      const i64 token = start + first + i / SCAN_STATE;
      taken[i] = b[token * b_cols + i % SCAN_STATE];
      read[i] = c[token * c_cols + i % SCAN_STATE];
    }
    __syncthreads();
    for (int t = 0; in && t < some; t++) {
      const i64 at = (i64)(first + t) * cols;
      const float raw = dt[at] + bias, step = fmaxf(raw, 0.f) + log1pf(expf(-fabsf(raw))), now = x[at];
      float y = through * now;
#pragma unroll
      for (int i = 0; i < SCAN_STATE; i++) {
        h[i] = fmaf(step * now, taken[t * SCAN_STATE + i], expf(step * decay[i]) * h[i]);
        y = fmaf(h[i], read[t * SCAN_STATE + i], y);
      }
      out[at] = y;
    }
  }
  if (in && n)
#pragma unroll
    for (int i = 0; i < SCAN_STATE; i++) state[i * 16] = h[i];
}
