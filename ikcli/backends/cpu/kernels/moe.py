"""Mixture of experts: routing, grouping by expert, weighted sum.

Route rows: n_used weights (f32), then n_used expert ids (i32, -1 = dropped). Plan (i64): word 0 = number of sorted
rows, then offsets[n_expert + 1], cursors[n_expert], order[rows*n_used] (sorted position -> row*n_used + slot) and
position[rows*n_used] (the inverse, -1 for dropped slots).
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import add_span, copy_f32, scale_span
from ikcli.backends.cpu.kernels.common import TOKENS, n_rows, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_products import (
    AddIdParams,
    GroupsParams,
    HashRouteParams,
    MoeSumParams,
    ResidentParams,
    RouteParams,
    ScaleIdParams,
    SortParams,
    ZeroDroppedParams,
)
from ikcli.graph.ops_experts import SPARSE_MARGIN
from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32x16,
    splat_f32x16,
    st_f32,
    st_i32,
    st_i64,
    store_f32x16,
    vfma,
    zero_f32x16,
)

_F0, _F1, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_MARGIN = np.float32(SPARSE_MARGIN)


@inline
def probabilities(logits, probs, n, gating):
    """Write probabilities, or (sparsemixer) logits."""
    if gating == 3:
        for i in range(n):
            x = ld_f32(logits + 4 * i)
            softplus = max(x, _F0) + np.float32(math.log1p(math.exp(-abs(x))))
            st_f32(probs + 4 * i, np.float32(math.sqrt(softplus)))
        return
    if gating == 2:
        for i in range(n):
            st_f32(probs + 4 * i, ld_f32(logits + 4 * i))
    elif gating == 1:
        top = _LOWEST
        for i in range(n):
            top = max(top, ld_f32(logits + 4 * i))
        total = _F0
        for i in range(n):
            p = np.float32(math.exp(ld_f32(logits + 4 * i) - top))
            st_f32(probs + 4 * i, p)
            total += p
        for i in range(n):
            st_f32(probs + 4 * i, ld_f32(probs + 4 * i) / total)
    else:
        for i in range(n):
            st_f32(probs + 4 * i, _F1 / (_F1 + np.float32(math.exp(-ld_f32(logits + 4 * i)))))


@inline
def drop_groups(scores, n, n_group, n_group_used, group_scores):
    """Set the scores of all but the best groups (largest sum of their two best scores) to -inf."""
    size = n // n_group
    for g in range(n_group):
        best, second = _LOWEST, _LOWEST
        for i in range(g * size, (g + 1) * size):
            s = ld_f32(scores + 4 * i)
            if s > best:
                best, second = s, best
            elif s > second:
                second = s
        st_f32(group_scores + 4 * g, best + second)
    for _ in range(n_group - n_group_used):
        worst = n_group - 1
        for g in range(n_group - 1, -1, -1):
            if ld_f32(group_scores + 4 * worst) == np.float32(np.inf) or (
                ld_f32(group_scores + 4 * g) < ld_f32(group_scores + 4 * worst)
            ):
                worst = g
        st_f32(group_scores + 4 * worst, np.float32(np.inf))
        for i in range(worst * size, (worst + 1) * size):
            st_f32(scores + 4 * i, _LOWEST)


@inline
def sparse_weight(scores, n, top):
    """Return the weight of the best expert by sparsemixer; scores of experts that were chosen before are -inf."""
    total = _F0
    for i in range(n):
        s = ld_f32(scores + 4 * i)
        if s > _LOWEST and not (top - s) / max(abs(s), top) > _MARGIN:
            total += np.float32(math.exp(s - top))
    return _F1 / total


@inline
def route_row(logits, bias, probs, scores, out, n, n_used, gating, norm, scale, n_group, n_group_used, fewest, least):
    probabilities(logits, probs, n, gating)
    for i in range(n):
        # The bias decides who is chosen, but weights are the probabilities without it.
        b = ld_f32(bias + 4 * i) if bias != 0 else _F0
        st_f32(scores + 4 * i, ld_f32(probs + 4 * i) + b)
    if n_group > 1:
        drop_groups(scores, n, n_group, n_group_used, scores + 4 * n)
    total, top = _F0, _F0
    for slot in range(n_used):
        best, best_score = np.int64(-1), _LOWEST
        for i in range(n):
            s = ld_f32(scores + 4 * i)
            if s > best_score or (s != s and best_score == best_score):  # NaN wins, so that it shows in the result
                best, best_score = i, s
        if slot == 0:
            top = best_score
        weight = _F0
        if best >= 0:
            weight = sparse_weight(scores, n, best_score) if gating == 2 else ld_f32(probs + 4 * best)
            st_f32(scores + 4 * best, _LOWEST)
            if fewest > 0 and slot >= fewest and best_score < least * top:
                best, weight = np.int64(-1), _F0
        st_f32(out + 4 * slot, weight)
        st_i32(out + 4 * (n_used + slot), best)
        total += weight
    factor = scale / total if norm != 0 else scale
    for slot in range(n_used):
        st_f32(out + 4 * slot, ld_f32(out + 4 * slot) * factor)


def make_route():
    @kernel(RouteParams)
    def route(params, ith, nth):
        logits, bias, out, n, n_used = params.logits, params.bias, params.out, params.n_expert, params.n_used
        scale, least = params.scale, params.least
        scratch = params.scratch + ith * params.scratch_bytes
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            route_row(
                logits + 4 * row * n, bias, scratch, scratch + 4 * n, out + 8 * row * n_used, n, n_used,
                params.gating, params.norm, scale, params.n_group, params.n_group_used, params.fewest, least,
            )  # fmt: skip

    return route


def make_hash_route():
    """Return a kernel that looks the experts of tokens up in a table."""

    @kernel(HashRouteParams)
    def hash_route(params, ith, nth):
        n, n_used, tokens = params.n_expert, params.n_used, state_word(params, TOKENS)
        probs, rows = params.scratch + ith * params.scratch_bytes, n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            probabilities(params.logits + 4 * row * n, probs, n, params.gating)
            ids, out, total = params.table + 4 * n_used * ld_i32(tokens + 4 * row), params.out + 8 * row * n_used, _F0
            for slot in range(n_used):
                total += ld_f32(probs + 4 * ld_i32(ids + 4 * slot))
            factor = params.scale / total if params.norm != 0 else params.scale
            for slot in range(n_used):
                e = ld_i32(ids + 4 * slot)
                st_f32(out + 4 * slot, ld_f32(probs + 4 * e) * factor)
                st_i32(out + 4 * (n_used + slot), e)

    return hash_route


def make_groups():
    """Return a kernel that replaces experts by their groups."""

    @kernel(GroupsParams)
    def groups(params, ith, nth):
        if ith != 0:
            return
        route, out, n_used, size = params.route, params.out, params.n_used, params.size
        for row in range(n_rows(params)):
            for slot in range(n_used):
                at = 4 * (2 * row * n_used + slot)
                st_f32(out + at, ld_f32(route + at))
                e = ld_i32(route + at + 4 * n_used)
                st_i32(out + at + 4 * n_used, np.int32(e // size) if e >= 0 else np.int32(-1))

    return groups


def make_resident(hits):
    """Return a kernel that keeps the experts in slots (`hits`), with slots for ids, or the others; it counts all."""

    @kernel(ResidentParams)
    def resident(params, ith, nth):
        if ith != 0:
            return
        route, table, uses, out, n_used = params.route, params.table, params.uses, params.out, params.n_used
        for row in range(n_rows(params)):
            at = 8 * row * n_used
            for slot in range(n_used):
                st_f32(out + at + 4 * slot, ld_f32(route + at + 4 * slot))
                e = ld_i32(route + at + 4 * (n_used + slot))
                kept = np.int32(-1)
                if e >= 0:
                    place = ld_i32(table + 4 * e)
                    if hits:
                        kept = place
                    elif place < 0:
                        kept = e
                    if uses != 0:
                        st_i32(uses + 4 * e, ld_i32(uses + 4 * e) + np.int32(1))
                st_i32(out + at + 4 * (n_used + slot), kept)

    return resident


def make_sort():
    """Return a stable counting sort by expert."""

    @kernel(SortParams)
    def sort(params, ith, nth):
        if ith != 0:
            return
        route, plan, n_expert, n_used = params.route, params.plan, params.n_expert, params.n_used
        pairs = n_rows(params) * n_used
        offsets = plan + 8
        cursors = offsets + 8 * (n_expert + 1)
        order = cursors + 8 * n_expert
        position = order + 8 * pairs
        for e in range(n_expert):
            st_i64(cursors + 8 * e, 0)
        for i in range(pairs):
            e = ld_i32(route + 8 * (i // n_used) * n_used + 4 * (n_used + i % n_used))
            if e >= 0:
                st_i64(cursors + 8 * e, ld_i64(cursors + 8 * e) + 1)
        total = np.int64(0)
        for e in range(n_expert):
            count = ld_i64(cursors + 8 * e)
            st_i64(offsets + 8 * e, total)
            st_i64(cursors + 8 * e, total)
            total += count
        st_i64(offsets + 8 * n_expert, total)
        st_i64(plan, total)
        for i in range(pairs):
            e = ld_i32(route + 8 * (i // n_used) * n_used + 4 * (n_used + i % n_used))
            at = np.int64(-1)
            if e >= 0:
                at = ld_i64(cursors + 8 * e)
                st_i64(cursors + 8 * e, at + 1)
                st_i64(order + 8 * at, i)
            st_i64(position + 8 * i, at)

    return sort


def make_zero_dropped():
    """Return a kernel that zeroes the rows after the sorted ones."""

    @kernel(ZeroDroppedParams)
    def zero_dropped(params, ith, nth):
        out, cols = params.out, params.cols
        lo, hi = ld_i64(params.plan), n_rows(params) * params.n_used
        n = (hi - lo) * cols
        for i in range(n * ith // nth, n * (ith + 1) // nth):
            st_f32(out + 4 * (lo * cols + i), _F0)

    return zero_dropped


def make_add_id():
    """Return a kernel that adds the row of their expert to sorted rows and copies others."""

    @kernel(AddIdParams)
    def add_id(params, ith, nth):
        x, w, out, cols, plan = params.x, params.w, params.out, params.cols, params.plan
        n_expert, rows = params.n_expert, n_rows(params) * params.n_used
        offsets = plan + 8
        lo, hi = rows * ith // nth, rows * (ith + 1) // nth
        for e in range(n_expert):
            for row in range(max(lo, ld_i64(offsets + 8 * e)), min(hi, ld_i64(offsets + 8 * e + 8))):
                add_span(out + 4 * row * cols, x + 4 * row * cols, w + 4 * e * cols, 0, cols)
        for row in range(max(lo, ld_i64(plan)), hi):
            copy_f32(out + 4 * row * cols, x + 4 * row * cols, cols)

    return add_id


def make_scale_id(by_route):
    """Return a kernel that scales sorted rows by a number of their expert or, `by_route`, of their slot."""

    @kernel(ScaleIdParams)
    def scale_id(params, ith, nth):
        x, by, out, cols, plan = params.x, params.by, params.out, params.cols, params.plan
        n_expert, n_used = params.n_expert, params.n_used
        rows = n_rows(params) * n_used
        offsets, order = plan + 8, plan + 8 * (2 + 2 * n_expert)
        lo, hi = rows * ith // nth, rows * (ith + 1) // nth
        for e in range(n_expert):
            for row in range(max(lo, ld_i64(offsets + 8 * e)), min(hi, ld_i64(offsets + 8 * e + 8))):
                at = e
                if by_route:
                    pair = ld_i64(order + 8 * row)
                    at = pair + pair // n_used * n_used
                scale_span(out + 4 * row * cols, x + 4 * row * cols, ld_f32(by + 4 * at), 0, cols)
        for row in range(max(lo, ld_i64(plan)), hi):
            copy_f32(out + 4 * row * cols, x + 4 * row * cols, cols)

    return scale_id


def make_sum(weighted):
    """Return out[row] = sum over slots of weight (1 unless `weighted`) * y[position]."""

    @kernel(MoeSumParams)
    def weighted_sum(params, ith, nth):
        y, route, cols, n_used, out = params.y, params.route, params.cols, params.n_used, params.out
        rows = n_rows(params)
        position = params.plan + 8 * (2 + 2 * params.n_expert + rows * n_used)
        per_row = (cols + 15) // 16
        for item in range(rows * per_row * ith // nth, rows * per_row * (ith + 1) // nth):
            row, c = item // per_row, item % per_row * 16
            weights, at = route + 8 * row * n_used, position + 8 * row * n_used
            dst = out + 4 * (row * cols + c)
            if c + 16 <= cols:
                acc = zero_f32x16()
                for slot in range(n_used):
                    p = ld_i64(at + 8 * slot)
                    if p >= 0:
                        weight = ld_f32(weights + 4 * slot) if weighted else _F1
                        acc = vfma(load_f32x16(y + 4 * (p * cols + c)), splat_f32x16(weight), acc)
                store_f32x16(dst, acc)
            else:
                for i in range(cols - c):
                    total = _F0
                    for slot in range(n_used):
                        p = ld_i64(at + 8 * slot)
                        if p >= 0:
                            weight = ld_f32(weights + 4 * slot) if weighted else _F1
                            total += ld_f32(y + 4 * (p * cols + c + i)) * weight
                    st_f32(dst + 4 * i, total)

    return weighted_sum
