// Shared parts of the attention kernels: the rows and cached positions of a block, and its partial results.
//
// The queries of a segment are rows r = token*group + g for the `group` heads that share a KV head, cut into tiles. A
// tile belongs to one segment; blocks find theirs in the step block, so grids are only upper bounds.
#pragma once
#include "kv_formats.cuh"

// The attention mask of a query over the positions before it: the last `window`, those of its `chunk` (0: all).
struct View {
  int window, chunk;
};
DI int first_seen(const View& view, int pos) {
  int first = view.window ? pos - view.window + 1 : 0;
  if (view.chunk) first = max(first, pos - pos % view.chunk);
  return max(first, 0);
}
// The most positions that any query sees.
DI int most_seen(const View& view) {
  const int window = view.window ? view.window : 1 << 30;
  return view.chunk ? min(view.chunk, window) : window;
}

// How cached positions are divided into parts, which are whole blocks of `block` positions. `fixed` 0: n_split equal parts of
// what a tile sees. Otherwise the bounds are multiples of a size that depends on nothing but the position of a row, so
// that its sums have the same bits whatever is beside it: at most `fixed` parts of at least PART_LEAST blocks.
struct Split {
  int n_split, fixed, block;
};
constexpr int PART_LEAST = 2;
DI int part_size(const Split& s, const View& view, int pos) {
  const int blocks = (min(pos + 1, most_seen(view)) + s.block - 1) / s.block;
  return max(PART_LEAST, (blocks + s.fixed - 1) / s.fixed) * s.block;
}
// How many of a segment's tokens, from the first on, have parts of one size. The others, of at most 8, have the next size.
DI int same_parts(const Split& s, const View& view, int pos, int tokens) {
  if (!s.fixed || tokens < 2) return tokens;
  const int limit = part_size(s, view, pos) * s.fixed;
  return limit >= most_seen(view) ? tokens : min(tokens, limit - pos);
}

struct Tile {
  int row0, n_rows;            // first row of the tile inside the segment, end of the rows it may have
  i64 token0;                  // first token of the segment in the micro-batch
  i64 cell, kv_row;            // row of position 0: in caches, in compact rows
  int segment;
  int pos;                     // position of the first token
  int kv_first, kv_end;        // positions that rows of the tile may see
};
// Tile number `index` of `tile_rows` rows; false beyond the last one. A lane per segment: all read at once.
DI bool find_tile(const i64* st, int index, int tile_rows, int group, const View& view, const Split& split, Tile& t) {
  const i64* segments = step_segments(st);
  const int n = (int)st[ST_SEGMENTS], lane = threadIdx.x & 31;
  for (int first = 0; first < n; first += 32) {
    const i64* p = segments + min(first + lane, n - 1) * SEG_WORDS;
    const int tokens = first + lane < n ? (int)p[SEG_TOKENS] : 0, pos = (int)p[SEG_POS];
    const int head = same_parts(split, view, pos, tokens);  // these have tiles of their own
    const int tiles = (head * group + tile_rows - 1) / tile_rows;
    const int all = tiles + ((tokens - head) * group + tile_rows - 1) / tile_rows;
    int end = all;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = (int)shup_u32((u32)end, d);
      if (lane >= d) end += before;
    }
    const u32 beyond = ballot(index < end);
    if (!beyond) {
      index -= (int)shfl_u32((u32)end, 31);
      continue;
    }
    const int at = __ffs((int)beyond) - 1;
    index -= (int)shfl_u32((u32)(end - all), at);
    const int mine = (int)shfl_u32((u32)tiles, at), heads = (int)shfl_u32((u32)head, at) * group;
    p = segments + (first + at) * SEG_WORDS;
    t.row0 = index < mine ? index * tile_rows : heads + (index - mine) * tile_rows;
    const int all_rows = (int)shfl_u32((u32)tokens, at) * group;
    t.n_rows = index < mine ? heads : all_rows;
    t.token0 = p[SEG_START], t.cell = p[SEG_CELL], t.kv_row = p[SEG_KV_START], t.segment = first + at;
    t.pos = (int)shfl_u32((u32)pos, at);
    t.kv_first = first_seen(view, t.pos + t.row0 / group);
    t.kv_end = t.pos + (min(t.row0 + tile_rows, t.n_rows) - 1) / group + 1;
    return true;
  }
  return false;
}
// Where rows of a tensor are: at cells, compact rows, or cells of windows (attention.py: PLACES).
DI i64 row_base(const i64* st, const Tile& t, int place) {
  if (place == 2) return step_windows(st)[t.segment];
  return place ? t.kv_row : t.cell;
}
// Position of a row, -1 beyond the segment: positions up to it are visible.
DI int row_pos(const Tile& t, int row, int group) { return row < t.n_rows ? t.pos + row / group : -1; }
// The positions that a row sees: from .. from + more; none beyond the segment.
struct Sight {
  int from;
  u32 more;
  __device__ __forceinline__ bool hides(int pos) const { return (u32)(pos - from) > more; }
};
DI Sight row_sight(const Tile& t, const View& view, int row, int group) {
  if (row >= t.n_rows) return {1 << 30, 0};
  const int pos = t.pos + row / group, from = first_seen(view, pos);
  return {from, (u32)(pos - from)};
}

