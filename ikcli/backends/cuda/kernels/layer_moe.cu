// Mixture of experts: routing, grouping of (row, slot) pairs by expert, weighted sum. Layouts: layouts.py.
//
// Everything is deterministic: ties go to the expert, group or pair that comes first, sorting is a stable counting sort
// without atomics, sums run over the slots in order.
#include "layer_common.cuh"

constexpr int PER_LANE = 16, PER_LANE_WIDE = 32;  // experts per lane: at most 512, or 1024
constexpr float SPARSE_MARGIN = 0.02f;  // of ops_experts.py
constexpr int TILE_FEW = 8, TILE_MANY = 64;

DI u32 warp_max_u32(u32 v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = max(v, shx_u32(v, d));
  return v;
}
DI u32 warp_min_u32(u32 v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = min(v, shx_u32(v, d));
  return v;
}
// Unsigned words in the order of the floats: -0 equals 0, NaN is above everything, 0 is below everything.
DI u32 ordered(float x) {
  if (x != x) return 0xffffffffu;
  const u32 u = __float_as_uint(x + 0.f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
DI float unordered(u32 u) { return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u); }
// Smallest index among the lanes with the largest key; `top` becomes that key.
DI u32 warp_best(u32 key, u32 index, u32& top) {
  top = warp_max_u32(key);
  return warp_min_u32(key == top ? index : 0xffffffffu);
}

struct Router {
  const float* bias;
  int n, n_used, gating, norm, n_group, n_group_used, fewest;
  float scale, least;
};

// Bits of the groups that are eligible: those with the largest sum of their two best scores.
DI u32 best_groups(const float* scores, const Router& r) {
  const int lane = threadIdx.x & 31, size = r.n / r.n_group;
  u32 key = 0;
  if (lane < r.n_group) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = lane * size; i < (lane + 1) * size; i++) {
      const float s = scores[i];
      if (s > best) {
        second = best;
        best = s;
      } else if (s > second) {
        second = s;
      }
    }
    key = ordered(size > 1 ? best + second : best);
  }
  u32 allowed = 0;
#pragma unroll 1
  for (int k = 0; k < r.n_group_used; k++) {
    u32 top;
    const u32 g = warp_best(key, lane, top);
    allowed |= 1u << g;
    if (lane == (int)g) key = 0;
  }
  return allowed;
}

// One row by one warp. Lane l has the experts l, l + 32, ...; shared memory: r.n probabilities and, with groups, r.n scores.
template <int PER_LANE> DI void route_row(const float* logits, int* out, float* probs, const Router& r) {
  const int lane = threadIdx.x & 31;
  float* scores = probs + r.n;
  float p[PER_LANE];
  u32 key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) p[i] = lane + 32 * i < r.n ? logits[lane + 32 * i] : -INFINITY;
  if (r.gating == 2) {  // sparsemixer: experts are chosen by their logits
    if (r.bias) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) p[i] += lane + 32 * i < r.n ? r.bias[lane + 32 * i] : 0.f;
    }
  } else if (r.gating == 1) {
    float top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) top = fmaxf(top, p[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      p[i] = lane + 32 * i < r.n ? expf(p[i] - top) : 0.f;
      sum += p[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p[i] = p[i] / sum;
  } else {  // sigmoid, or with gating 3 the square root of ln(1 + exp(logit))
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float e = expf(-fabsf(p[i])), u = 1.f + e;
      // log(u) * e / (u - 1) cancels the rounding error of u = 1 + e.
      if (r.gating == 3) p[i] = p[i] != p[i] ? p[i] : sqrtf(fmaxf(p[i], 0.f) + (u == 1.f ? e : logf(u) * (e / (u - 1.f))));
      else p[i] = p[i] < 0.f ? e / u : 1.f / u;
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int e = lane + 32 * i;
    key[i] = 0;
    if (e < r.n) {
      probs[e] = p[i];
      const float s = r.bias && r.gating != 2 ? p[i] + r.bias[e] : p[i];
      // 0 is below every score: such an expert cannot be chosen.
      key[i] = s == -INFINITY ? 0 : ordered(s);
      if (r.n_group > 1) scores[e] = s;
    }
  }
  __syncwarp();
  if (r.n_group > 1) {
    const u32 allowed = best_groups(scores, r);
    const int size = r.n / r.n_group;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < r.n && !(allowed >> ((lane + 32 * i) / size) & 1)) key[i] = 0;
  }
  float weight = 0.f, total = 0.f, first = 0.f;
  int id = -1;
#pragma unroll 1
  for (int slot = 0; slot < r.n_used; slot++) {
    u32 mine = 0, top;
    int at = lane;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      // Strictly above, so that of equal experts the first one is kept.
      if (key[i] > mine) {
        mine = key[i];
        at = lane + 32 * i;
      }
    const int e = (int)warp_best(mine, (u32)at, top);
    float near = 0.f;  // sparsemixer: sum over the experts that are left and near the best one
    if (r.gating == 2) {
      const float best = unordered(top);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (key[i] && !((best - p[i]) / fmaxf(fabsf(p[i]), best) > SPARSE_MARGIN)) near += expf(p[i] - best);
      near = warp_sum(near);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i == e) key[i] = 0;
    const float score = unordered(top);
    if (slot == 0) first = score;
    bool keep = top != 0;  // 0: no eligible expert is left
    if (r.fewest > 0 && slot >= r.fewest && score < r.least * first) keep = false;
    const float w = !keep ? 0.f : r.gating == 2 ? 1.f / near : probs[e];
    total += w;
    if (lane == slot) {
      weight = w;
      id = keep ? e : -1;
    }
  }
  __syncwarp();  // the next row of this warp writes the probabilities
  const float f = r.norm ? r.scale / total : r.scale;
  if (lane < r.n_used) {
    ((float*)out)[lane] = weight * f;
    out[r.n_used + lane] = id;
  }
}

