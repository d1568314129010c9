"""Number the ways in which attention finds the row of a position; kernels and lowering share these numbers."""

# Of a K or V part: cells of the sequence, compact rows of the micro-batch, cells of a cache of windows.
IN_CELLS, IN_ROWS, IN_WINDOW = range(3)
# Words of the state block: addresses of i64[n_tokens], the cell of every token in caches of positions and of windows,
# and of i64[n_seg], the cell of position 0 in caches of windows, below zero where the first positions are gone.
CELLS, WINDOW_CELLS, WINDOWS = 6, 11, 12
