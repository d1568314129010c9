"""The searches behind error feedback (`ikcli.quant.feedback`): by tables of values, grid points, trellis rows.

All take rows (n_rows, ne0), the matrix (ne0, ne0) by which the error of a column is added to the targets of later ones,
and weights (ne0,) of squared errors, and return the bytes of the rows. Scales are those of the plain encoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant import tables
from ikcli.quant.code_fields import REPLACEABLE, code_space, replace_codes
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, iqk, iquants, iquants_pack, quantize_rows, trellis
from ikcli.quant.encoders.iquants import grid_format
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import FORMATS, row_size

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
T = GGMLType

_SUB = 16  # columns that share all scales, in every type
_LANES = 16
_FAR = np.float32(1e30)
_LEAST_SQUARES = EncodeOptions(least_squares=True)
_GRIDS: dict[GGMLType, tuple[str, tuple[int, ...]]] = {  # kernels: factory and its arguments
    T.IQ2_XXS: ("make_grid", (8, 256, 1)),
    T.IQ2_XS: ("make_grid", (8, 512, 1)),
    T.IQ2_S: ("make_grid", (8, 1024, 0)),
    T.IQ3_XXS: ("make_grid", (4, 256, 1)),
    T.IQ3_S: ("make_grid", (4, 512, 0)),
    T.IQ1_S: ("make_ternary", (2048, 0)),
    T.IQ1_M: ("make_ternary", (2048, 1)),
}


def group_size(type: GGMLType) -> int:
    """Columns that are chosen together; 0 for types without search."""
    if type in _GRIDS:
        return 4 if type == T.IQ3_S else 8
    if type in trellis.SEARCHES:
        return trellis.SEARCHES[type].size
    space = code_space(type)
    return 4 if type == T.IQ4_KSS else space.group if space is not None and type in REPLACEABLE else 0


def column_order(type: GGMLType, ne0: int) -> npt.NDArray[np.intp] | None:
    """The order in which columns are gone through, in which `passed` and `weights` come; None: as they stand.

    Four codes of IQ4_KSS that depend on each other are two neighbours and those 16 columns further.
    """
    if type != T.IQ4_KSS:
        return None
    return np.arange(ne0).reshape(-1, 2, 8, 2).transpose(0, 2, 1, 3).reshape(-1)


def choose(values: Floats, type: GGMLType, passed: Floats, weights: Floats) -> Bytes:
    """The n_rows * row size bytes of a type with a `group_size`."""
    weights = weights / max(float(weights.max(initial=0)), 1e-30)
    if type in _GRIDS:
        return _points(values, type, passed, weights)
    if type in trellis.SEARCHES:
        return _trellis(values, type, passed, weights)
    if type == T.IQ4_KSS:
        return _even(values, type, passed, weights)
    return _tabled(values, type, passed, weights)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _trellis(values: Floats, type: GGMLType, passed: Floats, weights: Floats) -> Bytes:
    """Rows of a trellis type: row scale, multipliers and tables as without feedback."""
    search = trellis.SEARCHES[type]
    n_rows, ne0 = values.shape
    found = trellis.find(values, trellis.mean_one_weights(weights), search)
    multipliers = np.array(search.multipliers, np.float32)[found.m].reshape(n_rows, -1)
    scales = np.ascontiguousarray(found.d[:, None] * multipliers)
    books = [book.addresses() for book in search.codebooks()]
    slots = np.array(books, np.int64)
    rows, errors = np.empty((n_rows, ne0 // search.size), np.int32), np.empty_like(values)
    scratch = np.empty(256 + 4 * search.n_clusters, np.uint8)
    targets, passed, weights = values.copy(), np.ascontiguousarray(passed), np.ascontiguousarray(weights)
    words = [_address(a) for a in (passed, weights, scales, found.book, slots)]
    words += [round(1000 * search.reach[1]), *(_address(a) for a in (rows, errors, scratch))]
    key = KernelKey("ikcli.quant.encoders.feedback_trellis", "make_rows", (search.size, int(search.magnitude)))
    run(key, _address(values), _address(targets), n_rows, ne0, *words)
    return trellis.pack(targets, type, found._replace(rows=rows.reshape(-1, 32 // search.size))).reshape(-1)


def _even(values: Floats, type: GGMLType, passed: Floats, weights: Floats) -> Bytes:
    """IQ4_KSS: four codes with an even number of bits at a time, under scales as without feedback."""
    n_rows, ne0 = values.shape
    order = column_order(type, ne0)
    assert order is not None
    back = np.argsort(order)
    found = iqk.find(values, type, np.ascontiguousarray(iqk.mean_one_weights(weights[back], ne0)), iqk.SEARCHES[type])
    scales = np.repeat(found.d[:, None] * found.m.astype(np.float32), 2, axis=1).reshape(n_rows, -1, 1, 1)
    levels = tables.IQ4_VALUES[np.repeat(found.t, 2, axis=1)].reshape(n_rows, -1, 1, 16)
    values_of = np.ascontiguousarray(scales * levels.astype(np.float32))
    x = np.ascontiguousarray(values[:, order])
    codes, _ = _codes(x, x.copy(), values_of, np.ascontiguousarray(passed), weights, parity=True)
    new = np.ascontiguousarray(codes[:, back], np.uint8).reshape(found.codes.shape)
    return iqk.PACKERS[type](*found._replace(codes=new), n_rows).reshape(-1)


def _points(values: Floats, type: GGMLType, passed: Floats, weights: Floats) -> Bytes:
    """Rows of a grid type, super-block by super-block."""
    fmt = grid_format(type)
    n_rows, ne0 = values.shape
    grid = np.ascontiguousarray(tables.grid(fmt.grid).T)
    kernel = KernelKey("ikcli.quant.encoders.feedback_grids", *_GRIDS[type])
    scratch = np.empty(512 + 16 * grid.shape[1], np.uint8)
    targets, out = values.copy(), []
    for first in range(0, ne0, fmt.span):
        last = first + fmt.span
        mine, x = (np.ascontiguousarray(a[:, first:last]) for a in (targets, values))
        found = iquants.find(mine, type, weights[first:last])
        d = found.d.astype(np.float16).astype(np.float32)
        scales = np.repeat(d * fmt.multipliers[found.scales], fmt.sub // 8, axis=1)
        errors, inner = np.empty_like(x), np.ascontiguousarray(passed[first:last, first:last])
        arrays = (inner, weights[first:last], scales, grid, found.points, found.signs, errors, scratch)
        addresses = [a.ctypes.data for a in arrays]
        run(kernel, x.ctypes.data, mine.ctypes.data, n_rows, fmt.span, *addresses)
        out.append(iquants_pack.pack(type, found))
        targets[:, last:] += errors @ passed[first:last, last:]
    return np.concatenate(out, axis=1).reshape(-1)


def _tabled(values: Floats, type: GGMLType, passed: Floats, weights: Floats) -> Bytes:
    """Rows of a type whose codes stand for values of their own, super-block by super-block."""
    fmt = FORMATS[type]
    n_rows, ne0 = values.shape
    out = np.empty((n_rows, row_size(type, ne0)), np.uint8)
    head = fmt.row_meta_size
    if head:
        out[:] = quantize_rows(values, type, weights, options=_LEAST_SQUARES).reshape(n_rows, -1)
    targets = values.copy()
    unit = max(fmt.block_size, 2 * _SUB)
    for first in range(0, ne0, unit):
        last = first + unit
        at = slice(head + first // fmt.block_size * fmt.type_size, head + last // fmt.block_size * fmt.type_size)
        mine = np.ascontiguousarray(targets[:, first:last])
        if not head:
            out[:, at] = quantize_rows(mine, type, weights[first:last], options=_LEAST_SQUARES).reshape(n_rows, -1)
        block = np.concatenate((out[:, :head], out[:, at]), axis=1)
        inner = np.ascontiguousarray(passed[first:last, first:last])
        codes, errors = _codes(
            np.ascontiguousarray(values[:, first:last]),
            mine,
            value_tables(block, type, unit),
            inner,
            weights[first:last],
        )
        blocks = replace_codes(
            np.ascontiguousarray(out[:, at]).reshape(-1, fmt.type_size),
            type,
            codes.reshape(-1, fmt.block_size // group_size(type)),
        )
        out[:, at] = blocks.reshape(n_rows, -1)
        targets[:, last:] += errors @ passed[first:last, last:]
    return out.reshape(-1)


def _codes(
    values: Floats, targets: Floats, tables: Floats, passed: Floats, weights: Floats, parity: bool = False
) -> tuple[npt.NDArray[np.int32], Floats]:
    """Codes (n_rows * blocks, codes per block's columns) and errors (n_rows, n) of the columns of one super-block."""
    n_rows, n = targets.shape
    size, n_codes = tables.shape[2:]
    codes, errors = np.empty((n_rows, n // size), np.int32), np.empty((n_rows, n), np.float32)
    scratch = np.empty(n_codes, np.float32)
    weights = np.ascontiguousarray(weights)
    kernel: tuple[str, tuple[int, ...]] = ("make_parity", ()) if parity else ("make_tables", (size,))
    key = KernelKey("ikcli.quant.encoders.feedback_kernels", *kernel)
    arrays = (values, targets, passed, weights, tables, codes, errors, scratch)
    x, t, p, w, v, c, e, s = (a.ctypes.data for a in arrays)
    run(key, x, t, n_rows, n, p, w, v, n_codes, c, e, s)
    return codes.reshape(n_rows, -1), errors


def value_tables(rows: Bytes, type: GGMLType, ne0: int) -> Floats:
    """What every code would stand for in these rows: (n_rows, ne0 / 16, columns per code, codes), at least 16 codes.

    Decoded from rows in which the columns under one scale hold one code after the other.
    """
    fmt, space = FORMATS[type], code_space(type)
    assert space is not None
    n_rows, size = len(rows), space.group
    per_sub = _SUB // size
    n_codes = max(_LANES, space.n_codes)
    out = np.full((n_rows, ne0 // _SUB, size, n_codes), _FAR, np.float32)
    blocks = np.ascontiguousarray(rows[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
    codes = np.arange(fmt.block_size // size) % per_sub
    for first in range(0, space.n_codes, per_sub):
        n = min(per_sub, space.n_codes - first)
        tried = np.broadcast_to(first + codes % n, (len(blocks), len(codes)))
        new = replace_codes(blocks, type, tried).reshape(n_rows, -1)
        data = np.concatenate((rows[:, : fmt.row_meta_size], new), axis=1)
        decoded = dequantize(data.reshape(-1), type, (ne0, n_rows)).reshape(n_rows, ne0 // _SUB, per_sub, size)
        out[:, :, :, first : first + n] = decoded[:, :, :n].transpose(0, 1, 3, 2)
    return out
