"""Measurements of benchmarks/divergence.py: a model's files from both programs, evaluated by ik in this process."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from divergence_report import COVARIANCE, IMATRIX, NOTHING, SELF, Record, Side, ratio_of_means
from model_divergence import Settings, compare, importance, store_base

from ikcli.gguf.constants import FILE_TYPES
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.imatrix.matrix import save
from ikcli.imatrix.random_tokens import write_self_covariance
from ikcli.main import main as ik
from ikcli.measure.kld_file import BaseReader
from ikcli.quant.covariance_file import write_covariance
from ikcli.quant.formats import tensor_size

PROGRAM = "llama-quantize"
# Both programs have special rules for these two tensors, also with --pure.
SAME_TYPES = ("--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0")
_SHAPE = (4096, 4096)
_IMATRIX, _COVARIANCE, _RANDOM = "imatrix.dat", "covariance.gguf", "random.gguf"
_RANDOM_TOKENS = 16384
_COVARIANCE_LIMIT = 1 << 30  # bytes per input


class Failed(Exception):
    """ik did not write a file."""


class ReferenceFailed(Exception):
    """The reference did not write a file."""


class Judge(NamedTuple):
    """A model with the text to evaluate and the one for the importance matrix."""

    name: str
    model: Path
    judge: str
    calibration: str


class Programs(NamedTuple):
    """How to quantize: further options of ik, the folder of the reference, and one that keeps its results."""

    options: str = ""
    reference: Path | None = None
    cache: Path | None = None


class Measured(NamedTuple):
    """The result for a file, and its divergence position by position."""

    side: Side
    kld: npt.NDArray[np.float64]


def file_type(type_: str) -> str | None:
    """Return the name of the first file type that makes tensors of a type with --pure, for example IQ2_M for IQ2_S."""
    return next((f.names[0] for f in FILE_TYPES.values() if f.names and f.type.name == type_), None)


def bpw(type_: str) -> float:
    """Return bits per weight in rows of 4096, headers of rows included."""
    type = next(f.type for f in FILE_TYPES.values() if f.type.name == type_)
    return 8 * tensor_size(type, _SHAPE) / (_SHAPE[0] * _SHAPE[1])


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Redirect the output of ik to the buffer."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


def quantize_here(arguments: list[str]) -> None:
    """Run `ik quantize` in this process, so that kernels are loaded once; return its last line if it fails."""
    with quiet() as out:
        code = ik(["quantize", *arguments])
    if code:
        raise Failed(f"ik quantize: exit code {code}: {out.getvalue().strip().rpartition(chr(10))[2]}")


def quantize_there(program: Path, arguments: list[str]) -> None:
    """Run the reference's llama-quantize, which aborts if it requires an importance matrix."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise ReferenceFailed(f"{PROGRAM}: exit code {done.returncode}")


def different_types(a: GGUFFile, b: GGUFFile) -> list[str]:
    """Return the tensors that two files hold in different types."""
    names = sorted(a.tensors.keys() | b.tensors.keys())
    kinds = [[f.tensors[n].type.name if n in f.tensors else "none" for f in (a, b)] for n in names]
    return [f"{name} {ours}/{theirs}" for name, (ours, theirs) in zip(names, kinds, strict=True) if ours != theirs]


def same_data(a: GGUFFile, b: GGUFFile) -> bool:
    """Return whether all tensors are equal byte by byte."""
    return a.tensors.keys() == b.tensors.keys() and all(np.array_equal(a.data(n), b.data(n)) for n in a.tensors)


def evaluate(path: Path, base: BaseReader, settings: Settings, seconds: float) -> Measured:
    """Compare a file, which took this long to write, with the base."""
    with quiet():
        found = compare(path, base, settings)
    s = found.summary
    return Measured(Side(*s.kld, s.ppl[0], *s.same_top, round(seconds, 2)), found.positions.kld)