// One warp per row. Shared memory: n floats per warp, 2n where n_group > 1.
template <int PER_LANE>
DI void route_rows(const i64* st, int symbol, int factor, const float* logits, int* out, const Router& r) {
  SMEM_DECL
  const int warp = threadIdx.x >> 5;
  const i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + warp;
  if (row >= step_rows(st, symbol, factor)) return;
  route_row<PER_LANE>(logits + row * r.n, out + row * 2 * r.n_used, (float*)smem_raw + warp * r.n * (r.n_group > 1 ? 2 : 1), r);
}
#define ROUTE_KERNEL(NAME, PER_LANE)                                                                                              \
  extern "C" __global__ void __launch_bounds__(128)                                                                               \
  NAME(const i64* st, int symbol, int factor, const float* logits, const float* bias, int* out, int n, int n_used, int gating,    \
       int norm, float scale, int n_group, int n_group_used, int fewest, float least) {                                           \
    route_rows<PER_LANE>(st, symbol, factor, logits, out,                                                                         \
                         {bias, n, n_used, gating, norm, n_group, n_group_used, fewest, scale, least});                           \
  }
ROUTE_KERNEL(layer_moe_route, PER_LANE)
ROUTE_KERNEL(layer_moe_route_wide, PER_LANE_WIDE)

// Experts of a route replaced by their groups. grid (rows), 32 threads
extern "C" __global__ void __launch_bounds__(32)
layer_moe_groups(const i64* st, int symbol, int factor, const int* route, int* out, int n_used, int size) {
  const i64 row = blockIdx.x;
  if (row >= step_rows(st, symbol, factor)) return;
  route += row * 2 * n_used;
  out += row * 2 * n_used;
  for (int i = threadIdx.x; i < 2 * n_used; i += blockDim.x) {
    const int e = route[i];
    out[i] = i < n_used ? e : e < 0 ? -1 : e / size;
  }
}

struct Plan {
  int2* order;
  int *position, *offsets, *counts;
  int4 *few, *many;
};

// Exclusive sum over the threads of the block; `scratch` holds 33 words, the last of them becomes the total.
DI u32 block_scan(u32 v, u32* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
  u32 sum = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 below = shup_u32(sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    u32 own = lane < n_warps ? scratch[lane] : 0, s = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const u32 below = shup_u32(s, d);
      if (lane >= d) s += below;
    }
    scratch[lane] = s - own;
    if (lane == 31) scratch[32] = s;
  }
  __syncthreads();
  return scratch[warp] + sum - v;
}

