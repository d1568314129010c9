"""Damaged model files end in an error for the user: mutated headers, metadata and tensor tables, opened as a session.

Cases run in child processes with limited memory. A child reports every case as a line; what it does not survive is
charged to the last case begun.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.settings.run import RunConfig

TESTS = Path(__file__).resolve().parent
LARGEST = 1 << 26  # bytes of a mutated file: a changed shape can make a tensor of gigabytes
HANG_SECONDS = 60
MEMORY = 6 << 30  # bytes of address space
GROWTH = 500 << 10  # KiB of resident memory
INTEGERS = (0, 1, -1, 2, 3, 5, 7, 31, 33, 63, 1000, 2**16, 2**31 - 1, 2**31, 2**40, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-300, 1e300, 1.0, float("nan"), float("inf"), -float("inf"), 1e-38, 1e38)
OTHERS: tuple[Any, ...] = ("", "yarn", "none", True, False, [], [1, 2], [4, 4], [0, 0], ["a"], [1.5, 2.5])


# --- cases, in the child ----------------------------------------------------------------------------------------------
def base_models() -> dict[str, Any]:
    from factories import tiny_deepseek2, tiny_model

    experts = {"expert_count": 8, "expert_used_count": 3}
    return {
        "llama": tiny_model("llama", **{"rope.freq_base": 1e4, "rope.scaling.factor": 2.0, "rope.dimension_count": 16}),
        "qwen3moe": tiny_model("qwen3moe", expert_feed_forward_length=48, **experts),
        "deepseek2": tiny_deepseek2(expert_group_count=4, expert_group_used_count=2, expert_gating_func=2),
    }


def every_key() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(case, model, metadata): every key absent, and with every odd value."""
    for name, model in base_models().items():
        for key in model.metadata:
            yield f"{name} without {key}", name, {k: v for k, v in model.metadata.items() if k != key}
            for value in (*INTEGERS, *FLOATS, *OTHERS):
                yield f"{name} {key}={value!r}", name, model.metadata | {key: value}


def mutate(raw: bytes, header: int, rng: np.random.Generator) -> bytes:
    """A few bytes of the header changed, or the file cut, or a piece repeated."""
    data = bytearray(raw)
    kind = rng.integers(0, 10)
    if kind == 0:
        return bytes(data[: rng.integers(0, len(data))])
    if kind == 1:
        at, n = rng.integers(0, header), rng.integers(1, 64)
        return bytes(data[:at] + data[at : at + n] + data[at:])
    for _ in range(rng.integers(1, 6)):
        at = rng.integers(0, header - 8)
        if kind < 6:
            data[at] = rng.integers(0, 256)
        else:
            value = int(rng.choice(np.array([0, 1, 2, 255, 2**16, 2**31, 2**32 - 1], np.uint64)))
            data[at : at + 4] = value.to_bytes(8, "little")[:4]
    return bytes(data)


def change_tensors(model: Any, rng: np.random.Generator) -> Any:
    """A copy with a tensor dropped, renamed, reshaped or of another type."""
    from factories import MemoryModel, MemoryTensor

    from ikcli.gguf.constants import GGMLType
    from ikcli.gguf.types import tensor_n_bytes

    tensors = dict(model.tensors)
    for _ in range(rng.integers(1, 3)):
        name = str(rng.choice(list(tensors)))
        old = tensors.pop(name)
        kind = rng.integers(0, 5)
        if kind == 0:
            continue
        type_, shape = old.type, old.shape
        if kind == 1:
            shape = tuple(int(n) for n in rng.choice([1, 2, 32, 64, 96, 256], rng.integers(1, 5)))
        elif kind == 2:
            shape = old.shape[::-1]
        elif kind == 3:
            type_ = GGMLType(int(rng.choice([int(t) for t in GGMLType])))
        else:
            name = name[: rng.integers(1, len(name))] + str(rng.choice(["", ".weight", ".bias", "\n", "é"]))
        try:
            size = tensor_n_bytes(type_, shape)
        except ValueError:
            continue
        if name not in tensors:
            tensors[name] = MemoryTensor(type_, shape, rng.integers(0, 256, size, dtype=np.uint8))
    return MemoryModel(dict(model.metadata), tensors)


