"""The table of a backend's lowering rules: which ops it supports, and with which settings.

A rule names the fields of the op that it takes into account. A field that it does not name must have its default value,
and a field with listed values one of those. Everything else is refused before anything is lowered, so a field that was
added to an op for one backend is never ignored silently by another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from ikcli.errors import UnsupportedError
from ikcli.graph import Node, Op

L = TypeVar("L")  # a backend's Lowering
RuleFunction = Callable[[L, Node, Any], None]


@dataclass(frozen=True, slots=True)
class LoweringRule(Generic[L]):
    """How an op is lowered: `lower(lowering, node, op)`.

    It lists the fields it knows, the values of those it knows in part, and the defaults of all fields.
    """

    lower: RuleFunction[L]
    known: frozenset[str]
    values: Mapping[str, Collection[Any]]
    defaults: list[tuple[str, Any]]


class Rules(Generic[L]):
    """The rules of one backend, by op; `device` and `way_out` appear in its error messages."""

    def __init__(self, device: str, way_out: str) -> None:
        self.device, self.way_out = device, way_out
        self._rules: dict[type[Op], LoweringRule[L]] = {}

    def add(
        self, op: type[Op], known: str = "", **values: Collection[Any]
    ) -> Callable[[RuleFunction[L]], RuleFunction[L]]:
        """Decorate the rule of an op; an op has one rule, and the last one wins.

        `known`: fields that the rule takes into account. `values`: fields of which it supports some values only.
        """
        names = frozenset(known.split()) | values.keys()
        unknown = names - {f.name for f in fields(op)}
        needed = {f.name for f in fields(op) if f.default is MISSING and f.default_factory is MISSING}
        if unknown or needed - names:
            raise ValueError(f"rule of {op.name}: no fields {sorted(unknown)}, or {sorted(needed - names)} forgotten")

        def register(function: RuleFunction[L]) -> RuleFunction[L]:
            self._rules[op] = LoweringRule(function, names, values, _defaults(op))
            return function

        return register

    def replaced(self, rules: Mapping[type[Op], RuleFunction[L]]) -> Rules[L]:
        """Return a copy in which some ops have other rules, which accept all settings."""
        copy: Rules[L] = Rules(self.device, self.way_out)
        copy._rules = dict(self._rules)
        for op, function in rules.items():
            copy._rules[op] = LoweringRule(function, frozenset(f.name for f in fields(op)), {}, _defaults(op))
        return copy

    def __contains__(self, op: type[Op]) -> bool:
        return op in self._rules

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise UnsupportedError for the first node that this backend cannot compute, naming op, field and device."""
        for node in nodes:
            rule = self._rules.get(type(node.op))
            if rule is None:
                raise UnsupportedError(f"{node.name}: {self.device} has no {node.op.name}; {self.way_out}")
            for name, default in rule.defaults:
                value = getattr(node.op, name)
                if value not in rule.values.get(name, (value,)) or (name not in rule.known and value != default):
                    raise UnsupportedError(
                        f"{node.name}: {self.device} cannot compute {node.op.name} with {name} {value}; {self.way_out}"
                    )

    def lower(self, lowering: L, node: Node) -> None:
        """Lower one node that has been checked."""
        self._rules[type(node.op)].lower(lowering, node, node.op)


def _defaults(op: type[Op]) -> list[tuple[str, Any]]:
    """Return the names of an op's fields with their defaults (MISSING for none)."""
    return [(f.name, f.default_factory() if f.default_factory is not MISSING else f.default) for f in fields(op)]