// Lanes of the warp that have the same bin (below 1024; -1 for lanes without one).
DI u32 same_bin(int bin) {
  u32 mask = ballot(bin >= 0);
#pragma unroll
  for (int b = 0; b < 10; b++) {
    const u32 set = ballot(bin >> b & 1);
    mask &= bin >> b & 1 ? set : ~set;
  }
  return mask;
}

DI void write_tiles(int4* list, u32 at, int e, int start, int count, int rows) {
  for (int done = 0; done < count; done += rows) list[at++] = make_int4(e, start + done, min(rows, count - done), 0);
}

// Stable counting sort of all pairs by one block of at least n_expert threads. Every warp (with more than 512 experts, each of
// the first 8) counts and then places its own adjacent part of the pairs, 32 at a time. Shared memory: (these warps + 1) *
// (n_expert + 1) + 33 words; dropped slots are the last bin.
DI void sort_pairs(const int* route, int pairs, const Plan& plan, int n_expert, int n_used, u32* shared) {
  const int bins = n_expert + 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int steps = (pairs + 31) >> 5, max_warps = n_expert > 32 * PER_LANE ? 8 : (int)blockDim.x >> 5;
  // Few pairs take few warps, whose counts have to be cleared and added up.
  const int n_warps = max(1, min(steps, max_warps)), part = (steps + n_warps - 1) / n_warps * 32;
  u32* hist = shared;                  // [warp][bin]: counts, then first sorted row for the warp's pairs
  u32* start = hist + n_warps * bins;  // [bin]
  u32* scratch = shared + (max_warps + 1) * bins;
  for (int i = threadIdx.x; i < n_warps * bins; i += blockDim.x) hist[i] = 0;
  __syncthreads();
  const int lo = warp * part, hi = warp < n_warps ? min(lo + part, pairs) : 0;
  for (int base = lo; base < hi; base += 32) {
    const int i = base + lane;
    int bin = -1;
    if (i < hi) {
      bin = route[(i64)(i / n_used) * 2 * n_used + n_used + i % n_used];
      if (bin < 0) bin = n_expert;
    }
    const u32 same = same_bin(bin);
    if (bin >= 0 && lane == __ffs((int)same) - 1) hist[warp * bins + bin] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) {
    u32 sum = 0;
    // Counts become the places where a warp's pairs begin in a bin: earlier pairs stay in front.
    for (int w = 0; w < n_warps; w++) {
      const u32 count = hist[w * bins + b];
      hist[w * bins + b] = sum;
      sum += count;
    }
    start[b] = sum;
  }
  __syncthreads();
  const int e = threadIdx.x;
  const u32 count = e < n_expert ? start[e] : 0;
  // Both kinds of tiles in one word, so that one scan places both.
  const u32 tiles = (count + TILE_FEW - 1) / TILE_FEW | (count + TILE_MANY - 1) / TILE_MANY << 16;
  const u32 first = block_scan(count, scratch), kept = scratch[32];
  __syncthreads();
  const u32 tile = block_scan(tiles, scratch), n_tiles = scratch[32];
  if (e < n_expert) {
    start[e] = first;
    plan.offsets[e] = first;
    write_tiles(plan.few, tile & 0xffff, e, first, count, TILE_FEW);
    write_tiles(plan.many, tile >> 16, e, first, count, TILE_MANY);
  }
  if (e == 0) {
    start[n_expert] = kept;
    plan.offsets[n_expert] = kept;
    *(int4*)plan.counts = make_int4(kept, n_tiles & 0xffff, n_tiles >> 16, 0);
  }
  __syncthreads();
  for (int base = lo; base < hi; base += 32) {
    const int i = base + lane;
    int bin = -1;
    if (i < hi) {
      bin = route[(i64)(i / n_used) * 2 * n_used + n_used + i % n_used];
      if (bin < 0) bin = n_expert;
    }
    const u32 same = same_bin(bin);
    u32* next = hist + warp * bins + max(bin, 0);
    if (bin >= 0) {
      const int at = start[bin] + *next + __popc(same & ((1u << lane) - 1));
      plan.order[at] = make_int2(i, bin < n_expert ? bin : -1);
      plan.position[i] = bin < n_expert ? at : -1;
    }
    __syncwarp();
    if (bin >= 0 && lane == __ffs((int)same) - 1) *next += __popc(same);
    __syncwarp();
  }
}

