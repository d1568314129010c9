"""Where experts are: plans, lines, metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ikcli.engine.experts.residency import ExpertPlace, expert_places, place_lines
from ikcli.engine.plan.expert_slots import ExpertLayer, ExpertMatrix, slots_for
from ikcli.gguf.constants import GGMLType
from ikcli.server.http.metrics import prometheus_text
from ikcli.server.http.users import Users
from ikcli.server.slots.states import EngineMetrics

MIB = 2**20
PARTS = ("gate", "up", "down")


def model(n_layer: int = 3) -> Any:
    """8 experts per layer; a matrix of an expert is 1 MiB."""
    specs = {
        f"blk.{il}.ffn_{part}_exps.weight": SimpleNamespace(type=GGMLType.F32, shape=(512, 512, 8))
        for il in range(n_layer)
        for part in PARTS
    }
    specs["blk.0.attn_q.weight"] = SimpleNamespace(type=GGMLType.F32, shape=(64, 64))
    return SimpleNamespace(
        specs=specs, n_bytes=lambda names: sum(4 * int(np.prod(specs[name].shape)) for name in names)
    )


def layers(path: Any) -> tuple[ExpertLayer, ...]:
    return tuple(
        ExpertLayer(il, 8, tuple(ExpertMatrix(f"blk.{il}.ffn_{p}_exps.weight", path, 0, MIB) for p in PARTS))
        for il in (1, 2)
    )


def test_whole_layers_and_parts_of_layers() -> None:
    m = model()
    buffers = {name: "CUDA0" if name.startswith("blk.0") else "CPU" for name in m.specs}
    buffers["blk.1.ffn_up_exps.weight"] = "CUDA1"
    found = expert_places(m, buffers)
    assert found == [
        ExpertPlace(0, "CUDA0", 8, 24 * MIB),
        ExpertPlace(1, "RAM", 8, 16 * MIB),
        ExpertPlace(1, "CUDA1", 8, 8 * MIB),
        ExpertPlace(2, "RAM", 8, 24 * MIB),
    ]
    assert place_lines(found) == [
        "experts of layer 0: 8 in CUDA0 (24.00 MiB)",
        "experts of layer 1: 8 in RAM (16.00 MiB), 8 in CUDA1 (8.00 MiB)",
        "experts of layer 2: 8 in RAM (24.00 MiB)",
    ]


def test_experts_on_disk(tmp_path) -> None:
    m = model()
    buffers = dict.fromkeys(m.specs, "CPU")
    slots = slots_for(layers(tmp_path / "m"), 12 * layers(tmp_path)[0].slot)
    planned = expert_places(m, buffers, slots)
    assert planned[1:3] == [ExpertPlace(1, "RAM", 6, 18 * MIB), ExpertPlace(1, "disk", 2, 6 * MIB)]
    now = expert_places(m, buffers, slots, in_ram=lambda il: 8 if il == 1 else 4)
    assert now == [
        ExpertPlace(0, "RAM", 8, 24 * MIB),
        ExpertPlace(1, "RAM", 8, 24 * MIB),
        ExpertPlace(2, "RAM", 4, 12 * MIB),
        ExpertPlace(2, "disk", 4, 12 * MIB),
    ]
    assert place_lines(planned)[-1] == "experts of each layer from 1 to 2: 6 in RAM (18.00 MiB), 2 on disk (6.00 MiB)"


def test_all_in_ram_needs_no_line() -> None:
    m = model()
    found = expert_places(m, dict.fromkeys(m.specs, "CPU"))
    assert len(found) == 3 and not place_lines(found)


@pytest.mark.parametrize("with_uses", [False, True])
def test_metrics(with_uses: bool) -> None:
    values = EngineMetrics(
        expert_places=[ExpertPlace(3, "RAM", 6, 100), ExpertPlace(3, "disk", 2, 50)],
        expert_uses={"ram": (40, 30)} if with_uses else {},
    )
    lines = prometheus_text(values, Users()).decode().splitlines()
    assert 'llamacpp:experts{layer="3",place="disk"} 2.0' in lines
    assert 'llamacpp:expert_bytes{layer="3",place="RAM"} 100.0' in lines
    assert ('llamacpp:expert_hits_total{cache="ram"} 30.0' in lines) == with_uses
    assert "expert" not in prometheus_text(EngineMetrics(), Users()).decode()