@dataclass(frozen=True, slots=True)
class Bench:
    """The shared inputs of all measurements on a model."""

    judge: Judge
    folder: Path
    settings: Settings
    programs: Programs
    base: BaseReader
    base_ppl: float

    def key(self, type_: str, mode: str) -> tuple[object, ...]:
        """Return the key of the record that `measure` would return."""
        s = self.settings
        return (self.judge.name, type_, mode, f"{self.base_ppl:.5g}", s.n_ctx, s.chunks, self.programs.options)

    def _arguments(self, path: Path, type_: str, mode: str) -> list[str]:
        rules = ["--ignore-imatrix-rules"] if mode == NOTHING else ["--imatrix", str(self.folder / _IMATRIX)]
        files = [str(self.judge.model), str(path), file_type(type_) or type_, str(self.settings.n_threads)]
        return [*SAME_TYPES, *rules, *files]

    def _ours(self, path: Path, type_: str, mode: str) -> Measured:
        start = time.perf_counter()
        file = {COVARIANCE: _COVARIANCE, SELF: _RANDOM}.get(mode)
        moments = ["--covariance", str(self.folder / file)] if file else []
        quantize_here([*shlex.split(self.programs.options), *moments, *self._arguments(path, type_, mode)])
        seconds = time.perf_counter() - start
        return evaluate(path, self.base, self.settings, seconds)

    def _theirs(self, path: Path, type_: str, mode: str, like: Path, ours: Measured) -> tuple[Measured, str]:
        """Return the result of the reference's file, evaluated only if it differs from ours, and a note on it."""
        assert self.programs.reference is not None
        start = time.perf_counter()
        quantize_there(self.programs.reference / PROGRAM, self._arguments(path, type_, mode))
        seconds = time.perf_counter() - start
        a, b = open_gguf(like, ()), open_gguf(path, ())
        if same_data(a, b):
            return Measured(replace(ours.side, seconds=round(seconds, 2)), ours.kld), "same data"
        differ = different_types(a, b)
        note = f"tensor types differ: {', '.join(differ[:3])}{' ...' * (len(differ) > 3)}" if differ else ""
        return evaluate(path, self.base, self.settings, seconds), note

    def _cached(self, path: Path, type_: str, mode: str, like: Path, ours: Measured) -> tuple[Measured, str]:
        """Return `_theirs` from the cache if it is there: it does not depend on ik's encoders."""
        if self.programs.cache is None:
            return self._theirs(path, type_, mode, like, ours)
        given = NOTHING if mode == NOTHING else IMATRIX
        file = self.programs.cache / ("_".join(map(str, self.key(type_, given)[:-1])) + ".npz")
        if file.is_file():
            with np.load(file) as stored:
                return Measured(Side(*stored["side"].tolist()), stored["kld"]), str(stored["note"])
        found, note = self._theirs(path, type_, mode, like, ours)
        file.parent.mkdir(parents=True, exist_ok=True)
        stay = "" if note == "same data" else note
        np.savez(file, side=np.array(astuple(found.side)), kld=found.kld, note=np.array(stay))
        return found, note

    def measure(self, type_: str, mode: str) -> Record:
        """Quantize with both programs and evaluate; raise Failed if ik refuses."""
        a, b = self.folder / "ours.gguf", self.folder / "reference.gguf"
        theirs, note = None, ""
        try:
            ours = self._ours(a, type_, mode)
            if self.programs.reference is not None:
                theirs, note = self._cached(b, type_, mode, a, ours)
        except ReferenceFailed as problem:
            note = str(problem)
        finally:
            a.unlink(missing_ok=True)
            b.unlink(missing_ok=True)
        ratio = ratio_of_means(ours.kld.tolist(), theirs.kld.tolist()) if theirs else (None, None)
        s, side = self.settings, theirs.side if theirs else None
        return Record(
            self.judge.name, type_, bpw(type_), mode, self.base_ppl, s.n_ctx, s.chunks, self.programs.options,
            ours.side, side, *ratio, note,
        )  # fmt: skip


def open_bench(judge: Judge, folder: Path, settings: Settings, programs: Programs, modes: Sequence[str]) -> Bench:
    """Collect the importance matrix, and second moments if requested, and evaluate the unchanged model."""
    limit = _COVARIANCE_LIMIT if COVARIANCE in modes else 0
    with quiet():
        found = importance(judge.model, judge.calibration, settings, limit)
        base = store_base(judge.model, judge.judge, folder / "base.kld", settings)
    save(found.imatrix, folder / _IMATRIX, as_gguf=False)
    if limit:
        write_covariance(folder / _COVARIANCE, found.moments)
    if SELF in modes:
        with quiet():
            write_self_covariance(judge.model, folder / _RANDOM, _RANDOM_TOKENS, settings.n_threads, ())
    return Bench(judge, folder, settings, programs, BaseReader(folder / "base.kld"), base.ppl)
