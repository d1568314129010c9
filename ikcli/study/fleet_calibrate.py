"""Calibration by several processes or machines; a unit is a trial: tensors with other types, run over the text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ikcli
from ikcli.errors import IkError
from ikcli.fleet.choose import executor_of, threads_each
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import absolute, check_files, digests, files_of
from ikcli.fleet.ordered import in_order
from ikcli.gguf import digests as digest
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
class CalibrateWorkerOptions:
    """`digests` of the model, its files of importance and the text are compared where the worker runs."""

    resident: ResidentOptions
    data: ToolOptions
    digests: tuple[str, ...]
    text_digest: str

    @property
    def files(self) -> list[tuple[Path, str]]:
        """What a node must have."""
        o = self.resident
        return [*files_of(o.model, [self.data], self.digests), (o.text, self.text_digest)]

    def __call__(self) -> CalibrateWorker:
        """Make the worker."""
        return CalibrateWorker(self)


class CalibrateWorker:
    """A resident model."""

    def __init__(self, options: CalibrateWorkerOptions) -> None:
        """Load the model; IkError if a file is another than that of the command."""
        o = options.resident
        file = open_gguf(o.model, o.overrides)
        check_files(file, [options.data], options.digests)
        if digest.of_file(o.text) != options.text_digest:
            raise IkError(f"{o.text} on this node is another file than that of the command")
        self._encoding = encoding_of(file, options.data)
        with hushed():
            self._resident = Resident(o, "calibrate")

    def do(self, trial: Trial) -> dict[str, Any]:
        """Measure one."""
        return {"kld": mean_divergence(self._resident, trial, self._encoding)}

    def close(self) -> None:
        """Release the model."""
        self._resident.close()


class FleetCalibrator:
    """As `Calibrator`, by the workers of the options. The journal is that of the command with `.calibrate` after it."""

    def __init__(self, options: ResidentOptions, data: ToolOptions, fleet: BatchConfig) -> None:
        self._options, self._data, self._fleet = options, data, fleet

    def measure(self, trials: Sequence[Trial], encoding: Encoding) -> list[float]:
        """Mean KL divergence of every trial; workers make the same `encoding` of the same files."""
        o, fleet = self._options, self._fleet
        n_threads = threads_each(o.n_threads, fleet)
        each = replace(o, model=o.model.absolute(), text=o.text.absolute(), n_threads=n_threads)
        sums, text_digest = digests(open_gguf(o.model, o.overrides), [self._data]), digest.of_file(o.text)
        factory = CalibrateWorkerOptions(each, absolute(self._data), sums, text_digest)
        head = {
            "kind": "ik quantize --calibrate",
            "version": ikcli.__version__,
            "model": o.model.name,
            "digests": [*sums, text_digest],
            "n_ctx": o.n_ctx,
            "chunks": o.chunks,
            "override_kv": list(o.overrides),
            "encode": repr((self._data.include_weights, self._data.exclude_weights, self._data.encode)),
        }
        path = Path(f"{fleet.journal}.calibrate") if fleet.journal else None
        work = executor_of(fleet, n_threads)
        log(f"calibrate: {len(trials)} trials, {min(work.n_workers, len(trials))} workers")
        out = []
        with (
            closing(Journal(path, head)) as journal,
            progress("calibrating", len(trials), lines=True) as advance,
        ):
            units = [(_name(trial), dict(trial)) for trial in trials]
            for record in in_order(work, factory, units, journal):
                out.append(float(record["kld"]))
                advance(1)
        return out


def _name(trial: Trial) -> str:
    """By what is in it."""
    text = repr(sorted((name, TYPES[type].name) for name, type in trial.items()))
    return f"{len(trial)} tensors {hashlib.sha256(text.encode()).hexdigest()[:32]}"
