#!/usr/bin/env python3
"""Compare the speed of model families with ik_llama.cpp, at N_KV 0 and at one depth.

Makes random models, quantizes them, and compares them as `compare_reference.py` does.

Models have the widths, heads and sizes of experts of real ones, but few blocks (`tools/make_random_model.py`). Files
that are already in the folder are used. Options after `--` are given to both programs.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare_reference
from extra_options import parse_with_extra

MAKE = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
FAMILIES = (
    "qwen3moe", "qwen35", "qwen35moe", "deepseek2", "glm4moe", "gpt-oss", "minimax-m2", "mixtral", "ernie4_5-moe",
    "gemma3", "cohere2",
)  # fmt: skip
TYPES = ("Q4_K_M", "IQ4_K")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `extra` holds the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--reference", type=Path, required=True, help="folder with llama-sweep-bench")
    parser.add_argument("--folder", type=Path, required=True, help="where models are made, and kept")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("--types", default=",".join(TYPES), help="presets of ik quantize (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8192, help="the other N_KV (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, help="has to divide the depth")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, help="blocks instead of the preset's")
    parser.add_argument("--experts", type=int, help="experts instead of the preset's")
    parser.add_argument("--vocab", type=int, help="tokens instead of the preset's")
    found = parse_with_extra(parser, argv)
    unknown = sorted(set(found.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown family: {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    if found.depth % found.ubatch_size:
        parser.error(f"--depth {found.depth} is not a multiple of -ub {found.ubatch_size}")
    return found


def run(command: list[str]) -> None:
    """Run a step; its own output goes to stderr."""
    print(shlex.join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with exit code {done.returncode}")


def make(family: str, types: list[str], options: argparse.Namespace) -> list[Path]:
    """Make the quantized models of a family by way of q8_0, whose rounding does not affect speed."""
    sizes = [(f"--{key}", value) for key in ("layers", "experts", "vocab") if (value := getattr(options, key))]
    stem = "-".join([family, *(f"{key[2]}{value}" for key, value in sizes)])
    found = [options.folder / f"{stem}-{type_}.gguf" for type_ in types]
    missing = [(type_, path) for type_, path in zip(types, found, strict=True) if not path.exists()]
    if missing:
        source = options.folder / f"{stem}-source.gguf"
        size_options = [text for key, value in sizes for text in (key, str(value))]
        run([sys.executable, str(MAKE), "--preset", family, "--type", "Q8_0", *size_options, "-o", str(source)])
        for type_, path in missing:
            run([*shlex.split(options.ik), "quantize", "--allow-requantize", "--ignore-imatrix-rules", "-t",
                 str(options.threads), str(source), str(path), type_])  # fmt: skip
        source.unlink()
    return found


def main(argv: list[str]) -> int:
    """Make all models, then compare both programs on them."""
    options = parse_arguments(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    types = options.types.split(",")
    paths = [path for family in options.families or FAMILIES for path in make(family, types, options)]
    depth, step = options.depth, options.ubatch_size
    return compare_reference.main([
        *map(str, paths), "--reference", str(options.reference), "--ik", options.ik, "-t", str(options.threads), "-c",
        str(depth + step), "-ub", str(step), "-r", str(options.repetitions), "--", "--sweep-stride",
        str(max(1, depth // step)), *options.extra,
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
