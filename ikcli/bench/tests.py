"""bench: speed of given tests (ppP, tgN, ppP+tgN, tgN@ppP) for all combinations of settings, like llama-bench.

Every option of the run may list alternatives. Each combination gets a separate session, sized for the largest test. A
test is repeated `-r` times from an empty cache or at a depth; results are the mean and the sample standard deviation of
tokens per second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ikcli.engine.plan.bench_cases import BenchTest, bench_tests
from ikcli.engine.plan.sizes import bench_session
from ikcli.engine.run.batch import Batch
from ikcli.gguf.constants import file_type_label
from ikcli.measure.protocol import SessionLike, TokenIds
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.bench.drafts import Drafting
    from ikcli.engine.plan.planner import Planner
    from ikcli.engine.run.model import Model
    from ikcli.engine.run.session import Session
    from ikcli.models import HParams


Generate = Callable[[SessionLike, TokenIds, int, np.random.Generator], None]
"""Generates n tokens after those in the cache."""
_DRAFTS = "server."  # paths of the settings of drafts


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The model of a result: path, name like `deepseek2 16B IQ4_NL`, bytes and number of weights.

    `gpus`: names of the GPUs it ran on.
    """

    filename: str
    name: str
    n_bytes: int
    n_params: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, gpus: tuple[str, ...] = ()) -> BenchModel:
        """Describe an opened model."""
        file = model.file
        ftype = file.get("general.file_type")
        kind = file_type_label(int(ftype)) if ftype is not None else "unknown type"
        name = f"{model.hp.arch} {params_label(file.n_elements)} {kind}"
        return cls(model.source, name, file.n_bytes, file.n_elements, gpus)


def params_label(n: int) -> str:
    """Format a number of weights as in model names: `16B`, `6.7B`, `492M`."""
    for scale, unit in ((1e9, "B"), (1e6, "M")):
        if n >= scale:
            x = n / scale
            return f"{x:.1f}".removesuffix(".0") + unit if x < 10 else f"{x:.0f}{unit}"
    return f"{n / 1e3:.0f}K"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Nanoseconds of every repetition of a test under these settings; `node` and `cpu` if it ran elsewhere.

    `n_drafted`, `n_accepted`: tokens of drafts in all repetitions, and how many of them the model confirmed.
    """

    test: BenchTest
    config: RunConfig
    model: BenchModel
    started: str
    samples_ns: tuple[int, ...]
    node: str = ""
    cpu: str = ""
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of every repetition."""
        return tuple(1e9 * self.test.n_timed / max(1, ns) for ns in self.samples_ns)


def mean_and_deviation(values: Collection[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 for a single value)."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 0.0


def combinations(
    config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]], given: Collection[str]
) -> Iterator[RunConfig]:
    """Return one config per combination of the listed values, threads varying fastest; -t alone is for prompts too."""
    listed = {f.name: alternatives[f.name] for f in fields(config) if f.name in alternatives}
    threads = {name: listed.pop(name) for name in ("n_threads", "n_threads_batch") if name in listed}
    drafts = {path.removeprefix(_DRAFTS): values for path, values in alternatives.items() if path.startswith(_DRAFTS)}
    for values in product(*listed.values(), *drafts.values()):
        base = replace(config, **dict(zip(listed, values, strict=False)))
        server = replace(base.server, **dict(zip(drafts, values[len(listed) :], strict=True)))
        base = replace(base, server=server)
        if config.bench.threads_gen_batch:
            for n, n_batch in config.bench.threads_gen_batch:
                yield replace(base, n_threads=n, n_threads_batch=n_batch)
            continue
        for counts in product(*threads.values()):
            chosen = dict(zip(threads, counts, strict=True))
            if "n_threads" in chosen and "n_threads_batch" not in given:
                chosen["n_threads_batch"] = chosen["n_threads"]
            yield replace(base, **chosen)


