#!/usr/bin/env python3
"""Replay expert traces against cache policies: which share of the experts that tokens use is in the cache?

Traces come from `ik perplexity --moe-trace FILE` (tokens of a text, in order), or are drawn here (`--random`): the
experts of a layer have Zipf probabilities of exponent S, tokens draw without replacement, and the noise of a draw is
correlated with that of the token before (RHO) and with that of the guess one layer earlier (C).

Each layer has a cache of its own. The first half of a trace fills the caches, the second half is counted. Policies:

* static: the experts used most in the first half, never changed
* LRU: a miss replaces the expert that was not used for longest
* LFU: a miss replaces the expert with the smallest count, where counts halve every `--half-life` tokens
* rates: a miss replaces the expert with the smallest sum of a short and a long average of its uses, as `--expert-ram`
  does (`ikcli/engine/experts/rates.py`)
* guess: LRU, and what the next layer's router guesses from this layer's hidden state is loaded while this layer is
  computed, at most `--uploads` experts per token and layer
* best: a miss replaces the expert that is used again last (Belady); no policy without a look ahead can hit more often

"loads" are experts copied into the cache per token and layer.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ikcli.engine.experts.rates import UseRates
from ikcli.measure.moe_trace import ExpertTrace, read_trace

I32 = npt.NDArray[np.int32]
PUBLISHED = {"static 32": 0.10, "LRU 64": 0.67, "LRU 128": 0.81, "guess": 0.72}  # of 512 experts, 10 used
NEVER = 1 << 60


class Cache(Protocol):
    """The cache of one layer."""

    loads: int

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        """Take the experts of a token and those guessed before it; return how many of them were there."""


class Static:
    """The experts used most in the first part of a trace."""

    def __init__(self, size: int, before: I32, n_expert: int) -> None:
        counts = np.bincount(before[before >= 0], minlength=n_expert)
        self._held, self.loads = set(np.argsort(-counts, kind="stable")[:size].tolist()), 0

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        return sum(e in self._held for e in wanted)


class Lru:
    """The experts used last; `uploads` of the guessed ones are loaded before a token."""

    def __init__(self, size: int, uploads: int = 0) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._size, self._uploads, self.loads = size, uploads, 0

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        if self._uploads:
            for e in [e for e in guessed if e in self._held]:
                self._held.move_to_end(e)
            for e in [e for e in guessed if e not in self._held][: self._uploads]:
                self._load(e)
        hits = [e for e in wanted if e in self._held]
        for e in hits:
            self._held.move_to_end(e)
        for e in wanted:
            if e not in self._held:
                self._load(e)
        return len(hits)

    def _load(self, e: int) -> None:
        if self._size == 0:
            return
        if len(self._held) == self._size:
            self._held.popitem(last=False)
        self._held[e] = None
        self.loads += 1


class Lfu:
    """The experts with the largest counts, which halve every half-life."""

    def __init__(self, size: int, n_expert: int, half_life: float) -> None:
        self._counts, self._in = np.zeros(n_expert), np.zeros(n_expert, bool)
        self._size, self._growth, self._unit, self.loads = size, 2 ** (1 / half_life), 1.0, 0

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        self._unit *= self._growth  # the same as multiplying all counts by less than 1
        if self._unit > 1e200:
            self._counts /= self._unit
            self._unit = 1.0
        ids = np.array(wanted, np.int64)
        hits = int(self._in[ids].sum())
        self._counts[ids] += self._unit
        for e in ids[~self._in[ids]]:
            if self._size == 0:
                break
            if self._in.sum() == self._size:
                held = np.flatnonzero(self._in)
                worst = held[np.argmin(self._counts[held])]
                if self._counts[worst] >= self._counts[e]:
                    continue  # it would be the next to go
                self._in[worst] = False
            self._in[e] = True
            self.loads += 1
        return hits


class Rates:
    """The experts with the highest values of `UseRates`."""

    def __init__(self, size: int, n_expert: int) -> None:
        self._rates, self._in, self._size, self.loads = UseRates(np.zeros(n_expert)), np.zeros(n_expert, bool), size, 0

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        ids = np.array(wanted, np.int64)
        self._rates.add(ids, np.ones(len(ids), np.int64), 1)
        missing = ids[~self._in[ids]]
        for e in missing[: self._size]:
            if self._in.sum() == self._size:
                others = np.flatnonzero(self._in & ~np.isin(np.arange(len(self._in)), ids))
                if not len(others):
                    break
                self._in[others[np.argmin(self._rates.value[others])]] = False
            self._in[e] = True
            self.loads += 1
        return len(ids) - len(missing)


class Best:
    """The best choice with knowledge of all that follows."""

    def __init__(self, size: int, ids: I32) -> None:
        self._size, self._now, self.loads = size, 0, 0
        self._uses: dict[int, list[int]] = {}
        for t in range(len(ids) - 1, -1, -1):
            for e in ids[t][ids[t] >= 0].tolist():
                self._uses.setdefault(e, []).append(t)
        self._held: dict[int, int] = {}

    def use(self, wanted: Sequence[int], guessed: Sequence[int]) -> int:
        hits = 0
        for e in wanted:
            self._uses[e].pop()
            after = self._uses[e][-1] if self._uses[e] else NEVER
            hits += e in self._held
            if e not in self._held and self._size:
                if len(self._held) == self._size:
                    worst = max(self._held, key=lambda x: self._held[x])
                    if self._held[worst] <= after:
                        continue
                    del self._held[worst]
                self.loads += 1
            if self._size:
                self._held[e] = after
        return hits


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the counted half: the share of uses that hit, and experts loaded per token and layer."""

    hits: float
    loads: float


