"""Speed of types: prompts and generation alternating with F16, and the encoders, in pieces that can be stopped.

There are two models: the bundled demo model, whose weights fit into the caches of a processor, and a llama-like one
with random weights (about 300 MB in F16), whose weights do not. tools/make_random_model.py makes the random one. For
the other types its first rows are quantized and repeated, which does not affect speed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from quants_data import Record, read_records, record_key, rounded, speed_types, table_types

import ikcli
from ikcli.bench.environment import hardware
from ikcli.bench.sweep import SweepParams, SweepRow
from ikcli.bench.sweep import run as sweep
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo, open_gguf
from ikcli.gguf.types import TYPES
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.hostinfo import physical_cores
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.quant.formats import format_by_name
from ikcli.quant.recipes import plain_twin
from ikcli.settings.run import RunConfig, default_model

T = GGMLType
PP = 512
_TILE_ROWS = 64  # a multiple of every group height
_ENCODE_ROW, _ENCODE_SECONDS, _ENCODE_MOST = 4096, 0.3, 4096
_GEOMETRY = ("--preset", "llama", "--layers", "3", "--vocab", "4096")


class _Model(NamedTuple):
    """How one model is measured: generated tokens per run, alternating runs."""

    tg: int
    runs: int


_ABOUT = {"kind": "about", "part": "speed"}
MODELS = {"demo": _Model(32, 7), "random": _Model(32, 5)}


class Task(NamedTuple):
    """One record to make; `model` is empty for the encoder, `level` for the usual instruction set."""

    kind: str
    name: str
    model: str
    level: str = ""


class SpeedRound:
    """The remaining tasks of a round of measurements, and the F16 sessions to compare with."""

    def __init__(self, names: Sequence[str], work: Path | None, restart: bool, seconds: float | None) -> None:
        self.folder = work or Path(tempfile.gettempdir()) / "ik-quants-doc"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.n_threads = physical_cores()
        self._stop_at = time.monotonic() + seconds if seconds is not None else float("inf")
        known = {record_key(r): r for r in read_records()}
        usual = known.get(record_key(_ABOUT), {"round": 0})
        self.isa = hardware()["isa"]
        self.level = "" if usual.get("isa", self.isa) == self.isa else self.isa
        about = known.get(record_key(_ABOUT | {"level": self.level}), {"round": 0})
        self.restart = restart or not about["round"]
        self.round = int(about["round"]) + (1 if self.restart else 0)
        self._base: dict[str, Session] = {}

        def is_left(task: Task) -> bool:
            done = known.get(record_key(_head(task)))
            return bool(names) or self.restart or done is None or done["round"] != self.round

        self.todo = [t for t in tasks(self.level) if (not names or t.name.lower() in names) and is_left(t)]

    def run(self) -> Iterator[Record]:
        """Yield records until the time is over; a new round first compiles all kernels, which is not timed."""
        if self.restart:
            yield self._about()
            for type in speed_types():
                self._compile(type)
        try:
            while self.todo and time.monotonic() < self._stop_at:
                yield self._measure(self.todo[0])
                self.todo.pop(0)
        finally:
            for session in self._base.values():
                session.close()

    def _about(self) -> Record:
        file = open_gguf(self._f16("random"), ())
        return _ABOUT | {
            **({"level": self.level} if self.level else {}),
            "round": self.round,
            "isa": self.isa,
            "threads": self.n_threads,
            "version": ikcli.__version__,
            "date": time.strftime("%Y-%m"),
            "random_bytes": file.n_bytes,
            "random_params": file.n_elements,
            "demo_bytes": open_gguf(default_model(), ()).n_bytes,
        }

    def _measure(self, task: Task) -> Record:
        type = format_by_name(task.name).type
        found = _encode(type, self.n_threads) if task.kind == "encode" else self._compare(type, task.model)
        return {**_head(task), "round": self.round, **found}

    # --- models -------------------------------------------------------------------------------------------------------
    def _f16(self, model: str) -> Path:
        """Return the F16 file of a model; `tiny` is the random one with a single layer."""
        path = self.folder / f"{model}-f16.gguf"
        if not path.is_file():
            if model == "demo":
                _convert(open_gguf(default_model(), ()), path, T.F16)
            else:
                script = Path(__file__).with_name("make_random_model.py")
                small = ("--layers", "1", "--vocab", "512") if model == "tiny" else ()
                command = [sys.executable, str(script), *_GEOMETRY, *small, "--type", "F16", "-o", str(path)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise IkError(f"the random model was not made: {done.stderr.strip()}")
        return path

    def _typed(self, type: GGMLType, model: str) -> Path:
        path = self.folder / f"{model}.gguf"
        _convert(open_gguf(self._f16(model), ()), path, type, _TILE_ROWS if model != "demo" else 0)
        return path

    def _config(self, path: Path) -> RunConfig:
        n = self.n_threads
        return RunConfig(command="sweep-bench", model=path, n_ctx=PP, n_threads=n, n_threads_batch=n, warmup=False)

    def _compile(self, type: GGMLType) -> None:
        for model in ("demo", "tiny"):
            with closing(Session.plan(self._config(self._typed(type, model)))) as session:
                session.compile()
        quantize_rows(np.zeros((16, 256), np.float32), type)

    # --- timing -------------------------------------------------------------------------------------------------------
    def _compare(self, type: GGMLType, model: str) -> Record:
        """Return medians of the ratios of pairs of runs that follow each other."""
        if model not in self._base:
            self._base[model] = Session.open(self._config(self._f16(model)))
        base, how = self._base[model], MODELS[model]
        path = self._typed(type, model)
        first = SweepParams(PP, how.tg, PP, warmup_batch=True)
        timed = replace(first, warmup=False, warmup_batch=False)
        pairs: list[tuple[SweepRow, SweepRow]] = []
        with closing(Session.open(self._config(path))) as session:
            n_bytes = session.model.file.n_bytes
            for s in (base, session):
                s.clear()
                sweep(s, replace(first, tg=4))
            for _ in range(how.runs):
                pairs.append((sweep(base, timed)[0], sweep(session, timed)[0]))
        path.unlink()
        return {
            "bytes": n_bytes,
            "pp": rounded(statistics.median(b.speed_pp for _, b in pairs), 4),
            "tg": rounded(statistics.median(b.speed_tg for _, b in pairs), 4),
            "pp_f16": rounded(statistics.median(a.speed_pp for a, _ in pairs), 4),
            "tg_f16": rounded(statistics.median(a.speed_tg for a, _ in pairs), 4),
            "pp_ratio": rounded(statistics.median(b.speed_pp / a.speed_pp for a, b in pairs), 4),
            "tg_ratio": rounded(statistics.median(b.speed_tg / a.speed_tg for a, b in pairs), 4),
        }


def tasks(level: str = "") -> list[Task]:
    """Return the tasks of a round: encoders of types with values of their own, then both models with all types.

    Of an instruction set other than the usual one only the larger model.
    """
    if level:
        return [Task("speed", TYPES[t].name, "random", level) for t in speed_types()]
    encoders = [Task("encode", TYPES[t].name, "") for t in table_types()]
    return encoders + [Task("speed", TYPES[t].name, m) for m in MODELS for t in speed_types()]


def _head(task: Task) -> Record:
    head: Record = {"kind": task.kind, "name": task.name}
    more = {"model": task.model, "level": task.level}
    return head | {key: value for key, value in more.items() if value}


def _convert(file: GGUFFile, path: Path, type: GGMLType, tile_rows: int = 0) -> None:
    """Write the model with all matrices except routers as `type`; with tile_rows only that many are encoded."""
    assert TYPES[type].kind != "ternary"
    specs = [NewTensor(t.name, t.shape, _new_type(t, type)) for t in file.tensors.values()]
    with GGUFWriter(path, file.typed_metadata(), specs) as writer:
        for spec in specs:
            t = file.tensors[spec.name]
            if spec.type == t.type:
                writer.write_tensor(spec.name, [file.data(spec.name)])
                continue
            n_rows = t.n_elements // t.shape[0]
            tile = tile_rows if tile_rows and n_rows % tile_rows == 0 else n_rows
            rows = file.data(t.name).reshape(n_rows, -1)[:tile]
            values = dequantize(rows, t.type, (t.shape[0], tile)).reshape(tile, t.shape[0])
            encoded = quantize_rows(values, spec.type, n_threads=physical_cores())
            writer.write_tensor(spec.name, (encoded for _ in range(n_rows // tile)))


def _new_type(t: TensorInfo, type: GGMLType) -> GGMLType:
    if len(t.shape) == 1 or "ffn_gate_inp" in t.name:
        return t.type
    plain, group = plain_twin(type)
    return plain if t.name == "token_embd.weight" or t.shape[1] % group else type


def _encode(type: GGMLType, n_threads: int) -> Record:
    """Return millions of weights per second, without and with importance: median of three runs of about 0.3 s."""
    rng = np.random.default_rng(0)
    weights = rng.random(_ENCODE_ROW, np.float32) + np.float32(0.1)
    block = rng.standard_normal((_ENCODE_MOST, _ENCODE_ROW), np.float32) * np.float32(0.02)
    found: Record = {}
    for name, imatrix in (("mw_per_s", None), ("mw_per_s_imatrix", weights)):

        def seconds(n: int, imatrix: np.ndarray | None = imatrix) -> float:
            started = time.perf_counter()
            quantize_rows(block[:n], type, imatrix, n_threads=n_threads)
            return time.perf_counter() - started

        seconds(16)
        n = 64
        n = min(_ENCODE_MOST, max(1, round(_ENCODE_SECONDS * n / seconds(n) / 64)) * 64)
        found[name] = rounded(n * _ENCODE_ROW / 1e6 / statistics.median(seconds(n) for _ in range(3)), 4)
    return found
