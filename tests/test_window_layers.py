"""Layers with windows: which they are by the keys of a file, and what else differs in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import base_metadata, tiny_model
from tiny_architectures import WINDOWED, tiny

from ikcli.errors import FormatError, UnsupportedError
from ikcli.graph import Graph
from ikcli.graph.ops_attention import Attention
from ikcli.models import GraphConfig, HParams, Weights, find
from ikcli.models.gemma.gemma4 import kv_layer

PATTERN = "attention.sliding_window_pattern"


def read(arch: str, tensors: Any = None, **changes: Any) -> HParams:
    metadata = base_metadata(arch, **{**WINDOWED.get(arch, {}), **changes})
    return HParams.from_gguf(metadata, tensors or {}, "file.gguf")


def windows(hp: HParams) -> str:
    return "".join("w" if hp.at(il).window else "." for il in range(hp.n_layer))


@pytest.mark.parametrize(
    ("arch", "changes", "wanted"),
    [
        ("gpt-oss", {}, "w.w."), ("gemma2", {}, "w.w."), ("cohere2", {}, "www."), ("mellum", {}, "www."),
        ("gemma3", {PATTERN: None, "block_count": 7}, "wwwww.w"), ("phi3", {}, "wwww"),
        ("gemma3", {PATTERN: 2}, "w.w."), ("gemma3", {PATTERN: 0}, "wwww"), ("gemma3", {PATTERN: 1}, "...."),
        ("gemma3", {PATTERN: True}, "wwww"), ("gemma3", {PATTERN: False}, "...."),
        ("mellum", {PATTERN: np.array([False, True, True, False])}, ".ww."),
        ("mimo2", {PATTERN: np.array([0, 1, 0, 1, 1], np.int32)}, ".w.w"),  # the fifth is not part of the run
        ("laguna", {PATTERN: None}, ".w.w"),  # heads other than those of the first layer
        ("phi3", {"attention.sliding_window": 0}, "...."), ("starcoder2", {"attention.sliding_window": None}, "...."),
    ],
)  # fmt: skip
def test_which_layers_have_windows(arch: str, changes: dict[str, Any], wanted: str) -> None:
    assert windows(read(arch, **changes)) == wanted


def test_files_that_do_not_say_which_layers_have_windows() -> None:
    for arch in ("mimo2", "step35", "gemma4", "cohere2_moe"):
        with pytest.raises(FormatError, match=rf"{arch}\.{PATTERN} is missing"):
            read(arch, **{PATTERN: None})
    with pytest.raises(FormatError, match="has 2 values for 4 layers"):
        read("mimo2", **{PATTERN: np.array([True, False])})
    with pytest.raises(FormatError, match=r"gemma3\.attention\.sliding_window is missing"):
        read("gemma3", **{"attention.sliding_window": None})


def test_windows_of_old_phi3_files() -> None:
    old = {"attention.sliding_window": None, "context_length": 4096}
    assert read("phi3", block_count=32, **old).window == 2047
    with pytest.raises(FormatError, match=r"sliding_window is missing"):
        read("phi3", block_count=4, **old)


def test_rotation_of_window_layers() -> None:
    bases = [
        read("gemma3", **{"rope.freq_base_swa": b, "rope.freq_base": 1e6}).at(0).rope.freq_base for b in (7.0, None)
    ]
    assert bases == [7.0, 10000.0]
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert [read("gemma3", **scaled).at(il).rope.factor for il in (0, 1)] == [1.0, 8.0]
    assert [read("gpt-oss").at(il).rope.scaling for il in (0, 1)] == ["yarn", "yarn"]
    assert [read("mellum").at(il).rope.scaling for il in (0, 3)] == ["none", "yarn"]
    step = read("step35")
    assert [(step.at(il).n_rot, step.at(il).rope.factors) for il in (0, 1)] == [(16, False), (8, True)]
    assert read("step35", **{"rope.scaling.apply_mask": 3}).at(0).rope.factors
    sizes = np.array([4, 8, 12, 16], np.int32)
    assert [read("step35", **{"rope.dimension_count_per_layer": sizes}).at(il).n_rot for il in range(4)] == [
        4,
        8,
        12,
        16,
    ]
    per_layer = read("step35", **{"rope.freq_base_per_layer": np.float32([2, 3, 4, 5])})
    assert [per_layer.at(il).rope.freq_base for il in range(4)] == [2, 3, 4, 5]
    laguna = read("laguna", **{"rope.dimension_count": None, "rope.dimension_count_swa": None})
    assert [laguna.at(il).n_rot for il in (0, 1)] == [16, 8]
    with pytest.raises(
        FormatError, match=r"rope\.dimension_count_swa is 24; it must be even and at most the key length 16"
    ):
        read("laguna", **{"rope.dimension_count_swa": 24})


def test_bases_of_rotations_are_checked() -> None:
    for arch, bad in (
        ("gemma3", {"rope.freq_base_swa": 0.0}),
        ("step35", {"rope.freq_base_per_layer": np.float32([0, 2, 3, 4])}),
    ):
        with pytest.raises(FormatError, match=r"rope\.freq_base_swa is 0\.0; bases of rotations must be larger than 1"):
            read(arch, **bad)


def test_layers_that_do_not_rotate() -> None:
    assert [read("cohere2").at(il).n_rot for il in range(4)] == [16, 16, 16, 0]
    moe = read("cohere2_moe", **{PATTERN: np.array([False, True, False, True])})
    assert [moe.at(il).n_rot for il in range(4)] == [16, 16, 0, 16], "dense layers at the beginning rotate all the same"
    llama4 = read("llama4")
    assert [(llama4.at(il).n_rot, llama4.at(il).chunk) for il in (0, 3)] == [(16, 8192), (0, 0)]
    assert [llama4.at(il).temperature_scale > 0 for il in range(4)] == [False, False, False, True]
    whole = read("llama4", **{"attention.sliding_window": 0})
    assert {(whole.at(il).n_rot, whole.at(il).chunk, whole.at(il).temperature_scale) for il in range(4)} == {
        (16, 0, 0.0)
    }


def test_scale_of_the_largest_gemmas() -> None:
    for arch, n_layer in (("gemma2", 46), ("gemma3", 62)):
        scales = [read(arch, block_count=n, **{"attention.key_length": 32}).attention_scale for n in (n_layer, 26)]
        assert scales == [1 / 4, 0.0], "of heads as wide as n_embd / n_head; else of their own width"


def test_layers_with_a_router_are_those_with_experts() -> None:
    router = type("T", (), {"shape": (64, 8)})()
    hp = read("mimo2", {"blk.1.ffn_gate_inp.weight": router, "blk.3.ffn_gate_inp.weight": router})
    assert [hp.has_experts(il) for il in range(4)] == [False, True, False, True]


def test_norm_of_cohere2_moe_is_what_the_file_has_an_epsilon_for() -> None:
    assert read("cohere2_moe").norm == "rms"
    keys = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
    assert (read("cohere2_moe", **keys).norm, read("cohere2_moe", **keys).eps) == ("layer", 1e-5)


def test_shared_keys_and_values_are_those_of_the_last_layer_of_a_kind() -> None:
    hp = read("gemma4")
    assert [kv_layer(hp, il) for il in range(6)] == [0, 1, 2, 3, 2, 3]
    heads = np.array([2, 4, 2, 4, 2, 2], np.int32)
    for bad in ({"attention.shared_kv_layers": 5}, {"attention.head_count_kv": heads}):
        with pytest.raises(FormatError, match="layer 5 should use keys and values of an earlier layer of its kind"):
            kv_layer(read("gemma4", **bad), 5)


def recorded(arch: str, **settings: Any) -> Graph:
    model = tiny(arch)
    hp = HParams.from_gguf(model.metadata, model.tensors, "file.gguf")
    graph = Graph()
    find(arch).build(graph, hp, Weights(model.tensors, "file.gguf", model.values), GraphConfig(**settings))
    return graph


def test_factors_of_long_rope_depend_on_the_context_of_a_sequence() -> None:
    def table(**settings: Any) -> Any:
        return next(n.op.inv_freq for n in recorded("phi3", **settings).nodes if n.op.name == "rope_table")

    assert table(n_ctx=9) == table(n_ctx=64) != table(n_ctx=8) == table(n_ctx=16, n_seq=2)
    model = tiny_model("llama")
    model.set("rope_factors_long.weight", np.ones(8))
    with pytest.raises(UnsupportedError, match="LongRoPE"):
        HParams.from_gguf(model.metadata, model.tensors, "file.gguf")


def test_attention_gets_what_its_layer_has() -> None:
    def found(arch: str, *names: str) -> list[Any]:
        ops = [n.op for n in recorded(arch).nodes if isinstance(n.op, Attention)]
        return [tuple(getattr(op, name) for name in names) for op in ops]

    assert found("gemma2", "window", "softcap") == [(6, 2.0), (0, 2.0)] * 2
    assert [(window, bool(sinks)) for window, sinks in found("mimo2", "window", "sinks")] == [
        (6, True), (0, False), (6, False), (0, False),
    ]  # fmt: skip
    assert found("gemma4", "window", "scale")[:2] == [(6, 1.0), (0, 1.0)]
    assert [chunk for (chunk,) in found("llama4", "chunk")] == [8192, 8192, 8192, 0]
