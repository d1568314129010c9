// Attention for head sizes without a kernel of their own, and for transposed V caches: f32 throughout, one warp per
// (token, head). Keys and values are compact f32 rows (kv_rows_f32, or nodes). Written to be right, not fast.
#include "attn_lists.cuh"
#include "attn_seen.cuh"

// One of the two parts of a query or key.
DI float part_dot(const float* q, const float* k, int width) {
  float s = 0.f;
  for (int i = 0; i < width; i++) s = fmaf(q[i], k[i], s);
  return s;
}
// Shared memory per warp: query [w0 + w1], sums [dv], probabilities [32], rows [32].
// `chosen`: lists of up to `most` cells that tokens see (attn_lists.cuh), or null.
extern "C" __global__ void __launch_bounds__(128, 4)
attn_any(const i64* st, const float* q0, i64 q0_row, int q0_head, int q0_width, const float* q1, i64 q1_row, int q1_head,
         int q1_width, const float* k0, i64 k0_row, int k0_head, int k0_width, const float* k1, i64 k1_row, int k1_head,
         int k1_width, const float* v, i64 v_row, int v_head, int dv, float* out, int n_head, int n_head_kv, float scale,
         int window, int chunk, const float* sinks, float softcap, int seen, const int* chosen, int lists,
         int most, int span) {
  SMEM_DECL
  const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, dk = q0_width + q1_width;
  const i64 i = (i64)blockIdx.x * 4 + w;
  if (i >= st[ST_TOKENS] * n_head) return;
  const i64 token = i / n_head;
  const int head = i % n_head, kv_head = head / (n_head / n_head_kv);
  const i64* segment = segment_of(st, token);
  const int at = (int)(segment[SEG_POS] + (token - segment[SEG_START]));
  const Reach reach = reach_of(st, segment, {window, chunk}, seen, token, at);
  int n_kv = reach.last + 1;
  const int first = reach.from, *list = chosen ? list_of(st, {chosen, lists, most, span}, token, kv_head, n_kv) : nullptr;
  const Cap cap = cap_of(softcap * LOG2E);
  const i64 row0 = segment[SEG_KV_START];

  float* q = (float*)smem_raw + w * (dk + dv + 64);
  float* sum = q + dk;
  float* p = sum + dv;
  int* rows = (int*)(p + 32);
  for (int c = lane; c < dk; c += 32)
    q[c] = c < q0_width ? q0[token * q0_row + (i64)head * q0_head + c]
                        : q1[token * q1_row + (i64)head * q1_head + (c - q0_width)];
  for (int c = lane; c < dv; c += 32) sum[c] = 0.f;
  warp_sync();
  const float* k0_rows = k0 + row0 * k0_row + (i64)kv_head * k0_head;
  const float* k1_rows = k1 + row0 * k1_row + (i64)kv_head * k1_head;
  const float* v_rows = v + row0 * v_row + (i64)kv_head * v_head;
  float top = -INFINITY, total = 0.f;
  for (int pos = first; pos < n_kv; pos += 32) {
    float s = -INFINITY;
    if (pos + lane < n_kv) {
      const i64 row = list ? list[pos + lane] - segment[SEG_CELL] : pos + lane;
      rows[lane] = (int)row;
      s = part_dot(q, k0_rows + row * k0_row, k0_width);
      if (k1_width) s += part_dot(q + k0_width, k1_rows + row * k1_row, k1_width);
      s *= scale * LOG2E;
      if (cap.cap > 0.f) s = capped(cap, s);
    }
    const float peak = fmaxf(top, warp_max(s)), used = peak == -INFINITY ? 0.f : peak;
    const float alpha = ex2(top - used), e = ex2(s - used);
    total = total * alpha + warp_sum(e), top = peak;
    p[lane] = e;
    warp_sync();
    for (int c = lane; c < dv; c += 32) {
      float x = sum[c] * alpha;
      for (int k = 0; k < min(32, n_kv - pos); k++) x = fmaf(p[k], v_rows[rows[k] * v_row + c], x);
      sum[c] = x;
    }
    warp_sync();
  }
  const float f = row_factor(top, total, sinks, head);
  for (int c = lane; c < dv; c += 32) out[i * dv + c] = sum[c] * f;
}
