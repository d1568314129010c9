"""Count instructions per product in the compiled loops of ARM64 kernels: `count_instructions.py LEVEL [TYPE...]`.

For every weight type it compiles, whatever machine this is, the pieces of its products: one activation row, a few
(`--rows`), a tile of 16 rows times four activation rows, and the unpacking of a tile. Of the innermost loop with most
products it counts instructions; where that passes by activation rows, also those around it, which decode weights for
all of them. `--json` prints them by mnemonic. `--attention` counts the loops of attention, and
`--assembly FILE` those of functions in a file of other origin, such as `g++ -S` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Products of one number by one number that an instruction computes, on vectors of 16 bytes.
PRODUCTS = {
    "smmla": 32, "usmmla": 32, "ummla": 32, "sdot": 16, "usdot": 16, "udot": 16, "bfmmla": 16, "bfdot": 8,
    "smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8, "fmla": 4,
}  # fmt: skip
_FLOATS = ("fmla", "bfdot", "bfmmla")
_LABEL = re.compile(r"^([.\w$]+):")
_BRANCH = re.compile(r"^\s+(?:b|b\.\w+|b\w{2}|cbn?z|tbn?z)\s+(?:.*,\s*)?([.\w$]+)\s*$")
_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9.]*)\s*(.*)$")
_PER_LANE = ("umov", "smov")


def functions(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of every function."""
    name, lines = "", list[str]()
    for line in assembly.splitlines():
        found = _LABEL.match(line)
        if found and not found[1].startswith(".L"):
            if lines:
                yield name, lines
            name, lines = found[1], []
        else:
            lines.append(line.split("//")[0].rstrip())
    if lines:
        yield name, lines


def _spans(lines: list[str]) -> set[tuple[int, int]]:
    """Return the first and the last line of every loop."""
    places = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    spans = set[tuple[int, int]]()
    for i, line in enumerate(lines):
        found = _BRANCH.match(line)
        if found and places.get(found[1], i) < i:
            spans.add((places[found[1]], i))
    return spans


def _instructions(lines: list[str], span: tuple[int, int]) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for line in lines[span[0] : span[1] + 1] if (m := _INSTRUCTION.match(line))]


def _inner(spans: set[tuple[int, int]]) -> list[tuple[int, int]]:
    return [s for s in spans if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]


