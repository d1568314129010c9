// What the attention kernels share: which rows and which cached positions a block works on, and its partial results.
//
// The queries of a segment are rows r = token*group + g for the `group` heads that share a KV head, cut into tiles. A
// tile belongs to one segment; blocks find theirs in the step block, so grids are only upper bounds.
#pragma once
#include "kv_formats.cuh"

struct Tile {
  int row0, n_rows;    // first row of the tile inside the segment, rows of the segment
  i64 token0;          // first token of the segment in the micro-batch
  i64 cell, kv_row;    // first cell, first compact row of the segment
  int pos, n_kv;       // position of the first token, cached positions
  int kv_end;          // one past the last position that a row of the tile may see
};
// Tile number `index` of `tile_rows` rows; false beyond the last one. Segments are read eight at a time, because each
// read waits for L2.
DI bool find_tile(const i64* st, int index, int tile_rows, int group, Tile& t) {
  const i64* segments = step_segments(st);
  const int n = (int)st[ST_SEGMENTS];
  int found = -1;
  for (int s = 0; s < n && found < 0; s += 8) {
    int tokens[8];
#pragma unroll
    for (int i = 0; i < 8; i++) tokens[i] = s + i < n ? (int)segments[(s + i) * SEG_WORDS + SEG_TOKENS] : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int tiles = (tokens[i] * group + tile_rows - 1) / tile_rows;
      if (found < 0) {
        if (index < tiles) found = s + i;
        else index -= tiles;
      }
    }
  }
  if (found < 0) return false;
  const i64* p = segments + found * SEG_WORDS;
  t.row0 = index * tile_rows, t.n_rows = (int)p[SEG_TOKENS] * group;
  t.token0 = p[SEG_START], t.cell = p[SEG_CELL], t.kv_row = p[SEG_KV_START];
  t.pos = (int)p[SEG_POS], t.n_kv = (int)p[SEG_KV];
  t.kv_end = min(t.pos + (min(t.row0 + tile_rows, t.n_rows) - 1) / group + 1, t.n_kv);
  return true;
}
// Position of a row, -1 beyond the segment: positions up to it are visible.
DI int row_pos(const Tile& t, int row, int group) { return row < t.n_rows ? t.pos + row / group : -1; }

// Positions [lo, hi) of part `split`; bounds between parts are multiples of `block`, so that only the end of what a tile
// may see needs a mask. `steps` 0: equal parts of whole blocks of `block` positions. Otherwise parts whose
// bounds do not depend on the number of positions: PART_COUNT of 128, as many of 256, ..., up to 128 << (steps - 1).
constexpr int PART_COUNT = 16, PART_SIZE = 128;
DI int part_start(int part, int steps) {
  const int level = min(part / PART_COUNT, steps - 1);
  return PART_SIZE * (PART_COUNT * ((1 << level) - 1) + ((part - level * PART_COUNT) << level));
}
DI void split_range(const Tile& t, int split, int n_split, int steps, int block, int& lo, int& hi) {
  if (steps == 0) {
    const int blocks = (t.n_kv + block - 1) / block, per = (blocks + n_split - 1) / n_split * block;
    lo = split * per, hi = lo + per;
  } else {
    lo = part_start(split, steps), hi = part_start(split + 1, steps);
  }
  hi = split == n_split - 1 ? t.kv_end : min(hi, t.kv_end);
}
