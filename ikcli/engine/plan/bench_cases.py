"""What `ik bench` and `ik batched-bench` measure, from their options: the cases, by which their sessions are sized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ikcli.errors import UsageError
from ikcli.settings.rules import padded_ctx
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class BenchTest:
    """n_prompt tokens at once, then n_gen single ones; with `after_prompt` only the latter are timed.

    `n_depth` tokens are in the cache before.
    """

    n_prompt: int
    n_gen: int
    after_prompt: bool = False
    n_depth: int = 0

    @property
    def label(self) -> str:
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        label = f"tg{self.n_gen}@pp{self.n_prompt}" if self.after_prompt else "+".join(parts)
        return f"{label} @ d{self.n_depth}" if self.n_depth else label

    @property
    def n_cells(self) -> int:
        """Tokens in the cache at the end."""
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def n_timed(self) -> int:
        """Tokens that the measured time is for."""
        return self.n_gen + (0 if self.after_prompt else self.n_prompt)


def bench_tests(config: RunConfig) -> list[BenchTest]:
    """The tests by depth, then prompt lengths, generation lengths, -pg, -gp; lengths of 0 are left out."""
    b = config.bench
    pairs = [*b.pg, *b.gp]
    if min((*b.n_prompt, *b.n_gen, *b.n_depth, *(n for pair in pairs for n in pair)), default=0) < 0:
        raise UsageError("-p, -n, -pg, -gp and -d take token counts of 0 or more, for example -p 512 -n 128")
    if b.repetitions < 1:
        raise UsageError("-r takes a number of at least 1, for example -r 5")
    tests = [BenchTest(p, 0) for p in b.n_prompt] + [BenchTest(0, n) for n in b.n_gen]
    tests += [BenchTest(p, n) for p, n in b.pg] + [BenchTest(p, n, True) for p, n in b.gp]
    tests = [replace(t, n_depth=depth) for depth in b.n_depth for t in tests if t.n_timed]
    if not tests:
        raise UsageError("nothing to measure; name prompt lengths with -p or generation lengths with -n")
    return tests


@dataclass(frozen=True, slots=True)
class BatchedTest:
    """`pl` sequences of `pp` prompt tokens, each generating `tg` tokens; `shared`: they have one prompt."""

    pp: int
    tg: int
    pl: int
    shared: bool

    @property
    def n_kv(self) -> int:
        """Tokens in the cache at the end, a shared prompt counted once."""
        return self.pp + self.pl * self.tg if self.shared else self.n_cells

    @property
    def n_cells(self) -> int:
        """Cells the sequences occupy: each has its own copy of a shared prompt."""
        return self.pl * (self.pp + self.tg)

    @property
    def n_prompt(self) -> int:
        """Prompt tokens that are computed."""
        return self.pp if self.shared else self.pl * self.pp


@dataclass(frozen=True, slots=True)
class BatchedTests:
    """The tests that `-c` has room for, and those it has not; n_kv_max: tokens there is room for."""

    fitting: tuple[BatchedTest, ...]
    left_out: tuple[BatchedTest, ...]
    n_kv_max: int


def batched_tests(config: RunConfig) -> BatchedTests:
    """All combinations in the order of the lists: prompt length, generated tokens, sequences."""
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