def replay(trace: ExpertTrace, make: Callable[[I32, I32], Cache]) -> Outcome:
    """Run one cache per layer; `make(first half, all)` returns an empty one."""
    half = len(trace.experts) // 2
    hits = uses = loads = counted = 0
    for layer in range(trace.experts.shape[1]):
        ids, guessed = trace.experts[:, layer], trace.guessed[:, layer]
        cache = make(ids[:half], ids)
        at_half = 0
        for t, (wanted, guess) in enumerate(zip(_lists(ids), _lists(guessed), strict=True)):
            if t == half:
                at_half = cache.loads
            found = cache.use(wanted, guess)
            if t >= half and wanted:
                hits, uses, counted = hits + found, uses + len(wanted), counted + 1
        loads += cache.loads - at_half
    return Outcome(hits / max(uses, 1), loads / max(counted, 1))


def _lists(ids: I32) -> Iterator[list[int]]:
    for row in ids.tolist():
        yield [e for e in row if e >= 0]


def policies(trace: ExpertTrace, size: int, half_life: float, uploads: int) -> dict[str, Outcome]:
    """Replay a trace against every policy with caches of `size` experts per layer."""
    n = trace.n_expert
    makers: dict[str, Callable[[I32, I32], Cache]] = {
        "static": lambda before, ids: Static(size, before, n),
        "LRU": lambda before, ids: Lru(size),
        "LFU": lambda before, ids: Lfu(size, n, half_life),
        "rates": lambda before, ids: Rates(size, n),
        "guess": lambda before, ids: Lru(size, uploads),
        "best": lambda before, ids: Best(size, ids),
    }
    if (trace.guessed < 0).all():
        del makers["guess"]
    return {name: replay(trace, make) for name, make in makers.items()}


def recall(trace: ExpertTrace) -> float:
    """Return the share of used experts that the layer's router guessed one layer earlier."""
    known = (trace.guessed >= 0).all(axis=2) & (trace.experts >= 0).all(axis=2)
    if not known.any():
        return float("nan")
    used, guessed = trace.experts[known], trace.guessed[known]
    return float((used[:, :, None] == guessed[:, None, :]).any(axis=2).mean())


def of_batch(trace: ExpertTrace, n_tokens: int) -> float:
    """Return the share of a layer's experts that consecutive tokens use together."""
    shares = [
        len(np.unique(ids[ids >= 0])) / trace.n_expert
        for start in range(0, len(trace.experts) - n_tokens + 1, n_tokens)
        for ids in np.moveaxis(trace.experts[start : start + n_tokens], 1, 0)
        if (ids >= 0).all()
    ]
    return float(np.mean(shares)) if shares else float("nan")


@dataclass(frozen=True, slots=True)
class Random:
    """A random trace; see the module."""

    n_expert: int
    n_used: int
    layers: int
    tokens: int
    zipf: float
    rho: float
    guess: float
    seed: int = 1

    def trace(self) -> ExpertTrace:
        """Draw the trace."""
        rng = np.random.default_rng(self.seed)
        shape = (self.tokens, self.layers, self.n_used)
        experts, guessed = np.empty(shape, np.int32), np.full(shape, -1, np.int32)
        for layer in range(self.layers):
            scores = -self.zipf * np.log(rng.permutation(self.n_expert) + 1.0)
            z = rng.standard_normal(self.n_expert)
            for t in range(self.tokens):
                fresh = rng.standard_normal((2, self.n_expert))
                z = self.rho * z + np.sqrt(1 - self.rho**2) * fresh[0] if t else z
                experts[t, layer] = _draw(scores, z, self.n_used)
                if layer:
                    other = self.guess * z + np.sqrt(1 - self.guess**2) * fresh[1]
                    guessed[t, layer] = _draw(scores, other, self.n_used)
        name = f"random: Zipf {self.zipf:g}, RHO {self.rho:g}, C {self.guess:g}"
        return ExpertTrace(name, np.arange(self.layers, dtype=np.int32), self.n_expert, experts, guessed,
                           np.zeros(1, np.int64))  # fmt: skip


