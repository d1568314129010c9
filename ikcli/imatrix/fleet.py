"""An importance matrix by several processes or machines: groups of chunks are measured anywhere and added in order.

A unit is a group of windows that one process would sum before adding it to the rest, so the matrix is the same bit for
bit. Workers send all sums of a group, 8 bytes per column of every matrix (and of every expert).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.plan.sizes import imatrix_session
from ikcli.engine.run.opening import open_session
from ikcli.errors import UsageError
from ikcli.fleet.choose import executor_of
from ikcli.fleet.executor import LocalExecutor
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import HeaderSession, check_model, config_each, of_model, settings
from ikcli.fleet.ordered import in_order
from ikcli.gguf import digests as digest
from ikcli.imatrix.matrix import ChunkDone, Gathered, ImatrixParams, ImatrixResult, Measurer, groups, windows
from ikcli.imatrix.sums import Sums
from ikcli.log import hushed
from ikcli.measure.perplexity import bos_of
from ikcli.measure.protocol import TokenIds
from ikcli.settings.run import RunConfig

_AHEAD = 2  # units per worker that may wait to be added


@dataclass(frozen=True, slots=True)
class ImatrixWorkerOptions:
    """Sessions for windows; the digest is compared where the worker runs."""

    config: RunConfig
    params: ImatrixParams
    bos: int | None
    model_digest: str
    quiet: bool

    @property
    def files(self) -> list[tuple[Path, str]]:
        """What a node must have."""
        assert self.config.model is not None
        return [(self.config.model, self.model_digest)]

    def __call__(self) -> ImatrixWorker:
        """Make the worker."""
        return ImatrixWorker(self)


class ImatrixWorker:
    """Holds a session of its own."""

    def __init__(self, options: ImatrixWorkerOptions) -> None:
        """Load the model; IkError if it is another one than that of the command."""
        check_model(options.config, options.model_digest)
        config, sizes = imatrix_session(options.config)
        with hushed(options.quiet):
            self._session = open_session(config, n_ctx=sizes.n_ctx)
        self._measurer = Measurer(self._session, options.params, options.bos)

    def do(self, rows: TokenIds) -> dict[str, Any]:
        """Measure a group of windows."""
        found = [self._measurer.window(row) for row in rows]
        texts = [{"seconds": s, "nll": base64.b64encode(nll.astype("<f8").tobytes()).decode()} for nll, s in found]
        return {"windows": texts, "data": self._measurer.take().to_bytes()}

    def close(self) -> None:
        """Release the model."""
        self._session.close()


def check(config: RunConfig) -> None:
    """UsageError for what workers cannot do."""
    if not config.fleet.wanted:
        return
    if config.imatrix.covariance is not None:
        raise UsageError(
            "--covariance needs one process, as second moments are too much to send; give parts of the text to several "
            "runs (--from-chunk, --chunks) and merge what they write with --in-file"
        )
    if config.profile:
        raise UsageError("--profile measures one process; leave out --workers, --ray and --journal")


def collect(
    config: RunConfig,
    header: HeaderSession,
    tokens: TokenIds,
    params: ImatrixParams,
    *,
    on_chunk: Callable[[ChunkDone], None] | None = None,
    on_sums: Callable[[int, Sums], None] | None = None,
) -> ImatrixResult:
    """As `imatrix.collect`, by the workers of the options; groups in the journal are taken from there."""
    table, fleet = windows(tokens, params), config.fleet
    each = config_each(config, header)
    work = executor_of(fleet, max(each.n_threads, each.n_threads_batch))
    bos, model_digest = bos_of(header), digest.of_model(header.file)
    factory = ImatrixWorkerOptions(each, params, bos, model_digest, not isinstance(work, LocalExecutor))
    head = {
        "kind": "ik imatrix",
        **of_model(header, model_digest),
        "text_digest": hashlib.sha256(table[0].tobytes()).hexdigest(),
        "n_ctx": params.n_ctx,
        "output_tensor": params.output_name,
        "ppl": params.ppl,
        "layer_similarity": params.similarity,
        **settings(config),
    }
    gathered = Gathered(params, on_chunk, on_sums)
    units = [(_name(table, group), table[group.start : group.stop]) for group in groups(len(table), params)]
    with closing(Journal(Path(fleet.journal) if fleet.journal else None, head)) as journal:
        for record in in_order(work, factory, units, journal, ahead=_AHEAD * work.n_workers):
            for window in record["windows"]:
                gathered.window(np.frombuffer(base64.b64decode(window["nll"]), "<f8"), window["seconds"])
            gathered.sums(Sums.from_bytes(record["data"]))
    return gathered.result()


def _name(table: TokenIds, group: range) -> str:
    """By place and tokens, as a journal goes on with more --chunks of the same text."""
    found = hashlib.sha256(np.ascontiguousarray(table[group.start : group.stop]).tobytes()).hexdigest()
    return f"{group.start + 1}-{group.stop} {found[:16]}"
