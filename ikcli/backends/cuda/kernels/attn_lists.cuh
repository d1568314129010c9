// Lists of the cells that an indexer chose (attn_index.cu), as attention reads them.
#pragma once
#include "attn_tiles.cuh"

// Lists of up to `most` cells, in blocks of `span` positions: a list per token, or (`lists`) per token and KV head. Below 0,
// `span` is the negative of the positions of an entry: whole entries, then the positions that no entry has yet.
struct Lists {
  const int* cells;
  int lists, most, span;
};
// The list of a token and a KV head, and how many of its entries are cells: all positions, or `most` / `span` blocks of
// positions, of which the last is seen up to the token; or whole entries and what is left behind them.
DI const int* list_of(const i64* st, const Lists& l, i64 token, int kv_head, int& n) {
  const i64* segment = segment_of(st, token);
  const int seen = (int)(segment[SEG_POS] + token - segment[SEG_START]) + 1;
  const int size = abs(l.span), part = (seen - (l.span > 0)) % size;
  n = seen <= l.most ? seen : l.most - (size - 1) + part;
  return l.cells + (token * l.lists + (l.lists > 1 ? kv_head : 0)) * l.most;
}
