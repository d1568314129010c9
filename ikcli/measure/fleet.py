"""Perplexity and KL divergence by workers: windows of a text are evaluated in several processes or on several machines.

A unit is a group of windows that one process would decode side by side, so every value is bit-identical. Workers
receive tokens; per scored position they return one value (nll), or five with a base file (`Positions`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.errors import NonFiniteError, UsageError
from ikcli.fleet.choose import executor_of, runs_here
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import HeaderSession, config_each, of_model, settings, threads_of
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction, input_file, input_model
from ikcli.log import hushed
from ikcli.measure.chunks import Windows, WindowValues, evaluate
from ikcli.measure.kl_divergence import compare_rows
from ikcli.measure.kld_file import BaseReader
from ikcli.measure.perplexity import open_window_session
from ikcli.measure.protocol import FloatRows, TokenIds
from ikcli.measure.stats import F64, token_nll
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class WindowSetup:
    """Settings of sessions for windows of n_ctx tokens. `base`: a base file; `quiet`: log nothing while loading."""

    config: RunConfig
    n_ctx: int
    stride: int
    base: Path | None
    quiet: bool


@contextmanager
def open_windows(setup: WindowSetup) -> Iterator[Callable[[tuple[int, Windows]], dict[str, Any]]]:
    """Load the model and yield the function that evaluates a group of windows, given with the index of the first."""
    config = setup.config
    base = BaseReader(setup.base) if setup.base is not None else None
    n_threads = max(1, config.n_threads_batch or config.n_threads)
    with hushed(setup.quiet):
        session = open_window_session(config, setup.n_ctx, config.n_batch, stride=setup.stride)

    def values(unit: tuple[int, Windows]) -> dict[str, Any]:
        found = _Values(*unit, base, n_threads)
        evaluate(session, unit[1], found)
        return {"windows": found.windows}

    with closing(session):
        yield values


class _Values:
    """Receives logits and keeps the values of each window."""

    def __init__(self, first: int, windows: Windows, base: BaseReader | None, n_threads: int) -> None:
        self.windows: list[dict[str, Any]] = []
        self._first, self._base, self._n_threads = first, base, n_threads
        self._shape = (1 if base is None else 5, windows.n_scored)
        self._pending: dict[int, F64] = {}

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        values = self._pending.setdefault(chunk, np.empty(self._shape))[:, row : row + len(targets)]
        if self._base is None:
            values[0] = token_nll(logits, targets, self._n_threads)
            return
        base = self._base.rows(self._first + chunk, row, len(targets))
        found = compare_rows(logits, base, targets, self._n_threads)
        values[:] = found.nll, found.nll_base, found.kld, found.p_diff, found.same_top

    def finish(self, chunk: int, pass_seconds: float) -> None:
        data = base64.b64encode(self._pending.pop(chunk).astype("<f8", copy=False).tobytes()).decode()
        self.windows.append({"seconds": pass_seconds, "values": data})

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        self._pending.pop(chunk, None)
        self.windows.append({"seconds": 0.0, "problem": str(error)})


def base_digest(path: Path) -> str:
    """Hash the sizes, the tokens, and the first and last row of predictions: a base file may be large."""
    base = BaseReader(path)
    hashed = hashlib.sha256(f"{base.n_ctx} {base.n_vocab} {base.n_chunk}".encode())
    hashed.update(base.tokens.tobytes())
    hashed.update(base.rows(0, 0, 1).tobytes())
    hashed.update(base.rows(base.n_chunk - 1)[-1:].tobytes())
    return hashed.hexdigest()


def check(config: RunConfig) -> None:
    """Raise UsageError for options that workers do not support."""
    options = config.perplexity
    if not config.fleet.wanted:
        return
    if options.scores_choices:
        raise UsageError("--workers, --ray and --journal are for perplexity and --kl-divergence, not for choices")
    if options.logits_file is not None and not options.kl_divergence:
        raise UsageError(
            "--kl-divergence-base stores every prediction, which workers do not send; write it without --workers, "
            "--ray and --journal"
        )
    if config.profile:
        raise UsageError("--profile measures one process; leave out --workers, --ray and --journal")


def measure(
    config: RunConfig, header: HeaderSession, windows: Windows, *, stride: int = 0, base: BaseReader | None = None
) -> Iterator[WindowValues]:
    """Yield the values of all windows in order, computed by the workers of the options or taken from the journal."""
    fleet, n_ctx = config.fleet, windows.n_ctx
    each = config_each(config, header)
    assert each.model is not None
    model = input_model(each.model, config.override_kv, header.file)
    base_file = input_file(base.path, base_digest) if base is not None else None
    session_ctx = (config.n_ctx or DEFAULT_WINDOW) if stride else n_ctx  # a strided window fills the context
    setup = WindowSetup(each, session_ctx, stride, base_file.path if base_file else None, not runs_here(fleet))
    head = {
        "kind": "ik perplexity --kl-divergence" if base is not None else "ik perplexity",
        **of_model(header, model),
        "text_digest": hashlib.sha256(_all_tokens(windows, base)).hexdigest(),
        "base_digest": base_file.digest if base_file is not None else "",
        "n_ctx": n_ctx,
        "stride": stride,
        **settings(config),
    }
    worker, executor = UnitFunction(open_windows, setup, (model, base_file)), executor_of(fleet, threads_of(each))
    units = list(_units(windows))
    with Journal(fleet.journal, head) as journal:
        for (_, (first, group)), record in zip(units, map_units(worker, units, journal, executor), strict=True):
            yield from _read(record, first, group, 1 if base is None else 5)


def _all_tokens(windows: Windows, base: BaseReader | None) -> bytes:
    """Return the first window: more --chunks of the same text resume a journal, and units have their own digests."""
    return np.ascontiguousarray(windows.tokens[0] if base is None else base.tokens[0]).tobytes()


def _units(windows: Windows) -> Iterator[tuple[str, tuple[int, Windows]]]:
    """Yield groups of windows that are decoded together, named by the indices and a digest of their windows."""
    for first in range(0, windows.n_chunk, windows.n_seq):
        tokens = np.ascontiguousarray(windows.tokens[first : first + windows.n_seq])
        name = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        yield f"{first + 1}-{first + len(tokens)} {name}", (first, replace(windows, tokens=tokens))


def _read(record: dict[str, Any], first: int, windows: Windows, n_values: int) -> Iterator[WindowValues]:
    for i, found in enumerate(record["windows"]):
        data = found.get("values")
        values = None
        if data is not None:
            values = np.frombuffer(base64.b64decode(data), "<f8").reshape(n_values, windows.n_scored)
        yield WindowValues(first + i, found["seconds"], values, found.get("problem", ""))
