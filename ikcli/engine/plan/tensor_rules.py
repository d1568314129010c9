r"""Tensor placement rules (`-ot RE=BUF`): parse them, match them on tensor names, warn about mistakes.

A rule searches (unanchored, case-sensitive) the full tensor name; of all rules that match, the first decides. The
warnings cover the most common mistakes: shadowed rules, `[0-10]` digit classes, `\.*` for `.*`, rules without a match.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.errors import UsageError
from ikcli.rules import compile_pattern, layer_text, no_match, pattern_warnings, unmatched

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps\."
DENSE = r"\.ffn_(up|down|gate)\."
_CUDA = re.compile(r"CUDA\d+")


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One `RE=BUF` pair; `option` names the option it came from."""

    pattern: str
    buffer: str
    option: str = "-ot"

    @property
    def text(self) -> str:
        return f"{self.pattern}={self.buffer}"


@dataclass(frozen=True, slots=True)
class RuleUse:
    """The use of one rule: tensors it matched, tensors it won, and how many it lost to which rule (index from 0)."""

    rule: TensorRule
    matched: tuple[str, ...]
    won: tuple[str, ...]
    lost_to: dict[int, int]


@dataclass(frozen=True, slots=True)
class RuleMatches:
    """The result of applying all rules to all tensor names. `buffer_of`: tensors that a rule placed, in model order."""

    uses: tuple[RuleUse, ...]
    buffer_of: dict[str, str]


def parse_rule(text: str, buffers: Sequence[str] | None = None, option: str = "-ot") -> TensorRule:
    """Parse one rule. `buffers` are the valid buffer names; None accepts `CPU` and any `CUDA<i>`."""
    pattern, equals, buffer = text.partition("=")
    pattern, buffer = pattern.strip(), buffer.strip()
    if not equals or not pattern or not buffer:
        raise UsageError(f'{option}: rule "{text}" is not of the form RE=BUF, for example: -ot "exps=CPU"')
    if not _valid_buffer(buffer, buffers):
        valid = ", ".join(buffers) if buffers is not None else "CPU, CUDA0, CUDA1, ..."
        raise UsageError(f'{option}: unknown buffer "{buffer}" in rule "{text}"; valid buffers are {valid}')
    compile_pattern(pattern, option, text)
    return TensorRule(pattern, buffer, option)


def _valid_buffer(buffer: str, buffers: Sequence[str] | None) -> bool:
    if buffers is not None:
        return buffer in buffers
    return is_buffer(buffer)


def is_buffer(text: str) -> bool:
    """Return whether this can be the name of a buffer: `CPU` or `CUDA<i>`."""
    return text == "CPU" or _CUDA.fullmatch(text) is not None


def cpu_rules(cpu_moe: bool, n_cpu_moe: int, n_cpu_ffn: int) -> list[TensorRule]:
    """Return the rules of `--cpu-moe`, `--n-cpu-moe N` and `--n-cpu-ffn N` (blocks 0..N-1).

    They follow all `-ot` rules.
    """
    rules: list[TensorRule] = []
    for n, weights, option in ((n_cpu_moe, EXPERTS, "--n-cpu-moe"), (n_cpu_ffn, DENSE, "--n-cpu-ffn")):
        if n > 0:
            blocks = "|".join(str(block) for block in range(n))
            rules.append(TensorRule(rf"^blk\.({blocks}){weights}", "CPU", option))
    if cpu_moe:
        rules.append(TensorRule(EXPERTS, "CPU", "--cpu-moe"))
    return rules


def match_rules(rules: Sequence[TensorRule], names: Sequence[str]) -> RuleMatches:
    """Apply the rules to the tensor names; the first matching rule wins each tensor."""
    winner: dict[str, int] = {}
    uses: list[RuleUse] = []
    for index, rule in enumerate(rules):
        search = compile_pattern(rule.pattern, rule.option, rule.text).search
        matched = tuple(name for name in names if search(name))
        won = tuple(name for name in matched if winner.setdefault(name, index) == index)
        lost = Counter(winner[name] for name in matched if winner[name] != index)
        uses.append(RuleUse(rule, matched, won, dict(sorted(lost.items()))))
    return RuleMatches(tuple(uses), {name: rules[winner[name]].buffer for name in names if name in winner})


def rule_lines(matches: RuleMatches, n_bytes: dict[str, int] | None = None) -> list[str]:
    """Return one line per rule: matches, wins, MiB moved, and the rules that took the rest."""
    return [_use_line(matches, index, n_bytes) for index in range(len(matches.uses))]


def _use_line(matches: RuleMatches, index: int, n_bytes: dict[str, int] | None) -> str:
    use = matches.uses[index]
    text = f'rule {index + 1} "{use.rule.text}": {len(use.matched)} matches'
    if use.rule.option != "-ot":
        text = f"rule {index + 1} {use.rule.option} ({layer_text(use.matched)}): {len(use.matched)} matches"
    taken = [f'{count} already taken by rule {other + 1} "{matches.uses[other].rule.text}"' for other, count in
             use.lost_to.items()]  # fmt: skip
    if taken:
        text += ", " + ", ".join(taken)
    if n_bytes is not None:
        text += f", {sum(n_bytes[name] for name in use.won) / 2**20:.2f} MiB to {use.rule.buffer}"
    return text


def check_rules(matches: RuleMatches, names: Sequence[str], strict: bool = False) -> list[str]:
    """Return warnings about rules; with `strict`, raise UsageError if one matches nothing."""
    warnings: list[str] = []
    for index, use in enumerate(matches.uses):
        warnings += pattern_warnings(use.rule.pattern, use.rule.text, use.matched)
        if use.matched and (not use.won or 2 * len(use.won) < len(use.matched)):
            warnings.append(_use_line(matches, index, None) + ("" if use.won else ", so it does nothing"))
        if use.won:
            warnings += _small_only(index, use)
    for option in dict.fromkeys(use.rule.option for use in matches.uses):
        empty = [use.rule for use in matches.uses if use.rule.option == option and not use.matched]
        warnings += unmatched([_no_match(rule, names) for rule in empty], option, strict)
    return warnings


def _small_only(index: int, use: RuleUse) -> list[str]:
    experts = [name for name in use.matched if "_exps." in name]
    if not experts or any("_exps." in name for name in use.won):
        return []
    return [
        f'rule {index + 1} "{use.rule.text}" moved norms, router, shared experts and the like only, '
        f"0 of {len(experts)} expert tensors"
    ]


def _no_match(rule: TensorRule, names: Sequence[str]) -> str:
    return f'rule "{rule.text}" {no_match(rule.pattern, names)}'
