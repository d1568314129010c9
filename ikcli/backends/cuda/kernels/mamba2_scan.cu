// Mamba 2's scan: token by token for a few, by chunks of 64 tokens for more (Dao and Gu, arXiv:2405.21060).
//
// A state is [n_state][16] for every 16 columns of a head. With D(i, t) the product of the decays of tokens i+1 .. t and
// u = step * x, a chunk of tokens gives
//     y_t = D(start, t) c_t H + sum over i <= t of (c_t b_i) D(i, t) u_i,   H' = D(start, end) H + sum of b_i D(i, end) u_i
// D comes from sums of logarithms that are kept as two numbers, so that differences of large sums stay exact; no factor is
// above 1. Products are those of tf32 tensor cores with both sides as sums of two tf32 (the product of the lower parts is
// left out), which have the range of f32. Without dt_bias all steps are 1, and dt is not read (linear attention).
#include "states.cuh"

constexpr int CHUNK = 64, COLUMNS = 64;  // tokens of a chunk, columns of x of a block
constexpr int LINE = 68, WIDE = 72;      // floats between rows that are read along and across
constexpr int SLICES = 8;                // parts of a state's rows that threads of a column have

DI float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

struct Slice {  // of rows of heads or groups
  const float* at;
  i64 row;   // floats between tokens
  int head;  // ... between heads
};

// A thread has every eighth row of a column of the state; blocks are 16 columns. grid (segments, heads, columns / 16)
extern "C" __global__ void __launch_bounds__(128)
mamba2_scan(const i64* st, float* states, i64 state_cols, const float* x, i64 x_row, int x_head, const float* b, i64 b_row,
            int b_head, const float* c, i64 c_row, int c_head, const float* dt, const float* a, int a_step, const float* d,
            int d_step, const float* dt_bias, float* out, int n_head, int n_group, int n_state, int width) {
  IK_SHARED(float, sums, 2 * 4 * 16)
  if ((i64)blockIdx.x >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + (i64)blockIdx.x * SEG_WORDS;
  const int n = (int)segment[SEG_TOKENS], head = blockIdx.y, group = head / (n_head / n_group);
  const int column = threadIdx.x & 15, slice = threadIdx.x >> 4, col = blockIdx.z * 16 + column;
  const i64 start = segment[SEG_START];
  float* state = state_row(st, blockIdx.x, states, state_cols) + (i64)head * n_state * width + (i64)blockIdx.z * n_state * 16 + column;
  x += start * x_row + (i64)head * x_head + col;
  b += start * b_row + (i64)group * b_head;
  c += start * c_row + (i64)group * c_head;
  dt += start * n_head + head;
  out += (start * n_head + head) * width + col;
  const bool even = !dt_bias;
  const float log_decay = a[(i64)head * a_step], through = d[(i64)head * d_step], bias = even ? 0.f : dt_bias[head];
  const bool fresh = segment[SEG_POS] == 0;
  float h[256 / SLICES];
#pragma unroll
  for (int i = 0; i < 256 / SLICES; i++) {
    const int row = slice + SLICES * i;
    h[i] = row < n_state && !fresh ? state[row * 16] : 0.f;
  }
  for (int t = 0; t < n; t++) {
    const float step = even ? 1.f : softplus(dt[(i64)t * n_head] + bias), now = x[t * x_row], taken = step * now;
    const float decay = expf(step * log_decay);
    float y = 0.f;
#pragma unroll
    for (int i = 0; i < 256 / SLICES; i++) {
      const int row = slice + SLICES * i;
      if (row < n_state) {
        h[i] = fmaf(taken, b[t * b_row + row], decay * h[i]);
        y = fmaf(h[i], c[t * c_row + row], y);
      }
    }
    y += shx(y, 16);  // the other slice of this warp
    float* sum = sums + (t & 1) * 64;  // in turns: one barrier per token is enough
    if ((threadIdx.x & 16) == 0) sum[(slice >> 1) * 16 + column] = y;
    __syncthreads();
    if (slice == 0)
      out[(i64)t * n_head * width] = fmaf(through, now, (sum[column] + sum[16 + column]) + (sum[32 + column] + sum[48 + column]));
  }
  if (n)
#pragma unroll
    for (int i = 0; i < 256 / SLICES; i++) {
      const int row = slice + SLICES * i;
      if (row < n_state) state[row * 16] = h[i];
    }
}

struct Two {
  float hi, lo;
};
DI Two plus(Two x, Two y) {
  const float s = x.hi + y.hi, part = s - x.hi, lost = (x.hi - (s - part)) + (y.hi - part);
  return {s, lost + (x.lo + y.lo)};
}
DI float minus(Two x, Two y) { return (x.hi - y.hi) + (x.lo - y.lo); }

DI void split(float v, u32& hi, u32& lo) {
  hi = tf32(v);
  lo = tf32(v - __uint_as_float(hi));
}
// c[n] (16 x 8 each, of 4) += rows of A (16 x 64) times B (64 x 32); a(row, k), b(k, col) read one number.
template <class A, class B> DI void add_product(float (&c)[4][4], int depth, A a, B b) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  for (int k = 0; k < depth; k += 8) {
    u32 hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) split(a(g + 8 * (i & 1), k + q + 4 * (i >> 1)), hi[i], lo[i]);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      u32 b0, b1, l0, l1;
      split(b(k + q, 8 * n + g), b0, l0);
      split(b(k + q + 4, 8 * n + g), b1, l1);
      mma1688(c[n], lo, b0, b1);
      mma1688(c[n], hi, l0, l1);
      mma1688(c[n], hi, b0, b1);
    }
  }
}
// Row and column of accumulator i of part n.
DI int acc_row(int i) { return ((threadIdx.x & 31) >> 2) + 8 * (i >> 1); }
DI int acc_col(int n, int i) { return 8 * n + 2 * (threadIdx.x & 3) + (i & 1); }

