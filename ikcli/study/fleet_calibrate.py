"""Calibration by workers: a unit is a trial, which assigns other types to tensors and is run over the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ikcli
from ikcli.fleet.choose import executor_of, threads_each
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import absolute, digests, model_inputs
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction, input_file
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.log import hushed, log, progress
from ikcli.quant.encoding import Encoding
from ikcli.quant.tool import ToolOptions, encoding_of
from ikcli.settings.fleet import BatchConfig
from ikcli.study.calibrate import mean_divergence
from ikcli.study.resident import Resident, ResidentOptions

Trial = Mapping[str, GGMLType]


@dataclass(frozen=True, slots=True)
class CalibrateSetup:
    """The model that stays resident, and the options that say how tensors are encoded."""

    resident: ResidentOptions
    data: ToolOptions


@contextmanager
def open_calibration(setup: CalibrateSetup) -> Iterator[Callable[[Trial], dict[str, Any]]]:
    """Load the model and yield the function that measures a trial."""
    o = setup.resident
    encoding = encoding_of(open_gguf(o.model, o.overrides), setup.data)
    with hushed():
        resident = Resident(o, "calibrate")
    with closing(resident):
        yield lambda trial: {"kld": mean_divergence(resident, trial, encoding)}


class FleetCalibrator:
    """A `Calibrator` that uses the workers of the options; the journal is that of the command plus `.calibrate`."""

    def __init__(self, options: ResidentOptions, data: ToolOptions, fleet: BatchConfig) -> None:
        self._options, self._data, self._fleet = options, data, fleet

    def measure(self, trials: Sequence[Trial], encoding: Encoding) -> list[float]:
        """Return the mean KL divergence of every trial; workers build the same `encoding` from the same files."""
        o, fleet = self._options, self._fleet
        n_threads = threads_each(o.n_threads, fleet)
        each = replace(o, model=o.model.absolute(), text=o.text.absolute(), n_threads=n_threads)
        file = open_gguf(o.model, o.overrides)
        inputs = (*model_inputs(o.model, file, [replace(self._data, overrides=o.overrides)]), input_file(o.text))
        worker = UnitFunction(open_calibration, CalibrateSetup(each, absolute(self._data)), inputs)
        head = {
            "kind": "ik quantize --calibrate",
            "version": ikcli.__version__,
            "model": o.model.name,
            "digests": list(digests(inputs)),
            "n_ctx": o.n_ctx,
            "chunks": o.chunks,
            "override_kv": list(o.overrides),
            "encode": repr((self._data.include_weights, self._data.exclude_weights, self._data.encode)),
        }
        path = f"{fleet.journal}.calibrate" if fleet.journal else None
        executor = executor_of(fleet, n_threads)
        log(f"calibrate: {len(trials)} trials, {min(executor.n_workers, len(trials))} workers")
        out = []
        units = [(_name(trial), dict(trial)) for trial in trials]
        with Journal(path, head) as journal, progress("calibrating", len(trials), lines=True) as advance:
            for record in map_units(worker, units, journal, executor):
                out.append(float(record["kld"]))
                advance(1)
        return out


def _name(trial: Trial) -> str:
    """Name a trial by a digest of its tensors and types."""
    text = repr(sorted((name, TYPES[type].name) for name, type in trial.items()))
    return f"{len(trial)} tensors {hashlib.sha256(text.encode()).hexdigest()[:32]}"
