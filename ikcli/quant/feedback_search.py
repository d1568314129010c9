"""Search codes with GPTQ/LDLQ error feedback (`ikcli.quant.feedback`): all columns in order, then a few at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.quant.feedback_codes import FeedbackCodes, Step, group_size, new_codes
from ikcli.quant.feedback_metric import ColumnGroup, Metric

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_PASSES = 2
_TOGETHER = 8  # places after which all other columns hear of what changed
_ENOUGH = 0.02  # of the rows change their codes in some place: further passes would gain next to nothing


def choose(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Encode rows (n_rows, ne0), columns in the order of the metric, into the bytes of a type with a `group_size`."""
    size = group_size(type)
    codes = new_codes(values, type, metric.feedback(size)[1])
    errors = _in_order(codes, values, metric, size)
    _again(codes, values, errors, metric, metric.places(size))
    return codes.pack()


def _in_order(codes: FeedbackCodes, values: Floats, metric: Metric, size: int) -> Floats:
    """Choose all codes in order, each error made up for by later columns; return the errors."""
    errors, targets = np.empty_like(values), values.copy()
    passed, weights = metric.feedback(size)
    ne0 = values.shape[1]
    for first in range(0, ne0, codes.unit):
        last, block = min(first + codes.unit, ne0), metric.block_of(first)
        later = passed[first // metric.block, first - block.start : last - block.start]
        inner = np.ascontiguousarray(later[:, first - block.start : last - block.start])
        step = Step(first, last, inner, weights[first:last])
        mine, x = (np.ascontiguousarray(a[:, first:last]) for a in (targets, values))
        codes.scale(step, mine)
        chosen, errors[:, first:last] = codes.search(step, x, mine)
        codes.keep(step, chosen, slice(None))
        targets[:, last : block.stop] += errors[:, first:last] @ later[:, last - block.start :]
    return errors


def _again(codes: FeedbackCodes, values: Floats, errors: Floats, metric: Metric, places: list[ColumnGroup]) -> None:
    """Choose the codes of a few columns again, given all other columns, where that lowers e H e^T."""
    slopes = metric.slopes(errors)
    for _ in range(_PASSES):
        changed = 0
        for first in range(0, len(places), _TOGETHER):
            some = places[first : first + _TOGETHER]
            columns = slice(some[0].step.first, some[-1].step.last)
            before, near = errors[:, columns].copy(), slopes[:, columns].copy()
            for place in some:
                changed += _renew(codes, values, errors, near, metric, place, columns)
            block = metric.block_of(columns.start)
            slopes[:, block] += metric.times(errors[:, columns] - before, columns, block)
        if changed < _ENOUGH * len(values) * len(places):
            return


def _renew(
    codes: FeedbackCodes,
    values: Floats,
    errors: Floats,
    slopes: Floats,
    metric: Metric,
    place: ColumnGroup,
    columns: slice,
) -> int:
    """Choose the codes of one place, update its errors and the slopes of `columns`; return how many rows improved."""
    at, h = slice(place.step.first, place.step.last), place.moments
    here = slice(at.start - columns.start, at.stop - columns.start)
    mine = errors[:, at]
    for_others = (slopes[:, here] - mine @ h) @ place.inverse  # what makes up for the errors elsewhere
    best = values[:, at] + for_others.astype(np.float32, copy=False)
    old = best - values[:, at] + mine
    chosen, new = codes.search(place.step, best, best.copy())
    better = np.einsum("ij,ij->i", new @ h, new) < np.einsum("ij,ij->i", old @ h, old)
    codes.keep(place.step, chosen, better)
    moved = np.where(better[:, None], new - old, np.float32(0))
    errors[:, at] += moved
    slopes += metric.times(moved, at, columns)
    return int(better.sum())
