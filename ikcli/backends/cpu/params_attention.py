"""Parameters of kernels of the KV cache and of attention (see `params.py`). Strides are in bytes."""

from __future__ import annotations

from ikcli.backends.cpu.params import F32, Address, Params, Record

MAX_ROWS = 144  # of a task
STAT_BYTES = 4 * MAX_ROWS  # of one of the statistics of rows (kernels/attention_tasks.py)
STATS_BYTES = 6 * STAT_BYTES
SPLITS_PER_THREAD = 4  # parts of tasks, if there are few of these
BLOCK_SPACE = 2560  # bytes that kernels/attention_codes.py may need beyond rows of f32


class KvStoreParams(Params):
    x: Address  # at its first column
    stride: int
    cols: int
    cache: Address
    row_bytes: int  # of the cache
    first: int  # its column
    cells: int  # word of the state block with the address of the cells


class KvStoreTransposedParams(Params):
    x: Address  # at its first column
    stride: int
    cols: int
    cache: Address  # at its first row
    n_cells: int


class KvRowsParams(Params):
    cache: Address
    row_bytes: int
    first: int  # column
    cols: int
    out: Address


class AttentionPart(Record):
    """Columns of heads of q, k or v; `offset`, `head_stride` and `width` in columns."""

    at: Address
    row_bytes: int
    offset: int
    head_stride: int
    width: int  # 0: absent
    place: int  # see `cell_places.py`


class AttentionParams(Params):
    """Parameters of all attention kernels. A task is some tokens and the heads of a unit, which share a KV head."""

    out: Address
    out_stride: int
    first_head: int
    units: int
    unit_heads: int
    group: int  # query heads of a KV head
    block: int  # tokens of a task
    tile: int  # positions
    scale: F32
    k_chunks: int  # of 16 columns
    v_cols: int
    scratch: Address
    scratch_bytes: int  # of a thread
    k_at: int  # places in scratch, bytes
    v_at: int
    s_at: int
    window: int  # positions (many: no window)
    chunk: int
    sinks: Address  # f32 per head
    slopes: Address  # likewise
    cap: F32
    q: tuple[AttentionPart, AttentionPart]
    k: tuple[AttentionPart, AttentionPart]
    v: AttentionPart


class FlashParams(AttentionParams):
    v_chunk: int  # where V lies in K's rows
    o_at: int
    stats_at: int
    slots: Address  # for parts of tasks
    slot_bytes: int
    q_unit: int  # bytes per unit, where a task has several
    o_unit: int
    units_per_task: int
    min_split: int  # fewest positions of a part of a task
    most_distance: int  # from which on the biases in `slopes` stay the same
    batch_invariant: int  # 1: how a task is split does not depend on the other tasks


class FullParams(AttentionParams):
    """Parameters of attention with stored scores."""

    score_rows: int  # per head
    scores: Address
    score_bytes: int  # of a row


class SparseParams(FlashParams):
    """Parameters of attention to chosen positions."""

    cells: Address  # i32 per token, ascending
    cell_bytes: int  # of a token
    list_bytes: int  # from the list of a KV head to that of the next; 0: all have the same
    most: int  # cells of a token that sees as many positions
    span: int  # positions that are chosen together
    own: int  # 1: the list ends with the query's own span; 0: with what is left behind whole ones


class PrefixParams(SparseParams):
    """Parameters of attention to rows before all positions, and to listed ones."""

    prefix: Address  # f32, rows as wide as those of the cache
    prefix_bytes: int  # of a row
    n_prefix: int


INDEX_SPAN = 1024  # positions of a task of kernels/index_top_k.py, for few tokens


class IndexParams(AttentionParams):
    """Parameters of an indexer; q, k and scratch as in attention, `out`: the cells of every token."""

    most: int  # positions that are chosen
    ratio: int  # positions per key
    weights: Address  # f32 per head; 0: each is 1
    weight_bytes: int  # of a token
    weights_at: int  # places in scratch, bytes
    counts_at: int
    scores_at: int
    scores: Address  # of all tokens, where tasks share them
    score_bytes: int  # of a token


class IndexBlockParams(AttentionParams):
    """Parameters of an indexer of blocks; q, k and scratch as in attention, `out`: the cells of every token."""

    most: int  # blocks that are chosen
    span: int  # positions of a block
    local: int  # blocks up to the query's own that are always chosen
    task_span: int  # positions of a task: whole blocks
    best_at: int  # places in scratch, bytes
    counts_at: int
    chosen_at: int
    scores: Address  # f32 of every block, per token and head
    score_bytes: int  # of a head


class EntryPositionsParams(Params):
    out: Address
    out_bytes: int
    chosen: Address
    chosen_bytes: int
    ratio: int
    most: int


class PoolParams(Params):
    cache: Address  # f32
    row_bytes: int
    window: int  # 1: rows are those of a cache of windows
    bias: Address  # f32, a row per position of an entry
    parts: int
    width: int
    ratio: int
    out: Address


class PooledStoreParams(Params):
    x: Address
    stride: int
    cols: int
    cache: Address
    row_bytes: int
    ratio: int


class PooledCellsParams(Params):
    out: Address
    out_bytes: int
    in_window: int  # 1: rows are those of a cache of windows
    chosen: Address  # 0: all entries
    chosen_bytes: int
    window: int
    ratio: int
    most: int


class PooledParams(FlashParams):
    """Parameters of attention to positions and entries."""

    cells: Address  # i32 per token: rows, entries as -1 - row
    cell_bytes: int  # of a token
    recent: int  # most positions
    ratio: int
    most: int  # entries
    pooled: Address
