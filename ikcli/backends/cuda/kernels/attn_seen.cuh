// Queries that see more than the positions before them: later ones of their segment (an encoder), or a range of positions
// that comes with the token (an image in a text, the window of a patch).
#pragma once
#include "attn_tiles.cuh"

constexpr int ST_P_PLACES = 14;  // word of the step block: the address of i32 x 8 per token, of which 4 and 5 are the range
constexpr int PLACE_WORDS = 8, PLACE_SEEN = 4;
enum Seen { SEEN_RANGE = 1, SEEN_LATER = 2 };  // bits

// The positions from .. last that a token of the micro-batch at `pos` sees; `segment`: its words in the step block.
struct Reach {
  int from, last;
};
DI Reach reach_of(const i64* st, const i64* segment, const View& view, int seen, i64 token, int pos) {
  Reach r = {first_seen(view, pos), pos};
  if (seen & SEEN_RANGE) {
    const int* range = (const int*)st[ST_P_PLACES] + token * PLACE_WORDS + PLACE_SEEN;
    r.from = max(min(r.from, range[0]), 0), r.last = max(r.last, range[1] - 1);
  }
  const int end = (int)segment[SEG_KV] - 1;
  r.last = seen & SEEN_LATER ? end : min(r.last, end);
  return r;
}
DI Reach reach_of_row(const i64* st, const Tile& t, const View& view, int seen, int row, int group) {
  const int token = row / group;
  return reach_of(st, step_segments(st) + t.segment * SEG_WORDS, view, seen, t.token0 + token, t.pos + token);
}
DI Sight row_sight(const i64* st, const Tile& t, const View& view, int seen, int row, int group) {
  if (row >= t.n_rows) return {1 << 30, 0};
  const Reach r = reach_of_row(st, t, view, seen, row, group);
  return {r.from, (u32)(r.last - r.from)};
}

// Of the rows first .. first + n - 1 of a tile: oldest .. farthest are visible to one of them, newest .. nearest to all.
struct Limits {
  int oldest, newest, nearest, farthest;
};
DI int warp_top(int v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = max(v, (int)shx_u32((u32)v, d));
  return v;
}
DI Limits limits_of(const i64* st, const Tile& t, const View& view, int seen, int first, int n, int group) {
  Limits l = {1 << 30, -1, 1 << 30, -1};
  for (int row = first + (threadIdx.x & 31); row < min(first + n, t.n_rows); row += 32) {
    const Reach r = reach_of_row(st, t, view, seen, row, group);
    l.oldest = min(l.oldest, r.from), l.newest = max(l.newest, r.from);
    l.nearest = min(l.nearest, r.last), l.farthest = max(l.farthest, r.last);
  }
  return {-warp_top(-l.oldest), warp_top(l.newest), -warp_top(-l.nearest), warp_top(l.farthest)};
}
