// Writing the KV cache and reading it as compact rows. Formats: kv_formats.cuh; arithmetic of the quantizers is that of
// the CPU kernels (kernels/kv_blocks.py), in the same order of additions, so codes are the same.
#include "attn_tiles.cuh"

// ---- storing --------------------------------------------------------------------------------------------------------
// The cell of every token. `place`: see row_base.
DI i64 cell_of_token(const i64* st, i64 token, int place) { return (place == 2 ? step_window_cells(st) : step_cells(st))[token]; }
// Whether a token is stored: with `every` above 1, only those that complete so many positions.
DI bool completes(const i64* st, i64 token, int every) { return every == 1 || (step_pos(st)[token] + 1) % every == 0; }
// Elements of float types; a transposed cache only has other strides. One thread per element.
extern "C" __global__ void __launch_bounds__(256)
kv_store_float(const i64* st, const float* x, i64 x_row, int cols, u8* cache, i64 cell_stride, i64 col_stride, int type,
               int place, int every) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i >= st[ST_TOKENS] * cols) return;
  const i64 row = i / cols, col = i % cols;
  if (!completes(st, row, every)) return;
  const float v = x[row * x_row + col];
  u8* p = cache + cell_of_token(st, row, place) * cell_stride + col * col_stride;
  if (type == KT_F32) *(float*)p = v;
  else *(u16*)p = type == KT_F16 ? f2h(v) : f2b(v);
}

// Sum over 16 values in the order of the CPU's vector reduction; both halves of the warp hold the same values.
DI float sum16(float v) {
#pragma unroll
  for (int d = 8; d; d >>= 1) v = __fadd_rn(v, shx(v, d));
  return v;
}
DI float max16(float v) {
#pragma unroll
  for (int d = 8; d; d >>= 1) v = fmaxf(v, shx(v, d));
  return v;
}
constexpr float TINY = 1e-20f;  // below it a block is zero

// Level (as float) and code of a scaled value.
struct Level {
  int code;
  float level;
};
DI Level level_of(float x, int type) {
  if (type == KT_IQ4_NL) {
    constexpr float limits[15] = {-115.5f, -93.5f, -74.f, -57.f, -42.f, -28.5f, -16.f, -4.5f,
                                  7.f,     19.f,   31.5f, 45.5f, 61.f,  79.f,   101.f};
    int code = 0;
#pragma unroll
    for (int i = 0; i < 15; i++) code += x > limits[i];
    const u64 values = code < 8 ? 0xf6eaddcfbfad9881ull : 0x7159453526190d01ull;
    return {code, (float)(i8)(values >> (8 * (code & 7)))};
  }
  const int zero = type == KT_Q6_0 ? 32 : type == KT_Q5_0 ? 16 : 8;
  const float level = fminf(fmaxf(rintf(x), (float)-zero), (float)(zero - 1));
  return {(int)level + zero, level};
}

// The scale of a block and the inverse that its codes are rounded with; x and y are the lane's element of either half.
DI void best_scale(float x, float y, float extreme, int type, float& scale, float& best) {
  const float lowest = type == KT_IQ4_NL ? -127.f : type == KT_Q6_0 ? -32.f : type == KT_Q5_0 ? -16.f : -8.f;
  const float highest = type == KT_IQ4_NL ? 113.f : -lowest - 1.f;
  float top_xl = 0.f, top_ll = 1.f;
  best = 0.f;
  for (int k = 0; k < 7; k++) {
    float inverse;
    if (k == 6) inverse = top_xl != 0.f ? top_ll / top_xl : 0.f;
    else inverse = __fmul_rn(k < 3 ? lowest : highest, __fadd_rn(0.95f, __fmul_rn(0.05f, (float)(k % 3)))) / extreme;
    const float a = level_of(__fmul_rn(x, inverse), type).level, b = level_of(__fmul_rn(y, inverse), type).level;
    const float xl = sum16(fmaf(x, a, __fmul_rn(y, b))), ll = sum16(fmaf(a, a, __fmul_rn(b, b)));
    if (xl * xl * top_ll > top_xl * top_xl * ll) top_xl = xl, top_ll = ll, best = inverse;
  }
  scale = top_xl / top_ll;
}

