"""`-op` and `--offload-min-batch`: which products with weights in RAM a GPU computes, which GPU, and from when on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from leaves import leaf

from ikcli.engine.plan.offload import offload_of, places_of
from ikcli.engine.plan.placement import place
from ikcli.engine.run.runner import Offload
from ikcli.gguf.constants import GGMLType as T
from ikcli.graph import Graph, Node, Rows, Weight
from ikcli.settings.run import RunConfig

BASE = replace(RunConfig(command="bench"), offload_min_batch=4)
NAMES = [f"blk.{il}.{name}" for il in range(4) for name in ("attn_q.weight", "ffn_up_exps.weight")]


def offload(config: RunConfig, n_expert: int = 8, used: int = 3) -> Offload | None:
    """For four blocks, the first of which is on the CPU, on two GPUs."""
    model: Any = SimpleNamespace(hp=SimpleNamespace(n_expert=n_expert, n_expert_used=used))
    placement = place(NAMES, 4, replace(config, n_gpu_layers=3, cpu_moe=True), ("CUDA0", "CUDA1"))
    assert placement.home == ("CPU", "CUDA0", "CUDA0", "CUDA1")
    return offload_of(config, model, placement)


def experts(il: int, type_: T = T.Q4_K, rows: Rows = Rows.TOKENS) -> tuple[Node, Weight]:
    graph = Graph()
    graph.il = il
    w = Weight(f"blk.{il}.ffn_up_exps.weight", type_, (256, 64, 8))
    x = leaf(graph, "x", 256, rows)
    plan = leaf(graph, "plan", 6, rows)
    return graph.mul_mat_id(w, x, plan, "y"), w


def dense(il: int, rows: Rows = Rows.TOKENS) -> tuple[Node, Weight]:
    graph = Graph()
    graph.il = il
    w = Weight(f"blk.{il}.attn_q.weight", T.Q4_K, (256, 64))
    return graph.mul_mat(w, leaf(graph, "x", 256, rows), "y"), w


@pytest.mark.parametrize(("il", "device"), [(0, "CUDA0"), (1, "CUDA0"), (2, "CUDA0"), (3, "CUDA1")])
def test_weights_go_to_the_gpu_of_their_block(il: int, device: str) -> None:
    """So that what is computed stays where the rest of the block is; those of blocks in RAM go to the first."""
    found = offload(BASE)
    assert found is not None
    for node, w in (experts(il), dense(il)):
        assert found.device(node, w, 100) == device


def test_experts_wait_for_more_tokens() -> None:
    """4 tokens, and 4 * 8 / 3 for experts, rounded up."""
    found = offload(BASE)
    assert found is not None and found.thresholds == (4, 11)
    for make, least in ((dense, 4), (experts, 11)):
        node, w = make(1)
        assert found.device(node, w, least - 1) is None and found.device(node, w, least) == "CUDA0"
    whole = offload(BASE, n_expert=9)  # divides evenly
    assert whole is not None and whole.thresholds == (4, 12)


def test_what_stays_on_the_cpu() -> None:
    found = offload(BASE)
    assert found is not None
    assert found.device(*dense(1, Rows.OUTPUTS), 100) is None  # rows of the last layer: few
    assert found.device(*experts(1, T.Q4_K_R4), 100) == "CUDA0"  # the device separates the rows
    assert found.device(*experts(1, T.Q4_0_4_4), 100) is None  # a type without kernels
    for policy, on_gpu in (((("MUL_MAT_ID", False),), (False, True)), ((("MUL_MAT", False),), (True, False)),
                           ((("ALL", False), ("MUL_MAT", True)), (False, True))):  # fmt: skip
        some = offload(replace(BASE, offload_policy=policy))
        assert some is not None
        assert tuple(some.device(*pair, 100) is not None for pair in (experts(1), dense(1))) == on_gpu
    assert offload(replace(BASE, offload_policy=(("ALL", False),))) is None


def test_one_token_is_no_threshold() -> None:
    """Everything is computed on the GPU from the first token on."""
    found = offload(replace(BASE, offload_min_batch=1))
    assert found is not None and found.thresholds == (3,)
    node, w = dense(1)
    assert found.device(node, w, 1) == "CUDA0"


@pytest.mark.parametrize(("ngl", "device"), [(5, "CUDA1"), (4, "CPU"), (0, "CPU")])
def test_embeddings_are_multiplied_where_the_output_would_be(ngl: int, device: str) -> None:
    names = [*NAMES, "token_embd.weight"]
    places = places_of(place(names, 4, replace(BASE, n_gpu_layers=ngl), ("CUDA0", "CUDA1")))
    graph = Graph()
    graph.il = -1
    w = Weight("token_embd.weight", T.Q4_K, (256, 64))
    assert places.weight(graph.mul_mat(w, leaf(graph, "x", 256, Rows.OUTPUTS), "logits"), w) == device
    assert places.weight(leaf(graph, "other", 256), w) == "CPU"  # looked up on the CPU
