"""Run a quantize job: read a model tensor by tensor from its memory map, encode it in pieces, stream it to new files.

A piece is a run of rows of one matrix. It is decoded to float32, encoded and handed to the writer in order while other
pieces are in work, so memory depends on the number of threads, not on the model. Input pages are released once used.
Every file is written under a temporary name and renamed when complete; an interrupted run resumes after the last
complete tensor. Corresponds to llama_model_quantize.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.reader import GGUFFile, TensorInfo, read_part
from ikcli.gguf.types import TYPES
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import SPLIT_KEYS, GGUFWriter
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encoders import available_types
from ikcli.quant.encoders.floats import RowReader
from ikcli.quant.encoding import Encoding
from ikcli.quant.formats import row_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.job import JobProgress, OutputPart, QuantizeJob
from ikcli.quant.output_check import check_output, check_room, output_paths
from ikcli.quant.recipes import TypeChoice
from ikcli.quant.run_key import left_bytes, run_key
from ikcli.quant.validate import first_non_finite

Bytes = npt.NDArray[np.uint8]

QUANTIZATION_VERSION = 2
_COPY_BYTES = 32 << 20
_MIN_PIECE, _MAX_PIECE, _IN_WORK = 1 << 16, 1 << 19, 1 << 23  # elements per piece and in all pieces together
_IN_CACHE = 1 << 18  # elements read and encoded at a time; smaller parts cost more in turns of the GIL than they gain
_TERNARY_ROWS = 16
_MAX_KEY_TEXT = 127


def output_metadata(
    file: GGUFFile, file_type: int | None, imatrix: Imatrix | None = None, hide_imatrix: bool = False
) -> dict[str, Typed]:
    """Return the keys of the result: those of the input without split keys, versions, the importance matrix."""
    keys = {key: value for key, value in file.typed_metadata().items() if key not in SPLIT_KEYS}
    keys["general.quantization_version"] = Typed(QUANTIZATION_VERSION, GGUFValueType.UINT32)
    if imatrix is not None:
        keys |= _imatrix_keys(imatrix, hide_imatrix)
    if file_type is not None:
        keys["general.file_type"] = Typed(file_type, GGUFValueType.UINT32)
    return keys


def _imatrix_keys(imatrix: Imatrix, hide: bool) -> dict[str, Typed]:
    def text(value: str) -> Typed:
        raw = ("top_secret" if hide else value).encode("utf-8", "surrogateescape")[:_MAX_KEY_TEXT]
        return Typed(raw, GGUFValueType.STRING)

    keys = {"quantize.imatrix.file": text(imatrix.path)}
    if imatrix.datasets:
        keys["quantize.imatrix.dataset"] = text(",".join(imatrix.datasets))
    n_entries = 0 if hide else len(imatrix.entries)
    keys["quantize.imatrix.entries_count"] = Typed(n_entries, GGUFValueType.INT32)
    if imatrix.n_chunks > 0:
        keys["quantize.imatrix.chunks_count"] = Typed(0 if hide else imatrix.n_chunks, GGUFValueType.INT32)
    return keys


def output_parts(job: QuantizeJob) -> list[OutputPart]:
    """Return the files of the result: one, `splits`, or with `keep_split` those of the input with their tensors."""
    count = len(job.splits or job.file.paths)
    paths = output_paths(job.output, count, job.keep_split or len(job.splits) > 1)
    if len(paths) == 1:
        return [OutputPart(paths[0], job.metadata, tuple(job.choices))]
    parts: list[OutputPart] = []
    ends = list(itertools.accumulate(job.splits))
    for no in range(count):
        if job.splits:
            mine = tuple(job.choices[ends[no] - job.splits[no] : ends[no]])
        else:
            mine = tuple(c for c in job.choices if job.file.tensors[c.source or c.name].file_index == no)
        values = (no, count, len(job.choices))
        types = (GGUFValueType.UINT16, GGUFValueType.UINT16, GGUFValueType.INT32)
        split = {key: Typed(v, t) for key, v, t in zip(SPLIT_KEYS, values, types, strict=True)}
        keep = job.metadata if no == 0 else {k: v for k, v in job.metadata.items() if k == "general.alignment"}
        parts.append(OutputPart(paths[no], keep | split, mine))
    return parts


def check(job: QuantizeJob) -> None:
    """Refuse types without code, repeated quantization and unfit ternary types before anything is written."""
    changing = [c for c in job.choices if c.changes and not _regroups(c)]
    for c in changing:
        if c.new not in available_types():
            raise UnsupportedError(f"tensor {c.name}: {TYPES[c.new].name} cannot be written; choose another type")
        if c.old not in decodable_types():
            raise UnsupportedError(f"tensor {c.name}: {TYPES[c.old].name} cannot be read, so it cannot be converted")
    check_requantize(changing, job.allow_requantize)
    if not job.force:
        for c in changing:
            seen = job.file.has_data(c.source or c.name)  # a plan may have the header alone
            if TYPES[c.new].kind == "ternary" and seen and not _is_ternary(job.file, c):
                raise UsageError(
                    f"{TYPES[c.new].name} is for models with ternary weights, and tensor {c.name} is not ternary; "
                    "choose another type, or give --force"
                )


def check_requantize(changing: Sequence[TypeChoice], allowed: bool) -> None:
    """Raise UsageError if tensors would be quantized again without permission."""
    again = [c for c in changing if TYPES[c.old].is_quantized]
    if again and not allowed:
        raise UsageError(
            f"{len(again)} tensors are quantized already (the first is {again[0].name}, {TYPES[again[0].old].name}); "
            "start from a f16, bf16 or f32 model, or accept the loss with --allow-requantize"
        )


def _regroups(c: TypeChoice) -> bool:
    """Return whether old and new type hold the same blocks in another order of rows."""
    return c.old == TYPES[c.new].base or c.new == TYPES[c.old].base


def _is_ternary(file: GGUFFile, c: TypeChoice) -> bool:
    """Return whether sampled rows hold only zero and plus or minus one magnitude."""
    if TYPES[c.old].is_quantized or TYPES[c.old].is_interleaved:
        return TYPES[c.old].kind == "ternary"
    n_rows = math.prod(c.shape[1:])
    size = row_size(c.old, c.shape[0])
    rows = np.unique(np.linspace(0, n_rows - 1, _TERNARY_ROWS).astype(np.int64)).tolist()
    data = np.concatenate([file.part(c.source or c.name, row * size, (row + 1) * size) for row in rows])
    x = np.abs(dequantize(data, c.old, (c.shape[0], len(rows))))
    largest = x.max(axis=1, keepdims=True)
    return bool(((x <= 0.02 * largest) | (x >= 0.98 * largest)).all())


def run(job: QuantizeJob, progress: JobProgress | None = None) -> list[Path]:
    """Write all files of the job that are not skipped and return their paths.

    Raises IkError if an input file would be overwritten or the disk is too small; errors of data name the tensor.
    """
    check(job)
    hooks = progress or JobProgress()
    parts = output_parts(job)
    check_output([part.path for part in parts], job.file.paths)
    todo = [p for p in parts if not (job.skip_existing and part_is_done(p))]
    if todo:
        prepare_folder([part.path for part in todo])
        check_room(todo[0].path.parent, sum(part.n_bytes - left_bytes(part.path) for part in todo))
    readers = Readers()
    number, written, key = 0, [], run_key(job)
    with ThreadPoolExecutor(max(1, job.n_threads)) as pool:
        for part in parts:
            if part not in todo:
                hooks.skipped(part.path)
                number += len(part.choices)
                hooks.advance(sum(_input_bytes(job, c) for c in part.choices))
                continue
            with GGUFWriter(part.path, part.metadata, part.specs(), job.file.alignment, key=key) as writer:
                if writer.discarded:
                    hooks.discarded(part.path)
                whole = writer.n_whole
                if whole:
                    hooks.resumed(part.path, whole)
                    hooks.advance(sum(_input_bytes(job, c) for c in part.choices[:whole]))
                number += whole
                for number, c in enumerate(part.choices[whole:], number + 1):  # noqa: B020
                    hooks.tensor(number, c)
                    writer.write_tensor(c.name, _chunks(job, c, pool, readers, hooks.advance))
            written.append(part.path)
    return written


def _input_bytes(job: QuantizeJob, c: TypeChoice) -> int:
    return job.file.tensors[c.source or c.name].n_bytes


def part_is_done(part: OutputPart) -> bool:
    """Return whether a file with exactly these tensors exists; raise UsageError if it exists with others."""
    if not part.path.exists():
        return False
    try:
        found = [(t.name, t.shape, t.type) for t in read_part(part.path).tensors.values()]
    except FormatError:
        return False  # damaged: write it again
    if found == [(c.name, c.shape, c.new) for c in part.choices]:
        return True
    raise UsageError(
        f"{part.path} exists, but holds other tensors or types than this run would write; "
        "delete it or drop --partial-requant"
    )


def prepare_folder(paths: Sequence[Path]) -> None:
    """Create the folder of the output files, and delete what killed runs left of them there."""
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        for left in folder.glob(f".{path.name}.*.tmp"):
            m = re.fullmatch(r".*\.(\d+)\.tmp", left.name)
            if m and not _is_alive(int(m[1])):
                left.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # signal 0 is Ctrl-C there; files that are open cannot be deleted
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _chunks(
    job: QuantizeJob, c: TypeChoice, pool: ThreadPoolExecutor, readers: Readers, advance: Callable[[float], None]
) -> Iterator[Bytes]:
    """Yield the bytes of the new tensor in order; input pages are released once used."""
    if not c.changes:
        yield from copied(job.file, c.source or c.name, advance)
        return
    work = TensorEncoder(job.file, [Target(job, c)], job.n_threads, readers)
    for (encoded,) in work.run(pool, advance):
        yield encoded


def copied(file: GGUFFile, name: str, advance: Callable[[float], None]) -> Iterator[Bytes]:
    """Yield the unchanged bytes of a tensor, checked for NaN and Inf; pages are released once used."""
    t = file.tensors[name]
    for start in range(0, t.n_bytes, _COPY_BYTES):
        piece = file.part(t.name, start, min(start + _COPY_BYTES, t.n_bytes))
        _check_copied(piece, t, start)
        yield piece
        file.release(t.name, start, start + len(piece))
        advance(len(piece))


def _check_copied(piece: Bytes, t: TensorInfo, start: int) -> None:
    if TYPES[t.type].kind == "float" and not TYPES[t.type].is_interleaved:
        itemsize = TYPES[t.type].type_size
        part = TensorInfo(t.name, (len(piece) // itemsize,), t.type, len(piece), len(piece) // itemsize, 0)
        bad = first_non_finite(piece, part)
        if bad is not None:
            raise NonFiniteError(f"tensor {t.name} holds NaN or Inf at element {start // itemsize + bad}")


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[..., Any], items: Iterator[tuple[Any, ...]], window: int
) -> Iterator[Any]:
    """Yield the results of work(*item) in order, with at most `window` items in work or waiting."""
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, *item))
            if len(pending) >= window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        for future in pending:
            with suppress(BaseException):
                future.exception()


class Readers(threading.local):
    """The reader of each thread."""

    def __init__(self) -> None:
        self.mine = RowReader()


class Target:
    """One job's version of a tensor; safe to use from any number of threads."""

    def __init__(self, job: QuantizeJob, choice: TypeChoice) -> None:
        self.choice = choice
        self.info = job.file.tensors[choice.source or choice.name]
        self.regroups = choice.changes and _regroups(choice)
        self._encoding = Encoding(job.imatrix, job.covariance, job.encode_options).of(self.info.name, choice.shape)

    @property
    def needs_values(self) -> bool:
        """Return whether the target is made from float32 values, not from the old bytes."""
        return self.choice.changes and not self.regroups

    def feeds_back(self) -> bool:
        return self._encoding.feeds_back(self.choice.new)

    def rows(self, values: npt.NDArray[np.float32], first: int, matrix: int) -> Bytes:
        """Return the new bytes of adjacent rows of a matrix; `first` is the number of the first one."""
        try:
            return self._encoding.encode(values, self.choice.new, matrix)
        except NonFiniteError:
            bad = first + int(np.argmin(np.isfinite(values).all(axis=1)))
            raise NonFiniteError(f"tensor {self.info.name} holds NaN or Inf in row {bad}") from None

    def moved(self, raw: Bytes, start: int) -> Bytes:
        """Return new bytes made from old ones: unchanged (they begin at byte `start`), or with rows regrouped."""
        c = self.choice
        if not self.regroups:
            _check_copied(raw, self.info, start)
            return raw
        from ikcli.quant.repack import repack_rows, unrepack_rows

        if TYPES[c.new].base == c.old:
            return repack_rows(raw, c.new, c.shape[0]).reshape(-1)
        return unrepack_rows(raw, c.old, c.shape[0]).reshape(-1)

    def check(self, out: Bytes, first: int, stop: int) -> None:
        """Refuse scales outside the range of their type."""
        c, ne0 = self.choice, self.info.shape[0]
        made = TensorInfo(c.name, (ne0, stop - first), c.new, len(out), ne0 * (stop - first), 0)
        bad = first_non_finite(out, made)
        if bad is not None:
            raise NonFiniteError(
                f"tensor {c.name}, row {first + bad // ne0}: the values are too large for {TYPES[c.new].name}; "
                "choose bf16 or f32 for this tensor"
            )


