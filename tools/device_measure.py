"""What tools/device_check.py measures in a session, a process per measurement; every one writes JSON to `--json FILE`.

    memory   code of kernels and captured graphs, against what a plan leaves for them
    turns    a token between CPU and GPU (-ot exps=CPU): microseconds per round trip, and what runs beside the CPU
    stream   a prompt whose experts come from RAM: bytes per second against the bus, with pinned weights and without
    expect   logits of a model from NumPy (no GPU), for `logits`
    logits   logits of the devices against those
    tests    tests on the GPU, and the digests of the kernels that they cover if they pass

What follows `--` are options of a run, as `ik sweep-bench` takes them. Exit code 1: a number is not what it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ikcli.backends.cuda import driver  # noqa: E402
from ikcli.backends.cuda.device import Device  # noqa: E402
from ikcli.backends.cuda.modules import Package  # noqa: E402
from ikcli.backends.cuda.transfer import CHUNK_BYTES, Transfer  # noqa: E402
from ikcli.cli.parser import parse  # noqa: E402
from ikcli.engine.run.batch import Batch  # noqa: E402
from ikcli.engine.run.reference_session import ReferenceSession  # noqa: E402
from ikcli.engine.run.run_device import CPU, RESERVE_BYTES  # noqa: E402
from ikcli.engine.run.session import Session  # noqa: E402
from ikcli.errors import IkError, UsageError  # noqa: E402
from ikcli.models import GraphConfig  # noqa: E402
from ikcli.settings.run import RunConfig  # noqa: E402

MIB = 2**20
DIGESTS = ROOT / "tools" / "device_digests.json"
# tests run on the GPU; installed pytest plugins are disabled, since warnings are errors
ON_GPU = {"IK_TEST_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
N_PROMPT, N_STEPS = 20, 3  # tokens whose logits are compared: of one prompt, and one by one
# Standard deviations of the logits: the largest error of a row, median and worst, with activations of 8 bits.
MEDIAN_ERROR, LARGEST_ERROR = 0.15, 0.5
Found = dict[str, Any]


def settings(options: Sequence[str]) -> RunConfig:
    """Return the settings of a run."""
    return parse("sweep-bench", [*options, "--no-warmup"]).config


def _tokens(session: Session, n: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, session.n_vocab, n).astype(np.int32)


def _gpus(session: Session) -> dict[str, Any]:
    return {name: part for name, part in session.runner.parts.items() if name != CPU}


def _gpu(session: Session) -> Any:
    """Return the GPU of a session; raise UsageError without one."""
    found = _gpus(session)
    if not found:
        raise UsageError("the run uses no GPU; check ik devices, and that -ngl is above 0")
    return next(iter(found.values()))


# --- memory ----------------------------------------------------------------------------------------------------------
_SIZES = (*range(1, 9), 16, 32, 64, 128, 256, 512)


def memory(config: RunConfig, probe: Device, sizes: Sequence[int] = _SIZES) -> tuple[Found, bool]:
    """Run steps of many sizes and depths, as a server would; measure what the driver takes beyond our allocations."""
    before = probe.memory()[0]
    with closing(Session.open(config)) as session:
        session.decode(Batch.single(_tokens(session, 1)))
        part, sizes = _gpu(session), [n for n in sizes if n <= session.n_ubatch]
        loaded = before - part.device.memory()[0] - sum(part.device.owners().values())
        depth = 0
        while depth + max(sizes) <= session.n_ctx:
            for n in sizes:
                for _ in range(3):  # launch by launch, captured, replayed
                    session.truncate(0, depth)
                    session.decode(Batch.single(_tokens(session, n), depth))
            session.truncate(0, depth)
            step = min(max(256, depth // 2), session.n_batch)
            if depth + step + max(sizes) > session.n_ctx:
                break
            session.decode(Batch.single(_tokens(session, step), depth))
            depth += step
        graphs = sum(len(g) for p in part._programs for g in p.graphs.values())
        taken = before - part.device.memory()[0] - sum(part.device.owners().values())
    found = {
        "code_mib": loaded / MIB, "code_and_graphs_mib": taken / MIB, "reserve_mib": RESERVE_BYTES / MIB,
        "graphs": graphs, "depth": depth,
    }  # fmt: skip
    return found, graphs > 0 and taken <= RESERVE_BYTES


# --- splits ----------------------------------------------------------------------------------------------------------
class _Clocked:
    """A device of a runner whose calls are timed; `beside` notes which of its splits were over when another ended."""

    def __init__(self, part: Any, seconds: dict[str, float], after: Callable[[int], None]) -> None:
        self._part, self._seconds, self._after = part, seconds, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _timed(self, kind: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._seconds[kind] += time.perf_counter() - start

    def begin(self, *args: Any) -> None:
        self._timed("queue" if self._part.asynchronous else "cpu", self._part.begin, *args)

    def run(self, program: Any, turn: int, n_threads: int) -> None:
        self._timed("queue" if self._part.asynchronous else "cpu", self._part.run, program, turn, n_threads)
        self._after(turn)

    def wait(self, *args: Any) -> None:
        self._timed("wait", self._part.wait, *args)

    def finish(self) -> None:
        self._timed("wait", self._part.finish)


def _beside(program: Any) -> dict[int, tuple[str, int]]:
    """Return for splits of the CPU the last queued split of a GPU that they do not wait for."""
    found, last = {}, -1
    for i, split in enumerate(program.splits):
        if split.device != CPU:
            last = i
        elif last >= 0 and last not in split.after:
            found[program.numbers[i]] = program.splits[last].device, program.numbers[last]
    return found


def turns(config: RunConfig, n: int = 64) -> tuple[Found, bool]:
    """Time `n` tokens; a round trip is a split of the CPU between two of a GPU."""
    with closing(Session.open(config)) as session:
        gpu = _gpu(session)
        ids = _tokens(session, n + 40)
        session.decode(Batch.single(ids[:32]))
        for i in range(32, 40):
            session.decode(Batch.single(ids[i : i + 1], i))
        runner, program = session.runner, session._last[0]
        trips = sum(t.device == CPU and i > 0 for i, t in enumerate(program.splits))
        kernels = defaultdict[str, float](float)
        for _ in range(3):
            for op in runner.timed(program, config.n_threads, session.step_block, False):
                kernels["gpu" if any(op.kernel == k for k in Package.installed().kernels) else "cpu"] += op.seconds / 3
        seconds, over, beside = defaultdict[str, float](float), list[bool](), _beside(program)

        def after(turn: int) -> None:
            if turn in beside:
                name, other = beside[turn]
                part = runner.parts[name]
                over.append(part.device.done(program.parts[name].events[other]))

        for name, part in list(runner.parts.items()):
            runner.parts[name] = _Clocked(part, seconds, after if name == CPU else lambda turn: None)  # type: ignore[assignment]
        start = time.perf_counter()
        for i in range(40, 40 + n):
            session.decode(Batch.single(ids[i : i + 1], i))
        each = (time.perf_counter() - start) / n
    us = {kind: 1e6 * seconds[kind] / n for kind in ("cpu", "wait", "queue")}
    gpu_us = 1e6 * kernels["gpu"]
    found = {
        "us_per_token": 1e6 * each, "round_trips": trips, "us_cpu": us["cpu"], "us_waiting": us["wait"],
        "us_queueing": us["queue"], "us_kernels_gpu": gpu_us,
        "us_per_round_trip": (1e6 * each - us["cpu"]) / max(trips, 1), "turns_beside_cpu": len(beside),
        "of_them_over_with_it": float(np.mean(over)) if over else 0.0, "gpu": gpu.name,
    }  # fmt: skip
    return found, trips > 0


# --- streamed weights ------------------------------------------------------------------------------------------------
def bus(device: Device, n_bytes: int = CHUNK_BYTES, times: int = 8) -> float:
    """Return the bytes per second from pinned memory to the device."""
    pinned, memory, stream = device.pinned(n_bytes, "bus"), device.alloc(n_bytes, "bus"), device.stream()
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            device.upload(stream, memory.address, pinned.array)
        device.synchronize(stream)
        best = max(best, times * n_bytes / (time.perf_counter() - start))
    device.free_stream(stream)
    device.free(memory)
    device.free_pinned(pinned)
    return best


def stream(config: RunConfig, runs: int = 3) -> tuple[Found, bool]:
    """Compute a prompt of one micro-batch, with weights pinned in place and with copies through buffers."""
    found: Found = {}
    pin = Transfer.pin
    for pinned in (True, False):
        spent = [0.0, 0.0]

        def timed_pin(transfer: Transfer, arrays: Any, spent: list[float] = spent) -> None:
            start = time.perf_counter()
            pin(transfer, arrays)
            spent[0], spent[1] = time.perf_counter() - start, float(sum(b - a for a, b in transfer._registered))

        Transfer.pin = timed_pin if pinned else lambda transfer, arrays: None  # type: ignore[method-assign, assignment]
        try:
            with closing(Session.open(config)) as session:
                ids, best = _tokens(session, session.n_ubatch), float("inf")
                for _ in range(runs):
                    session.clear()
                    start = time.perf_counter()
                    session.decode(Batch.single(ids))
                    best = min(best, time.perf_counter() - start)
                program = session._last[0]
                names = (program.chosen or program).streamed
                n_bytes = sum(session.model.bytes_of(name).nbytes for name in names)
                if pinned:
                    found |= {"bus_gb_s": bus(_gpu(session).device) / 1e9, "streamed_mib": n_bytes / MIB,
                              "weights": len(names), "pin_seconds": spent[0], "pinned_mib": spent[1] / MIB}  # fmt: skip
                key = "pinned" if pinned else "buffered"
                found |= {f"{key}_seconds": best, f"{key}_of_bus": n_bytes / best / 1e9 / found["bus_gb_s"],
                          f"{key}_tokens_per_second": len(ids) / best}  # fmt: skip
        finally:
            Transfer.pin = pin  # type: ignore[method-assign]
    return found, bool(found["weights"])


# --- logits ----------------------------------------------------------------------------------------------------------
def compared_tokens(n_vocab: int) -> Any:
    """Return the tokens for comparisons of logits, always the same ones."""
    return np.random.default_rng(11).integers(3, n_vocab, N_PROMPT + N_STEPS).astype(np.int32)


def expect(model: Path, mla: int) -> Any:
    """Compute logits with NumPy: of a whole prompt, and of single tokens."""
    session = ReferenceSession(model, GraphConfig(n_ctx=64, n_ubatch=64, mla=mla))
    ids = compared_tokens(session.hp.n_vocab)
    rows = [np.array(session.decode(Batch.single(ids[:N_PROMPT], logits="all")))]
    rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(N_PROMPT, len(ids))]
    return np.concatenate(rows).astype(np.float32)


def logits(config: RunConfig, wanted: Any) -> tuple[Found, bool]:
    """Compute the same logits with a session, and their distance."""
    with closing(Session.open(config)) as session:
        devices = [part.name for part in _gpus(session).values()]
        ids = compared_tokens(session.n_vocab)
        rows = [np.array(session.decode(Batch.single(ids[:N_PROMPT], logits="all")))]
        rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(N_PROMPT, len(ids))]
    found, ok = difference(np.concatenate(rows), wanted)
    return {"devices": devices, **found}, ok


def difference(values: Any, wanted: Any) -> tuple[Found, bool]:
    """Return the distance of logits from the expected ones."""
    if values.shape != wanted.shape:
        return {"shape": list(values.shape), "expected_shape": list(wanted.shape)}, False
    error = np.abs(values - wanted).max(axis=1) / wanted.std()
    same = float((values.argmax(1) == wanted.argmax(1)).mean())
    found = {"median_error": float(np.median(error)), "largest_error": float(error.max()), "same_top_token": same}
    return found, bool(np.median(error) <= MEDIAN_ERROR and error.max() <= LARGEST_ERROR)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- tests -----------------------------------------------------------------------------------------------------------
_COVERED_BY = {  # files of kernels by the beginning of their names: the tests that run them
    "attn_blocks": ("test_cuda_sparse_blocks.py",),
    "attn_index": ("test_cuda_sparse.py", "test_cuda_sparse_blocks.py", "test_cuda_streams.py"),
    "attn_mla_sparse": ("test_cuda_sparse.py",),
    "attn_pooled": ("test_cuda_streams.py",),
    "attn_": ("test_cuda_attention.py", "test_cuda_attention_kv.py"),
    "delta_": ("test_cuda_recurrent.py",),
    "layer_altup": ("test_cuda_streams.py",),
    "layer_recurrent": ("test_cuda_recurrent.py",),
    "layer_streams": ("test_cuda_streams.py",),
    "mamba2_": ("test_cuda_recurrent.py",),
    "layer_": ("test_cuda_layers.py", "test_cuda_layers_moe.py"),
    "weights_": ("test_cuda_weights.py", "test_cuda_weights_moe.py"),
    "upload_": ("test_cuda_exec_transfer.py",),
}


def covering(file: str) -> tuple[str, ...]:
    """Return the tests that run the kernels of a file, by the longest beginning of its name.

    benchmarks/gpu.py runs those of `util` and `roof`.
    """
    return next((_COVERED_BY[k] for k in sorted(_COVERED_BY, key=len, reverse=True) if file.startswith(k)), ())


def test_files() -> list[str]:
    """Return all tests that run kernels on a GPU."""
    return sorted({test for tests in _COVERED_BY.values() for test in tests})


def read_digests(path: Path = DIGESTS) -> dict[str, dict[str, str]]:
    """Return by file of tests the digests of its kernel sources at the time when it last passed on a GPU."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text())["tests"]
    return found