// The same for types with a minimum: codes are rint((x - at) * best).
DI float range_code(float x, float at, float inverse, float top) {
  return fminf(fmaxf(rintf(__fmul_rn(__fsub_rn(x, at), inverse)), 0.f), top);
}
DI void best_range(float x, float y, float low, float width, float top, float& scale, float& minimum, float& at_out,
                   float& best) {
  const float mean = sum16(__fadd_rn(x, y)) / 32.f;
  float top_cov = 0.f, top_var = 1.f, top_mid = 0.f;
  at_out = low, best = 0.f;
  for (int k = 0; k < 4; k++) {
    float at, inverse;
    if (k == 3) {
      at = __fsub_rn(mean, __fmul_rn(top_cov / top_var, top_mid));
      inverse = top_cov > 0.f ? top_var / top_cov : 0.f;
    } else {
      const float inside = __fmul_rn(0.03f, (float)k);
      at = __fadd_rn(low, __fmul_rn(inside, width));
      inverse = top / __fmul_rn(width, __fsub_rn(1.f, __fmul_rn(2.f, inside)));
    }
    const float a = range_code(x, at, inverse, top), b = range_code(y, at, inverse, top);
    const float mid = sum16(__fadd_rn(a, b)) / 32.f, da = __fsub_rn(a, mid), db = __fsub_rn(b, mid);
    const float cov = sum16(fmaf(__fsub_rn(x, mean), da, __fmul_rn(__fsub_rn(y, mean), db)));
    const float var = sum16(fmaf(da, da, __fmul_rn(db, db)));
    if (cov * cov * top_var > top_cov * top_cov * var) top_cov = cov, top_var = var, top_mid = mid, at_out = at, best = inverse;
  }
  scale = top_cov / top_var;
  minimum = __fsub_rn(mean, __fmul_rn(scale, top_mid));
}

// Blocks of 32, one per warp. `first` is the first block of the cache row that is written.
extern "C" __global__ void __launch_bounds__(256)
kv_store_blocks(const i64* st, const float* x, i64 x_row, int n_blocks, u8* cache, i64 n_cells, int row_blocks, int first,
                int type, int place, int every) {
  const i64 i = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (i >= st[ST_TOKENS] * n_blocks) return;
  if (!completes(st, i / n_blocks, every)) return;
  const i64 row = i / n_blocks, block = cell_of_token(st, row, place) * row_blocks + first + i % n_blocks;
  const KvTensor t = kv_tensor(cache, n_cells, row_blocks, type);
  const float own = x[row * x_row + i % n_blocks * 32 + lane], other = shx(own, 16);
  const float v0 = lane < 16 ? own : other, v1 = lane < 16 ? other : own;
  const float nan = sum16(__fmul_rn(__fadd_rn(v0, v1), 0.f));  // a NaN or infinity goes into the scale
  u16* scales = (u16*)t.scale + block * (kv_has_minimum(type) ? 2 : 1);
  if (type == KT_Q8_0) {
    const float largest = max16(fmaxf(fabsf(v0), fabsf(v1)));
    const float inverse = largest > 0.f ? 127.f / largest : 0.f;
    ((u8*)t.codes)[block * 32 + lane] = (u8)(int)rintf(__fmul_rn(own, inverse));
    if (lane == 0) scales[0] = f2h(__fadd_rn(largest / 127.f, nan));
    return;
  }
  const float high = max16(fmaxf(v0, v1)), low = -max16(fmaxf(-v0, -v1));
  int code;
  float scale = 0.f, minimum = low, best = 0.f;
  if (kv_has_minimum(type)) {
    const float width = __fsub_rn(high, low), top = type == KT_Q5_1 ? 31.f : 15.f;
    float at = low;
    if (width > TINY) best_range(v0, v1, low, width, top, scale, minimum, at, best);
    code = (int)range_code(own, at, best, top);
  } else {
    const float extreme = high > -low ? high : low;
    if (fabsf(extreme) > TINY) best_scale(v0, v1, extreme, type, scale, best);
    code = level_of(__fmul_rn(own, best), type).code;
  }
  const int pair = (int)shx_u32((u32)code, 16);  // lanes below 16: the code 16 elements on
  if (lane < 16) ((u8*)t.codes)[block * 16 + lane] = (u8)((code & 15) | (pair & 15) << 4);
  if (lane == 0) scales[0] = f2h(__fadd_rn(scale, nan));
  if (lane == 0 && kv_has_minimum(type)) scales[1] = f2h(minimum);
  const u32 fifth = ballot((code >> 4) & 1);
  if (kv_high_bytes(type) == 4 && lane == 0) *(u32*)(t.high + block * 4) = fifth;
  const u32 two = (u32)(code >> 4) | (u32)(pair >> 4) << 2, far = shx_u32(two, 8);
  if (type == KT_Q6_0 && lane < 8) ((u8*)t.high)[block * 8 + lane] = (u8)(two | far << 4);
}

// q8_KV: one scale per row, one warp per row.
extern "C" __global__ void __launch_bounds__(256)
kv_store_rows(const i64* st, const float* x, i64 x_row, int cols, u8* cache, i64 n_cells, int place, int every) {
  const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= st[ST_TOKENS] || !completes(st, row, every)) return;
  const i64 cell = cell_of_token(st, row, place);
  const float* source = x + row * x_row;
  float largest = 0.f, nan = 0.f;
  for (int i = lane; i < cols; i += 32) {
    largest = fmaxf(largest, fabsf(source[i]));
    nan = fmaf(source[i], 0.f, nan);
  }
  largest = warp_max(largest), nan = warp_sum(nan);
  const float inverse = largest > TINY ? 127.f / largest : 0.f;
  int total = 0;
  for (int i = lane; i < cols; i += 32) {
    const int code = (int)rintf(__fmul_rn(source[i], inverse));
    total += code;
    cache[cell * cols + i] = (u8)code;
  }
  total = warp_sum_i32(total);
  u8* header = cache + n_cells * cols + cell * 8;
  if (lane == 0) *(float*)header = __fadd_rn(largest / 127.f, nan);
  if (lane == 1) *(int*)(header + 4) = total;
}

