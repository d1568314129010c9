"""What layers are, for keys that files of an architecture have or lack: windows, rotation, experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import base_metadata, tiny_deepseek2, tiny_model

from ikcli.errors import FormatError
from ikcli.models import HParams, check_tensors, find
from ikcli.models.rope import magnitude

EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 48, "leading_dense_block_count": 1}
LAGUNA = EXPERTS | {"block_count": 5, "attention.key_length": 16, "attention.value_length": 16}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}


def read(arch: str, tensors: Any = None, **keys: Any) -> HParams:
    return HParams.from_gguf(base_metadata(arch, **keys), tensors or {}, "file.gguf")


def windows(hp: HParams) -> list[int]:
    return [hp.at(il).window for il in range(hp.n_layer)]


def rotated(hp: HParams) -> list[int]:
    return [hp.at(il).n_rot for il in range(hp.n_layer)]


@pytest.mark.parametrize("pattern", [{}, {"attention.sliding_window_pattern": 4}])
def test_laguna_with_as_many_heads_everywhere_begins_periods_with_a_full_layer(pattern: dict[str, int]) -> None:
    hp = read("laguna", **LAGUNA | YARN | {"attention.sliding_window": 8, "rope.dimension_count": 8} | pattern)
    assert windows(hp) == [0, 8, 8, 8, 0]
    assert rotated(hp) == [8, 16, 16, 16, 8], "window layers rotate whole heads where the file does not say"
    assert [hp.at(il).rope.scaling for il in range(3)] == ["yarn", "none", "none"]
    hp = read("laguna", **LAGUNA | {"attention.sliding_window": 8, "rope.dimension_count_swa": 4})
    assert rotated(hp) == [8, 4, 4, 4, 8], "and others half of them"


def test_laguna_tells_windows_by_heads() -> None:
    heads = {"attention.head_count": np.array([4, 6, 6, 4, 6], np.int32), "attention.sliding_window": 8}
    assert windows(read("laguna", **LAGUNA | heads)) == [0, 8, 8, 0, 8]


@pytest.mark.parametrize("window", [None, 0])
def test_laguna_without_windows(window: int | None) -> None:
    hp = read("laguna", **LAGUNA | {"attention.sliding_window": window})
    assert windows(hp) == [0] * 5 and rotated(hp) == [16] * 5


def test_cohere2_moe_with_a_period() -> None:
    keys = {"block_count": 5, "attention.sliding_window": 8, "attention.sliding_window_pattern": 3, "logit_scale": 1.0}
    hp = read("cohere2_moe", **EXPERTS | keys)
    assert windows(hp) == [0, 8, 8, 0, 8]
    assert rotated(hp) == [16, 16, 16, 0, 16], "dense layers at the beginning rotate"


def test_olmo_3_has_windows_whose_rotation_is_not_scaled() -> None:
    assert windows(read("olmo2", block_count=5)) == [0] * 5
    hp = read("olmo2", block_count=5, **YARN | {"attention.sliding_window": 8})
    assert windows(hp) == [8, 8, 8, 0, 8]
    assert [hp.at(il).rope.scaling for il in range(5)] == ["none", "none", "none", "yarn", "none"]
    listed = {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([1, 0, 1, 0, 1], np.int32)}
    assert windows(read("olmo2", block_count=5, **listed)) == [8, 0, 8, 0, 8]


def test_widths_of_shared_experts_are_those_of_the_tensors() -> None:
    """ERNIE's converter writes another number than what the matrices have."""
    keys = EXPERTS | {"interleave_moe_layer_step": 1, "expert_shared_count": 1, "expert_shared_feed_forward_length": 99}
    model = tiny_model("ernie4_5-moe", **keys | {"expert_shared_feed_forward_length": 40})
    model.metadata["ernie4_5-moe.expert_shared_feed_forward_length"] = 99
    hp = HParams.from_gguf(model.metadata, model.tensors, "file.gguf")
    assert hp.n_ff_shexp == 40
    check_tensors(find(hp.arch).tensor_shapes(hp), model.tensors, "file.gguf")