// One block.
extern "C" __global__ void __launch_bounds__(1024, 1)
layer_moe_sort(const i64* st, int symbol, int factor, const int* route, int* order, int* position, int* offsets, int* counts,
               int* few, int* many, int n_expert, int n_used) {
  SMEM_DECL
  sort_pairs(route, (int)step_rows(st, symbol, factor) * n_used, {(int2*)order, position, offsets, counts, (int4*)few, (int4*)many},
             n_expert, n_used, (u32*)smem_raw);
}

// Both for few rows, in one block: every warp routes rows, then all sort.
extern "C" __global__ void __launch_bounds__(512, 1)
layer_moe_route_sort(const i64* st, int symbol, int factor, const float* logits, const float* bias, int* out, int n, int n_used,
                     int gating, int norm, float scale, int n_group, int n_group_used, int fewest, float least, int* order,
                     int* position, int* offsets, int* counts, int* few, int* many) {
  SMEM_DECL
  const int warp = threadIdx.x >> 5, rows = (int)step_rows(st, symbol, factor);
  for (int row = warp; row < rows; row += blockDim.x >> 5)
    route_row<PER_LANE>(logits + (i64)row * n, out + (i64)row * 2 * n_used, (float*)smem_raw + warp * n * (n_group > 1 ? 2 : 1),
              {bias, n, n_used, gating, norm, n_group, n_group_used, fewest, scale, least});
  __syncthreads();
  sort_pairs(out, rows * n_used, {(int2*)order, position, offsets, counts, (int4*)few, (int4*)many}, n, n_used, (u32*)smem_raw);
}

// Sorted rows plus the row of w of their expert; rows without expert are copied. grid (sorted rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_add_id(const i64* st, int symbol, int factor, const float* x, const float* w, i64 w_cols, const int* order, float* out,
             int cols) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  const int e = order[2 * row + 1];
  x += row * cols;
  out += row * cols;
  for (int j = i; j < min(i + 4, cols); j++) out[j] = e < 0 ? x[j] : x[j] + w[e * w_cols + j];
}

// Sorted rows times by[expert], or with n_used times the weight of their slot in a route; rows without expert are copied. Same grid.
extern "C" __global__ void __launch_bounds__(256)
layer_scale_id(const i64* st, int symbol, int factor, const float* x, const float* by, const int* order, float* out, int cols,
               int n_used) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  const int pair = order[2 * row], e = order[2 * row + 1];
  const float f = e < 0 ? 1.f : n_used ? by[pair + pair / n_used * n_used] : by[e];
  for (int j = i; j < min(i + 4, cols); j++) out[row * cols + j] = x[row * cols + j] * f;
}

// out[row] = sum over the slots of weight (1 without route) * y[position]; dropped slots add nothing. grid (rows, parts of 4 * blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_moe_sum(const i64* st, int symbol, int factor, const float* y, const float* route, const int* position, float* out, int cols,
              int n_used) {
  const i64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  if (route) route += row * 2 * n_used;
  position += row * n_used;
  out += row * cols;
  if (cols % 4 == 0) {
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int s = 0; s < n_used; s++) {
      const int p = position[s];
      if (p < 0) continue;
      const float w = route ? route[s] : 1.f;
      const float4 v = ld_f4(y + (i64)p * cols + i);
      acc = make_float4(fmaf(v.x, w, acc.x), fmaf(v.y, w, acc.y), fmaf(v.z, w, acc.z), fmaf(v.w, w, acc.w));
    }
    st_f4(out + i, acc);
  } else {
    for (int j = i; j < min(i + 4, cols); j++) {
      float acc = 0.f;
      for (int s = 0; s < n_used; s++)
        if (position[s] >= 0) acc = fmaf(y[(i64)position[s] * cols + j], route ? route[s] : 1.f, acc);
      out[j] = acc;
    }
  }
}

// Rows after the sorted ones (of dropped slots) become zero. grid (pairs, parts of blockDim.x columns)
extern "C" __global__ void __launch_bounds__(256)
layer_zero_dropped(const i64* st, int symbol, int factor, const int* counts, float* out, int cols) {
  const i64 row = blockIdx.x + (i64)counts[0];
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= step_rows(st, symbol, factor) || i >= cols) return;
  out[row * cols + i] = 0.f;
}