// ---- reading --------------------------------------------------------------------------------------------------------
template <int TO> DI void put(void* out, i64 at, float v) {
  if (TO == KT_F32) ((float*)out)[at] = v;
  else ((u16*)out)[at] = TO == KT_F16 ? f2h(v) : f2b(v);
}
// 16 values; in whole vectors where rows are multiples of eight values.
template <int TO> DI void put16(void* out, i64 at, const float (&y)[16], bool vectors) {
  if (!vectors) {
#pragma unroll
    for (int e = 0; e < 16; e++) put<TO>(out, at + e, y[e]);
  } else if constexpr (TO == KT_F32) {
#pragma unroll
    for (int e = 0; e < 16; e += 4) *(float4*)((float*)out + at + e) = make_float4(y[e], y[e + 1], y[e + 2], y[e + 3]);
  } else {
    u32 w[8];
#pragma unroll
    for (int e = 0; e < 8; e++) w[e] = pack2<TO == KT_BF16>(y[2 * e], y[2 * e + 1]);
    *(uint4*)((u16*)out + at) = make_uint4(w[0], w[1], w[2], w[3]);
    *(uint4*)((u16*)out + at + 8) = make_uint4(w[4], w[5], w[6], w[7]);
  }
}
// Where compact row r is in a tensor: segments hold adjacent rows. Below 0: no query sees that position.
DI i64 row_of(const i64* st, i64 r, int place, const View& view) {
  const i64* segment = step_segments(st);
  i64 index = 0;
  while (r >= segment[SEG_KV_START] + segment[SEG_KV]) segment += SEG_WORDS, index++;
  const i64 pos = r - segment[SEG_KV_START];
  if (pos < first_seen(view, (int)segment[SEG_POS])) return -1;
  return place == 1 ? r : (place == 2 ? step_windows(st)[index] : segment[SEG_CELL]) + pos;
}
// Columns offset.. of every cached position that queries see as rows of `cols` elements.
// Quantized: `row` is blocks per row. Float types: strides in bytes. Threads take 16 columns of one position.
template <int TO>
DI void rows_body(const i64* st, const u8* source, i64 n_cells, int row_blocks, i64 row_stride, i64 col_stride, int type,
                  int place, int offset, int cols, void* out, const View& view) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x, n_kv = st[ST_KV];
  const int groups = (cols + 15) / 16;
  if (i >= n_kv * groups) return;
  const bool across = col_stride > row_stride;  // transposed: positions are adjacent
  const i64 r = across ? i % n_kv : i / groups;
  const int first = (int)(across ? i / n_kv : i % groups) * 16;
  const i64 cell = row_of(st, r, place, view);
  if (cell < 0) return;
  if (!kv_is_float(type)) {
    const int group = (offset + first) >> 4;
    Raw16 raw;
    float y[16];
    kv_load_codes(raw, kv_tensor(source, n_cells, row_blocks, type), cell, group);
    kv_codes_f32(y, raw, type, group & 1);
    put16<TO>(out, r * cols + first, y, cols % 8 == 0);
    return;
  }
  const u8* p = source + cell * row_stride + (offset + first) * col_stride;
  if (type == KT_F32 && col_stride == 4 && ((i64)p & 15) == 0 && cols - first >= 16) {
    float y[16];
#pragma unroll
    for (int e = 0; e < 16; e += 4) {
      const float4 v = *(const float4*)(p + 4 * e);
      y[e] = v.x, y[e + 1] = v.y, y[e + 2] = v.z, y[e + 3] = v.w;
    }
    put16<TO>(out, r * cols + first, y, cols % 8 == 0);
    return;
  }
  for (int e = 0; e < min(16, cols - first); e++) put<TO>(out, r * cols + first + e, kv_element(p + e * col_stride, type));
}
#define KV_ROWS(NAME, TO)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
  NAME(const i64* st, const u8* source, i64 n_cells, int row_blocks, i64 row_stride, i64 col_stride, int type,         \
       int place, int offset, int cols, void* out, int window, int chunk) {                                            \
    rows_body<TO>(st, source, n_cells, row_blocks, row_stride, col_stride, type, place, offset, cols, out,             \
                  {window, chunk});                                                                                    \
  }
KV_ROWS(kv_rows_f32, KT_F32)
KV_ROWS(kv_rows_f16, KT_F16)
KV_ROWS(kv_rows_bf16, KT_BF16)
