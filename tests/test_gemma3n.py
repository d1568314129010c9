"""Gemma 3n: keys of files, files made of checkpoints, and sessions; logits of torch are in test_convert_answers.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import build, values
from factories import base_metadata
from gguf_files import write_model
from recipe_models import info
from tiny_architectures import WINDOWED, tiny

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig, HParams, check_tensors, find
from ikcli.quant.recipes import RecipeOptions, choose_types
from ikcli.settings.run import RunConfig

TOKENS = np.random.default_rng(4).integers(0, 96, 120)
OTHER = np.random.default_rng(5).integers(0, 96, 120)
CUTS = "activation_sparsity_scale"


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def read(**changes: Any) -> HParams:
    return HParams.from_gguf(base_metadata("gemma3n", **WINDOWED["gemma3n"] | changes), {}, "file.gguf")


# --- keys -------------------------------------------------------------------------------------------------------------
def test_files_that_do_not_say() -> None:
    names = ("attention.sliding_window_pattern", "attention.shared_kv_layers", "rope.freq_base_swa", CUTS,
             "embedding_length_per_layer_input", "final_logit_softcapping", "altup.num_inputs")  # fmt: skip
    hp = read(**dict.fromkeys(names), block_count=30, feed_forward_length=64)
    layers = [hp.at(il) for il in range(30)]
    assert [bool(own.window) for own in layers] == [il % 5 != 4 for il in range(30)]
    assert [own.gate_cut > 0 for own in layers] == [il < 10 for il in range(30)]
    assert [own.rope.freq_base for own in layers[3:5]] == [10000.0, 10000.0]
    assert (hp.n_layer_kv, hp.n_embd_per_layer, hp.n_stream, hp.final_softcap) == (20, 256, 4, 30.0)


def test_keys_that_make_no_sense() -> None:
    with pytest.raises(UnsupportedError, match=r"altup\.active_idx is 1; known is 0"):
        read(**{"altup.active_idx": 1})
    for bad in ([math.nan] * 6, [math.inf] * 6, ["a"] * 6):
        with pytest.raises(FormatError, match=f"{CUTS} should hold numbers, or minus infinity"):
            read(**{CUTS: bad})
    with pytest.raises(FormatError, match=f"{CUTS} has 2 values for 6 layers"):
        read(**{CUTS: [1.0, 1.0]})


def test_only_layers_that_use_those_of_others_lack_keys_and_values() -> None:
    model = tiny("gemma3n")
    specs = find("gemma3n").tensor_shapes(HParams.from_gguf(model.metadata, model.tensors, "file.gguf"))
    for il in (4, 5):
        assert f"blk.{il}.attn_k.weight" not in model.tensors
    for name in ("attn_v", "attn_k", "attn_k_norm"):
        with pytest.raises(FormatError, match=rf"'blk\.3\.{name}\.weight' is missing"):
            check_tensors(specs, {n: t for n, t in model.tensors.items() if n != f"blk.3.{name}.weight"}, "file.gguf")


# --- files ------------------------------------------------------------------------------------------------------------
CONFIG = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text", "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": [16, 16, 12, 12], "vocab_size": 6,
        "vocab_size_per_layer_input": 4, "hidden_size_per_layer_input": 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0], "rope_local_base_freq": 1e4, "rope_theta": 1e6,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_scaling": None, "laurel_rank": 4,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


def test_a_file_says_what_those_of_llama_cpp_do(tmp_path: Path) -> None:
    inner = "model.language_model."
    projections = [numbers(8, 8) + np.float32(i) for i in range(3)]
    tensors = {f"{inner}altup_projections.{i}.weight": x for i, x in enumerate(projections)} | {
        f"{inner}altup_unembed_projections.{i}.weight": x for i, x in enumerate(reversed(projections))
    }
    tensors |= {
        f"{inner}embed_tokens_per_layer.weight": (own := numbers(4, 8)),
        f"{inner}layers.1.altup.correct_output_scale": numbers(8),
        f"{inner}layers.1.altup.prediction_coefs.weight": numbers(16, 4),
        f"{inner}layers.1.laurel.linear_left.weight": numbers(4, 8),
        "model.vision_tower.timm_model.conv_stem.conv.weight": numbers(2, 2),
        "model.embed_audio.embedding.weight": numbers(2, 2),
    }
    m = build(tmp_path, CONFIG, tensors)
    keys = {key.removeprefix("gemma3n."): value for key, value in m.metadata.items()}
    assert keys["feed_forward_length"] == [16, 16, 12, 12]
    assert keys["attention.sliding_window_pattern"] == [True, False, True, False]
    assert (keys["attention.shared_kv_layers"], keys["attention.sliding_window"]) == (2, 512)
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"], keys["final_logit_softcapping"]) == (1e6, 1e4, 30.0)
    assert (keys["altup.num_inputs"], keys["altup.active_idx"]) == (4, 0)
    assert keys[CUTS] == [pytest.approx(1.6448533, abs=1e-6), 0.0, -math.inf, -math.inf]
    np.testing.assert_array_equal(values(m, "altup_proj.weight").reshape(3, 8, 8), projections)
    np.testing.assert_array_equal(values(m, "altup_unembd_proj.weight").reshape(3, 8, 8), projections[::-1])
    assert m.tensors["altup_proj.weight"].shape == (8, 8, 3)
    np.testing.assert_array_equal(values(m, "per_layer_token_embd.weight").reshape(6, 8), own[[0, 1, 2, 3, 0, 0]])
    assert m.tensors["blk.1.altup_correct_scale.weight"].shape == (8,)
    assert m.tensors["blk.1.altup_predict_coef.weight"].type is GGMLType.F32
    assert "blk.1.laurel_l.weight" in m.tensors and not any("embed_audio" in name for name in m.tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [("altup_active_idx", 1), ("altup_correct_scale", False), ("activation_sparsity_pattern", [0.5, 1.0, 0.0, 0.0]),
     ("activation_sparsity_pattern", [0.5]), ("hidden_activation", "relu")],
)  # fmt: skip
def test_settings_without_a_graph_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    text: Any = CONFIG["text_config"]
    with pytest.raises(UnsupportedError, match=f"key {key} is"):
        build(tmp_path, CONFIG | {"text_config": text | {key: value}}, {})


def test_small_matrices_of_streams_are_not_quantized() -> None:
    model = tiny("gemma3n")
    tensors = [info(name, *t.shape, type=t.type) for name, t in model.tensors.items()]
    types = {c.name: c.new for c in choose_types(tensors, model.metadata, RecipeOptions(2))}
    small = {name for name, t in model.tensors.items() if "altup" in name or "laurel" in name}
    assert len(small) == 2 + 6 * 8 and {types[name] for name in small} == {GGMLType.F32}
    assert types["blk.1.ffn_up.weight"] is not GGMLType.F32


# --- sessions ---------------------------------------------------------------------------------------------------------
def opened(path: Path, **changes: Any) -> Session:
    settings: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32"}
    return Session.open(RunConfig(model=path, warmup=False, **settings | changes), n_ctx=512, n_seq_max=2)


def test_batches_of_any_size_two_texts_and_roll_backs(tmp_path: Path) -> None:
    path = write_model(tiny("gemma3n"), tmp_path / "m.gguf")
    wanted = [
        ReferenceSession(path, GraphConfig(n_ctx=256, type_k=GGMLType.F32, type_v=GGMLType.F32)).decode(
            Batch.single(text, logits="all")
        )
        for text in (TOKENS, OTHER)
    ]

    def check(found: Any, text: int, first: int, end: int) -> None:
        assert np.abs(found - wanted[text][first:end]).max() < 2e-3 * wanted[text].std()

    for n_ubatch in (7, 64):
        with opened(path, n_ubatch=n_ubatch, n_batch=n_ubatch) as session:
            for (a0, a1), (b0, b1) in (((0, 3), (0, 4)), ((3, 5), (4, 8)), ((5, 9), (8, 9))):
                tokens = np.concatenate([TOKENS[a0:a1], OTHER[b0:b1]]).astype(np.int32)
                pos = np.concatenate([np.arange(a0, a1), np.arange(b0, b1)]).astype(np.int32)
                seq = np.repeat([0, 1], [a1 - a0, b1 - b0]).astype(np.int32)
                found = np.array(session.decode(Batch(tokens, pos, seq, np.ones(len(pos), bool))))
                check(found[: a1 - a0], 0, a0, a1)
                check(found[a1 - a0 :], 1, b0, b1)
            for first in range(9, 51, 7):
                check(np.array(session.decode(Batch.single(TOKENS[first : first + 7], first, logits="all"))), 0, first,
                      first + 7)  # fmt: skip
            session.decode(Batch.single(OTHER[:3], 51))
            kept = session.truncate(0, 48)
            check(np.array(session.decode(Batch.single(TOKENS[kept : kept + 5], kept, logits="all"))), 0, kept,
                  kept + 5)  # fmt: skip