// 64 rows of 64 floats from `at`: zeros behind n rows and `cols` columns.
DI void load_tile(float* to, const float* at, i64 row, int n, int cols) {
  for (int i = threadIdx.x; i < CHUNK * 64; i += blockDim.x) {
    const int t = i >> 6, col = i & 63;
    to[t * LINE + col] = t < n && col < cols ? at[t * row + col] : 0.f;
  }
}

// A warp has 16 rows (tokens, or rows of the state) and 32 columns of every product. grid (segments, heads, columns / 64)
extern "C" __global__ void __launch_bounds__(256)
mamba2_chunks(const i64* st, float* states, i64 state_cols, const float* x, i64 x_row, int x_head, const float* b, i64 b_row,
              int b_head, const float* c, i64 c_row, int c_head, const float* dt, const float* a, int a_step, const float* d,
              int d_step, const float* dt_bias, float* out, int n_head, int n_group, int n_state, int width) {
  SMEM_DECL
  IK_SHARED(float, step, CHUNK)
  IK_SHARED(float, since, CHUNK)
  IK_SHARED(float, left, CHUNK)
  IK_SHARED(float, sum_hi, CHUNK)
  IK_SHARED(float, sum_lo, CHUNK)
  float *s_c = (float*)smem_raw, *s_b = s_c + CHUNK * LINE, *s_p = s_b + CHUNK * LINE, *s_h = s_p + CHUNK * LINE;
  float* s_u = s_h + CHUNK * WIDE;
  if ((i64)blockIdx.x >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + (i64)blockIdx.x * SEG_WORDS;
  const int n_tokens = (int)segment[SEG_TOKENS], head = blockIdx.y, group = head / (n_head / n_group);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rows = 16 * (warp >> 1), cols = 32 * (warp & 1);
  const int first_col = blockIdx.z * COLUMNS, some = min(COLUMNS, width - first_col);
  const i64 start = segment[SEG_START];
  float* state = state_row(st, blockIdx.x, states, state_cols) + (i64)head * n_state * width + (i64)first_col * n_state;
  x += start * x_row + (i64)head * x_head + first_col;
  b += start * b_row + (i64)group * b_head;
  c += start * c_row + (i64)group * c_head;
  dt += start * n_head + head;
  out += (start * n_head + head) * width + first_col;
  const bool even = !dt_bias;
  const float log_decay = a[(i64)head * a_step], through = d[(i64)head * d_step], bias = even ? 0.f : dt_bias[head];

  for (int first = 0; first < n_tokens; first += CHUNK) {
    const int n = min(CHUNK, n_tokens - first);
    const bool fresh = first == 0 && segment[SEG_POS] == 0;
    __syncthreads();  // the last chunk is done
    if (warp == 0) {  // two tokens per lane; those behind the last leave everything as it is
      Two sum[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float v = t < n ? even ? 1.f : softplus(dt[(i64)(first + t) * n_head] + bias) : 0.f;
        step[t] = v;
        sum[i] = {v * log_decay, 0.f};
      }
      sum[1] = plus(sum[0], sum[1]);
      Two all = sum[1];
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const Two other = {__uint_as_float(shup_u32(__float_as_uint(all.hi), by)),
                           __uint_as_float(shup_u32(__float_as_uint(all.lo), by))};
        if (lane >= by) all = plus(other, all);
      }
      const Two before = {__uint_as_float(shup_u32(__float_as_uint(all.hi), 1)), __uint_as_float(shup_u32(__float_as_uint(all.lo), 1))};
      const Two end = {shfl(all.hi, 31), shfl(all.lo, 31)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const Two s = lane ? plus(before, sum[i]) : sum[i];
        sum_hi[t] = s.hi, sum_lo[t] = s.lo;
        since[t] = expf(s.hi + s.lo);
        left[t] = expf(minus(end, s));
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * COLUMNS; i += blockDim.x) {
      const int t = i >> 6, col = i & 63;
      s_u[t * WIDE + col] = t < n && col < some ? step[t] * x[(i64)(first + t) * x_row + col] : 0.f;
    }
    float p[4][4], y[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) p[i >> 2][i & 3] = y[i >> 2][i & 3] = 0.f;
    for (int from = 0; from < n_state; from += 64) {  // 64 rows of the state at a time
      const int depth = min(64, n_state - from);      // a multiple of 16
      __syncthreads();
      load_tile(s_c, c + first * c_row + from, c_row, n, depth);
      load_tile(s_b, b + first * b_row + from, b_row, n, depth);
      for (int i = threadIdx.x; i < 64 * COLUMNS; i += blockDim.x) {  // 16 columns of a row are together
        const int row = i >> 4 & 63, col = (i >> 10) * 16 + (i & 15);
        s_h[row * WIDE + col] = row < depth && col < some && !fresh ? state[(i64)(col >> 4) * n_state * 16 + (from + row) * 16 + (col & 15)] : 0.f;
      }
      __syncthreads();
      if (rows + 15 >= cols)  // tokens see none after them
        add_product(p, depth, [&](int r, int k) { return s_c[(rows + r) * LINE + k]; },
                    [&](int k, int i) { return s_b[(cols + i) * LINE + k]; });
      add_product(y, depth, [&](int r, int k) { return s_c[(rows + r) * LINE + k]; },
                  [&](int k, int col) { return s_h[k * WIDE + cols + col]; });
      float h[4][4];
#pragma unroll
      for (int i = 0; i < 16; i++)
        h[i >> 2][i & 3] = since[CHUNK - 1] * s_h[(rows + acc_row(i & 3)) * WIDE + cols + acc_col(i >> 2, i)];
      if (rows < depth) {
        add_product(h, CHUNK, [&](int r, int k) { return s_b[k * LINE + rows + r]; },
                    [&](int k, int col) { return left[k] * s_u[k * WIDE + cols + col]; });
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int row = from + rows + acc_row(i & 3), col = cols + acc_col(i >> 2, i);
          if (col < some) state[(i64)(col >> 4) * n_state * 16 + row * 16 + (col & 15)] = h[i >> 2][i & 3];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int t = rows + acc_row(i & 3), k = cols + acc_col(i >> 2, i);
      const float decay = k <= t ? expf(minus({sum_hi[t], sum_lo[t]}, {sum_hi[k], sum_lo[k]})) : 0.f;
      s_p[t * LINE + k] = k <= t ? p[i >> 2][i & 3] * decay : 0.f;
      y[i >> 2][i & 3] *= since[t];
    }
    __syncthreads();
    add_product(y, rows + 16, [&](int r, int k) { return s_p[(rows + r) * LINE + k]; },
                [&](int k, int col) { return s_u[k * WIDE + cols + col]; });
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int t = rows + acc_row(i & 3), col = cols + acc_col(i >> 2, i);
      if (t < n && col < some)
        out[(i64)(first + t) * n_head * width + col] = fmaf(through, x[(i64)(first + t) * x_row + col], y[i >> 2][i & 3]);
    }
  }
}
