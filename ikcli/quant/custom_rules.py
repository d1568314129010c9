"""Parse the custom rules of `ik quantize` (`--custom-q RE=TYPE,...`) and report what each did to a model.

Texts are split at `,` and line breaks, pairs at the first `=`. Surrounding blanks and lines that start with `#` are
ignored. The first rule whose expression matches part of the tensor name wins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.errors import UsageError
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import format_by_name
from ikcli.quant.recipes import CustomRule, TypeChoice
from ikcli.rules import compile_pattern, layer_text, near_misses, pattern_warnings, unmatched

OPTION = "--custom-q"


def parse_custom_rules(texts: Sequence[str]) -> tuple[CustomRule, ...]:
    """Parse the rules of all texts, in order.

    Raises UsageError that quotes a rule without `=`, with a bad expression or an unknown type.
    """
    rules: list[CustomRule] = []
    for text in texts:
        lines = (re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
        pieces = (piece.strip() for line in lines for piece in line.split(","))
        rules += [_parse(piece) for piece in pieces if piece]
    return tuple(rules)


def _parse(text: str) -> CustomRule:
    pattern, equals, name = (part.strip() for part in text.partition("="))
    if not (pattern and equals and name):
        raise UsageError(
            f'{OPTION}: rule "{text}" is not of the form RE=TYPE, for example: --custom-q "attn_k=q8_0"; '
            "an expression cannot contain , or ="
        )
    compile_pattern(pattern, OPTION, text)
    try:
        return CustomRule(pattern, format_by_name(name).type, text)
    except UsageError as problem:
        raise UsageError(f'{OPTION}: rule "{text}": {problem}') from None


@dataclass(frozen=True, slots=True)
class CustomRuleUse:
    """The tensors that a rule matched, decided and left as they are, and how many it lost to other rules, by index."""

    rule: CustomRule
    matched: tuple[str, ...]
    won: tuple[str, ...]
    kept: tuple[str, ...]
    lost_to: dict[int, int]
    n_bytes: int  # of the tensors it decided, after quantization


def rule_uses(rules: Sequence[CustomRule], choices: Sequence[TypeChoice]) -> list[CustomRuleUse]:
    """Return what every rule matched and decided in `choices`, which were made with these rules."""
    first: dict[str, int] = {}
    uses: list[CustomRuleUse] = []
    for index, rule in enumerate(rules):
        matched = [c for c in choices if not c.source and re.search(rule.pattern, c.name)]
        mine = [c for c in matched if first.setdefault(c.name, index) == index]
        kept = tuple(c.name for c in mine if c.reason.startswith("kept"))
        won = [c for c in mine if c.rule == index]
        lost = Counter(first[c.name] for c in matched if first[c.name] != index)
        uses.append(
            CustomRuleUse(
                rule,
                tuple(c.name for c in matched),
                tuple(c.name for c in won),
                kept,
                dict(sorted(lost.items())),
                sum(c.n_bytes for c in won),
            )
        )
    return uses


def rule_table(uses: Sequence[CustomRuleUse]) -> list[str]:
    """Format a table: rule, type, tensors matched and decided, MiB, where, and what the others went to."""
    lines = ["| rule | type | matched | decided | MiB | expression |", "|---:|:---|---:|---:|---:|:---|"]
    for index, use in enumerate(uses):
        lines.append(
            f"| {index + 1} | {TYPES[use.rule.type].name} | {len(use.matched)} | {len(use.won)} | "
            f"{use.n_bytes / 2**20:.2f} | {use.rule.pattern} |"
        )
    return lines


def check_uses(uses: Sequence[CustomRuleUse], names: Sequence[str], strict: bool = False) -> list[str]:
    """Return notes and warnings about rules; with `strict` raise UsageError if a rule matches no tensor."""
    notes = unmatched([_no_match(use.rule, names) for use in uses if not use.matched], OPTION, strict)
    for index, use in enumerate(uses):
        notes += pattern_warnings(use.rule.pattern, use.rule.text, use.matched)
        if use.kept:
            notes.append(
                f'rule {index + 1} "{use.rule.text}": {len(use.kept)} of {len(use.matched)} matched tensors stay as '
                f"they are (norms, biases, routers and other small ones, e.g. {use.kept[0]})"
            )
        taken = sum(use.lost_to.values())
        if taken and 2 * taken > len(use.matched):
            others = ", ".join(f"{n} already taken by rule {i + 1}" for i, n in use.lost_to.items())
            text = f'rule {index + 1} "{use.rule.text}": {len(use.matched)} matches, {others}'
            notes.append(text + ("" if use.won or use.kept else ", so it does nothing"))
    return notes


def _no_match(rule: CustomRule, names: Sequence[str]) -> str:
    near = near_misses(rule.pattern, names)
    hint = f"; nearest: {', '.join(near)}" if near else f" (blocks: {layer_text(names) or 'none'})"
    return f'rule "{rule.text}" matches no tensor of this model{hint}'