def changed(files: Mapping[str, str] | None = None, path: Path = DIGESTS) -> dict[str, tuple[str, ...]]:
    """Return tests whose kernels changed since they last passed on a GPU, with the files of those kernels."""
    known = read_digests(path)
    by_test: dict[str, list[str]] = {}
    for name, digest in (Package.installed().files if files is None else files).items():
        for test in covering(name):
            if known.get(test, {}).get(name) != digest:
                by_test.setdefault(test, []).append(name)
    return {test: tuple(names) for test, names in sorted(by_test.items())}


def passed(test: str, device: str, path: Path = DIGESTS) -> None:
    """Record that a file of tests passed on a GPU with the present kernels."""
    record = json.loads(path.read_text())
    record["tests"][test] = {
        name: digest for name, digest in Package.installed().files.items() if test in covering(name)
    }
    record |= {"tests": dict(sorted(record["tests"].items())), "device": device}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def tests(name: str, digests: Path) -> tuple[Found, bool]:
    """Run a file of tests on the GPU in place of the emulation, in one process."""
    kernels = changed(path=digests).get(name, ())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "", "-q",
               "--no-header", "--durations=3", f"tests/{name}"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **ON_GPU},
                          check=False)  # fmt: skip
    lines = done.stdout.splitlines()
    print("\n".join(lines[-40:]), done.stderr[-2000:], sep="\n", flush=True)
    summary = lines[-1] if lines else ""
    ok = done.returncode == 0 and " passed" in summary
    if ok:
        passed(name, driver.devices()[0].name, digests)
    return {"summary": summary, "changed": list(kernels)}, ok


