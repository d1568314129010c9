#!/usr/bin/env python3
"""What a type costs in `ik perplexity --kl-divergence` and in ik_llama.cpp's llama-perplexity, as a Markdown table.

Every type is written once, by `ik quantize --pure`; both programs evaluate the same file, as it is and repacked (-rtr),
against the probabilities of the unquantized model. What differs between them is how their kernels round.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "llama-perplexity"
TYPES = [
    "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q4_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS",
    "IQ2_XS", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ5_KS", "IQ4_KSS", "IQ2_KL",
    "IQ2_KT", "IQ3_KT", "IQ4_KT",
]  # fmt: skip
FIELDS = ("Mean PPL(Q)", "Mean KLD", "Median KLD", "99.0% KLD", "Same top p")


def run(command: list[str], folder: Path) -> str:
    """Return the output of a program; exit with its end if it failed."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-10:])
        sys.exit(f"error: exit code {done.returncode} of {shlex.join(command)}\n{tail}")
    return done.stdout


def parse(text: str) -> list[float]:
    """Return the statistics named in FIELDS, in their order."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        name, number = " ".join(name.split()), re.match(r"\s*(-?[\d.]+|nan)", value)
        if name in FIELDS and number:
            found[name] = float(number[1])
    if missing := [name for name in FIELDS if name not in found]:
        sys.exit(f"error: the output does not name {', '.join(missing)}\n{text[-2000:]}")
    return [found[name] for name in FIELDS]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: the most common types")
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file, not quantized")
    parser.add_argument("-f", "--file", type=Path, required=True, help="text to evaluate")
    parser.add_argument("--imatrix", type=Path, help="importance matrix for ik quantize, of another text")
    parser.add_argument("--reference", type=Path, required=True, help=f"folder with {PROGRAM}")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Evaluate everything and print the table; progress goes to stderr."""
    arguments = parse_arguments(argv)
    ik, model = shlex.split(arguments.ik), str(arguments.model.resolve())
    text = ["-f", str(arguments.file.resolve()), "-c", str(arguments.ctx_size), "-t", str(arguments.threads)]
    quantize = [*ik, "quantize", "--pure"]
    if arguments.imatrix:
        quantize += ["--imatrix", str(arguments.imatrix.resolve())]
    programs = {"ik": [*ik, "perplexity"], "reference": [str((arguments.reference / PROGRAM).resolve())]}
    print("| type | program | PPL | mean KLD | median KLD | 99 % KLD | same top % |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([*ik, "perplexity", "-m", model, *text, "--kl-divergence-base", "base.kld"], folder)
        for type_ in arguments.types or TYPES:
            run([*quantize, model, "q.gguf", type_], folder)
            for repack in ([], ["-rtr"]):
                for program, command in programs.items():
                    label = " ".join([type_, *repack])
                    print(f"{label}: {program}", file=sys.stderr)
                    options = ["-m", "q.gguf", *text, *repack, "--kl-divergence", "--kl-divergence-base", "base.kld"]
                    ppl, mean, median, most, same = parse(run([*command, *options], folder))
                    print(f"| {label} | {program} | {ppl:.4f} | {mean:.6f} | {median:.6f} | {most:.5f} | {same:.2f} |")
                    sys.stdout.flush()
            (folder / "q.gguf").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