def test_width_of_experts_where_files_do_not_say() -> None:
    model = tiny_model("qwen2moe", **EXPERTS | {"expert_shared_feed_forward_length": 40})
    del model.metadata["qwen2moe.expert_feed_forward_length"], model.metadata["qwen2moe.leading_dense_block_count"]
    assert read("qwen2moe", model.tensors, expert_count=8, expert_used_count=3).n_ff_exp == 48


def test_gating_over_the_chosen_experts_is_softmax_normalised() -> None:
    hp = read("qwen2moe", **EXPERTS | {"expert_gating_func": 3})
    assert (hp.expert_gating, hp.expert_weights_norm) == ("softmax", True)
    assert not read("qwen2moe", **EXPERTS).expert_weights_norm


def test_step35_without_limits() -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([False, True])}
    hp = read("step35", **EXPERTS | keys)
    assert hp.swiglu_limit == hp.swiglu_limit_shared == 0 and not hp.per_layer.keys() & {"swiglu_limit"}


def test_the_other_spelling_of_cohere2_moe() -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "logit_scale": 0.5}
    hp = read("cohere2moe", **EXPERTS | keys)
    assert hp == replace(read("cohere2_moe", **EXPERTS | keys), source=hp.source)
    assert find("cohere2moe") is find("cohere2_moe")


def test_the_earlier_spelling_of_granite_swa() -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([False, True])}
    hp = read("granite-swa", **keys | {"logit_scale": 4.0})
    assert (hp.arch, hp.at(1).window, hp.logit_scale) == ("granite_swa", 8, 0.25)
    assert find("granite-swa") is find("granite_swa")


def test_layers_that_run_several_times() -> None:
    hp = read("ouro", num_loops=3)
    assert (hp.n_layer, hp.n_loop, hp.norms_loops) == (2, 3, True)
    assert not read("nanbeige", num_loops=2, skip_loop_final_norm=True).norms_loops
    with pytest.raises(FormatError, match=r"nanbeige\.num_loops is missing"):
        read("nanbeige")
    with pytest.raises(FormatError, match=r"ouro\.num_loops is 257, outside 1\.\.256"):
        read("ouro", num_loops=257)


def test_queries_of_mistral_large_3_grow_with_the_position() -> None:
    metadata = tiny_deepseek2().metadata
    assert HParams.from_gguf(metadata, {}, "file.gguf").temperature_scale == 0
    scaled = {"deepseek2.attention.temperature_scale": 0.1, "deepseek2.attention.temperature_length": 32}
    hp = HParams.from_gguf(metadata | scaled, {}, "file.gguf")
    assert (hp.temperature_scale, hp.temperature_length) == (0.1, 32)


def test_mixtral_whose_experts_have_a_width_of_their_own() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2}
    for width in ({}, {"expert_feed_forward_length": 48}):
        specs = find("llama").tensor_shapes(read("llama", **keys | width))
        assert specs["blk.0.ffn_up_exps.weight"].shape == (64, 48 if width else 96, 4)


def test_norms_of_cohere2_moe() -> None:
    keys = EXPERTS | {"attention.sliding_window": 0, "logit_scale": 1.0, "attention.layer_norm_epsilon": 1e-5}
    for rms, wanted in ((None, ("layer", 1e-5)), (0.0, ("layer", 1e-5)), (1e-6, ("rms", 1e-6))):
        hp = read("cohere2_moe", **keys | {"attention.layer_norm_rms_epsilon": rms})
        assert (hp.norm, hp.eps) == wanted


def test_attention_factor_of_a_checkpoint_is_that_of_the_whole() -> None:
    """OLMo 3 has the value that YaRN has anyway."""
    plain = read("olmo2", **YARN).rope
    usual = 1 + 0.1 * math.log(8)
    for written, wanted in ((1.0, usual), (usual, usual), (1.5, 1.5)):
        rope = read("olmo2", **YARN | {"rope.scaling.yarn_attn_factor": written}).rope
        assert magnitude(rope, rope.attn_factor) == pytest.approx(wanted)
        assert replace(rope, attn_factor=1.0) == plain
    assert read("llama", **{"rope.scaling.yarn_attn_factor": 1.5}).rope.attn_factor == 1.5
