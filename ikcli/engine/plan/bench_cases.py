"""Derive the cases of `ik bench` and `ik batched-bench` from their options.

The sizes of their sessions follow from these cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS
from ikcli.errors import UsageError
from ikcli.settings.drafts import label
from ikcli.settings.rules import padded_ctx
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class BenchTest:
    """A run of n_prompt tokens at once, then n_gen single tokens.

    The cache holds `n_depth` tokens before. With `after_prompt` only the generated tokens are timed. With `image`, the
    name of a file, the image of n_prompt tokens is encoded, and the text model computes nothing. With `drafts`, the
    names of drafters (`settings.drafts.label`), tokens are generated greedily and drafts of them checked.
    """

    n_prompt: int
    n_gen: int
    after_prompt: bool = False
    n_depth: int = 0
    image: str = ""
    drafts: str = ""

    @property
    def label(self) -> str:
        if self.image:
            return f"image {self.image}"
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        label = f"tg{self.n_gen}@pp{self.n_prompt}" if self.after_prompt else "+".join(parts)
        label = f"{label} {self.drafts}" if self.drafts else label
        return f"{label} @ d{self.n_depth}" if self.n_depth else label

    @property
    def n_cells(self) -> int:
        """Return the number of cached tokens at the end."""
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def n_timed(self) -> int:
        """Return the number of tokens that the measured time covers."""
        return self.n_gen + (0 if self.after_prompt else self.n_prompt)


def bench_tests(config: RunConfig) -> list[BenchTest]:
    """Return the tests, ordered by depth, then prompt lengths, generation lengths, -pg and -gp.

    Lengths of 0 are left out. With drafters, every generation alone is followed by one with drafts.
    """
    b = config.bench
    pairs = [*b.pg, *b.gp]
    if min((*b.n_prompt, *b.n_gen, *b.n_depth, *(n for pair in pairs for n in pair)), default=0) < 0:
        raise UsageError("-p, -n, -pg, -gp and -d take token counts of 0 or more, for example -p 512 -n 128")
    if b.repetitions < 1:
        raise UsageError("-r takes a number of at least 1, for example -r 5")
    tests = [BenchTest(p, 0) for p in b.n_prompt] + [BenchTest(0, n) for n in b.n_gen]
    tests += [BenchTest(p, n) for p, n in b.pg] + [BenchTest(p, n, True) for p, n in b.gp]
    tests = [replace(t, n_depth=depth) for depth in b.n_depth for t in tests if t.n_timed]
    if drafts := label(config, BATCH_INVARIANT_ROWS - 1):
        tests = [t for test in tests for t in ([test, replace(test, drafts=drafts)] if _generates(test) else [test])]
    if not tests and not config.vision.images:
        raise UsageError("nothing to measure; name prompt lengths with -p or generation lengths with -n")
    return tests


def _generates(test: BenchTest) -> bool:
    """Return whether the measured time covers generated tokens alone."""
    return test.n_gen > 0 and (test.after_prompt or not test.n_prompt)


@dataclass(frozen=True, slots=True)
class BatchedTest:
    """A run of `pl` sequences with `pp` prompt tokens each, which generate `tg` tokens each.

    `shared`: all sequences have the same prompt.
    """

    pp: int
    tg: int
    pl: int
    shared: bool

    @property
    def n_kv(self) -> int:
        """Return the number of cached tokens at the end; a shared prompt counts once."""
        return self.pp + self.pl * self.tg if self.shared else self.n_cells

    @property
    def n_cells(self) -> int:
        """Return the number of cells that the sequences occupy; each has its own copy of a shared prompt."""
        return self.pl * (self.pp + self.tg)

    @property
    def n_prompt(self) -> int:
        """Return the number of prompt tokens that are computed."""
        return self.pp if self.shared else self.pl * self.pp


@dataclass(frozen=True, slots=True)
class BatchedTests:
    """The tests that fit the context of `-c`, and those that do not; n_kv_max is that context in tokens."""

    fitting: tuple[BatchedTest, ...]
    left_out: tuple[BatchedTest, ...]
    n_kv_max: int


def batched_tests(config: RunConfig) -> BatchedTests:
    """Return all combinations of the lists in their order: prompt length, generated tokens, sequences."""
    b = config.batched
    if min((*b.npp, *b.ntg), default=0) < 0 or min(b.npl, default=0) < 1:
        raise UsageError(
            "-npp and -ntg take token counts of 0 or more, -npl counts of at least 1, for example -npl 1,2,4"
        )
    tests = [BatchedTest(pp, tg, pl, b.shared_prompt) for pp, tg, pl in product(b.npp, b.ntg, b.npl)]
    n_kv_max = padded_ctx(config.n_ctx or max(t.n_kv for t in tests), config.flash_attn)
    fitting = tuple(t for t in tests if t.n_kv <= n_kv_max)
    if not fitting:
        raise UsageError("no test fits; raise -c, or lower -npp, -ntg or -npl")
    return BatchedTests(fitting, tuple(t for t in tests if t.n_kv > n_kv_max), n_kv_max)
