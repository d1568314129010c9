"""Cut candidates or reshape their logits; definitions as in src/llama-sampling.cpp.

Sources: top-p arXiv:1904.09751, locally typical arXiv:2202.00666, top-n-sigma arXiv:2411.07641, min-p
arXiv:2407.01082, tail free (T. Cloud), XTC (p-e-w, text-generation-webui #6335).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ikcli.sampling.candidates import Candidates, ascending
from ikcli.sampling.params import SamplerParams

Step = Callable[[Candidates], Candidates]
_FEW = (256, 4096)
COLDEST = 1e-6


def active_filters(p: SamplerParams) -> dict[str, Step]:
    """Return the filters that these parameters switch on, by the names of their samplers."""
    keep = max(1, p.min_keep)
    filters: dict[str, tuple[bool, Step]] = {
        "top_k": (p.top_k > 0, partial(top_k, k=p.top_k, min_keep=keep)),
        "top_p": (p.top_p < 1, partial(top_p, p=p.top_p, min_keep=keep)),
        "min_p": (p.min_p > 0, partial(min_p, p=p.min_p, min_keep=keep)),
        "tfs_z": (p.tfs_z < 1, partial(tfs_z, z=p.tfs_z, min_keep=keep)),
        "typical_p": (p.typical_p < 1, partial(typical_p, p=p.typical_p, min_keep=keep)),
        "top_n_sigma": (p.top_n_sigma > 0, partial(top_n_sigma, n=p.top_n_sigma)),
    }
    return {name: step for name, (active, step) in filters.items() if active}


def top_k(c: Candidates, k: int, min_keep: int = 1) -> Candidates:
    """Keep the `k` most likely candidates; `k` <= 0 keeps all."""
    return c.head(max(k, min_keep)) if k > 0 else c


def top_p(c: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Keep the most likely candidates up to a total probability of `p`."""
    if p >= 1:
        return c
    if c.ids is None and not c.descending:
        for few in _FEW:
            found = _top_p_of_few(c, p, max(few, min_keep), min_keep)
            if found is not None:
                return found
    c = c.best_first()
    return c.head(_count_up_to(np.cumsum(c.probabilities()), p, min_keep))


def min_p(c: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Keep the candidates that are at least `p` times as likely as the best one."""
    if p <= 0:
        return c
    bound = (c.logits[0] if c.descending else c.logits.max()) + np.log(min(p, 1.0))
    if c.descending:
        return c.head(max(int(np.searchsorted(-c.logits, -bound, side="right")), min_keep, 1))
    kept = np.flatnonzero(c.logits >= bound)
    return c.take(kept, descending=False) if len(kept) >= min_keep else c.head(min_keep)


def tfs_z(c: Candidates, z: float, min_keep: int = 1) -> Candidates:
    """Cut the tail where the summed curvature of the sorted probabilities exceeds `z` (tail free sampling)."""
    if z >= 1:
        return c
    c = c.best_first()
    if len(c.logits) <= 2:
        return c
    curvature = np.abs(np.diff(c.probabilities(), n=2))
    total = curvature.sum()
    curvature = curvature / total if total > 1e-6 else np.full(len(curvature), 1 / len(curvature))
    over = np.flatnonzero(np.cumsum(curvature)[min_keep:] > z)
    return c.head(int(over[0]) + min_keep) if len(over) else c


def typical_p(c: Candidates, p: float, min_keep: int = 1) -> Candidates:
    """Keep the candidates whose surprise is nearest to the entropy, up to a total probability of `p`."""
    if p >= 1:
        return c
    probs = c.probabilities()
    log_p = np.log(np.maximum(probs, np.finfo(probs.dtype).tiny))
    order = ascending(np.abs(probs @ log_p - log_p))
    over = np.flatnonzero(np.cumsum(probs[order], dtype=np.float64)[min_keep - 1 :] > p)
    kept = order[: int(over[0]) + min_keep] if len(over) else order[probs[order] > 0]
    return c.take(np.sort(kept), descending=c.descending)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keep the candidates within `n` standard deviations of the largest logit; needs at least four."""
    if n <= 0:
        return c
    finite = c.logits if c.ids is not None else c.logits[c.logits > -np.inf]
    if len(finite) < 4:
        return c
    kept = np.flatnonzero(c.logits >= finite.max() - n * float(np.std(finite, dtype=np.float64)))
    return c.take(kept, descending=c.descending)


def xtc(c: Candidates, threshold: float, min_keep: int = 1) -> Candidates:
    """Drop all candidates that reach `threshold` except the least likely of them."""
    if threshold > 0.5:
        return c
    c = c.best_first()
    last = int(np.count_nonzero(c.probabilities() >= threshold)) - 1
    if last < 1 or len(c.logits) - last < min_keep:
        return c
    return c.take(slice(last, None), descending=True)


def temperature(c: Candidates, t: float) -> Candidates:
    """Divide the logits by `t` > 0."""
    if t == 1:
        return c
    # Relative to the best logit, so that a tiny temperature cannot overflow to inf - inf.
    logits = c.logits - (c.logits[0] if c.descending else c.logits.max())
    return Candidates(c.ids, np.divide(logits, max(t, COLDEST), out=logits), c.descending)


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> Candidates:
    """Divide the logits by a temperature within `t` +- `spread` that grows with the entropy of the candidates."""
    probs = c.probabilities()
    probs = probs[probs > 0]
    if len(probs) <= 1:
        return c
    n = len(probs) if c.ids is None else len(c.logits)
    entropy = max(0.0, -float(probs @ np.log(probs)) / np.log(n))
    low, high = max(0.0, t - spread), max(0.0, t + spread)
    return temperature(c, low + (high - low) * min(entropy, 1.0) ** exponent)


def _count_up_to(cumulated: np.ndarray, p: float, min_keep: int) -> int:
    return max(int(np.searchsorted(cumulated, p, side="left")) + 1, min_keep, 1)


def _top_p_of_few(c: Candidates, p: float, n: int, min_keep: int) -> Candidates | None:
    """Apply top-p to the `n` best of a whole vocabulary, since sorting all is slow; None if they do not reach `p`."""
    largest = c.logits.max()
    total = float(np.exp(c.logits - largest).sum())
    few = c.head(n)
    cumulated = np.cumsum(np.exp(few.logits - largest)) / total
    return few.head(_count_up_to(cumulated, p, min_keep)) if cumulated[-1] >= p else None
