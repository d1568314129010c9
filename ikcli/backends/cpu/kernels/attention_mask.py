"""The attention mask and the changes of scores: windows, sinks, soft caps and distances.

`more`: see attention_tasks.py. A sink is a score that a row begins with, in the first part of a split task: it is the
maximum so far, and the sum is 1, while the output is that of no positions.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention_tasks import FIRST, HEAD, LIMIT, LOWEST, PLACE, SLOPE, L, M, make_first_seen
from ikcli.backends.cpu.kernels.media import SEEN, SEEN_END, place
from ikcli.backends.cpu.params_attention import STAT_BYTES
from ikcli.native.jit import inline
from ikcli.native.simd.tanh import vtanh
from ikcli.native.simd.vec import (
    cvt_i32x16_f32,
    lane_index,
    ld_f32,
    ld_i32,
    load_f32x16,
    load_i32x16,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    st_i32,
    store_f32x16,
    vabs,
    vadd,
    vmul,
    vsub,
    zero_f32x16,
)

_F1 = np.float32(1.0)


def make_start_rows(more):
    """Return start_rows(params, token, unit, rows, position, end, stats, out, out_bytes, is_first).

    It writes statistics and output of no positions at all. `position` is that of the first row's token, `end` the end
    of the positions that the task sees, `is_first`: whether this is the first part of the task.
    """
    has_windows, has_sinks, first_seen = "w" in more, "s" in more, make_first_seen(more)
    sees_all, has_distance, has_ranges = (
        "b" in more or "i" in more or "p" in more or "x" in more,
        "d" in more,
        "r" in more,
    )
    has_table = "t" in more

    @inline
    def start_rows(params, token, unit, rows, position, end, stats, out, out_bytes, is_first):
        heads = params.unit_heads
        # Rows that only fill the last vector repeat the last real one, so they never mask more than it does.
        for i in range(0, 16 * ((rows + 15) >> 4)):
            here = position + min(i, rows - 1) // heads
            st_i32(stats + LIMIT + 4 * i, end if sees_all else here + 1)
            if has_windows:
                st_i32(stats + FIRST + 4 * i, first_seen(params, here))
                if sees_all:
                    st_i32(stats + LIMIT + 4 * i, min(end, here + params.window))
            if has_ranges:
                own = place(params, token + min(i, rows - 1) // heads)
                st_i32(stats + LIMIT + 4 * i, max(here + 1, ld_i32(own + SEEN_END)))
                if has_windows:
                    st_i32(stats + FIRST + 4 * i, min(first_seen(params, here), ld_i32(own + SEEN)))
            if has_distance:
                slope = params.slopes + 4 * (params.first_head + unit * heads + min(i, rows - 1) % heads)
                st_i32(stats + PLACE + 4 * i, here)
                st_f32(stats + SLOPE + 4 * i, ld_f32(slope))
            if has_table:  # heads have keys of their own, so that all rows are of one head
                st_i32(stats + PLACE + 4 * i, here)
                st_i32(stats + HEAD + 4 * i, params.first_head + unit * heads)
        # A finite lowest number: the difference of two infinite maxima would be NaN.
        for i in range(0, STAT_BYTES, 64):
            store_f32x16(stats + M + i, splat_f32x16(LOWEST))
            store_f32x16(stats + L + i, zero_f32x16())
        for i in range(0, out_bytes, 64):
            store_f32x16(out + i, zero_f32x16())
        # In the first part only, or merging the parts would count the sink several times.
        if has_sinks and is_first:
            sinks = params.sinks + 4 * (params.first_head + unit * heads)
            for i in range(rows):
                st_f32(stats + M + 4 * i, ld_f32(sinks + 4 * (i % heads)))
                st_f32(stats + L + 4 * i, _F1)

    return start_rows


@inline
def load_cap(params):
    """Return (soft cap, its inverse), used where scores are capped."""
    most = params.cap
    return splat_f32x16(most), splat_f32x16(_F1 / most)


def make_capped(more):
    """Return capped(x, cap): scores as they enter the soft-max."""
    if "c" not in more:

        @inline
        def as_it_is(x, cap):
            return x

        return as_it_is

    @inline
    def capped(x, cap):
        return vmul(vtanh(vmul(x, cap[1])), cap[0])

    return capped


@inline
def _not_weakened(params, x, at, tile, stats):
    return x


@inline
def _biases(params, stats, which, distance):
    """Return the biases of 16 ascending distances of a row's head; see `bias_tables` for `which`."""
    most = params.most_distance
    n = 2 * most + 33
    at = min(max(distance, -most - 16), most) + most + 16
    return load_f32x16(params.slopes + 4 * (n * (2 * ld_i32(stats + HEAD) + which) + at))


