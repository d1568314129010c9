#!/usr/bin/env python3
"""Encoding speed of `ik quantize` next to the llama-quantize of ik_llama.cpp, type by type, as a Markdown table.

The input is a model with one large F16 tensor of normally distributed weights with outliers (ternary weights for the
bitnet types), written once into the working folder with an importance matrix for it. Both programs run in turns and
medians are compared. `command` is the wall clock of the whole program, `quantize` the time that each of them reports.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.encoders import available_types
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_legacy

PROGRAM = "llama-quantize"
TENSOR = "blk.0.ffn_up.weight"
NE0 = 4096
_CHUNK_ROWS = 1024
_TERNARY = (GGMLType.IQ1_BN, GGMLType.IQ2_BN, GGMLType.IQ2_BN_R4)
_PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_NEEDS_IMATRIX = re.compile(r"IQ(1_S|1_M|2_XXS|2_XS|2_S|1_KT|2_KT)(_R4)?")
_TIMES = re.compile(r"quantize time =\s*([\d.]+) ms|wrote \d+ files? in ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run: the whole program, and the quantizing time that it reports (NaN if it reports none)."""

    command: float
    quantize: float


def file_types() -> dict[str, str]:
    """Return tensor type -> name of the first file type that makes all tensors of it with --pure."""
    found: dict[str, str] = {}
    for f in FILE_TYPES.values():
        if f.names and f.type in available_types() and f.type not in _PLAIN:
            found.setdefault(f.type.name, f.names[0])
    return found


