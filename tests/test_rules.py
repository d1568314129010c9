"""What a backend does not know about an op is refused before anything is lowered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from leaves import leaf

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cuda.lower import all_rules
from ikcli.backends.rules import Rules
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import (
    Graph,
    Node,
    Op,
    Place,
    RowSpec,
    Weight,
    ops_alibi,
    ops_attention,
    ops_elements,
    ops_experts,
    ops_media,
    ops_recurrent,
    ops_rows,
)
from ikcli.graph.ops_rows import Product


@dataclass(frozen=True, slots=True)
class Scaled(Op):
    name = "scaled"

    x: Node
    factor: float
    kind: str = "linear"
    shift: float = 0.0

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols


def lowered(rules: Rules[list[str]], op_changes: dict[str, object]) -> list[str]:
    g = Graph()
    op = replace(Scaled(leaf(g, "x", 4), 2.0), **op_changes)
    node, out = g.record(op, "y"), list[str]()
    rules.check([node])
    rules.lower(out, node)
    return out


def test_settings_that_a_rule_does_not_know() -> None:
    rules: Rules[list[str]] = Rules("the test device", "take another")

    @rules.add(Scaled, "x factor", kind=("linear", "cubic"))
    def scaled(low: list[str], node: Node, op: Scaled) -> None:
        low.append(f"{node.name} {op.factor}")

    assert lowered(rules, {}) == lowered(rules, {"kind": "cubic"}) == ["y 2.0"]
    with pytest.raises(UnsupportedError, match=r"y: the test device cannot compute scaled with shift 0.5; take an"):
        lowered(rules, {"shift": 0.5})
    with pytest.raises(UnsupportedError, match="with kind square;"):
        lowered(rules, {"kind": "square"})
    with pytest.raises(UnsupportedError, match="the other device has no scaled; buy one"):
        lowered(Rules("the other device", "buy one"), {})


def test_rules_name_fields() -> None:
    rules: Rules[list[str]] = Rules("the test device", "")
    with pytest.raises(ValueError, match="no fields \\['wrong'\\]"):
        rules.add(Scaled, "x factor wrong")
    with pytest.raises(ValueError, match="\\['factor'\\] forgotten"):
        rules.add(Scaled, "x kind")


def all_ops() -> list[type[Op]]:
    modules = (ops_alibi, ops_rows, ops_elements, ops_attention, ops_experts, ops_media, ops_recurrent)
    return [
        x for m in modules for x in vars(m).values() if isinstance(x, type) and issubclass(x, Op) and "name" in vars(x)
    ]


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_every_op_has_rules_and_a_meaning(op: type[Op]) -> None:
    assert op in RULES and (op in all_rules() or op.place is Place.HOST)
    assert op.compute is not Op.compute and op.shape is not Op.shape
    assert bool(op.policy) == issubclass(op, Product)


def test_gating_that_nobody_knows() -> None:
    g = Graph()
    route = g.moe_route(leaf(g, "logits", 8), None, "route", n_used=2, gating="sqrt", norm=False, scale=1.0)
    for rules, device in ((RULES, "the CPU backend"), (all_rules(), "the CUDA backend")):
        with pytest.raises(UnsupportedError, match=f"route: {device} cannot compute moe_route with gating sqrt"):
            rules.check([route])


def test_operands_in_the_order_of_the_fields() -> None:
    g = Graph()
    x, w = leaf(g, "x", 8), Weight("w", GGMLType.F32, (8, 3))
    assert g.mul_mat(w, x, "y").inputs == (w, x)
    assert g.concat([x, x], "twice").inputs == (x, x)
    with pytest.raises(ValueError, match="w has rows of 8, its input has 3 columns"):
        g.mul_mat(w, leaf(g, "short", 3), "z")
