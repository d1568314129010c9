"""An importance matrix by workers: groups of chunks are measured anywhere, and their sums are added in order.

A unit is a group of windows that one process would sum before adding it to the rest, so the matrix is bit-identical.
Workers send all sums of a group: 8 bytes per column of every matrix (and of every expert).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.engine.plan.sizes import imatrix_session
from ikcli.engine.run.opening import open_session
from ikcli.errors import UsageError
from ikcli.fleet.choose import executor_of, runs_here
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import HeaderSession, config_each, of_model, settings, threads_of
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction, input_model
from ikcli.imatrix.matrix import ChunkDone, Gathered, ImatrixParams, ImatrixResult, Measurer, groups, windows
from ikcli.imatrix.sums import Sums
from ikcli.log import hushed
from ikcli.measure.perplexity import bos_of
from ikcli.measure.protocol import TokenIds
from ikcli.settings.run import RunConfig

_AHEAD = 2  # units per worker that may wait until earlier ones are added


@dataclass(frozen=True, slots=True)
class ImatrixSetup:
    """Settings of sessions for windows; `quiet`: log nothing while loading."""

    config: RunConfig
    params: ImatrixParams
    bos: int | None
    quiet: bool


@contextmanager
def open_measurer(setup: ImatrixSetup) -> Iterator[Callable[[TokenIds], dict[str, Any]]]:
    """Load the model and yield the function that measures a group of windows."""
    config, sizes = imatrix_session(setup.config)
    with hushed(setup.quiet):
        session = open_session(config, n_ctx=sizes.n_ctx)

    def sums(rows: TokenIds) -> dict[str, Any]:
        found = [measurer.window(row) for row in rows]
        texts = [{"seconds": s, "nll": base64.b64encode(nll.astype("<f8").tobytes()).decode()} for nll, s in found]
        return {"windows": texts, "data": measurer.take().to_bytes()}

    with closing(session):
        measurer = Measurer(session, setup.params, setup.bos)
        yield sums


def check(config: RunConfig) -> None:
    """Raise UsageError for options that workers do not support."""
    if not config.fleet.wanted:
        return
    if config.imatrix.covariance is not None:
        raise UsageError(
            "--covariance needs one process, as second moments are too large to send; give parts of the text to "
            "several runs (--from-chunk, --chunks) and merge what they write with --in-file"
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
    """Collect like `matrix.collect`, by the workers of the options; groups in the journal are not measured again."""
    table, fleet = windows(tokens, params), config.fleet
    each = config_each(config, header)
    assert each.model is not None
    model = input_model(each.model, config.override_kv, header.file)
    setup = ImatrixSetup(each, params, bos_of(header), not runs_here(fleet))
    head = {
        "kind": "ik imatrix",
        **of_model(header, model),
        "text_digest": hashlib.sha256(table[0].tobytes()).hexdigest(),
        "n_ctx": params.n_ctx,
        "output_tensor": params.output_name,
        "ppl": params.ppl,
        "layer_similarity": params.similarity,
        **settings(config),
    }
    gathered = Gathered(params, on_chunk, on_sums)
    units = [(_name(table, group), table[group.start : group.stop]) for group in groups(len(table), params)]
    worker, executor = UnitFunction(open_measurer, setup, (model,)), executor_of(fleet, threads_of(each))
    with Journal(fleet.journal, head) as journal:
        for record in map_units(worker, units, journal, executor, ahead=_AHEAD * executor.n_workers):
            for window in record["windows"]:
                gathered.window(np.frombuffer(base64.b64decode(window["nll"]), "<f8"), window["seconds"])
            gathered.sums(Sums.from_bytes(record["data"]))
    return gathered.result()


def _name(table: TokenIds, group: range) -> str:
    """Name a group by place and digest, so that more --chunks of the same text resume a journal."""
    found = hashlib.sha256(np.ascontiguousarray(table[group.start : group.stop]).tobytes()).hexdigest()
    return f"{group.start + 1}-{group.stop} {found[:16]}"
