// The gated delta rule, token by token, with the state in registers.
//
// A warp has 8 columns of v: lane = 8 * p + column, p = 0 .. 3 has the rows of a quarter of the keys. Sums over keys are
// two shuffles. Decays, keys, queries of some tokens are staged in shared memory for the four warps of a block, quarter
// by quarter with a gap that keeps the quarters in different banks. A state holds blocks of 16 columns, [d_k][16].
#include "states.cuh"

constexpr int WARPS = 4, COLUMNS = 8;

DI float4 fma4(float4 a, const float* b, float4 c) {
  return make_float4(fmaf(a.x, b[0], c.x), fmaf(a.y, b[1], c.y), fmaf(a.z, b[2], c.z), fmaf(a.w, b[3], c.w));
}
DI float sum_quarters(float4 parts) {
  float v = (parts.x + parts.y) + (parts.z + parts.w);
  v += shx(v, 8);
  return v + shx(v, 16);
}

// Four floats of shared memory at once. Left to the compiler, some become loads of a part of a vector, which PTX 7.4 lacks.
#ifdef IK_EMU
DI float4 ld_shared(const float* p) { return *(const float4*)p; }
#else
DI float4 ld_shared(const float* p) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(smem_addr(p)) : "memory");
  return v;
}
#endif

struct Rows {
  const float* at;
  i64 row;   // floats between tokens
  int head;  // ... between heads
};

// DK: the most columns of a key; BY_COLUMN: each has a decay of its own.
template <int DK, bool BY_COLUMN>
DI void delta_net(const i64* st, float* states, i64 state_cols, Rows q, Rows k, Rows v, const float* decay, const float* beta,
                  float* out, int n_head, int n_head_k, int dk, int dv, float scale, int tiled) {
  constexpr int R = DK / 4, GAP = R + 4, TOKENS = 2048 / DK;
  SMEM_DECL
  float *keys = (float*)smem_raw, *queries = keys + TOKENS * 4 * GAP, *betas = queries + TOKENS * 4 * GAP;
  float* decays = betas + TOKENS;  // TOKENS rows like those of keys, or TOKENS numbers
  if ((i64)blockIdx.x >= st[ST_SEGMENTS]) return;
  const i64* segment = step_segments(st) + (i64)blockIdx.x * SEG_WORDS;
  const int lane = threadIdx.x & 31, p = lane >> 3, head = blockIdx.y, n = (int)segment[SEG_TOKENS];
  const int column = (blockIdx.z * WARPS + (threadIdx.x >> 5)) * COLUMNS + (lane & 7);
  const bool in = column < dv;  // of whole warps, all of which take part in barriers
  const int k_head = tiled ? head % n_head_k : head / (n_head / n_head_k);
  const i64 start = segment[SEG_START];
  float* s = state_row(st, blockIdx.x, states, state_cols) + (i64)head * dk * dv;
  s += (i64)(column >> 4) * dk * 16 + (column & 15);
  q.at += start * q.row + (i64)k_head * q.head;
  k.at += start * k.row + (i64)k_head * k.head;
  v.at += start * v.row + (i64)head * v.head + column;
  decay += (start * n_head + head) * (BY_COLUMN ? dk : 1);
  beta += start * n_head + head;
  out += (start * n_head + head) * dv + column;

  // In registers from the first token to the last: memory is read and written once.
  float state[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int row = p * R + r;
    state[r] = in && row < dk && segment[SEG_POS] != 0 ? s[(i64)row * 16] : 0.f;
  }
  for (int t0 = 0; t0 < n; t0 += TOKENS) {
    const int some = min(TOKENS, n - t0);
    __syncthreads();
    for (int i = threadIdx.x; i < some * DK; i += 32 * WARPS) {
      const int t = i / DK, row = i % DK, to = t * 4 * GAP + row / R * GAP + row % R;
      const bool there = row < dk;
      keys[to] = there ? k.at[(i64)(t0 + t) * k.row + row] : 0.f;
      // The scale goes into queries, instead of into every result.
      queries[to] = there ? q.at[(i64)(t0 + t) * q.row + row] * scale : 0.f;
      if (BY_COLUMN) decays[to] = there ? decay[(i64)(t0 + t) * n_head * dk + row] : 0.f;
    }
    for (int t = threadIdx.x; t < some; t += 32 * WARPS) {
      if (!BY_COLUMN) decays[t] = decay[(i64)(t0 + t) * n_head];
      betas[t] = 1.f / (1.f + expf(-beta[(i64)(t0 + t) * n_head]));
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < some; t++) {
      const float *kt = keys + (t * 4 + p) * GAP, *qt = queries + (t * 4 + p) * GAP;
      const float* at = decays + (BY_COLUMN ? (t * 4 + p) * GAP : t);
      const float wanted = in ? v.at[(i64)(t0 + t) * v.row] : 0.f;
      float4 read = make_float4(0.f, 0.f, 0.f, 0.f), y = read;  // sums that do not wait for each other
#pragma unroll
      for (int r = 0; r < R; r += 4) {
        const float4 key = ld_shared(kt + r);
        const float4 left = BY_COLUMN ? ld_shared(at + r) : make_float4(*at, *at, *at, *at);
        state[r] *= left.x, state[r + 1] *= left.y, state[r + 2] *= left.z, state[r + 3] *= left.w;
        read = fma4(key, state + r, read);
      }
      const float u = betas[t] * (wanted - sum_quarters(read));
#pragma unroll
      for (int r = 0; r < R; r += 4) {
        const float4 key = ld_shared(kt + r), query = ld_shared(qt + r);
        state[r] = fmaf(key.x, u, state[r]), state[r + 1] = fmaf(key.y, u, state[r + 1]);
        state[r + 2] = fmaf(key.z, u, state[r + 2]), state[r + 3] = fmaf(key.w, u, state[r + 3]);
        y = fma4(query, state + r, y);
      }
      const float result = sum_quarters(y);
      if (in && p == 0) out[(i64)(t0 + t) * n_head * dv] = result;
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++)
    if (in && p * R + r < dk) s[(i64)(p * R + r) * 16] = state[r];
}

// grid (segments, heads, parts of 32 columns of v)
#define DELTA_NET(NAME, DK, BY_COLUMN)                                                                                        \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)                                                                 \
  NAME(const i64* st, float* states, i64 state_cols, const float* q, i64 q_row, int q_head, const float* k, i64 k_row,        \
       int k_head, const float* v, i64 v_row, int v_head, const float* decay, const float* beta, float* out, int n_head,      \
       int n_head_k, int dk, int dv, float scale, int tiled) {                                                                \
    delta_net<DK, BY_COLUMN>(st, states, state_cols, {q, q_row, q_head}, {k, k_row, k_head}, {v, v_row, v_head}, decay, beta, \
                             out, n_head, n_head_k, dk, dv, scale, tiled);                                                    \
  }
DELTA_NET(delta_net_64, 64, false)
DELTA_NET(delta_net_128, 128, false)
DELTA_NET(delta_net_256, 256, false)
DELTA_NET(delta_net_64_columns, 64, true)
DELTA_NET(delta_net_128_columns, 128, true)
DELTA_NET(delta_net_256_columns, 256, true)
