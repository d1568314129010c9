"""Hyper-parameters and tensor checks: what a broken or unusual file says to the user."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, base_metadata, tiny_deepseek2, tiny_model

from ikcli.errors import FormatError, UnsupportedError
from ikcli.models import HParams, Weights, check_tensors, find
from ikcli.models.deepseek2 import tensor_shapes

KEYS = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]
MLA_KEYS = [
    "attention.kv_lora_rank",
    "leading_dense_block_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_weights_scale",
]


def read(metadata: dict[str, Any], tensors: Any = None) -> HParams:
    return HParams.from_gguf(metadata, tensors or {}, "file.gguf")


@pytest.mark.parametrize("key", KEYS)
def test_missing_key_names_file_and_key(key: str) -> None:
    with pytest.raises(FormatError, match=rf"file\.gguf: metadata key llama\.{key} is missing"):
        read(base_metadata("llama", **{key: None}))


@pytest.mark.parametrize("key", MLA_KEYS)
def test_missing_mla_key(key: str) -> None:
    metadata = tiny_deepseek2().metadata
    del metadata[f"deepseek2.{key}"]
    with pytest.raises(FormatError, match=rf"deepseek2\.{key} is missing"):
        read(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", "two", "whole number"),
        ("block_count", 2.0, "whole number"),
        ("block_count", True, "whole number"),
        ("block_count", 0, "outside 1..512"),
        ("block_count", 2**31, "outside 1..512"),
        ("embedding_length", -1, "outside"),
        ("attention.head_count", 0, "outside"),
        ("attention.head_count_kv", 3, "does not divide"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "finite"),
        ("attention.layer_norm_rms_epsilon", 0.0, "positive"),
        ("rope.dimension_count", 7, "even"),
        ("rope.dimension_count", 32, "at most the key length 16"),
        ("rope.freq_base", 0.0, "larger than 1"),
        ("rope.scaling.factor", -2.0, "positive"),
        ("expert_used_count", 2, "with 0 experts"),
        ("expert_count", 4, "is 0 with 4 experts"),
        ("expert_group_count", 3, None),
    ],
)
def test_wrong_values(key: str, value: Any, message: str | None) -> None:
    metadata = base_metadata("llama", **{key: value})
    if message is None:
        metadata |= {"llama.expert_count": 4, "llama.expert_used_count": 2}
        message = "is 3"
    with pytest.raises(FormatError, match=message) as error:
        read(metadata)
    assert f"llama.{key}" in str(error.value) or "expert_used_count" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.scaling.type", "longrope"), ("expert_gating_func", 5)],
)
def test_unsupported_values(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"file\.gguf: llama\.{key}"):
        read(base_metadata("llama", **{key: value}))


def test_long_rope_tensors_are_unsupported() -> None:
    model = tiny_model()
    model.set("rope_factors_long.weight", np.ones(8))
    with pytest.raises(UnsupportedError, match="LongRoPE"):
        read(model.metadata, model.tensors)


def test_values_that_differ_between_layers() -> None:
    keys = {"attention.head_count": np.array([4, 8], np.int32), "attention.key_length": 16}
    hp = read(base_metadata("llama", **keys))
    assert hp.n_head == 8 and [hp.at(il).n_head for il in range(2)] == [4, 8]
    with pytest.raises(FormatError, match="has 1 values for 2 layers"):
        read(base_metadata("llama", **keys | {"attention.head_count_kv": np.array([4])}))
    with pytest.raises(FormatError, match="does not divide head_count 8"):
        read(base_metadata("llama", **keys | {"attention.head_count_kv": np.array([4, 3])}))


def test_values_per_layer_that_agree_are_one_value() -> None:
    hp = read(base_metadata("llama", **{"attention.head_count": np.array([4, 4], np.int32)}))
    assert hp.n_head == 4


def test_defaults() -> None:
    hp = read(base_metadata("llama", **{"attention.head_count_kv": None}))
    assert (hp.n_head_kv, hp.head_dim_k, hp.head_dim_v, hp.n_rot) == (4, 16, 16, 16)
    assert (hp.rope.freq_base, hp.rope.scaling, hp.rope.factor, hp.rope.n_ctx_orig) == (10000.0, "none", 1.0, 128)
    assert read(base_metadata("llama", **{"rope.scaling.factor": 4.0})).rope.scaling == "linear"
    assert read(base_metadata("llama", **{"rope.scaling.type": "none", "rope.scaling.factor": 4.0})).rope.factor == 1
    old = tiny_deepseek2().metadata
    assert (read(old).expert_gating, read(old).expert_weights_norm) == ("softmax", False)
    new = read(old | {"deepseek2.expert_gating_func": 2, "deepseek2.expert_weights_norm": True})
    assert (new.expert_gating, new.expert_weights_norm) == ("sigmoid", True)


def test_vocabulary_size_comes_from_key_tokens_or_embedding() -> None:
    metadata = base_metadata("llama", vocab_size=None)
    with pytest.raises(FormatError, match="vocab_size"):
        read(metadata)
    assert read(metadata, tiny_model().tensors).n_vocab == 96
    assert read(metadata | {"tokenizer.ggml.tokens": ["a", "b"]}, tiny_model().tensors).n_vocab == 2


def test_expert_models_need_experts() -> None:
    with pytest.raises(FormatError, match=r"qwen3moe\.expert_count is missing"):
        read(base_metadata("qwen3moe"))
    with pytest.raises(FormatError, match=r"deepseek2\.expert_count is missing"):
        read(tiny_deepseek2().metadata | {"deepseek2.expert_count": 0, "deepseek2.expert_used_count": 0})
    assert read(base_metadata("qwen3moe", expert_count=8, expert_used_count=2)).n_ff_exp == 48


def test_three_layouts_give_the_same_numbers() -> None:
    legacy, mainline, ik = (read(tiny_deepseek2(layout).metadata) for layout in ("legacy", "mainline", "ik"))
    assert legacy == mainline == ik
    assert (mainline.n_head_kv, mainline.head_dim_k, mainline.head_dim_v) == (4, 64, 32)


def checked(model: MemoryModel) -> None:
    hp = read(model.metadata, model.tensors)
    check_tensors(find(hp.arch).tensor_shapes(hp), model.tensors, "file.gguf")


def test_wrong_shape_says_what_was_expected() -> None:
    model = tiny_deepseek2()
    model.set("blk.0.attn_q_b.weight", np.zeros((100, 48)))
    message = (
        r"file\.gguf: check_tensor_dims: tensor 'blk\.0\.attn_q_b\.weight' has wrong shape; "
        "expected 48, 256, got 48, 100"
    )
    with pytest.raises(FormatError, match=message):
        checked(model)


def test_missing_tensor() -> None:
    model = tiny_model()
    del model.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(FormatError, match=r"tensor 'blk\.1\.ffn_up\.weight' is missing"):
        checked(model)
    weights = Weights(model.tensors, "file.gguf")
    assert weights.get("blk.1.ffn_up.weight") is None and weights.layer(1).get("attn_q_bias") is None
    assert weights.layer(0).attn_q.name == "blk.0.attn_q.weight"
    with pytest.raises(FormatError, match=r"file\.gguf: tensor 'blk\.1\.ffn_up\.weight' is missing"):
        _ = weights.layer(1).ffn_up


def test_experts_stored_one_by_one_are_refused_with_a_way_out() -> None:
    model = tiny_model(expert_count=4, expert_used_count=2)
    for part in ("gate", "up", "down"):
        one = model.values(f"blk.0.ffn_{part}_exps.weight")[0]
        del model.tensors[f"blk.0.ffn_{part}_exps.weight"]
        for e in range(4):
            model.set(f"blk.0.ffn_{part}.{e}.weight", one)
    with pytest.raises(UnsupportedError, match=r"one by one.*convert"):
        checked(model)


def test_both_shapes_of_k_b_are_accepted() -> None:
    for layout in ("mainline", "ik"):
        checked(tiny_deepseek2(layout))
    specs = tensor_shapes(read(tiny_deepseek2().metadata))
    assert specs["blk.0.attn_k_b.weight"].shape == (32, 64, 4)
    assert specs["blk.0.attn_k_b.weight"].also == ((32, 256),)


def test_trailing_ones_do_not_matter() -> None:
    model = tiny_model()
    model.set("output_norm.weight", np.ones((1, 64)))
    checked(model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", ["a", "a"], "should hold whole numbers"),
        ("rope.scaling.type", np.array([1, 2]), "only|known are none"),
        ("rope.scaling.yarn_log_multiplier", 1e38, "outside -1e\\+06"),
        ("attention.layer_norm_rms_epsilon", 1e31, "outside"),
    ],
)
def test_odd_values_are_refused(key: str, value: object, message: str) -> None:
    metadata = tiny_model().metadata
    metadata[f"llama.{key}"] = value
    with pytest.raises((FormatError, UnsupportedError), match=message):
        read(metadata)
