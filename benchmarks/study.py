#!/usr/bin/env python3
"""What types for a size gain from `ik study`: presets, and files of the same size by estimate, study and calibration.

Importance matrix, study and calibration see the first third of the text, every file is evaluated on the rest.
A size is that of the preset's file. Ratios are divergences over that of the study's file (above 1 the study's file is
nearer to the unquantized model), their errors those of the evaluated text, position by position.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np
import numpy.typing as npt
from divergence_bench import Failed, quiet
from divergence_report import ratio_of_means
from model_divergence import Settings, compare, importance, store_base

from ikcli.gguf.reader import open_gguf
from ikcli.hostinfo import physical_cores
from ikcli.imatrix.matrix import save
from ikcli.main import main as ik
from ikcli.measure.kld_file import BaseReader
from ikcli.settings.run import default_model, default_text

PRESETS = "Q2_K,IQ3_M,Q3_K_M,Q4_K_S,Q4_K_M"
WAYS = ("preset", "estimate", "study", "calibrated")


def third(text: str) -> tuple[str, str]:
    """Return the first third, and the rest."""
    at = text.find("\n\n", len(text) // 3) + 2
    return text[:at], text[at:]


def run(*words: object) -> None:
    """Run a command of ik that must succeed."""
    with quiet() as said:
        code = ik([str(w) for w in words])
    if code:
        raise Failed(f"ik {words[0]} failed:\n{said.getvalue()[-2000:]}")


def options_of(way: str, size: int, arguments: argparse.Namespace, work: Path) -> list[object]:
    """Return the options of `ik quantize` beside the importance matrix."""
    target: list[object] = ["--target-size", f"{size}B"]
    if way == "study":
        target += ["--study", work / "study.jsonl"]
    if way == "calibrated":
        target += ["--calibrate", work / "seen.txt", "--calibrate-chunks", arguments.chunks]
    return target + (["--candidates", arguments.candidates] if arguments.candidates else [])


def rows(arguments: argparse.Namespace, work: Path) -> Iterator[dict[str, object]]:
    """Yield results, one size after the other."""
    model, threads = arguments.model, arguments.threads
    seen, unseen = third(arguments.file.read_text(encoding="utf-8"))
    (work / "seen.txt").write_text(seen, encoding="utf-8")
    settings = Settings(512, threads, arguments.eval_chunks)
    with quiet():
        imatrix = importance(model, seen, Settings(512, threads)).imatrix
        store_base(model, unseen, work / "base.kld", settings)
    save(imatrix, work / "imatrix.dat", as_gguf=False)
    study = [
        "study",
        "-m",
        model,
        "-f",
        work / "seen.txt",
        "--imatrix",
        work / "imatrix.dat",
        "-o",
        work / "study.jsonl",
    ]
    run(*study, "--types", arguments.types, "--by", arguments.by, "--chunks", arguments.chunks, "-t", threads)
    base = BaseReader(work / "base.kld")
    common = ["quantize", "--imatrix", work / "imatrix.dat"]
    for preset in arguments.presets.split(","):
        made = work / "made.gguf"
        run(*common, model, made, preset, threads)
        size, found = open_gguf(made).n_bytes, {}
        bpw = 8 * size / open_gguf(made).n_elements
        for way in arguments.ways.split(","):
            if way != "preset":
                run(*common, *options_of(way, size, arguments, work), model, made, threads)
            with quiet():
                found[way] = compare(made, base, settings).positions.kld
        yield row(preset, bpw, found)


def row(preset: str, bpw: float, found: dict[str, npt.NDArray[np.float64]]) -> dict[str, object]:
    """Return means with errors, and ratios to the study's."""
    out: dict[str, object] = {"size_of": preset, "bpw": bpw}
    for way, kld in found.items():
        out[way] = float(kld.mean()), float(kld.std(ddof=1) / np.sqrt(len(kld)))
    for way in ("preset", "estimate"):
        if way in found and "study" in found:
            out[f"{way} / study"] = ratio_of_means(found[way], found["study"])
    return out


def cell(value: object) -> str:
    """Format a value, with its error where it has one."""
    if isinstance(value, tuple):
        return (
            f"{value[0]:.5f} ± {value[1]:.5f}"
            if value[0] < 1 and value[1] < 0.01
            else f"{value[0]:.2f} ± {value[1]:.2f}"
        )
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "-m",
        "--model",
        type=Path,
        default=default_model(),
        help="GGUF file, not quantized (default: the bundled model)",
    )
    add(
        "-f",
        "--file",
        type=Path,
        default=default_text(),
        help="text; a third is for measuring (default: the bundled one)",
    )
    add("--presets", default=PRESETS, help=f"whose sizes (default {PRESETS})")
    add("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    add("--types", default="iq2_k,iq3_k,iq4_k,iq6_k", help="types to study")
    add("--by", default="tensor", choices=("tensor", "role", "block"), help="units of the study")
    add("--candidates", default="", help="types to choose among (default: those of --target-size)")
    add("--chunks", type=int, default=12, help="windows that study and calibration see (default 12)")
    add("--eval-chunks", type=int, default=30, help="windows to evaluate on (default 30, -1: all)")
    add("-t", "--threads", type=int, default=physical_cores())
    add("--work", type=Path, help="keep imatrix, study and base here; the study continues where it was stopped")
    add("--json", type=Path, help="append the results to this file, one JSON object per line")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        header: list[str] = []
        for found in rows(arguments, work):
            if not header:
                header = list(found)
                print(f"{arguments.model.name}\n\n| {' | '.join(header)} |\n|:---|{'---:|' * (len(header) - 1)}")
            print(f"| {' | '.join(cell(found[key]) for key in header)} |", flush=True)
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"model": arguments.model.name, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
