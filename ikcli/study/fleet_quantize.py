"""Quantization by workers: rows are encoded anywhere and written to their place by one process.

A unit is a run of rows of one tensor, encoded for all results that change it; how rows are grouped does not change a
byte. Tensors that keep their type are copied by the command. With a journal, encoded data stays in the unfinished file
of a result, and the journal lists the units that are in it, with checksums.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import ikcli
from ikcli.errors import UsageError
from ikcli.fleet.choose import executor_of, threads_each
from ikcli.fleet.journal import Journal
from ikcli.fleet.model import absolute, digests, model_inputs
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import InputFile, UnitFunction
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.placed import PlacedFile
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.log import log
from ikcli.quant.formats import row_size
from ikcli.quant.job import JobProgress, OutputPart, QuantizeJob
from ikcli.quant.matrix import MatrixJob, check_rooms
from ikcli.quant.output_check import check_output
from ikcli.quant.quantizer import (
    Bytes,
    Readers,
    Target,
    TensorEncoder,
    check,
    copied,
    output_parts,
    part_is_done,
    prepare_folder,
)
from ikcli.quant.recipes import TypeChoice
from ikcli.quant.tool import ToolOptions, encoding_of
from ikcli.settings.fleet import BatchConfig

_UNIT = 1 << 24  # weights: seconds of work for a thread


@dataclass(frozen=True, slots=True)
class EncodeUnit:
    """Rows first..stop (of one matrix) of the tensor `name`, and the choices of a type with indices of their data.

    Without choices, the tensor is copied to the results where it keeps its type.
    """

    name: str
    source: str
    matrix: int
    first: int
    stop: int
    choices: tuple[tuple[int, TypeChoice], ...]

    @property
    def key(self) -> str:
        """The name in the journal."""
        return f"{self.name} {self.first}-{self.stop}" if self.choices else f"{self.name} copied"


@dataclass(frozen=True, slots=True)
class QuantizeSetup:
    """The model, and the options that say how the tensors of each kind of result are encoded."""

    source: Path
    data: tuple[ToolOptions, ...]
    n_threads: int


@contextmanager
def open_encoder(setup: QuantizeSetup) -> Iterator[Callable[[EncodeUnit], list[Bytes]]]:
    """Map the model and yield the function that encodes rows: their new bytes for every choice of a unit."""
    file = open_gguf(setup.source, setup.data[0].overrides)
    jobs, readers = [_job(file, o) for o in setup.data], Readers()

    @lru_cache(maxsize=1)  # the targets of a tensor are kept, as factoring its covariance takes a while
    def targets_of(choices: tuple[tuple[int, TypeChoice], ...]) -> list[Target]:
        return [Target(jobs[data], choice) for data, choice in choices]

    def encode(unit: EncodeUnit) -> list[Bytes]:
        work = TensorEncoder(file, targets_of(unit.choices), setup.n_threads, readers)
        if work.info.type == GGMLType.I2_S:  # one scale for the whole tensor
            todo, start = work.pieces(), 0
        else:
            todo = work.pieces_of(unit.matrix, unit.first, unit.stop)
            start = unit.first * row_size(work.info.type, work.info.shape[0])
        found = list(work.run(pool, lambda n_bytes: None, todo, start))
        return [np.concatenate([piece[i] for piece in found]) for i in range(len(unit.choices))]

    with ThreadPoolExecutor(setup.n_threads) as pool:
        yield encode


def _job(file: GGUFFile, options: ToolOptions) -> QuantizeJob:
    """Return a job without tensors, which has what `Target` reads."""
    found = encoding_of(file, options)
    return QuantizeJob(file, Path(), (), {}, found.imatrix, found.covariance, encode_options=found.options)


@dataclass(slots=True)
class _Output:
    """An output file with the index of its data. `known`: the file that an earlier run left unfinished or finished."""

    part: OutputPart
    data: int
    file: PlacedFile
    known: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether an earlier run finished it."""
        return self.known == self.part.path


