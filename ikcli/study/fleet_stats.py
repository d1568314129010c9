"""The error table of types by workers: a unit is a tensor in a type.

Sums over the rows of a tensor are added in row order, so every number equals that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import ikcli
from ikcli.fleet.choose import executor_of, threads_each
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import absolute, digests, model_inputs
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.types import TYPES
from ikcli.log import progress
from ikcli.quant.code_fields import code_space
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.quant.measure import Errors
from ikcli.quant.tool import ToolOptions
from ikcli.settings.fleet import BatchConfig
from ikcli.study.code_use import CodeUse
from ikcli.study.quantize_stats import (
    StatsParams,
    StatsRow,
    added,
    fits,
    measure_piece,
    measured_tensors,
    pieces,
    stats_row,
    totals,
)


@dataclass(frozen=True, slots=True)
class StatsSetup:
    """The files, and at most how many rows of a matrix are measured (0: all)."""

    model: Path
    imatrix: str | None
    rows: int
    n_threads: int


@contextmanager
def open_stats(setup: StatsSetup) -> Iterator[Callable[[tuple[str, GGMLType]], dict[str, Any]]]:
    """Map the model and yield the function that measures the errors and codes of a tensor in a type."""
    file = open_gguf(setup.model)
    imatrix = read_imatrix(setup.imatrix) if setup.imatrix else None

    def errors_of(unit: tuple[str, GGMLType]) -> dict[str, Any]:
        name, type = unit
        t = file.tensors[name]
        weights = imatrix.weights(name, t.shape) if imatrix is not None else None
        errors, use, n_measured = Errors(), None, 0
        todo = pieces(file, t, weights, setup.rows)
        while some := list(islice(todo, setup.n_threads)):
            n_measured += sum(len(piece.values) for piece in some)
            for more, its_use in pool.map(lambda piece: measure_piece(piece, type), some):
                errors, use = errors + more, added(use, its_use)
        return {
            "n_measured": n_measured,
            "errors": astuple(errors),
            "use": _use_record(use),
            "weights": bool(weights is not None),
        }

    with ThreadPoolExecutor(setup.n_threads) as pool:
        yield errors_of


def measure_model(file: GGUFFile, params: StatsParams, imatrix: str | None, fleet: BatchConfig) -> Iterator[StatsRow]:
    """Measure like `quantize_stats.measure_model`, by the workers of the options, except what the journal holds."""
    tensors = measured_tensors(file, params)
    units = [(t, type) for t in tensors for type in params.types if fits(type, t.shape)]
    data, n_threads = ToolOptions(imatrix=imatrix), threads_each(params.n_threads, fleet)
    inputs = model_inputs(file.paths[0], file, [data])
    setup = StatsSetup(file.paths[0].absolute(), absolute(data).imatrix, params.rows, n_threads)
    worker, executor = UnitFunction(open_stats, setup, inputs), executor_of(fleet, n_threads)
    head = {
        "kind": "ik quantize-stats",
        "version": ikcli.__version__,
        "model": file.paths[0].name,
        "digests": list(digests(inputs)),
        "rows": params.rows,
    }
    named = [(f"{t.name} {TYPES[type].name}", (t.name, type)) for t, type in units]
    rows: list[StatsRow] = []
    with Journal(fleet.journal, head) as journal, progress("measuring", len(units)) as advance:
        for (t, type), record in zip(units, map_units(worker, named, journal, executor), strict=True):
            use = _use_of(record["use"], type)
            rows.append(stats_row(t, type, record["n_measured"], Errors(*record["errors"]), use, record["weights"]))
            advance(1)
            yield rows[-1]
    yield from totals(rows, params)


def _use_record(use: CodeUse | None) -> dict[str, Any] | None:
    if use is None:
        return None
    return {
        "codes": use.codes.tolist(),
        "multipliers": use.multipliers.tolist() if use.multipliers is not None else None,
        "minimums": use.minimums.tolist() if use.minimums is not None else None,
        "exponents": use.exponents.tolist(),
        "others": [use.shifted, use.n_choices, use.zero_scales, use.subnormal_scales],
    }


def _use_of(record: Mapping[str, Any] | None, type: GGMLType) -> CodeUse | None:
    space = code_space(TYPES[type].base or type)
    if record is None or space is None:
        return None
    codes, multipliers, minimums, exponents = (
        np.array(record[key], np.int64) if record[key] is not None else None
        for key in ("codes", "multipliers", "minimums", "exponents")
    )
    assert codes is not None and exponents is not None
    shifted, n_choices, zero, subnormal = record["others"]
    return CodeUse(space, codes, multipliers, minimums, shifted, n_choices, exponents, zero, subnormal)
