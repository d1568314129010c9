"""Show which tensors of a model rules match: `-ot RE=BUF`, `--custom-q RE=TYPE`, or a bare expression.

The rules compete in their order, so all of them are of one kind. The options' own parsers and matching are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.engine.plan.tensor_rules import TensorRule, check_rules, is_buffer, match_rules, parse_rule
from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile
from ikcli.quant.custom_rules import check_uses, parse_custom_rules, rule_uses
from ikcli.quant.recipes import RecipeOptions, choose_types
from ikcli.rules import compile_pattern, no_match, pattern_warnings
from ikcli.settings.values import parse_rules

PLACEMENT, TYPES_OF, BARE = "-ot", "--custom-q", "expression"
_Q8_0 = 7  # a file type for which custom rules decide; the types it gives to other tensors do not matter


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """A tensor that a rule matches.

    `taken_by` is the earlier rule that wins it (index in the report). `kept`: a custom rule wins it, but quantize
    leaves such a tensor unchanged. `new` is what the rule makes of it.
    """

    name: str
    type: GGMLType
    n_bytes: int
    taken_by: int | None = None
    kept: bool = False
    new: GGMLType | None = None
    new_bytes: int | None = None

    @property
    def won(self) -> bool:
        return self.taken_by is None and not self.kept


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """One rule and all tensors that it matches."""

    text: str
    kind: str
    target: str
    tensors: tuple[MatchedTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Return the bytes, as stored, of the tensors that the rule wins."""
        return sum(t.n_bytes for t in self.tensors if t.won)

    @property
    def new_bytes(self) -> int | None:
        sizes = [t.new_bytes for t in self.tensors if t.won]
        return sum(n for n in sizes if n is not None) if self.kind == TYPES_OF else None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """All rules in their order, and warnings about them."""

    rules: tuple[RuleMatch, ...]
    warnings: tuple[str, ...]


def match_report(file: GGUFFile, texts: Sequence[str]) -> MatchReport:
    """Apply the rules of all texts to the tensors of a model; UsageError for a bad rule or one without a match."""
    rules = [rule for text in texts for rule in _split(text)]
    kinds = {_kind(rule): rule for rule in rules}
    if len(kinds) > 1:
        both = '" and "'.join(kinds.values())
        raise UsageError(f'--match: rules of different kinds do not compete: "{both}"')
    found, warnings = {PLACEMENT: _placement, TYPES_OF: _types, BARE: _bare}[next(iter(kinds))](file, rules)
    return MatchReport(tuple(found), tuple(warnings))


def _split(text: str) -> list[str]:
    pieces = [piece.strip() for line in text.splitlines() for piece in line.split(",") if piece.strip()]
    if not pieces:
        raise UsageError("--match: the rule is empty; for example: --match exps=CPU")
    return pieces


def _kind(rule: str) -> str:
    _, equals, target = rule.partition("=")
    if not equals:
        return BARE
    return PLACEMENT if is_buffer(target.strip()) else TYPES_OF


def _placement(file: GGUFFile, texts: list[str]) -> tuple[list[RuleMatch], list[str]]:
    try:
        rules: list[TensorRule] = [parse_rule(rule) for text in texts for rule in parse_rules(text)]
    except ValueError as problem:
        raise UsageError(f"--match {problem}") from None
    names = list(file.tensors)
    found = match_rules(rules, names)
    warnings = check_rules(found, names, strict=True)
    first: dict[str, int] = {}
    out: list[RuleMatch] = []
    for index, use in enumerate(found.uses):
        tensors = [_tensor(file, name, _taken(first, name, index)) for name in use.matched]
        out.append(RuleMatch(use.rule.text, PLACEMENT, use.rule.buffer, tuple(tensors)))
    return out, warnings


def _types(file: GGUFFile, texts: list[str]) -> tuple[list[RuleMatch], list[str]]:
    rules = parse_custom_rules(texts)
    infos = list(file.tensors.values())
    choices = choose_types(infos, file.metadata, RecipeOptions(_Q8_0, ignore_imatrix_rules=True, custom=rules))
    by_name = {c.name: c for c in choices}
    uses = rule_uses(rules, choices)
    warnings = check_uses(uses, list(file.tensors), strict=True)
    first: dict[str, int] = {}
    out: list[RuleMatch] = []
    for index, use in enumerate(uses):
        tensors: list[MatchedTensor] = []
        for name in use.matched:
            info, choice, taken = file.tensors[name], by_name[name], _taken(first, name, index)
            mine = taken is None and name in use.won
            tensors.append(
                MatchedTensor(
                    name, info.type, info.n_bytes, taken, taken is None and not mine,
                    choice.new if mine else None, choice.n_bytes if mine else None,
                )
            )  # fmt: skip
        target = use.rule.text.partition("=")[2].strip()
        out.append(RuleMatch(use.rule.text, TYPES_OF, target, tuple(tensors)))
    return out, warnings


def _bare(file: GGUFFile, texts: list[str]) -> tuple[list[RuleMatch], list[str]]:
    names = list(file.tensors)
    out: list[RuleMatch] = []
    warnings: list[str] = []
    for text in texts:
        search = compile_pattern(text, "--match", text).search
        matched = [name for name in names if search(name)]
        if not matched:
            raise UsageError(f'--match: "{text}" {no_match(text, names)}')
        warnings += pattern_warnings(text, text, matched)
        out.append(RuleMatch(text, BARE, "", tuple(_tensor(file, name, None) for name in matched)))
    return out, warnings


def _taken(first: dict[str, int], name: str, index: int) -> int | None:
    """Return the rule that won the tensor before this one."""
    winner = first.setdefault(name, index)
    return None if winner == index else winner


def _tensor(file: GGUFFile, name: str, taken_by: int | None) -> MatchedTensor:
    info = file.tensors[name]
    return MatchedTensor(name, info.type, info.n_bytes, taken_by)