def run(
    jobs: Sequence[MatrixJob],
    options: Sequence[ToolOptions],
    fleet: BatchConfig,
    progress: JobProgress | None = None,
) -> list[Path]:
    """Write the files of all jobs, which share one model, and return the paths of those that were not skipped.

    `options[i]` are those that job i was planned with. IkError as from `quantizer.run`; with a journal the unfinished
    files stay, and the same call resumes.
    """
    hooks, model = progress or JobProgress(), jobs[0].job.file
    data: dict[Hashable, int] = {}
    kinds: list[ToolOptions] = []
    outputs: list[_Output] = []
    for j, o in zip(jobs, options, strict=True):
        check(j.job)
        if j.data not in data:
            data[j.data] = len(kinds)
            kinds.append(o)
        for part in output_parts(j.job):
            check_output([part.path], model.paths)
            if j.job.skip_existing and part_is_done(part):
                hooks.skipped(part.path)
                continue
            file = PlacedFile(part.path, part.metadata, part.specs(), model.alignment, keep=fleet.journal is not None)
            outputs.append(_Output(part, data[j.data], file))
    paths = [o.part.path for o in outputs]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("two results have the same file name")
    if not outputs:
        return []
    for path in paths:
        prepare_folder([path])
    kinds = [absolute(o) for o in kinds]
    inputs = model_inputs(model.paths[0], model, kinds)
    with Journal(fleet.journal, _head(model, outputs, kinds, digests(inputs))) as journal:
        _Run(model, outputs, journal, hooks).run(kinds, inputs, fleet)
    return paths


def _head(
    model: GGUFFile, outputs: Sequence[_Output], kinds: Sequence[ToolOptions], sums: Sequence[str]
) -> dict[str, Any]:
    """Describe the work that a journal can resume; the header of an output file covers all its tensors."""
    return {
        "kind": "ik quantize",
        "version": ikcli.__version__,
        "model": model.paths[0].name,
        "digests": list(sums),
        "encode": [repr((o.include_weights, o.exclude_weights, o.encode)) for o in kinds],
        "files": {str(o.part.path): hashlib.sha256(o.file.header).hexdigest() for o in outputs},
    }