def _draw(scores: npt.NDArray[np.float64], z: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.int64]:
    """Draw n experts without replacement (Gumbel's way); z: standard normal noise."""
    uniform = 1 / (1 + np.exp(-z * (1.5976 + 0.070565 * z * z)))  # the normal distribution, to 1.5e-4
    noisy = scores - np.log(-np.log(np.clip(uniform, 1e-12, 1 - 1e-12)))
    best = np.argpartition(-noisy, n)[:n]
    return best[np.argsort(-noisy[best])]


def solve(outcome: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where an increasing function reaches the target, by bisection."""
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (middle, high) if outcome(middle) < target else (low, middle)
    return (low + high) / 2


def fit(tokens: int) -> Random:
    """Return the random trace whose static top 32, LRU 64 and guesses are those published for 512 experts."""
    base = Random(512, 10, 2, tokens, 0.0, 0.0, 0.0)

    def changed(**values: float) -> Random:
        return Random(**{**{k: getattr(base, k) for k in Random.__slots__}, **values})

    zipf = solve(lambda s: replay(changed(zipf=s).trace(), lambda before, ids: Static(32, before, 512)).hits,
                 PUBLISHED["static 32"], 0.0, 1.0)  # fmt: skip
    base = changed(zipf=round(zipf, 3))
    rho = solve(lambda r: replay(changed(rho=r).trace(), lambda before, ids: Lru(64)).hits, PUBLISHED["LRU 64"], 0, 1)
    base = changed(rho=round(rho, 3))
    guess = solve(lambda c: recall(changed(guess=c).trace()), PUBLISHED["guess"], 0, 1)
    return changed(guess=round(guess, 3))


def table(trace: ExpertTrace, sizes: Sequence[int], half_life: float, uploads: int) -> Iterator[str]:
    """Yield the lines of the table of a trace."""
    n, layers, used = trace.experts.shape
    yield f"## {trace.model}: {n} tokens, {layers} layers, {used} of {trace.n_expert} experts"
    yield ""
    yield f"guessed one layer earlier: {100 * recall(trace):.0f} % (chance: {100 * used / trace.n_expert:.0f} %)"
    shares = ", ".join(f"{100 * of_batch(trace, size):.0f}" for size in (32, 128, 512))
    yield f"a batch of 32, 128, 512 tokens uses {shares} % of a layer's experts"
    yield ""
    found = {size: policies(trace, size, half_life, uploads) for size in sizes}
    names = list(next(iter(found.values())))
    yield "| cache per layer | " + " | ".join(f"{name}: hits, loads" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for size, row in found.items():
        cells = [f"{100 * row[name].hits:.0f} %, {row[name].loads:.2f}" for name in names]
        yield f"| {size} ({100 * size / trace.n_expert:.0f} %) | " + " | ".join(cells) + " |"
    yield ""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="files of `ik perplexity --moe-trace`")
    parser.add_argument("--random", action="append", default=[], metavar="EXPERTS,USED,S,RHO,C",
                        help="also draw a trace, for example 128,8,0.6,0.8,0.9")  # fmt: skip
    parser.add_argument("--fit", action="store_true",
                        help="also find the random trace that gives the published figures")  # fmt: skip
    parser.add_argument("--sizes", help="experts per layer in the cache (default: 1/16, 1/8, 1/4 and 1/2 of them)")
    parser.add_argument("--tokens", type=int, default=3000, help="of random traces (default: %(default)s)")
    parser.add_argument("--most", type=int, default=6000, help="tokens of a file to use (default: %(default)s)")
    parser.add_argument("--half-life", type=float, default=256, help="tokens, of LFU (default: %(default)s)")
    parser.add_argument("--uploads", type=int, default=4, help="of guess (default: %(default)s)")
    return parser.parse_args(argv)


def _random(text: str, tokens: int) -> ExpertTrace:
    try:
        n, used, zipf, rho, guess = (float(x) for x in text.split(","))
        return Random(int(n), int(used), 2, tokens, zipf, rho, guess).trace()
    except ValueError:
        sys.exit(f"error: --random {text}: give EXPERTS,USED,S,RHO,C, for example 128,8,0.6,0.8,0.9")


def main(argv: list[str]) -> int:
    """Print a table per trace."""
    options = parse_arguments(argv)
    traces = [read_trace(path) for path in options.traces] + [_random(x, options.tokens) for x in options.random]
    if options.fit:
        traces.append(fit(options.tokens).trace())
    if not traces:
        sys.exit("error: name a trace, or give --random or --fit")
    for trace in traces:
        if len(trace.experts) > options.most:
            trace = ExpertTrace(trace.model, trace.layers, trace.n_expert, trace.experts[: options.most],
                                trace.guessed[: options.most], trace.starts)  # fmt: skip
        n = trace.n_expert
        sizes = [int(x) for x in options.sizes.split(",")] if options.sizes else [n // 16, n // 8, n // 4, n // 2]
        for line in table(trace, [s for s in sizes if s], options.half_life, options.uploads):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
