"""Chunked scans against loops over tokens, in turns: Mamba 2's scan and the gated delta rule on the CPU backend.

    python benchmarks/scan_loops.py [--threads 1,2] [--turns 7] [--tokens 2048] [--filter NAME]

Four ways to the same results, medians over the turns:

* chunks: the op, with all tokens in one call;
* loop: the same kernel without chunks: vectorised, a head's state stays in the cache from token to token;
* calls: the op, called for one token at a time as in generation, without anything between the calls;
* plain: nested loops as one writes them first, in the order of the formula, compiled without fast math.

"of the peak" counts instructions of a multiply-add unit (a single multiplication takes as long as a multiply-add), as a
share of what the machine does from registers in the same turn. `limit` is loop / chunks if the chunks ran at that peak.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_harness import Harness, Segment, team
from recurrent_cases import Case, Heads, delta_case, mamba2_case

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.params_layers import DELTA_CHUNK
from ikcli.backends.cpu.peaks import product_peak
from ikcli.backends.cpu.program import CpuLowering
from ikcli.graph import Node
from ikcli.graph.ops_recurrent import DeltaNet, Mamba2Scan

Array = npt.NDArray[Any]
ALWAYS = 1 << 30  # tokens up to which there are no chunks


@numba.njit(nogil=True, error_model="numpy")
def plain_mamba2(first, last, state, xbc, dt, a, d, dt_bias, n_group, out):  # type: ignore[no-untyped-def]
    """Scan heads first .. last-1; states are [head][column][n_state]."""
    n_head, width, n_state = state.shape
    cols = n_head * width
    for t in range(len(xbc)):
        for h in range(first, last):
            step = np.float32(np.log1p(np.exp(dt[t, h] + dt_bias[h])))
            decay = np.float32(np.exp(step * a[h]))
            b = cols + h // (n_head // n_group) * n_state
            c = b + n_group * n_state
            for i in range(width):
                x = xbc[t, h * width + i]
                taken, y = x * step, d[h] * x
                for j in range(n_state):
                    new = state[h, i, j] * decay + xbc[t, b + j] * taken
                    y += new * xbc[t, c + j]
                    state[h, i, j] = new
                out[t, h * width + i] = y


@numba.njit(nogil=True, error_model="numpy")
def plain_delta(first, last, state, qkv, decay, beta, n_head_k, scale, out):  # type: ignore[no-untyped-def]
    """Apply the delta rule in heads first .. last-1; states are [head][column of v][column of k]."""
    n_head, dv, dk = state.shape
    for t in range(len(qkv)):
        for h in range(first, last):
            q = h // (n_head // n_head_k) * dk
            k, v = n_head_k * dk + q, 2 * n_head_k * dk + h * dv
            left, strength = decay[t, h], np.float32(1) / (np.float32(1) + np.float32(np.exp(-beta[t, h])))
            for i in range(dv):
                read = np.float32(0)
                for j in range(dk):
                    state[h, i, j] *= left
                    read += state[h, i, j] * qkv[t, k + j]
                u, y = (qkv[t, v + i] - read) * strength, np.float32(0)
                for j in range(dk):
                    state[h, i, j] += u * qkv[t, k + j]
                    y += state[h, i, j] * qkv[t, q + j]
                out[t, h * dv + i] = y * scale


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's op: heads, and the multiply-add instructions times 16 lanes of a token, in a loop and in chunks."""

    name: str
    case: Case
    heads: int
    state: tuple[int, int, int]
    plain: Callable[..., None]
    loop: float
    chunks: float


