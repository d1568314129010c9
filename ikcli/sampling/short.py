"""Run the usual chain (top-k, then only top-p, min-p and temperature) without arrays.

With a few dozen candidates, a NumPy call costs more than the step it computes. Results equal those of `filters`, with
one random number per draw. One kernel draws from a whole vocabulary (native/top_k.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import native_function, shared_library
from ikcli.sampling.candidates import Candidates
from ikcli.sampling.dry import dry_active
from ikcli.sampling.filters import COLDEST, active_filters
from ikcli.sampling.params import SamplerParams
from ikcli.sampling.penalties import penalizes

DRAW = KernelKey("ikcli.native.top_k", "make_draw")
_MOST = 256
_CODES = {"temperature": 0, "top_p": 1, "min_p": 2}  # of native/top_k.py


class ShortChain:
    """See the module; `steps` are names and values."""

    def __init__(self, k: int, steps: Sequence[tuple[str, float]], min_keep: int) -> None:
        self._k, self._steps, self._min_keep = k, tuple(steps), min_keep
        self._ids, self._values = np.empty(k, np.int64), np.empty(k, np.float32)
        self._state = np.zeros(2 + 2 * len(steps) + k)
        self._state[2 : 2 + 2 * len(steps)] = [x for name, value in steps for x in (_CODES[name], value)]
        at = [address_of(a) for a in (self._ids, self._values, self._state)]
        self._fixed = (k, *at, len(steps), min_keep)
        self._kernel = draw_function()

    def sample(self, c: Candidates, rng: np.random.Generator) -> int:
        """Draw a token; at least one must have a finite logit."""
        best = c.head(self._k)
        assert best.ids is not None
        return int(best.ids[self._draw(best.logits.tolist(), rng)])

    def sample_all(self, logits: npt.NDArray[np.float32], rng: np.random.Generator) -> int:
        """Draw from a whole vocabulary; -1 unless it is writable, contiguous float32 without NaN, +Inf or only -Inf."""
        if not (logits.flags.carray and logits.dtype == np.float32):
            return -1
        self._state[0] = rng.random()
        return self._kernel(address_of(logits), len(logits), *self._fixed)

    def _draw(self, logits: list[float], rng: np.random.Generator) -> int:
        """Draw an index into logits in descending order."""
        largest = logits[0]
        # Relative to the best logit, which stays first because filters only cut the end.
        logits = [x - largest for x in logits]
        for name, value in self._steps:
            if name == "temperature":
                logits = [x / value for x in logits]
            else:
                n = self._top_p(logits, value) if name == "top_p" else bisect_right(logits, -value, key=_negative)
                del logits[max(n, self._min_keep) :]
        sums = list(accumulate(map(math.exp, logits)))
        at = bisect_right(sums, rng.random() * sums[-1])
        # A product that rounds up to the total would fall off the end.
        return min(at, len(sums) - 1)

    @staticmethod
    def _top_p(logits: list[float], p: float) -> int:
        weights = list(map(math.exp, logits))
        bound = p * math.fsum(weights)
        total = 0.0
        for n, weight in enumerate(weights, 1):
            total += weight
            if total >= bound:
                return n
        return len(weights)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of a writable array's data, in half the time of `ctypes.data`."""
    return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]


@cache
def draw_function() -> Callable[..., int]:
    """Return the kernel `make_draw` of native/top_k.py, compiled at first use and cached on disk."""
    shared_library().require([DRAW])
    return native_function(shared_library()[DRAW], 8, keep_gil=True)


def _negative(x: float) -> float:
    return -x


def short_chain(params: SamplerParams) -> ShortChain | None:
    """Return the chain of these parameters; None if it has other samplers or its candidates are wanted."""
    p, filters = params, active_filters(params)
    others = {
        "temperature": p.temperature != 1 or p.dynatemp_range > 0,
        "xtc": p.xtc_probability > 0 and p.xtc_threshold <= 0.5,
        "penalties": penalizes(p),
        "dry": dry_active(p),
    }
    active = [name for name in p.samplers if name in filters or others.get(name)]
    if not active or active[0] != "top_k" or not _CODES.keys() >= set(active[1:]):
        return None
    k = max(p.top_k, p.min_keep, 1)
    if k > _MOST or p.dynatemp_range > 0 or (p.n_probs and p.post_sampling_probs):
        return None
    values = {
        "temperature": max(p.temperature, COLDEST),
        "top_p": p.top_p,
        "min_p": math.log(min(p.min_p, 1.0)) if p.min_p > 0 else 0.0,
    }
    return ShortChain(k, [(name, values[name]) for name in active[1:]], max(1, p.min_keep))