class TensorEncoder:
    """Converts row ranges of one tensor, read once, for all `targets`; `encode` runs on any thread."""

    def __init__(self, file: GGUFFile, targets: Sequence[Target], n_threads: int, readers: Readers) -> None:
        self.file, self.targets, self.n_threads, self.readers = file, targets, n_threads, readers
        self.info = targets[0].info
        self.group = math.lcm(TYPES[self.info.type].rows, *(TYPES[t.choice.new].rows for t in targets))

    def _rows(self, n_elements: int) -> int:
        """Return the number of rows with about this many elements, in whole groups."""
        return max(1, n_elements // self.info.shape[0] // self.group) * self.group

    def run(
        self,
        pool: ThreadPoolExecutor,
        advance: Callable[[float], None],
        pieces: Iterator[tuple[int, int, int]] | None = None,
        start: int = 0,
    ) -> Iterator[list[Bytes]]:
        """Yield the new bytes of each target, piece by piece in order; input pages are released once used.

        Takes all pieces, or the given ones, which are adjacent and begin at the input byte `start`.
        """
        released = start
        for stop, encoded in _in_order(pool, self.encode, pieces or self.pieces(), 2 * self.n_threads + 1):
            yield encoded
            self.file.release(self.info.name, released, stop)
            advance(stop - released)
            released = stop

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (matrix, first row, end row) covering all rows; rows are counted over the whole tensor."""
        n_rows = math.prod(self.info.shape[1:])
        ne1 = self.info.shape[1] if len(self.info.shape) > 1 else 1
        if self.info.type == GGMLType.I2_S:
            yield 0, 0, n_rows  # one scale for the whole tensor
            return
        for matrix in range(n_rows // ne1):
            yield from self.pieces_of(matrix, matrix * ne1, (matrix + 1) * ne1)

    def pieces_of(
        self, matrix: int, first: int, stop: int, n_elements: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Yield `pieces` of adjacent rows of a matrix, of about `n_elements` or a size that suits the threads."""
        wanted = min(_MAX_PIECE, max(_MIN_PIECE, _IN_WORK // max(1, 2 * self.n_threads)))
        step = self._rows(n_elements or wanted)
        for row in range(first, stop, step):
            yield matrix, row, min(row + step, stop)

    def encode(self, matrix: int, first: int, stop: int) -> tuple[int, list[Bytes]]:
        """Encode one piece; return the end of its input bytes and the new bytes of each target."""
        old, ne0 = self.info.type, self.info.shape[0]
        if old == GGMLType.I2_S:
            data = self.file.data(self.info.name)
            values = dequantize(data, old, (ne0, stop)).reshape(stop, ne0)
            return len(data), [
                t.rows(values, first, matrix) if t.needs_values else t.moved(data, 0) for t in self.targets
            ]
        n_bytes = row_size(old, ne0)
        raw = self.file.part(self.info.name, first * n_bytes, stop * n_bytes)
        made = {
            i: np.empty((stop - first, row_size(t.choice.new, ne0)), np.uint8)
            for i, t in enumerate(self.targets)
            if t.needs_values
        }
        n_rows = stop - first
        step = n_rows if any(t.feeds_back() for t in self.targets) else self._rows(_IN_CACHE)
        for row in range(0, n_rows if made else 0, step):
            end = min(row + step, n_rows)
            values = self.readers.mine.read(raw[row * n_bytes : end * n_bytes], old, ne0)
            for i, out in made.items():
                out[row:end] = self.targets[i].rows(values, first + row, matrix).reshape(end - row, -1)
        for i, out in made.items():
            self.targets[i].check(out.reshape(-1), first, stop)
        return stop * n_bytes, [
            made[i].reshape(-1) if i in made else t.moved(raw, first * n_bytes) for i, t in enumerate(self.targets)
        ]