def measure(
    session: SessionLike,
    test: BenchTest,
    repetitions: int,
    warmup: bool,
    rng: np.random.Generator,
    generate: Generate | None = None,
) -> list[int]:
    """Return the nanoseconds of every repetition; `generate` replaces the generation of random tokens."""
    generate = generate or _generate
    before = rng.integers(0, session.n_vocab, test.n_depth, dtype=np.int32)
    if test.n_depth:
        session.clear()
        _compute(session, before, 0)
        session.checkpoint(0)
    if warmup:
        _back_to(session, before)
        text = _prompt(session, before, min(test.n_prompt, session.n_ubatch), rng)
        generate(session, text, min(test.n_gen, 1), rng)
        session.settle_weights()
    samples = []
    for _ in range(repetitions):
        _back_to(session, before)
        started = time.perf_counter_ns()
        text = _prompt(session, before, test.n_prompt, rng)
        if test.after_prompt:
            started = time.perf_counter_ns()
        generate(session, text, test.n_gen, rng)
        samples.append(time.perf_counter_ns() - started)
    return samples


def _back_to(session: SessionLike, before: TokenIds) -> None:
    """Keep only these tokens in the cache; recompute them where the sequence cannot be truncated."""
    if not len(before):
        session.clear()
        return
    kept = session.truncate(0, len(before))
    _compute(session, before[kept:], kept)


def _prompt(session: SessionLike, before: TokenIds, n: int, rng: np.random.Generator) -> TokenIds:
    """Compute n random tokens; return them with those before."""
    tokens = rng.integers(0, session.n_vocab, n, dtype=np.int32)
    _compute(session, tokens, len(before))
    return np.concatenate([before, tokens])


def _compute(session: SessionLike, tokens: TokenIds, pos: int) -> None:
    for start in range(0, len(tokens), session.n_batch):
        session.decode(Batch.single(tokens[start : start + session.n_batch], pos + start))


def _generate(session: SessionLike, text: TokenIds, n: int, rng: np.random.Generator) -> None:
    for i, token in enumerate(rng.integers(0, session.n_vocab, n, dtype=np.int32).tolist()):
        session.step_each([token], [len(text) + i], [0])


def run(
    config: RunConfig,
    alternatives: Mapping[str, tuple[Any, ...]],
    given: Collection[str],
    planner: Planner | None = None,
) -> Iterator[BenchResult]:
    """Yield every test of every combination as soon as it is measured; `given` are the fields that the user set."""
    for chosen in combinations(config, alternatives, given):
        same = (chosen.model, chosen.override_kv) == (config.model, config.override_kv)
        yield from measured(chosen, bench_tests(chosen), planner if same else None)


def measured(config: RunConfig, tests: list[BenchTest], planner: Planner | None) -> Iterator[BenchResult]:
    """Measure the tests in one session."""
    from ikcli.engine.run.opening import open_session

    settings, sizes = bench_session(config)
    opened = open_session(settings, n_ctx=sizes.n_ctx, n_step=sizes.n_step, planner=planner)
    with closing(opened) as session, _drafting(session, tests) as drafting:
        model = BenchModel.of(session.model, session.gpus)
        rng = np.random.default_rng(max(1, config.seed))
        for test in tests:
            started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            generate = drafting.generate if drafting is not None and test.drafts else None
            samples = measure(session, test, config.bench.repetitions, config.bench.warmup, rng, generate)
            counts = drafting.take_counts() if drafting is not None else (0, 0)
            yield BenchResult(test, session.config, model, started, tuple(samples), "", "", *counts)
        if config.vision.images:
            yield from _images(session.config, session.model.hp, model)


@contextmanager
def _drafting(session: Session, tests: Sequence[BenchTest]) -> Iterator[Drafting | None]:
    """Yield what generates with drafts, if a test does."""
    if not any(test.drafts for test in tests):
        yield None
        return
    from ikcli.bench.drafts import Drafting

    with closing(Drafting(session)) as drafting:
        yield drafting


def _images(config: RunConfig, hp: HParams, model: BenchModel) -> Iterator[BenchResult]:
    """Time the encoding of images, from pixels that are decoded to the rows of all tiles."""
    from ikcli.vision.decode import Tile
    from ikcli.vision.opening import needed_projector, read_picture

    with closing(needed_projector(config, hp)) as projector:
        for path in config.vision.images:
            picture, started = read_picture(path), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            samples, n_tokens = [], 0
            for _ in range(config.bench.repetitions + config.bench.warmup):
                begin = time.perf_counter_ns()
                tiles = [piece for piece in projector.pieces(picture) if isinstance(piece, Tile)]
                n_tokens = sum(len(projector.encode(tile)) for tile in tiles)
                samples.append(time.perf_counter_ns() - begin)
            test = BenchTest(n_tokens, 0, image=path.name)
            yield BenchResult(test, config, model, started, tuple(samples[int(config.bench.warmup) :]))
