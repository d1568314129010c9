"""Report on `--target-size`: a recipe for `--custom-q @FILE` with comments, and a table of the choices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.recipes import TypeChoice
from ikcli.quant.target import TargetPlan


def recipe_groups(types: Mapping[str, GGMLType]) -> dict[str, list[str]]:
    """Return `RE=TYPE` rules for --custom-q that give these types, each with its tensors.

    Blocks of one kind and type share a rule.
    """
    groups: dict[tuple[str, GGMLType], list[str]] = {}
    for name, type in types.items():
        m = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        groups.setdefault((m[2] if m else name, type), []).append(name)
    rules: dict[str, list[str]] = {}
    for (kind, type), names in groups.items():
        tail = re.escape(kind)
        blocks = [m[1] for n in names if n != kind and (m := re.match(r"blk\.(\d+)\.", n))]
        if blocks:
            which = blocks[0] if len(blocks) == 1 else f"({'|'.join(blocks)})"
            tail = rf"blk\.{which}\.{tail}"
        rules[f"^{tail}$={TYPES[type].name}"] = names
    return rules


def recipe_rules(types: Mapping[str, GGMLType]) -> list[str]:
    """Return the rules alone."""
    return list(recipe_groups(types))


def prediction_lines(plan: TargetPlan) -> list[str]:
    """Return the predicted damage, how far it can be from the best choice, and the measured one if there is any."""
    gap = 100 * (plan.damage / plan.bound - 1) if plan.bound > 0 else 0.0
    how = "measured by groups" if plan.measured is not None else "estimated from the weights, right to a factor of 3"
    lines = [
        f"predicted KL divergence from the input {plan.damage:.5f} ({how}), "
        f"at most {max(0.0, gap):.1f} % above the least possible in this size"
    ]
    if plan.measured is not None:
        lines.append(f"measured KL divergence of all types together on the calibration text {plan.measured:.5f}")
    return lines


def recipe_text(choices: Sequence[TypeChoice], plan: TargetPlan | None) -> list[str]:
    """Return lines for `--custom-q @FILE` that give every tensor the type it has in these choices."""
    n_bytes, n_elements = sum(c.n_bytes for c in choices), sum(math.prod(c.shape) for c in choices)
    lines = [f"# {n_bytes} bytes, {8 * n_bytes / max(1, n_elements):.4f} bits per weight"]
    if plan is not None:
        lines += [f"# {line}" for line in prediction_lines(plan)]
    types = {c.name: c.new for c in choices if not c.source and not c.reason.startswith("kept")}
    if plan is None:
        return lines + recipe_rules(types)
    sizes = {c.name: c.n_bytes for c in choices}
    for rule, names in recipe_groups(types).items():
        mib = sum(sizes[n] for n in names) / 2**20
        damage = sum(plan.chosen[n].damage for n in names if n in plan.chosen)
        count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
        lines.append(f"{rule}  # {count} {mib:.2f} MiB; KLD {damage:.5f}")
    return lines


def choice_table(choices: Sequence[TypeChoice], plan: TargetPlan) -> list[str]:
    """Format a Markdown table by kind and type: side, blocks, bits, MiB, error, share of damage."""
    groups: dict[tuple[str, str, GGMLType], list[TypeChoice]] = {}
    for c in choices:
        if c.name in plan.chosen:
            kind = re.sub(r"^blk\.\d+\.", "", c.name).removesuffix(".weight")
            groups.setdefault((plan.chosen[c.name].side, kind, c.new), []).append(c)
    total = plan.damage or 1.0
    lines = [
        "| for | tensor | blocks | type | bpw | MiB | error % | damage % |",
        "|:---|:---|:---|:---|---:|---:|---:|---:|",
    ]
    for (side, kind, type), members in groups.items():
        found = [plan.chosen[c.name] for c in members]
        error = math.sqrt(sum(f.error2 for f in found) / len(found))
        lines.append(
            f"| {side.upper()} | {kind} | {_blocks([c.name for c in members])} | {TYPES[type].name} | "
            f"{TYPES[type].bpw:.4g} | {sum(c.n_bytes for c in members) / 2**20:.2f} | {100 * error:.2f} | "
            f"{100 * sum(f.damage for f in found) / total:.1f} |"
        )
    return lines


def _blocks(names: Sequence[str]) -> str:
    """Format block numbers as `0-3,5`; empty for tensors outside the blocks."""
    blocks = sorted({int(m[1]) for n in names if (m := re.match(r"blk\.(\d+)\.", n))})
    out: list[list[int]] = []
    for b in blocks:
        if out and out[-1][1] == b - 1:
            out[-1][1] = b
        else:
            out.append([b, b])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def nearest_file_type(types: Mapping[str, GGMLType], sizes: Mapping[str, int]) -> int:
    """Return the file type whose tensor type holds the most of these bytes."""
    totals: dict[GGMLType, int] = {}
    for name, type in types.items():
        totals[type] = totals.get(type, 0) + sizes[name]
    for type in sorted(totals, key=lambda t: -totals[t]):
        found = [n for n, f in FILE_TYPES.items() if f.names and f.type == type and TYPES[type].is_quantized]
        if found:
            return min(found)
    return 7