# --- command ---------------------------------------------------------------------------------------------------------
def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "turns", "stream", "expect", "logits", "tests"))
    parser.add_argument("--file", default="", help="of `tests`: a file in tests/")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--expected", type=Path, help="logits and digest of the model, written by `expect`")
    parser.add_argument("--digests", type=Path, default=DIGESTS)
    args = parser.parse_args(argv[:at])
    options = list(argv[at + 1 :])
    if args.what == "tests":
        found, ok = tests(args.file, args.digests)
    else:
        config = settings(options)
        if args.what == "expect":
            assert config.model is not None
            np.savez(args.expected, logits=expect(config.model, config.mla), digest=file_digest(config.model))
            found, ok = {"bytes": args.expected.stat().st_size}, True
        elif args.what == "logits":
            assert config.model is not None
            expected = np.load(args.expected)
            if str(expected["digest"]) != file_digest(config.model):
                found, ok = (
                    {"error": "the model made here is another one than the one that the logits belong to"},
                    False,
                )
            else:
                found, ok = logits(config, expected["logits"])
        elif args.what == "memory":
            found, ok = memory(config, driver.open_device())
        else:
            found, ok = turns(config) if args.what == "turns" else stream(config)
    args.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except IkError as e:
        raise SystemExit(f"error: {e}") from None
