"""Recurrent layers on the CPU backend: GFLOP/s of delta rule and scan for prompts, bytes of states per second else.

    python benchmarks/recurrent.py [--threads 2] [--repeat 5] [--filter decode]

FLOPs are those of the recurrence (7 per element of the state and token, 6 and an exponential of the scan), not of the
chunks computed; bytes are those of the states, read and written once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_harness import Harness, Segment, team
from recurrent_cases import Case as Graph
from recurrent_cases import Heads, conv_case, delta_case, mamba2_case, scan_case

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.peaks import product_peak


@dataclass(frozen=True, slots=True)
class Case:
    """A graph of one op, tokens of each sequence, FLOPs per token, floats of a state."""

    name: str
    graph: Graph
    n_tokens: int
    n_seq: int
    flops: float
    state: int


def delta(name: str, heads: Heads, n_tokens: int, n_seq: int = 1) -> Case:
    size = heads.n_head * heads.dk * heads.dv
    return Case(name, delta_case(heads), n_tokens, n_seq, 7.0 * size, size)


def conv(name: str, columns: int, n_tokens: int) -> Case:
    return Case(name, conv_case((columns,), 4), n_tokens, 1, 8.0 * columns, 3 * columns)


def scan(name: str, columns: int, n_tokens: int) -> Case:
    return Case(name, scan_case(columns, 16), n_tokens, 1, 6.0 * 16 * columns, 16 * columns)


def mamba2(name: str, n_tokens: int) -> Case:
    """64 heads of 64 columns with states of 128: a layer of Mamba 2 of 1.3B parameters."""
    size = 64 * 64 * 128
    return Case(name, mamba2_case(64, 1, 64, 128), n_tokens, 1, 6.0 * size, size)


QWEN, KIMI = Heads(32, 16, 128, 128), Heads(32, 32, 128, 128, by_column=True)
CASES = [
    delta("pp512 delta net 32/16x128", QWEN, 512),
    delta("pp512 kda 32x128", KIMI, 512),
    delta("pp16 delta net 32/16x128", QWEN, 16),
    delta("decode delta net 32/16x128", QWEN, 1),
    delta("decode kda 32x128", KIMI, 1),
    delta("decode delta net 32/16x128, 8 sequences", QWEN, 1, 8),
    conv("pp512 short conv 8192", 8192, 512),
    conv("decode short conv 8192", 8192, 1),
    scan("pp512 selective scan 5120x16", 5120, 512),
    scan("decode selective scan 5120x16", 5120, 1),
    mamba2("pp2048 mamba2 64x64x128", 2048),
    mamba2("decode mamba2 64x64x128", 1),
    delta("pp2048 delta net 32/16x128", QWEN, 2048),
    scan("pp2048 selective scan 5120x16", 5120, 2048),
]


def measure(case: Case, threads: int, repeat: int, clock: Callable[[], float]) -> float:
    """Return the best time of the op in seconds; the sequences have cached positions."""
    n = case.n_tokens * case.n_seq
    run = Harness(n, 8, RULES, n_seq=case.n_seq)
    leaves = {name: run.input(name, cols) for name, cols in case.graph.inputs.items()}
    out = case.graph.build(run.graph, leaves)
    weights = {name: np.ascontiguousarray(w).view(np.uint8) for name, w in case.graph.weights.items()}
    run.compile(out, threads, weights)
    values = case.graph.make(np.random.default_rng(0), n)
    best = float("inf")
    for i in range(repeat + 1):
        past = case.n_tokens * i
        run.prepare([Segment(case.n_tokens, 0, past, seq=seq) for seq in range(case.n_seq)],
                    {leaves[name]: x for name, x in values.items()})  # fmt: skip
        start = clock()
        run.execute()
        best = min(best, clock() - start)
    assert np.isfinite(run.program.view(run.arena, out, n)).all()
    return best


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--filter", default="")
    args = parser.parse_args()
    # With one thread processor time counts, so that other work on the machine disturbs less.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    top = product_peak("f32", args.threads, clock)
    print(f"FMA peak, {args.threads} threads: {top / 1e9:.0f} GFLOP/s")
    for case in CASES:
        if args.filter not in case.name:
            continue
        seconds = measure(case, args.threads, args.repeat if case.n_tokens > 1 else 5 * args.repeat, clock)
        n = case.n_tokens * case.n_seq
        print(f"{case.name:42} {1e6 * seconds:9.0f} us {case.flops * n / seconds / 1e9:7.1f} GFLOP/s "
              f"{100 * case.flops * n / seconds / top:5.1f}% {8e-9 * case.state * case.n_seq / seconds:6.1f} GB/s",
              flush=True)  # fmt: skip
    team(args.threads).close()


if __name__ == "__main__":
    main()