def loops(lines: list[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the instructions (mnemonic, operands) of every innermost loop."""
    for span in _inner(_spans(lines)):
        yield _instructions(lines, span)


def by_rows(assembly: str, n_rows: int) -> dict[str, Any]:
    """Return the counts of a loop around one that is passed once per activation row, with these passes."""
    kinds = {name: n for name, n in PRODUCTS.items() if name not in _FLOATS}
    found = []
    for _, lines in functions(assembly):
        spans = _spans(lines)
        for first, last in _inner(spans):
            around = [(a, b) for a, b in spans if (a, b) != (first, last) and a <= first and last <= b]
            if around:
                whole = _instructions(lines, max(around, key=lambda s: s[0]))
                found.append(whole + (n_rows - 1) * _instructions(lines, (first, last)))
    best = max(found, key=lambda loop: (products(loop, kinds), -len(loop)))
    return counted(best, products(best, kinds))


def products(loop: list[tuple[str, str]], kinds: dict[str, int]) -> int:
    """Return how many products a pass of a loop computes."""
    return sum(kinds.get(name, 0) for name, operands in loop if ".4s" in operands or ".8h" in operands)


def main_loop(assembly: str, floats: bool = False) -> dict[str, Any]:
    """Return the counts of the innermost loop that computes most products: of integers where there are any."""
    kinds = {name: n for name, n in PRODUCTS.items() if (name in _FLOATS) == floats}
    found = [loop for _, lines in functions(assembly) for loop in loops(lines)]
    # What follows a loop may jump back as well, with as many products: the shorter one is the loop.
    best = max(found, key=lambda loop: (products(loop, kinds), -len(loop)), default=[])
    return counted(best, products(best, kinds))


def counted(loop: list[tuple[str, str]], n_products: int) -> dict[str, Any]:
    """Return the counts of a loop."""
    names = Counter(name for name, _ in loop)
    return {
        "products": n_products,
        "instructions": len(loop),
        "per_product": len(loop) / n_products if n_products else None,
        "stack": sum("[sp" in operands for _, operands in loop),
        "per_lane": sum(names[name] for name in _PER_LANE),
        "calls": names["bl"] + names["blr"],
        "by_name": dict(names.most_common()),
    }


def weight_kernels(type_name: str, n_rows: int) -> dict[str, str]:
    """Return the assembly of the pieces of a quantized type's products; `some` is for n_rows activation rows."""
    from ikcli.backends.cpu.kernels.format_api import unpack_sixteen
    from ikcli.backends.cpu.kernels.formats import weight_format
    from ikcli.backends.cpu.kernels.gemm_arm64 import quant_tile_arm64
    from ikcli.backends.cpu.kernels.group_dot import group_dot
    from ikcli.backends.cpu.kernels.groupformat import GroupFormat
    from ikcli.backends.cpu.kernels.row_dot_arm64 import row_dot_arm64, row_dots_arm64
    from ikcli.backends.cpu.lower import stored_name
    from ikcli.gguf.constants import GGMLType
    from ikcli.native.jit import compile_to_assembly

    fmt = weight_format(stored_name(GGMLType[type_name.upper()]))
    grouped = isinstance(fmt, GroupFormat)
    dot = group_dot(fmt, 1) if grouped else row_dot_arm64(fmt)
    dots = group_dot(fmt, n_rows) if grouped else row_dots_arm64(fmt)
    tile, unpack = quant_tile_arm64(fmt.mode, 4), unpack_sixteen(fmt)

    def few(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
        dot(a, b, c, d, e, f)

    def some_at_once(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
        dots(a, b, c, d, e, f)

    def some_by_rows(a, b, c, d, e, f, g):  # type: ignore[no-untyped-def]
        dots(a, b, c, d, e, f, g)

    def many(a, b, c, d, e, f, g, h, i, j):  # type: ignore[no-untyped-def]
        tile(a, b, c, d, e, f, g, h, i, j)

    def to_tile(a, b, c, d, e):  # type: ignore[no-untyped-def]
        unpack(a, b, c, d, e)

    some = (some_at_once, 6) if grouped else (some_by_rows, 7)
    return {f.__name__: compile_to_assembly(f, n, False) for f, n in ((few, 6), some, (many, 10), (to_tile, 5))}


def weight_counts(type_name: str, n_rows: int) -> dict[str, dict[str, Any]]:
    """Return the counts of a quantized type's products, and of the whole of what unpacks a tile."""
    made = weight_kernels(type_name, n_rows)
    found = {name: main_loop(made[name]) for name in ("few", "many")}
    by_row = made.get("some_by_rows")
    found["some"] = by_rows(by_row, n_rows) if by_row else main_loop(made["some_at_once"])
    lines = [line for _, lines in functions(made["to_tile"]) for line in lines]
    found["to_tile"] = counted([(m[1], m[2]) for line in lines if (m := _INSTRUCTION.match(line))], 0)
    return found


def _of_8(body: Any) -> Any:
    """Return a function of eight numbers that does this; Numba compiles functions with a fixed number of arguments."""

    def of_8(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
        body(a, b, c, d, e, f, g, h)

    return of_8


def _of_9(body: Any) -> Any:
    """Return a function of nine numbers."""

    def of_9(a, b, c, d, e, f, g, h, i):  # type: ignore[no-untyped-def]
        body(a, b, c, d, e, f, g, h, i)

    return of_9


def _of_7(body: Any) -> Any:
    """Return a function of seven numbers."""

    def of_7(a, b, c, d, e, f, g):  # type: ignore[no-untyped-def]
        body(a, b, c, d, e, f, g)

    return of_7


def attention_counts(kinds: list[str], m: int = 4) -> dict[str, dict[str, Any]]:
    """Return the counts of attention over caches of these types: of generation, m heads per KV head, and of prompts."""
    from ikcli.backends.cpu.kernels import attention_stream as stream
    from ikcli.backends.cpu.kernels import sgemm
    from ikcli.native.jit import compile_to_assembly

    at_once, positions, columns = stream.shapes(m)
    kernels = {}
    for kind in kinds:
        dot = stream.make_scores(kind, at_once, positions, m, 1)
        if kind == "q8_0":
            dot = stream.make_q8_scores(m, 16 // m, 1)
        kernels[f"generation K {kind}"] = _of_8(dot), 8
        steps = columns // stream.STEPS[kind][1]
        kernels[f"generation V {kind}"] = _of_9(stream.make_values(kind, at_once, steps, 1)), 9
    shape = sgemm.BLOCKS[-1]
    kernels["prompts K"] = _of_7(sgemm.make_rows_block(*shape, False, "f32")), 7
    kernels["prompts V"] = _of_8(sgemm.make_columns_block(*shape, "f32", 0)), 8
    return {
        name: main_loop(compile_to_assembly(*kernel, False), "K q8_0" not in name) for name, kernel in kernels.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--pieces", action="store_true", help="of the products of weight types, which is the default")
    parser.add_argument(
        "--rows", type=int, default=4, help="activation rows of `some` (1, 2 or 4 for interleaved types)"
    )
    parser.add_argument("--attention", action="store_true", help="of attention over caches of these types")
    parser.add_argument("--assembly")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args()
    os.environ["IK_BUILD_ISA"] = args.level
    rows: dict[str, dict[str, Any]] = {}
    if args.assembly:
        with open(args.assembly, encoding="utf-8") as file:
            for name, lines in functions(file.read()):
                for i, loop in enumerate(loops(lines)):
                    kinds = {k: n for k, n in PRODUCTS.items() if k not in _FLOATS}
                    if products(loop, kinds) >= 32:
                        rows[f"{name}.{i}"] = counted(loop, products(loop, kinds))
    elif args.attention:
        rows = attention_counts(args.types or ["f16", "q8_0"])
    else:
        for type_name in args.types:
            rows |= {f"{type_name} {piece}": counts for piece, counts in weight_counts(type_name, args.rows).items()}
    if args.json:
        print(json.dumps(rows))
        return 0
    for name, row in rows.items():
        per = f"{row['per_product']:.3f}" if row["per_product"] else ""
        print(f"{name:40} {row['instructions']:6} {row['products']:6} {per:>7} stack {row['stack']:3} "
              f"lanes {row['per_lane']:3} calls {row['calls']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