def weights(n_rows: int, ternary: bool, rng: np.random.Generator) -> Iterator[npt.NDArray[np.float16]]:
    """Yield chunks of rows: a spread of row scales, one weight in a thousand ten times as large; or -s, 0 and s."""
    for start in range(0, n_rows, _CHUNK_ROWS):
        shape = (min(_CHUNK_ROWS, n_rows - start), NE0)
        if ternary:
            yield (rng.integers(-1, 2, shape, np.int8) * np.float32(0.02)).astype(np.float16)
            continue
        x = rng.standard_normal(shape, np.float32) * np.exp(rng.normal(-4, 0.3, (shape[0], 1))).astype(np.float32)
        rows, columns = rng.integers(0, shape, (x.size // 1000, 2)).T
        x[rows, columns] *= 10
        yield x.astype(np.float16)


def write_model(path: Path, n_weights: int, ternary: bool = False) -> None:
    """Write a llama model with a single tensor."""
    n_rows = max(16, n_weights // NE0 // 16 * 16)
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": 2048,
        "embedding_length": NE0,
        "feed_forward_length": n_rows,
        "attention.head_count": NE0 // 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 32,
    }
    general = {"general.architecture": "llama", "general.file_type": 1, "tokenizer.ggml.model": "no_vocab"}
    metadata = general | {f"llama.{k}": v for k, v in keys.items()}
    rng = np.random.Generator(np.random.SFC64(0))
    with GGUFWriter(path, metadata, [NewTensor(TENSOR, (NE0, n_rows), GGMLType.F16)]) as writer:
        writer.write_tensor(TENSOR, weights(n_rows, ternary, rng))


def write_imatrix(path: Path) -> None:
    """Write an importance of the columns: chi-squared like mean squares of activations, some columns far larger."""
    rng = np.random.default_rng(1)
    values = rng.chisquare(2, NE0) * np.where(rng.random(NE0) < 0.01, 50, 1)
    entry = ImatrixEntry(values.astype(np.float32)[None, :], np.ones(1, np.float32))
    write_legacy(Imatrix({TENSOR: entry}, path=str(path), datasets=("random",), n_chunks=1), path)


def run_once(command: list[str], output: Path, timeout: float) -> Times:
    """Run a program and time it; exit with the log's end if it fails or writes nothing."""
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=output.parent, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {shlex.join(command)}: {error}")
    seconds = time.perf_counter() - start
    log = done.stdout + done.stderr
    if done.returncode or not output.is_file():
        tail = "\n".join(log.splitlines()[-10:])
        sys.exit(f"error: {shlex.join(command)} (exit code {done.returncode})\n{tail}")
    output.unlink()
    found = _TIMES.search(log)
    if not found:
        return Times(seconds, float("nan"))
    return Times(seconds, float(found[1]) / 1e3 if found[1] else float(found[2]))


def medians(runs: list[Times]) -> Times:
    """Return medians of both times."""
    return Times(statistics.median(r.command for r in runs), statistics.median(r.quantize for r in runs))


def table_row(name: str, n_weights: int, ours: Times, reference: Times) -> str:
    """Return one Markdown row; ratios above 1 mean that ik is faster."""
    return (
        f"| {name} | {n_weights / 1e6:.1f} | {ours.command:.2f} | {reference.command:.2f} "
        f"| {reference.command / ours.command:.2f} | {ours.quantize:.2f} | {reference.quantize:.2f} "
        f"| {reference.quantize / ours.quantize:.2f} | {n_weights / ours.command / 1e6:.1f} |"
    )


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="tensor types (default: all that both can write)")
    parser.add_argument("--reference", type=Path, required=True, help=f"folder with {PROGRAM}")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--millions", type=float, default=64, help="weights in millions (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="runs of each program (default: %(default)s)")
    parser.add_argument(
        "--imatrix", action="store_true", help="importance weights for all types, not only where needed"
    )
    parser.add_argument("--folder", type=Path, help="working folder; its models are kept for the next time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per run (default: %(default)s)")
    return parser.parse_args(argv)


def input_model(folder: Path, n_weights: int, ternary: bool) -> Path:
    """Return the path of a model, which is written unless it exists."""
    path = folder / f"{'ternary' if ternary else 'normal'}-{n_weights}.gguf"
    if not path.exists():
        write_model(path, n_weights, ternary)
    return path


def compare(name: str, file_type: str, folder: Path, arguments: argparse.Namespace) -> str:
    """Alternate between both programs and return the row of a type."""
    n_weights = int(arguments.millions * 1e6)
    model = input_model(folder, n_weights, GGMLType[name] in _TERNARY)
    options = ["--pure"]
    if arguments.imatrix or _NEEDS_IMATRIX.fullmatch(name):
        options += ["--imatrix", str(folder / "imatrix.dat")]
    programs = {
        "ik": [*shlex.split(arguments.ik), "quantize"],
        "reference": [str((arguments.reference / PROGRAM).resolve())],
    }
    output = folder / f"out-{os.getpid()}.gguf"
    runs: dict[str, list[Times]] = {program: [] for program in programs}
    for repetition in range(arguments.repetitions):
        for program, command in programs.items():
            print(f"{name}: {program}, run {repetition + 1} of {arguments.repetitions}", file=sys.stderr)
            line = [*command, *options, str(model), str(output), file_type, str(arguments.threads)]
            runs[program].append(run_once(line, output, arguments.timeout))
    return table_row(name, n_weights // NE0 // 16 * 16 * NE0, medians(runs["ik"]), medians(runs["reference"]))


def main(argv: list[str]) -> int:
    """Run everything and print the table; progress goes to stderr."""
    arguments = parse_arguments(argv)
    known = file_types()
    names = [name.upper() for name in arguments.types] or list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: no file type makes {', '.join(unknown)}; types are {' '.join(known)}")
    weighted = "with an importance matrix" if arguments.imatrix else "importance matrix only where it is needed"
    print(f"{arguments.threads} threads, {weighted}, medians of {arguments.repetitions}\n")
    print("| type | M weights | command ik s | reference s | ratio | quantize ik s | reference s | ratio | ik MW/s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_imatrix(folder / "imatrix.dat")
        for name in names:
            print(compare(name, known[name], folder, arguments), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
