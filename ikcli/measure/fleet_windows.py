"""Windows of a text that workers evaluate: perplexity and KL divergence in several processes or on several machines.

A unit is a group of windows that one process would decode side by side, so every value is the same bit for bit. Tokens
go to the workers; per scored position they send one value back (nll), or with a base file five (`Positions`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.fleet.choose import executor_of
from ikcli.fleet.executor import LocalExecutor
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import HeaderSession, check_model, config_each, of_model, settings
from ikcli.fleet.ordered import in_order
from ikcli.gguf import digests as digest
from ikcli.log import hushed
from ikcli.measure.chunks import Windows, WindowValues, evaluate
from ikcli.measure.kl_divergence import compare_rows
from ikcli.measure.kld_file import BaseReader
from ikcli.measure.perplexity import open_session
from ikcli.measure.protocol import FloatRows, TokenIds
from ikcli.measure.stats import F64, token_nll
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class WindowWorkerOptions:
    """Sessions for windows of n_ctx tokens. Digests are compared where the worker runs; `base` is a base file."""

    config: RunConfig
    n_ctx: int
    stride: int
    model_digest: str
    base: Path | None
    base_digest: str
    quiet: bool

    @property
    def files(self) -> list[tuple[Path, str]]:
        """What a node must have."""
        assert self.config.model is not None
        return [(self.config.model, self.model_digest), *([(self.base, self.base_digest)] if self.base else [])]

    def __call__(self) -> WindowWorker:
        """Make the worker."""
        return WindowWorker(self)


class WindowWorker:
    """Holds a session of its own."""

    def __init__(self, options: WindowWorkerOptions) -> None:
        """Load the model; IkError if a file here is another one than that of the command."""
        config = options.config
        check_model(config, options.model_digest)
        self._base = BaseReader(options.base) if options.base is not None else None
        if self._base is not None and base_digest(self._base) != options.base_digest:
            raise IkError(f"{options.base} on this node is another file than that of the command")
        self._n_threads = max(1, config.n_threads_batch or config.n_threads)
        with hushed(options.quiet):
            self._session = open_session(config, options.n_ctx, config.n_batch, stride=options.stride)

    def do(self, unit: tuple[int, Windows]) -> dict[str, Any]:
        """Evaluate a group of windows, the first of which is number unit[0]."""
        first, windows = unit
        found = _Values(first, windows, self._base, self._n_threads)
        evaluate(self._session, windows, found)
        return {"windows": found.windows}

    def close(self) -> None:
        """Release the model."""
        self._session.close()


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


def base_digest(base: BaseReader) -> str:
    """Of the sizes, the tokens, and the first and last row of predictions: the file may be large."""
    hashed = hashlib.sha256(f"{base.n_ctx} {base.n_vocab} {base.n_chunk}".encode())
    hashed.update(base.tokens.tobytes())
    hashed.update(base.rows(0, 0, 1).tobytes())
    hashed.update(base.rows(base.n_chunk - 1)[-1:].tobytes())
    return hashed.hexdigest()


def check(config: RunConfig) -> None:
    """UsageError for what workers cannot do."""
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
    """Values of all windows in order, by the workers of the options; those in the journal are taken from there."""
    fleet = config.fleet
    each = config_each(config, header)
    work = executor_of(fleet, max(each.n_threads, each.n_threads_batch))
    n_ctx = windows.n_ctx
    model_digest, digest_of_base = digest.of_model(header.file), base_digest(base) if base is not None else ""
    base_path = base.path.absolute() if base is not None else None
    quiet = not isinstance(work, LocalExecutor)
    session_ctx = (config.n_ctx or DEFAULT_WINDOW) if stride else n_ctx  # a strided window fills the context
    factory = WindowWorkerOptions(each, session_ctx, stride, model_digest, base_path, digest_of_base, quiet)
    head = {
        "kind": "ik perplexity --kl-divergence" if base is not None else "ik perplexity",
        **of_model(header, model_digest),
        "text_digest": hashlib.sha256(_all_tokens(windows, base)).hexdigest(),
        "base_digest": digest_of_base,
        "n_ctx": n_ctx,
        "stride": stride,
        **settings(config),
    }
    with closing(Journal(Path(fleet.journal) if fleet.journal else None, head)) as journal:
        units = list(_units(windows))
        for (_, (first, group)), record in zip(units, in_order(work, factory, units, journal), strict=True):
            yield from _read(record, first, group, 1 if base is None else 5)


def _all_tokens(windows: Windows, base: BaseReader | None) -> bytes:
    """The first window only, as more --chunks of the same text go on with a journal; every unit has its own digest."""
    return np.ascontiguousarray(windows.tokens[0] if base is None else base.tokens[0]).tobytes()


def _units(windows: Windows) -> Iterator[tuple[str, tuple[int, Windows]]]:
    """Groups that are decoded together, by the numbers and the tokens of their windows."""
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