def make_weakened(more):
    """Return weakened(params, x, t, tile, stats): scores of a vector of rows at position t, changed by distance."""
    if "t" in more:

        @inline
        def biased(params, x, t, tile, stats):
            return vadd(x, _biases(params, stats, 1, ld_i32(stats + PLACE) - (tile + t)))

        return biased
    if "d" not in more:
        return _not_weakened

    @inline
    def weakened(params, x, t, tile, stats):
        distance = vabs(cvt_i32x16_f32(vsub(load_i32x16(stats + PLACE), splat_i32x16(tile + t))))
        return vsub(x, vmul(load_f32x16(stats + SLOPE), distance))

    return weakened


def make_weakened_row(more):
    """Return weakened_row(params, x, i, tile, stats): the same of one row at 16 positions from i of the tile on."""
    if "t" in more:

        @inline
        def biased_row(params, x, i, tile, stats):
            return vadd(x, _biases(params, stats, 0, tile + i - ld_i32(stats + PLACE)))

        return biased_row
    if "d" not in more:
        return _not_weakened

    @inline
    def weakened_row(params, x, i, tile, stats):
        first = splat_i32x16(ld_i32(stats + PLACE) - tile - i)
        distance = vabs(cvt_i32x16_f32(vsub(first, lane_index())))
        return vsub(x, vmul(splat_f32x16(ld_f32(stats + SLOPE)), distance))

    return weakened_row


# --- many rows: lanes are rows ---------------------------------------------------------------------------------------
def make_is_masked(more):
    """Return is_masked(n, tile, stats): whether a row of one vector may not see all n positions from `tile` on."""
    if "w" not in more:

        @inline
        def has_limit(n, tile, stats):
            return ld_i32(stats + LIMIT) - tile < n

        return has_limit

    @inline
    def is_masked(n, tile, stats):
        return ld_i32(stats + LIMIT) - tile < n or ld_i32(stats + FIRST + 4 * 15) > tile

    return is_masked


def make_sees_none(more):
    """Return sees_none(stats, end): whether no row from a vector's first one on sees a position before `end`."""
    if "w" not in more:

        @inline
        def never(stats, end):
            return False

        return never

    @inline
    def sees_none(stats, end):
        return ld_i32(stats + FIRST) >= end

    return sees_none


@inline
def limits(tile, stats):
    """Return (limit, first) of one vector of rows, counted from `tile`; the second is used where there are windows."""
    return vsub(load_i32x16(stats + LIMIT), splat_i32x16(tile)), vsub(load_i32x16(stats + FIRST), splat_i32x16(tile))


def make_where_seen(more):
    """Return where_seen(t, limit, first, x, otherwise): x in lanes with first <= t < limit."""
    if "w" not in more:

        @inline
        def below(t, limit, first, x, otherwise):
            return select_less_i32(t, limit, x, otherwise)

        return below

    @inline
    def where_seen(t, limit, first, x, otherwise):
        return select_less_i32(t, first, otherwise, select_less_i32(t, limit, x, otherwise))

    return where_seen
