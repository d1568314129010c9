"""Generation kernels of the CPU backend next to those of ik_llama.cpp, on the same weights, in turns, on one thread.

    python benchmarks/kernels.py --library .../libggml.so [--types q4_K,iq4_k_r4,...|all] [--tokens 1] [--rows 64]

Up to a few hundred rows stay in the second-level cache, so this shows arithmetic without the noise of memory; tens of
thousands come from memory each time. Nanoseconds per 256 columns of a row, the shortest and the median of all turns,
and their ratios; above 1 ik is faster. To compare plain AVX2 set IK_CPU_ISA=avx2 and name a library built for it.
Activations are what each program makes of them for a type.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ikcli.native import isa

if isa.current().feature_string:  # before Numba is imported
    os.environ |= {"NUMBA_CPU_NAME": isa.current().cpu, "NUMBA_CPU_FEATURES": isa.current().feature_string}

import numba
from weight_bytes import stored

from ikcli.backends.cpu.kernels.activations import quantize_blocks
from ikcli.backends.cpu.kernels.format_api import few_dots
from ikcli.backends.cpu.kernels.formats import weight_format
from ikcli.backends.cpu.lower import activation_row_bytes, stored_name
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import format_by_name, row_size

COLUMNS, ROWS_PER_RUN = 4096, 1280
# ggml types of activations, and the function that makes them
Q8_K, Q8_2_X4, Q8_K32 = (15, "quantize_row_q8_K"), (99, "quantize_row_q8_2_x4"), (148, "quantize_row_q8_K32")
OTHERS = """
q4_0 q4_1 q5_0 q5_1 q6_0 q8_0 q4_K q5_K q6_K iq4_nl mxfp4 iq1_kt iq2_kt iq3_kt iq4_kt
q4_0_r8 q5_0_r4 q6_0_r4 q8_0_r8 iq4_nl_r4 mxfp4_r8
"""
ACTIVATIONS = dict.fromkeys(OTHERS.split(), Q8_2_X4)  # of the types that are not multiplied with Q8_K
ACTIVATIONS |= dict.fromkeys(("q4_k_r4", "q5_k_r4", "iq4_ks_r4", "iq5_ks_r4", "iq4_xs_r8"), Q8_K32)
DEFAULT = """
q8_0 q6_K q5_K q4_K q3_K q2_K q4_0 iq4_nl iq4_xs iq3_s iq3_xxs iq2_xs iq2_k iq3_k iq4_k iq5_k iq2_ks iq3_ks iq4_ks
iq5_ks iq4_kss iq2_kl iq2_kt iq3_kt iq4_kt q8_0_r8 q6_k_r4 q5_k_r4 q4_k_r4 q3_k_r4 q2_k_r4 q4_0_r8 iq4_nl_r4 iq4_xs_r8
iq3_s_r4 iq3_xxs_r4 iq2_xs_r4 iq2_k_r4 iq3_k_r4 iq4_k_r4 iq5_k_r4 iq4_ks_r4 iq5_ks_r4
"""
Bytes = npt.NDArray[np.uint8]
Run = Callable[[], object]


def aligned(n_bytes: int) -> Bytes:
    """Return zeros at a multiple of 64, followed by as many as kernels read ahead."""
    data = np.zeros(n_bytes + 64 + 16384, np.uint8)
    return data[-data.ctypes.data % 64 :]


def calls(n_rows: int) -> int:
    """Return how often a run multiplies."""
    return max(1, ROWS_PER_RUN // n_rows)


def of_ik(name: str, weights: Bytes, n_rows: int, x: npt.NDArray[np.float32]) -> Run:
    """Return products of n_rows with activation rows x, by ik."""
    dots, n_calls = few_dots(weight_format(stored_name(format_by_name(name).type))), calls(n_rows)
    stride, row_bytes = activation_row_bytes(COLUMNS), row_size(format_by_name(name).type, COLUMNS)
    quantized, out = aligned(len(x) * stride), np.zeros((len(x), n_rows), np.float32)

    @numba.njit
    def quantize(src: int, dst: int, n: int) -> None:
        for t in range(n):
            quantize_blocks(src + 4 * COLUMNS * t, dst + stride * t, COLUMNS, 0, COLUMNS // 32)

    @numba.njit
    def multiply(w: int, a: int, n: int, to: int) -> None:
        for _ in range(n_calls):
            dots(w, row_bytes, n_rows, a, stride, n, COLUMNS, to, 4 * n_rows)

    quantize(x.ctypes.data, quantized.ctypes.data, len(x))
    return lambda: multiply(weights.ctypes.data, quantized.ctypes.data, len(x), out.ctypes.data)


def of_reference(
    library: ctypes.CDLL, name: str, weights: Bytes, n_rows: int, x: npt.NDArray[np.float32]
) -> Run | None:
    """Return the same products by the reference; None if the library has no such kernel."""
    number, quantizer = ACTIVATIONS.get(name, Q8_K)
    stride = 4 * COLUMNS
    quantized, out = aligned(len(x) * stride), np.zeros((len(x), n_rows), np.float32)
    for t, row in enumerate(x):
        to = ctypes.c_void_p(quantized.ctypes.data + t * stride)
        getattr(library, quantizer)(ctypes.c_void_p(row.ctypes.data), to, ctypes.c_int64(COLUMNS))
    type_ = format_by_name(name).type
    long, pointer, int_ = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    args: tuple[Any, ...] = (
        *(long(n_rows), long(len(x)), long(COLUMNS)),
        *(int_(type_), pointer(weights.ctypes.data), long(row_size(type_, COLUMNS))),
        *(int_(number), pointer(quantized.ctypes.data), long(stride)),
        *(pointer(out.ctypes.data), long(n_rows), int_(0), int_(1)),
    )
    multiply = library.iqk_mul_mat
    multiply.restype = ctypes.c_bool

    kept = quantized, out  # the addresses in args are theirs

    def run() -> object:
        for _ in range(calls(n_rows)):
            multiply(*args)
        return kept

    return run if multiply(*args) else None


def nanoseconds(run: Run, n_rows: int, n_tokens: int) -> float:
    """Return nanoseconds per 256 columns of a row and token.

    This is the shortest of five runs, or one run if it comes from memory.
    """
    times = []
    for _ in range(5 if calls(n_rows) > 1 else 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) / (calls(n_rows) * n_rows * COLUMNS // 256 * n_tokens) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--library", required=True, help="libggml.so of a build of ik_llama.cpp")
    parser.add_argument("--types", default=",".join(DEFAULT.split()))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="a multiple of 16 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    try:
        library = ctypes.CDLL(arguments.library)
    except OSError as e:
        parser.error(f"--library {e}")
    n_rows = arguments.rows
    if n_rows < 16 or n_rows % 16:
        parser.error("--rows must be a multiple of 16")
    names = [t.name for t in TYPES.values() if t.cpu] if arguments.types == "all" else arguments.types.split(",")
    x = np.random.default_rng(0).standard_normal((arguments.tokens, COLUMNS)).astype(np.float32)
    print(f"CPU features: {isa.current().name}; {n_rows} rows, {len(x)} tokens; ns per 256 columns of a row and token")
    print("| type | ik | (median) | reference | (median) | ratio | (median) |\n|---|---:|---:|---:|---:|---:|---:|")
    for name in names:
        data = stored(format_by_name(name).type, n_rows, COLUMNS)
        weights = aligned(data.size)
        weights[: data.size] = data
        reference = of_reference(library, name, weights, n_rows, x)
        if reference is None:
            print(f"| {name} | the reference has no kernel for it |")
            continue
        runs = of_ik(name, weights, n_rows, x), reference
        times: tuple[list[float], list[float]] = ([], [])
        for run in runs:
            run()
        for _ in range(arguments.turns):
            for run, found in zip(runs, times, strict=True):
                found.append(nanoseconds(run, n_rows, len(x)))
        (a, b), (c, d) = ((min(t), statistics.median(t)) for t in times)
        print(f"| {name} | {a:.1f} | {b:.1f} | {c:.1f} | {d:.1f} | {c / a:.2f} | {d / b:.2f} |", flush=True)


if __name__ == "__main__":
    main()
