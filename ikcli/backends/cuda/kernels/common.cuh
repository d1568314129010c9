// What several kernels share: the step block, activations, reductions over warps and blocks.
#pragma once
#include "prims.cuh"

// The step block: words that change from micro-batch to micro-batch, written by the host before every step.
enum Step {
  ST_TOKENS = 0,   // tokens in the micro-batch
  ST_OUTPUTS = 1,  // rows of the output
  ST_KV = 2,       // cached positions of all segments
  ST_SEGMENTS = 3,
  ST_P_TOKENS = 4,    // address of i32 token ids
  ST_P_POS = 5,       // i32 positions
  ST_P_CELLS = 6,     // i64 cache cell of every token
  ST_P_OUT_IDS = 7,   // i64 rows that are output
  ST_P_SEGMENTS = 8,  // i64 x 6: start, n_tokens, cell, pos, kv_start, n_kv
  ST_P_KV_CELLS = 9,  // i64 cell of every cached position
  ST_P_WINDOW_CELLS = 11,  // of caches of windows: i64 cell of every token,
  ST_P_WINDOWS = 12        // i64 cell of position 0 of every segment, below 0 where the first positions are gone
};
constexpr int SEG_WORDS = 6, SEG_START = 0, SEG_TOKENS = 1, SEG_CELL = 2, SEG_POS = 3, SEG_KV_START = 4, SEG_KV = 5;

DI const int* step_tokens(const i64* st) { return (const int*)st[ST_P_TOKENS]; }
DI const int* step_pos(const i64* st) { return (const int*)st[ST_P_POS]; }
DI const i64* step_cells(const i64* st) { return (const i64*)st[ST_P_CELLS]; }
DI const i64* step_out_ids(const i64* st) { return (const i64*)st[ST_P_OUT_IDS]; }
DI const i64* step_segments(const i64* st) { return (const i64*)st[ST_P_SEGMENTS]; }
DI const i64* step_window_cells(const i64* st) { return (const i64*)st[ST_P_WINDOW_CELLS]; }
DI const i64* step_windows(const i64* st) { return (const i64*)st[ST_P_WINDOWS]; }
// Rows of a value: a count of the step block times a constant.
DI i64 step_rows(const i64* st, int symbol, int factor) { return st[symbol] * factor; }

constexpr float LOG2E = 1.44269504088896340736f;

DI float silu(float x) { return x / (1.f + expf(-x)); }

DI float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += shx(v, d);
  return v;
}
DI float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, shx(v, d));
  return v;
}
DI int warp_sum_i32(int v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += (int)shx_u32((u32)v, d);
  return v;
}
// Over all threads of the block (a multiple of 32); every thread gets the result, in an order that never changes.
// `scratch`: 32 floats of shared memory that nobody else uses between the two barriers.
DI float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int n = blockDim.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = warp_sum(lane < n ? scratch[lane] : 0.f);
  __syncthreads();
  return v;
}
DI float block_max(float v, float* scratch) {
  v = warp_max(v);
  const int n = blockDim.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = warp_max(lane < n ? scratch[lane] : -INFINITY);
  __syncthreads();
  return v;
}
