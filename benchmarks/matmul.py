"""Matrix products on the CPU backend, per weight type: GOP/s for prompts, GB/s for single tokens.

    python benchmarks/matmul.py [--threads 2] [--types q4_K,iq4_k,...|all] [--rows 16384] [--columns 4096]

`error` is the relative deviation from the decoded weights in float64 (activations are quantized to 8 bits, so 0.5 % is
the expected size for integer types).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_harness import Harness, Segment, team
from weight_bytes import stored

from ikcli.backends.cpu.lower import FLOAT_TYPES, RULES
from ikcli.backends.cpu.tile_modes import MODES
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import format_by_name, get_format, row_size

DEFAULT = "f16,bf16,q8_0,q6_K,q5_K,q4_K,q3_K,q2_K,q4_0,iq4_nl,iq4_xs,iq4_k,iq4_ks,iq3_k,iq2_k,iq2_ks,iq2_xxs,iq3_s"
CHECK_ROWS = 64


def best(run: Callable[[], None], repeat: int) -> float:
    """Shortest of `repeat` runs, in seconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(type_: GGMLType, n_rows: int, k: int, n_tokens: int, n_threads: int, repeat: int) -> tuple[float, float]:
    """(seconds, relative error) of one product."""
    data = stored(type_, n_rows, k)
    harness = Harness(n_tokens, 64, RULES)
    x = harness.input("x", k)
    y = harness.graph.mul_mat(Weight("w", type_, (k, n_rows)), x, "y")
    aligned = np.zeros(len(data) + 64, np.uint8)
    aligned[: len(data)] = data
    harness.compile(y, n_threads, {"w": aligned})
    values = np.random.default_rng(0).standard_normal((n_tokens, k)).astype(np.float32)
    harness.prepare([Segment(n_tokens, 0, 0)], {x: values})
    harness.execute()
    few = row_size(type_, k) * CHECK_ROWS
    exact = values.astype(np.float64) @ dequantize(data[:few], type_, (k, CHECK_ROWS)).astype(np.float64).T
    got = harness.program.view(harness.arena, y, n_tokens)[:, :CHECK_ROWS]
    error = float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))
    run = team(n_threads).run
    return best(lambda: (run(harness.program.address, len(harness.program.ops), n_threads), None)[1], repeat), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default=DEFAULT)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    names = args.types.split(",")
    types = [format_by_name(n).type for n in names] if names != ["all"] else []
    types = types or [*FLOAT_TYPES, *(format_by_name(n).type for n in MODES)]
    print("| type | bpw | PP512 GOP/s | TG GB/s | TG Gweights/s | error |")
    print("|---|---|---|---|---|---|")
    for type_ in types:
        pp, _ = measure(type_, 6144, args.columns, 512, args.threads, args.repeat)
        tg, error = measure(type_, args.rows, args.columns, 1, args.threads, 3 * args.repeat)
        ops, weights = 2.0 * 6144 * args.columns * 512, float(args.rows * args.columns)
        rate = args.rows * row_size(type_, args.columns) / tg / 1e9
        fmt = get_format(type_)
        numbers = f"{ops / pp / 1e9:.0f} | {rate:.1f} | {weights / tg / 1e9:.1f} | {error:.1e}"
        print(f"| {fmt.name} | {fmt.bpw:.3f} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
