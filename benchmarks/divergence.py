#!/usr/bin/env python3
"""Acceptance test of encoders: KL divergence of whole models that ik and ik_llama.cpp quantize to the same types.

Every type is written twice, by `ik quantize --pure` and by the llama-quantize of the reference: with importance matrix,
without, and by ik with second moments of the text (`--covariance`) or of random tokens beside the importance matrix
(`--covariance self`); the reference then has the importance matrix. ik evaluates both
files, so that nothing but the weights differs. A ratio (ours / reference) below 1 says that ik's file is nearer to the
unquantized model. Its error is that of the evaluated text, position by position.

The bundled demo model is always measured, other models are added: each --model has its --eval and --calib text, the
latter for the importance matrix. tools/train_judges.py makes two. Quantizing for the reference can be slow: --cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from divergence_bench import PROGRAM, Bench, Failed, Judge, Programs, file_type, open_bench
from divergence_report import HEADER, MODES, SUMMARY_HEADER, Record, line, read, row, summary
from model_divergence import Settings, halves

from ikcli.hostinfo import physical_cores
from ikcli.settings.run import default_model, default_text

TYPES = [
    "IQ1_S", "IQ1_M", "IQ1_KT", "IQ2_XXS", "IQ2_KT", "IQ2_KS", "IQ2_XS", "IQ2_K", "IQ2_S", "Q2_K", "IQ2_KL", "IQ3_XXS",
    "IQ3_KT", "IQ3_KS", "IQ3_S", "IQ3_K", "Q3_K", "IQ4_KT", "IQ4_KSS", "IQ4_XS", "IQ4_KS", "MXFP4", "Q4_0", "IQ4_NL",
    "Q4_K", "IQ4_K", "Q4_1", "IQ5_KS", "Q5_0", "IQ5_K", "Q5_K", "Q5_1", "Q6_0", "Q6_K", "IQ6_K",
]  # fmt: skip


def judges(arguments: argparse.Namespace) -> list[Judge]:
    """Return the bundled model with the halves of its text, then those of --model."""
    found = []
    if not arguments.no_demo:
        calibration, judge = halves(default_text().read_text(encoding="utf-8"))
        found.append(Judge("demo", default_model(), judge, calibration))
    for model, judge, calibration in zip(arguments.model, arguments.eval, arguments.calib, strict=True):
        texts = judge.read_text(encoding="utf-8"), calibration.read_text(encoding="utf-8")
        found.append(Judge(model.stem, model.resolve(), *texts))
    return found


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("types", nargs="*", metavar="TYPE", help="tensor types (default: all up to 8 bits per weight)")
    add("-m", "--model", type=Path, action="append", default=[], help="GGUF file, not quantized (repeatable)")
    add("--eval", type=Path, action="append", default=[], metavar="TEXT", help="text to evaluate, one per model")
    add("--calib", type=Path, action="append", default=[], metavar="TEXT", help="text for the importance matrix")
    add("--no-demo", action="store_true", help="without the bundled model")
    add("--reference", type=Path, help="folder with llama-quantize; without it ik alone is measured")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="inputs of the quantizers (default: all)")
    add("--quantize-options", default="", metavar="OPTIONS", help="further options of ik quantize, in quotes")
    add("--json", type=Path, metavar="FILE", help="append the results to this file, one JSON object per line")
    add("--resume", action="store_true", help="skip records that the file of --json has")
    add("--cache", type=Path, metavar="DIR", help="keep the reference's results here, and take them from here")
    add("--chunks", type=int, default=-1, help="windows to evaluate (default: all)")
    add("-t", "--threads", type=int, default=physical_cores())
    add("-c", "--ctx-size", type=int, default=512)
    found = parser.parse_args(argv)
    if not len(found.model) == len(found.eval) == len(found.calib):
        parser.error("every --model needs one --eval and one --calib")
    if found.resume and not found.json:
        parser.error("--resume needs --json")
    found.types = [t.upper() for t in found.types] or TYPES
    if unknown := [t for t in found.types if file_type(t) is None]:
        parser.error(f"no file type makes tensors of {', '.join(unknown)}")
    return found


def evaluate(bench: Bench, arguments: argparse.Namespace) -> list[Record]:
    """Return the records of one model in the order of the types, printed as they come."""
    done = {r.key: r for r in read(arguments.json)} if arguments.resume else {}
    found = []
    for type_ in arguments.types:
        for mode in arguments.modes:
            record = done.get(bench.key(type_, mode))
            if record is None:
                try:
                    record = bench.measure(type_, mode)
                except Failed as problem:
                    print(f"{bench.judge.name}, {type_}: {problem}", file=sys.stderr)
                    continue
                if arguments.json:
                    with arguments.json.open("a", encoding="utf-8") as file:
                        file.write(line(record))
            print(row(record), flush=True)
            found.append(record)
    return found


def main(argv: list[str]) -> int:
    """Measure everything, print the table and the summary."""
    arguments = parse_arguments(argv)
    settings = Settings(arguments.ctx_size, arguments.threads, arguments.chunks)
    programs = Programs(arguments.quantize_options, arguments.reference, arguments.cache)
    if programs.reference and not (programs.reference / PROGRAM).is_file():
        sys.exit(f"error: no {PROGRAM} in {programs.reference}")
    records: list[Record] = []
    print(HEADER, flush=True)
    for judge in judges(arguments):
        with tempfile.TemporaryDirectory() as folder:
            records += evaluate(open_bench(judge, Path(folder), settings, programs, arguments.modes), arguments)
    print("\nGeometric means of ours / reference (number of types), below 1 is better:\n")
    print("\n".join([SUMMARY_HEADER, *summary(records)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