def random_cases(seeds: range, folder: Path) -> Iterator[tuple[str, Path]]:
    """(case, file) for every seed."""
    models = base_models()
    path = folder / "case.gguf"
    for seed in seeds:
        rng = np.random.default_rng(seed)
        name = str(rng.choice(list(models)))
        model, metadata = models[name], dict(models[name].metadata)
        if rng.integers(0, 3) == 0:
            model = change_tensors(model, rng)
        for key in rng.choice(list(metadata), rng.integers(0, 4)):
            options = (*INTEGERS, *FLOATS, *OTHERS)
            metadata[str(key)] = options[rng.integers(0, len(options))]
        if not written(model, path, metadata) or path.stat().st_size > LARGEST:
            continue
        raw = path.read_bytes()
        if rng.integers(0, 2):
            header = len(raw) - sum(-(-t.bytes.size // 32) * 32 for t in model.tensors.values())
            raw = mutate(raw, max(header, 64), rng)
        path.unlink()
        path.write_bytes(raw)
        yield f"seed {seed} ({name})", path


def keyed_cases(part: range, folder: Path) -> Iterator[tuple[str, Path]]:
    """(case, file) for a part of `every_key`."""
    models = base_models()
    path = folder / "case.gguf"
    for i, (case, name, metadata) in enumerate(every_key()):
        if i in part and written(models[name], path, metadata):
            yield case, path


def written(model: Any, path: Path, metadata: dict[str, Any]) -> bool:
    """Whether the file format can hold these values; then they are in a new file (older maps stay valid)."""
    from gguf_files import write_model

    from ikcli.errors import FormatError

    path.unlink(missing_ok=True)
    try:
        write_model(model, path, metadata)
    except FormatError:
        return False
    return True


SETTINGS: tuple[dict[str, Any], ...] = ({}, {"mla": 1, "flash_attn": False})


def run_config(path: Path, n_ctx: int) -> RunConfig:
    return RunConfig(command="bench", model=path, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, n_ubatch=32)


def attempt(path: Path, n_ctx: int) -> str:
    """Open, and compute two tokens if the kernels are there: "" or what went wrong beyond an error for the user."""
    from ikcli.engine.run.batch import Batch
    from ikcli.engine.run.session import Session
    from ikcli.errors import IkError

    for settings in SETTINGS:
        try:
            with Session.plan(replace(run_config(path, n_ctx), **settings)) as session:
                needed = session.compute_bytes + sum(session.cache_bytes().values())
                if session.runner.n_missing(list(session.programs.values())) or 1 << 28 < needed < 2 * MEMORY:
                    continue
                session.load()
                session.warm_up()
                session.decode(Batch.single([1, 2], logits="all"))
        except IkError as e:
            if not str(e) or "internal error" in str(e):
                return f"unhelpful error {e!r}"
        except Exception:
            return traceback.format_exc(limit=-4)
    return ""


def child(kind: str, start: int, stop: int, folder: str) -> None:
    """Run cases start..stop-1; one JSON line before and one after each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cases = random_cases if kind == "random" else keyed_cases
    for i, (case, path) in enumerate(cases(range(start, stop), Path(folder))):
        print(json.dumps({"begin": case}), flush=True)
        signal.alarm(HANG_SECONDS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with contextlib.redirect_stderr(io.StringIO()):
            problem = attempt(path, (512, 0)[i % 2])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if not problem and grown > GROWTH:
            problem = f"needed {grown >> 10} MiB"
        print(json.dumps({"end": case, "problem": problem}), flush=True)


# --- tests ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The unharmed models run, and the children find their kernels."""
    from ikcli.engine.run.session import Session

    path = tmp_path_factory.mktemp("unharmed") / "model.gguf"
    for model in base_models().values():
        assert written(model, path, model.metadata)
        for settings in SETTINGS:
            Session.open(replace(run_config(path, 512), **settings)).close()


def check(kind: str, start: int, stop: int, folder: Path) -> None:
    code = f"import test_fuzz_cli as t; t.child({kind!r}, {start}, {stop}, {str(folder)!r})"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]), OPENBLAS_NUM_THREADS="1")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=3600
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    problems = [f"{x['end']}: {x['problem']}" for x in lines if x.get("problem")]
    if run.returncode:
        last = lines[-1] if lines else {}
        problems.append(f"the process ended with {run.returncode} in {last}: {run.stderr[-2000:]}")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])
    assert sum("end" in x for x in lines) > 0


def test_mutated_files(tmp_path: Path) -> None:
    check("random", 0, 60, tmp_path)


def test_odd_values_of_some_keys(tmp_path: Path) -> None:
    """Every eleventh of a grid that `-m slow` runs completely is enough to notice a new kind of failure."""
    check("keyed", 0, 150, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_mutated_files(tmp_path: Path, part: int) -> None:
    check("random", 1000 + 500 * part, 1500 + 500 * part, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_odd_values_of_every_key(tmp_path: Path, part: int) -> None:
    check("keyed", 200 * part, 200 * part + 200, tmp_path)