def triangle(chunk: int) -> float:
    """Return the mean columns of a row of a triangle that is computed in blocks of 16."""
    return 16 * (chunk // 16 + 1) / 2


def mamba2(name: str, heads: int, groups: int, width: int, n_state: int) -> Shape:
    case, cols = mamba2_case(heads, groups, width, n_state, strongest=0.0), heads * width
    w = {key: x.astype(np.float32).reshape(-1) for key, x in case.weights.items()}

    def plain(first: int, last: int, state: Array, values: dict[str, Array], out: Array) -> None:
        plain_mamba2(first, last, state, values["xbc"], values["dt"], w["a"], w["d"], w["dt_bias"], groups, out)

    row = triangle(DELTA_CHUNK)
    # Products with and for the state and with the brackets, for each column; products of c and b, for each group.
    chunks = cols * (2 * n_state + row) + groups * n_state * row
    return Shape(name, case, heads, (heads, width, n_state), plain, 3.0 * cols * n_state, chunks)


def delta(name: str, h: Heads) -> Shape:
    case, cols = delta_case(h, strongest=0.0), h.n_head * h.dv

    def plain(first: int, last: int, state: Array, values: dict[str, Array], out: Array) -> None:
        scale = np.float32(0.3)
        plain_delta(first, last, state, values["qkv"], values["decay"], values["beta"], h.n_head_k, scale, out)

    row = triangle(DELTA_CHUNK)
    # Keys and queries with the state, writes to it; L below its blocks of 16, substitution, P. Then L and P themselves:
    # 3 for each column of k within a block of 16, 2 between blocks.
    chunks = cols * (3 * h.dk + (row - 16) + 7.5 + row) + h.n_head * h.dk * (3 * 16 + 2 * (row - 16))
    # The state is decayed twice rather than written twice.
    return Shape(name, case, h.n_head, (h.n_head, h.dv, h.dk), plain, 5.0 * cols * h.dk, chunks)


SHAPES = [
    mamba2("Mamba-2 2.7B, 80 heads of 64, state 128", 80, 1, 64, 128),
    mamba2("Nemotron-H 8B, 128 heads of 64, 8 groups, state 128", 128, 8, 64, 128),
    mamba2("Granite 4.0 H Tiny, 48 heads of 64, state 128", 48, 1, 64, 128),
    delta("Qwen3-Next, 32 heads of 128, 16 of keys", Heads(32, 16, 128, 128)),
]


class _WithoutChunks:
    """A lowering whose kernels take tokens one by one."""

    def __init__(self, low: CpuLowering) -> None:
        self._low = low

    def __getattr__(self, name: str) -> Any:
        return getattr(self._low, name)

    def emit(self, key: Any, *args: Any, **more: Any) -> None:
        self._low.emit(replace(key, args=(*key.args, ALWAYS)), *args, **more)


def _without_chunks(low: CpuLowering, node: Node, op: Any) -> None:
    RULES.lower(cast(CpuLowering, _WithoutChunks(low)), node)


LOOP_RULES = RULES.replaced({Mamba2Scan: _without_chunks, DeltaNet: _without_chunks})


def prepared(shape: Shape, n: int, threads: int, rules: Any, values: dict[str, Array]) -> Harness:
    """Return the op, ready to run for n tokens behind an earlier one; it begins with empty states."""
    run = Harness(n, 8, rules)
    leaves = {name: run.input(name, cols) for name, cols in shape.case.inputs.items()}
    out = shape.case.build(run.graph, leaves)
    weights = {name: np.ascontiguousarray(w).view(np.uint8) for name, w in shape.case.weights.items()}
    run.compile(out, threads, weights)
    for states in run.caches.values():
        states[:] = 0
    run.prepare([Segment(n, 0, 1)], {leaves[name]: x[:n] for name, x in values.items()})
    return run


def measure(shape: Shape, n: int, threads: int, turns: int, pool: ThreadPoolExecutor) -> str:
    """Return a row of the table."""
    # With one thread processor time counts, so that other work on the machine disturbs less.
    clock = time.thread_time if threads == 1 else time.perf_counter
    values = {name: x.astype(np.float32) for name, x in shape.case.make(np.random.default_rng(0), n).items()}
    chunks, loop = prepared(shape, n, threads, RULES, values), prepared(shape, n, threads, LOOP_RULES, values)
    call = prepared(shape, 1, threads, RULES, values)
    state, out = np.zeros(shape.state, np.float32), np.empty((n, shape.state[0] * shape.state[1]), np.float32)
    bounds = [shape.heads * i // threads for i in range(threads + 1)]

    def calls() -> None:
        for _ in range(n):
            call.execute()

    def plain() -> None:
        if threads == 1:
            return shape.plain(0, shape.heads, state, values, out)
        jobs = [pool.submit(shape.plain, *bounds[i : i + 2], state, values, out) for i in range(threads)]
        for job in jobs:
            job.result()

    ways: dict[str, Callable[[], None]] = {
        "chunks": chunks.execute, "loop": loop.execute, "calls": calls, "plain": plain
    }  # fmt: skip
    for way in (ways["chunks"], ways["loop"], ways["plain"]):  # all three begin with empty states
        way()
    found = [run.program.view(run.arena, run.program.result, n) for run in (chunks, loop)]
    for result in found:
        assert np.linalg.norm(result - out) < 1e-4 * np.linalg.norm(out), "the ways differ"
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = []
    for _ in range(turns):
        peaks.append(product_peak("f32", threads, clock, repeat=3) / 2)
        for name, way in ways.items():
            start = clock()
            way()
            times[name].append(clock() - start)
    middle = {name: statistics.median(found) for name, found in times.items()}
    peak = statistics.median(peaks)
    ratios = [statistics.median(t / c for t, c in zip(times[name], times["chunks"], strict=True))
              for name in ("loop", "calls", "plain")]  # fmt: skip
    shares = [100 * n * work / middle[name] / peak for name, work in (("chunks", shape.chunks), ("loop", shape.loop))]
    limit = middle["loop"] * peak / (n * shape.chunks)
    return (
        f"| {shape.name} | {threads} | " + " | ".join(f"{1e3 * t:.0f}" for t in middle.values()) + " | "
        + " | ".join(f"{r:.1f}" for r in ratios) + f" | {shape.loop / 1e6:.2f} | {shape.chunks / 1e6:.2f} | "
        + " | ".join(f"{s:.0f} %" for s in shares) + f" | {limit:.1f} |"
    )  # fmt: skip


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--filter", default="")
    args = parser.parse_args()
    print(
        "| op | threads | chunks, ms | loop | calls | plain | loop / chunks | calls / chunks | plain / chunks "
        "| million multiply-adds per token, loop | chunks | chunks, of the peak | loop, of the peak | limit |"
    )
    print("|---" + "|---:" * 13 + "|", flush=True)
    for threads in map(int, args.threads.split(",")):
        with ThreadPoolExecutor(threads) as pool:
            for shape in SHAPES:
                if args.filter in shape.name:
                    print(measure(shape, args.tokens, threads, args.turns, pool), flush=True)
        team(threads).close()


if __name__ == "__main__":
    main()