// Positions of part `part` of a tile: those from lo to hi - 1 are read, blocks begin at `start` <= lo.
struct Range {
  int start, lo, hi;
};
//
// Where windows move, part k of all positions that a row may ever see is part k % n_split: the parts of a row are added
// in the same order whatever the first position of its tile is.
DI Range part_range(const Tile& t, const View& view, const Split& s, int part, int group) {
  int size, first;
  if (s.fixed) {
    size = part_size(s, view, t.pos + t.row0 / group);
    first = t.kv_first / size;
    part -= first % s.n_split;
    if (part < 0) part += s.n_split;
    first *= size;
  } else {
    first = t.kv_first / s.block * s.block;
    size = ((t.kv_end - first + s.block - 1) / s.block + s.n_split - 1) / s.n_split * s.block;
  }
  const int lo = max(first + part * size, t.kv_first);
  return {lo / s.block * s.block, lo, min(first + (part + 1) * size, t.kv_end)};
}

// The segment of a token.
DI const i64* segment_of(const i64* st, i64 token) {
  const i64* segment = step_segments(st);
  while (token >= segment[SEG_START] + segment[SEG_TOKENS]) segment += SEG_WORDS;
  return segment;
}
// Tile number `index` of the rows (heads) of single tokens that see the entries of a list of up to `most` positions.
DI bool token_tile(const i64* st, int index, int tile_rows, int heads, int most, Tile& t) {
  const int tiles = (heads + tile_rows - 1) / tile_rows;
  t.token0 = index / tiles, t.row0 = index % tiles * tile_rows, t.n_rows = heads;
  if (t.token0 >= st[ST_TOKENS]) return false;
  const i64* segment = segment_of(st, t.token0);
  t.kv_first = 0, t.kv_end = min((int)(segment[SEG_POS] + t.token0 - segment[SEG_START]) + 1, most);
  t.pos = t.kv_end - 1;
  t.cell = segment[SEG_CELL], t.kv_row = segment[SEG_KV_START], t.segment = 0;
  return true;
}
// Part `part` of such a list.
DI Range list_range(const Tile& t, const Split& s, int part, int most) {
  const int size = ((most + s.block - 1) / s.block + s.n_split - 1) / s.n_split * s.block, lo = part * size;
  return {lo, lo, min(lo + size, t.kv_end)};
}

// Scores (in base 2) that are limited to +-cap by a tanh; cap 0: they are not.
struct Cap {
  float cap, twice;  // twice: 2 log2(e) / cap
};
DI Cap cap_of(float cap) { return {cap, cap > 0.f ? 2.f * LOG2E / cap : 0.f}; }
DI float capped(const Cap& c, float s) { return fmaf(-2.f * c.cap, rcp(1.f + ex2(s * c.twice)), c.cap); }

// 1 / sum of a soft-max; 0 for a row that sees nothing. A NaN stays one.
DI float reciprocal(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }
// What a row's sums are multiplied with at the end. `sinks`: logits of the heads that have no value, or null.
DI float row_factor(float top, float sum, const float* sinks, int head) {
  const float sink = sinks ? sinks[head] * LOG2E : -INFINITY;
  const float peak = fmaxf(top, sink), used = peak == -INFINITY ? 0.f : peak, f = ex2(top - used);
  return f * reciprocal(sum * f + ex2(sink - used));
}

// The queries of a tile as ROWS rows of WIDTH values, a row (two short ones) per warp and turn: `at` (token, head, column)
// is where four values are, `put` (row, column, two pairs of 16 bits) where they go. Scaled in f32. Up to
// MOST rows of a warp are on their way at once; `then` is called behind the first of these reads, because those of it would
// delay them.
template <bool BF, int ROWS, int WIDTH, int WARPS, class At, class Put, class Then>
DI void load_queries(const Tile& t, int group, int first_head, float scale, At at, Put put, Then then) {
  constexpr int LANES = WIDTH <= 64 ? 16 : 32, PER = 32 / LANES, TURNS = (WIDTH / 4 + LANES - 1) / LANES;
  constexpr int ALL = (ROWS + WARPS * PER - 1) / (WARPS * PER), MOST = TURNS > 2 ? 4 : 8;
  constexpr int AT_ONCE = ALL < MOST ? ALL : MOST;
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * PER + lane / LANES;
#pragma unroll 1
  for (int turn = 0; turn < ALL; turn += AT_ONCE) {
    float4 v[AT_ONCE][TURNS];
#pragma unroll
    for (int x = 0; x < AT_ONCE; x++) {
      const int row = t.row0 + first + (turn + x) * WARPS * PER, head = first_head + row % group;
      const i64 token = t.token0 + row / group;
#pragma unroll
      for (int i = 0; i < TURNS; i++) {
        const int c = (lane % LANES + i * LANES) * 4;
        v[x][i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row < t.n_rows && c < WIDTH) v[x][i] = *(const float4*)at(token, head, c);
      }
    }
    if (turn == 0) then();
#pragma unroll
    for (int x = 0; x < AT_ONCE; x++) {
      const int r = first + (turn + x) * WARPS * PER;
#pragma unroll
      for (int i = 0; i < TURNS; i++) {
        const int c = (lane % LANES + i * LANES) * 4;
        const float4 q = v[x][i];
        if (r < ROWS && c < WIDTH) put(r, c, make_uint2(pack2<BF>(q.x * scale, q.y * scale), pack2<BF>(q.z * scale, q.w * scale)));
      }
    }
  }
}