class _Run:
    """One call of `run` with known outputs."""

    def __init__(self, model: GGUFFile, outputs: Sequence[_Output], journal: Journal, hooks: JobProgress) -> None:
        self._model, self._outputs, self._journal, self._hooks = model, outputs, journal, hooks
        self._choices = [{c.name: c for c in o.part.choices} for o in outputs]
        largest = max(self._choices, key=len)
        self._names = list(dict.fromkeys(name for choices in (largest, *self._choices) for name in choices))

    def run(self, kinds: Sequence[ToolOptions], inputs: tuple[InputFile | None, ...], fleet: BatchConfig) -> None:
        """Do what is not done yet."""
        n_threads = threads_each(kinds[0].n_threads, fleet)
        units = [unit for name in self._names for unit in self._units(name)]
        for o in self._outputs:
            self._find_known(o, units)
        todo = [u for u in units if not self._is_done(u)]
        for u in todo:
            self._journal.forget(u.key)
        if len(todo) < len(units):
            log(f"quantize: {len(units) - len(todo)} of {len(units)} pieces are there already")
        for u in units if len(todo) < len(units) else []:
            self._hooks.advance(0 if u in todo else self._n_bytes(u))
        writing = [o for o in self._outputs if not o.finished]
        check_rooms([(o.part.path, o.file.size) for o in writing if o.known is None])
        setup = QuantizeSetup(self._model.paths[0].absolute(), tuple(kinds), n_threads)
        worker, executor = UnitFunction(open_encoder, setup, inputs), executor_of(fleet, n_threads)
        left = Counter(u.name for u in todo)
        with ExitStack() as stack:
            for o in writing:
                stack.callback(o.file.close)
                o.file.begin()
            for u in todo:
                if not u.choices:
                    self._copy(u)
                    self._told(u, left)
            encoded = [u for u in todo if u.choices]

            def place(i: int, found: Sequence[Bytes]) -> dict[str, Any]:
                record = self._place(encoded[i], found)
                self._told(encoded[i], left)
                return record

            named = [(u.key, u) for u in encoded]
            for _ in map_units(worker, named, self._journal, executor, keep=place):
                pass  # every result was written as soon as it was there
            for o in writing:
                o.file.finish()

    def _told(self, unit: EncodeUnit, left: Counter[str]) -> None:
        left[unit.name] -= 1
        if not left[unit.name]:
            choice = next(choices[unit.name] for choices in self._choices if unit.name in choices)
            self._hooks.tensor(self._names.index(unit.name) + 1, choice)
        self._hooks.advance(self._n_bytes(unit))

    def _n_bytes(self, unit: EncodeUnit) -> int:
        """Return the bytes of input that a unit completes; a copy counts only if no other result encodes the tensor."""
        t = self._model.tensors[unit.source]
        if unit.choices:
            return (unit.stop - unit.first) * row_size(t.type, t.shape[0])
        return 0 if any(unit.name in c and c[unit.name].changes for c in self._choices) else t.n_bytes

    def _units(self, name: str) -> Iterator[EncodeUnit]:
        found = [(o.data, c[name]) for o, c in zip(self._outputs, self._choices, strict=True) if name in c]
        source = found[0][1].source or name
        n_rows = math.prod(found[0][1].shape[1:])
        if any(not c.changes for _, c in found):
            yield EncodeUnit(name, source, 0, 0, n_rows, ())
        changing = {(data, c.new): (data, c) for data, c in found if c.changes}
        if not changing:
            return
        choices = tuple(changing.values())
        jobs = QuantizeJob(self._model, Path(), (), {})
        work = TensorEncoder(self._model, [Target(jobs, c) for _, c in choices], 1, Readers())
        ne1 = work.info.shape[1] if len(work.info.shape) > 1 else 1
        if work.info.type == GGMLType.I2_S:
            yield EncodeUnit(name, source, 0, 0, n_rows, choices)
            return
        for m in range(n_rows // ne1):
            for matrix, first, stop in work.pieces_of(m, m * ne1, (m + 1) * ne1, _UNIT):
                yield EncodeUnit(name, source, matrix, first, stop, choices)

    def _places(self, unit: EncodeUnit) -> Iterator[tuple[_Output, int, int, int]]:
        """Yield (output, index of the choice or 0, first byte, bytes) for every place the result of a unit goes to."""
        kinds = [(data, c.new) for data, c in unit.choices]
        for o, choices in zip(self._outputs, self._choices, strict=True):
            c = choices.get(unit.name)
            if c is None or c.changes != bool(unit.choices):
                continue
            size = row_size(c.new, c.shape[0])
            place = kinds.index((o.data, c.new)) if c.changes else 0
            yield o, place, unit.first * size, (unit.stop - unit.first) * size

    def _find_known(self, o: _Output, units: Sequence[EncodeUnit]) -> None:
        if not self._journal.records:
            return
        if o.file.holds(o.file.partial):
            o.known = o.file.partial
        elif o.file.holds(o.part.path):
            o.known = o.part.path
            mine = [u for u in units if any(place[0] is o for place in self._places(u))]
            if not all(self._is_there(u, o) for u in mine):
                o.known = None

    def _is_there(self, unit: EncodeUnit, output: _Output) -> bool:
        record = self._journal.records.get(unit.key)
        if record is None or output.known is None:
            return False
        return all(
            o.file.crc32(output.known, unit.name, start, n) == record["crc32"][i]
            for o, i, start, n in self._places(unit)
            if o is output
        )

    def _is_done(self, unit: EncodeUnit) -> bool:
        return all(o.finished or self._is_there(unit, o) for o, *_ in self._places(unit))

    def _copy(self, unit: EncodeUnit) -> None:
        crc, at = 0, 0
        places = [o.file for o, *_ in self._places(unit) if not o.finished]
        for piece in copied(self._model, unit.source, lambda n_bytes: None):
            crc = zlib.crc32(piece.data, crc)
            for file in places:
                file.write(unit.name, at, piece)
            at += len(piece)
        self._journal.add(unit.key, self._kept([crc], places))

    def _place(self, unit: EncodeUnit, found: Sequence[Bytes]) -> dict[str, Any]:
        places = [(o.file, i, start) for o, i, start, _ in self._places(unit) if not o.finished]
        for file, i, start in places:
            file.write(unit.name, start, found[i])
        crc32 = [zlib.crc32(np.ascontiguousarray(data).data) for data in found]
        return self._kept(crc32, [file for file, *_ in places])

    def _kept(self, crc32: list[int], files: Sequence[PlacedFile]) -> dict[str, Any]:
        """Return the record of a unit; with a journal its bytes reach the disk before the record does."""
        if self._journal.path is not None:
            for file in files:
                file.sync()
        return {"crc32": crc32}
