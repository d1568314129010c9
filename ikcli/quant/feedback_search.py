"""The search of error feedback: columns in order, then again a few at a time (see `ikcli.quant.feedback`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.quant.feedback_codes import Codes, Step, group_size, new_codes
from ikcli.quant.feedback_metric import Metric, Place

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_PASSES = 3
_ENOUGH = 0.02  # of the rows change their codes in some place: further passes would gain next to nothing


def choose(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Rows (n_rows, ne0), columns in the order of the metric, as bytes of a type with a `group_size`."""
    passed, weights = metric.feedback(group_size(type))
    codes = new_codes(values, type, weights)
    errors = _in_order(codes, values, passed, weights)
    _again(codes, values, errors, metric, metric.places(group_size(type)))
    return codes.pack()


def _in_order(codes: Codes, values: Floats, passed: Floats, weights: Floats) -> Floats:
    """Choose all codes, each error made up for by later columns; the errors."""
    errors, targets = np.empty_like(values), values.copy()
    ne0 = values.shape[1]
    for first in range(0, ne0, codes.unit):
        last = min(first + codes.unit, ne0)
        inner = np.ascontiguousarray(passed[first:last, first:last])
        step = Step(first, last, inner, weights[first:last])
        mine, x = (np.ascontiguousarray(a[:, first:last]) for a in (targets, values))
        codes.scale(step, mine)
        chosen, errors[:, first:last] = codes.search(step, x, mine)
        codes.keep(step, chosen, slice(None))
        targets[:, last:] += errors[:, first:last] @ passed[first:last, last:]
    return errors


def _again(codes: Codes, values: Floats, errors: Floats, metric: Metric, places: list[Place]) -> None:
    """Choose the codes of a few columns anew, given all others before and behind them, where that lessens e H e^T."""
    slopes = metric.times(errors)
    for _ in range(_PASSES):
        changed = 0
        for place in places:
            at, h = slice(place.step.first, place.step.last), place.moments
            mine = errors[:, at]
            for_others = (slopes[:, at] - mine @ h) @ place.inverse  # what makes up for the errors elsewhere
            best = values[:, at] + for_others.astype(np.float32, copy=False)
            old = best - values[:, at] + mine
            chosen, new = codes.search(place.step, best, best.copy())
            better = np.einsum("ij,ij->i", new @ h, new) < np.einsum("ij,ij->i", old @ h, old)
            if not better.any():
                continue
            codes.keep(place.step, chosen, better)
            moved = (new - old)[better]
            errors[better, at] += moved
            slopes[better] += metric.times(moved, at)
            changed += int(better.sum())
        if changed < _ENOUGH * len(values) * len(places):
            return
