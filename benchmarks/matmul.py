"""Matrix products on the CPU backend, per weight type and number of tokens: GOP/s, for the fewest tokens GB/s as well.

    python benchmarks/matmul.py [--threads 2] [--types q4_K,iq4_k,...|all] [--tokens 1,8,512] [--rows 16384]

Shares are those of peaks measured just before: products from registers, and reading of memory in order. Weights that
fit into the last cache are read faster than that.

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

from ikcli.backends.cpu.lower import FLOAT_TYPES, RULES, activation_kind
from ikcli.backends.cpu.peaks import product_peak, read_rates
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import format_by_name, get_format, row_size

DEFAULT = "f16,bf16,q8_0,q6_K,q5_K,q4_K,q3_K,q2_K,q4_0,iq4_nl,iq4_xs,iq4_k,iq4_ks,iq3_k,iq2_k,iq2_ks,iq2_xxs,iq3_s"
CHECK_ROWS = 64


def best(run: Callable[[], None], repeat: int) -> float:
    """Return the shortest of `repeat` runs, in seconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(type_: GGMLType, n_rows: int, k: int, n_tokens: int, n_threads: int, repeat: int) -> tuple[float, float]:
    """Return (seconds, relative error) of one product."""
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


def peak_of(type_: GGMLType, peaks: dict[str, float]) -> float:
    """Return the peak of the products that a type is computed with: bytes, except for float types."""
    return peaks[activation_kind(type_).replace("q8", "i8")]


def main() -> None:
    """Print one row per type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default=DEFAULT)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,512", help="numbers of activation rows, the first for GB/s")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    names = args.types.split(",")
    types = [format_by_name(n).type for n in names] if names != ["all"] else []
    types = types or [*FLOAT_TYPES, *(t.type for t in TYPES.values() if t.cpu)]
    tokens = [int(n) for n in args.tokens.split(",")]
    peaks = {kind: product_peak(kind, args.threads) for kind in ("i8", "i16", "bf16", "f32")}
    memory = max(read_rates(np.empty(1 << 29, np.uint8), args.threads, repeat=7))
    shown = ", ".join(f"{p / 1e9:.0f} GOP/s of {kind}" for kind, p in peaks.items() if p)
    print(f"peaks of {args.threads} threads: {shown}; {memory / 1e9:.1f} GB/s read from memory\n")
    heads = [f"{tokens[0]} GB/s (of peak)", *(f"{n} GOP/s" for n in tokens)]
    print(f"| type | bpw | {' | '.join(heads)} (of peak) | error |")
    print("|---" * (len(tokens) + 4) + "|")
    for type_ in types:
        fmt, cells = get_format(type_), []
        for n in tokens:
            rows = args.rows if n <= 64 else 2048
            seconds, error = measure(type_, rows, args.columns, n, args.threads, 3 * args.repeat)
            rate = 2.0 * rows * args.columns * n / seconds
            if not cells:
                read = rows * row_size(type_, args.columns) / seconds
                cells.append(f"{read / 1e9:.1f} ({100 * read / memory:.0f} %)")
            cells.append(f"{rate / 1e9:.0f}")
        cells[-1] += f" ({100 * rate / peak_of(type_, peaks):.0f} %)"
        print(f"| {fmt.name} | {fmt.bpw:.3f} | {' | '.join(cells)} | {error:.1e} |", flush=True)


if __name__ == "__main__":
    main()
