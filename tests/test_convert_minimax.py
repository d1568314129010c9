"""Conversion of MiniMax-01 and M3: configurations of released checkpoints, and a checkpoint without indexer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import drawn, write_checkpoint

from ikcli.convert.tool import OpenCheckpoint, open_checkpoint
from ikcli.errors import UnsupportedError
from ikcli.models import HParams
from ikcli.models.recurrent.minimax01 import slopes

ANSWERS = json.loads((Path(__file__).parent / "data" / "convert_answers.json").read_text())
MINIMAX_01 = next(m for m in ANSWERS["models"] if m["name"] == "minimax-01")
SAVED = next(m for m in ANSWERS["models"] if m["name"] == "minimax-m3-sparse")
_SPARSE = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip


def released() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the configuration and the tensors of the same model as its publisher names them."""
    config = dict(SAVED["config"])
    config["sparse_attention_config"] = {new: config.pop(old) for old, new in _SPARSE.items()}
    config["moe_layer_freq"] = [int(kind == "sparse") for kind in config.pop("mlp_layer_types")]
    config |= {"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3"}
    tensors = {}
    for name, shape in SAVED["tensors"].items():
        x = drawn(name, shape)
        name = name.replace(".self_attn.indexer.", ".self_attn.index_")
        if ".mlp.gate" in name and "gate_up" not in name:
            name = name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")
        if ".experts." in name:
            name = name.replace(".mlp.", ".block_sparse_moe.")
            parts = {"w2": x} if "down" in name else dict(zip(("w1", "w3"), np.split(x, 2, axis=1), strict=True))
            stem = name.rsplit(".", 1)[0]
            tensors |= {f"{stem}.{i}.{w}.weight": rows[i] for w, rows in parts.items() for i in range(len(x))}
        elif "gate_up" in name:
            name = name.replace(".mlp.shared", ".block_sparse_moe.shared")
            gate, up = np.split(x, 2)
            tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            tensors[name.replace(".mlp.shared", ".block_sparse_moe.shared")] = x
    return config, tensors


def opened(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> OpenCheckpoint:
    return open_checkpoint(write_checkpoint(folder, config, tensors))


def test_the_released_names(tmp_path: Path) -> None:
    """The file is that of the checkpoint which transformers saves."""
    saved = opened(tmp_path / "saved", SAVED["config"], {n: drawn(n, s) for n, s in SAVED["tensors"].items()})
    other = opened(tmp_path / "released", *released())
    assert set(saved.file.tensors) == set(other.file.tensors)
    keys = {k: v for k, v in saved.file.metadata.items() if k.startswith("minimax-m3.")}
    assert keys == {k: v for k, v in other.file.metadata.items() if k.startswith("minimax-m3.")}
    numbers = {k.removeprefix("minimax-m3.attention.indexer."): v for k, v in keys.items() if ".indexer." in k}
    assert numbers == {"head_count": 2, "key_length": 32, "top_k": 2, "block_size": 4, "local_blocks": 1}


def test_a_checkpoint_without_indexer_says_so(tmp_path: Path) -> None:
    tensors = {n: drawn(n, s) for n, s in SAVED["tensors"].items() if ".indexer." not in n}
    found = opened(tmp_path / "model", SAVED["config"], tensors)
    assert any("attention will cover all positions" in note for note in found.notes)


def released_01() -> dict[str, Any]:
    """Return the configuration of the small MiniMax-01 as its publisher writes it; names of tensors are the same."""
    config = dict(MINIMAX_01["config"])
    config["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    for old, new in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for which in ("alpha", "beta"):
            config[f"layernorm_{new}_{which}"] = config.pop(f"{old}_{which}_factor")
    config |= {
        "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "postnorm": True,
        "rotary_dim": 8, "rope_theta": 1e7, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
    }  # fmt: skip
    del config["rope_parameters"], config["block_size"]
    return config


def test_linear_attention_by_its_published_names(tmp_path: Path) -> None:
    tensors = {name: drawn(name, shape) for name, shape in MINIMAX_01["tensors"].items()}
    buffers = {"model.layers.0.self_attn.slope_rate": np.ones((4, 1, 1), np.float32)}
    saved = opened(tmp_path / "saved", MINIMAX_01["config"], tensors | buffers)
    other = opened(tmp_path / "released", released_01(), tensors)
    assert set(saved.file.tensors) == set(other.file.tensors) and "blk.0.attn_norm_2.weight" in saved.file.tensors
    keys = {k.removeprefix("minimax-01."): v for k, v in other.file.metadata.items()}
    differ = {k for k, v in saved.file.metadata.items() if keys[k.removeprefix("minimax-01.")] != v}
    assert {k for k in differ if k.startswith("minimax-01.")} == {
        "minimax-01.rope.dimension_count",
        "minimax-01.rope.freq_base",
    }
    assert (keys["rope.dimension_count"], keys["rope.freq_base"], keys["residual_scale"]) == (8, 1e7, 3.5)
    assert keys["attention.recurrent_layers"] == [True, False, True, True, False]
    for changes, message in (
        ({"layernorm_mlp_alpha": 2.0}, "known are an equal alpha in all parts, and a beta of 1"),
        ({"layernorm_linear_attention_beta": 0.5}, "known are an equal alpha in all parts, and a beta of 1"),
        ({"postnorm": False}, "postnorm is false; known is true"),
        ({"attn_type_list": [0, 1, 2, 0, 1]}, "one of two kinds for every layer"),
        ({"sliding_window": 8}, "sliding_window"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            opened(tmp_path / "other", released_01() | changes, tensors)


def test_slopes_and_layers_of_the_released_size(tmp_path: Path) -> None:
    """Every eighth layer has a soft-max, which the file need not say; slopes are those of ALiBi, smaller with depth."""
    metadata = {"general.architecture": "minimax-01"} | {
        f"minimax-01.{k}": v
        for k, v in {
            "block_count": 80, "context_length": 1 << 20, "embedding_length": 6144, "feed_forward_length": 9216,
            "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 128,
            "attention.value_length": 128, "rope.dimension_count": 64, "residual_scale": 3.5, "vocab_size": 200064,
            "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 32, "expert_used_count": 2,
        }.items()
    }  # fmt: skip
    hp = HParams.from_gguf(metadata, {}, "x.gguf")
    assert [il for il in range(80) if not hp.is_recurrent(il)] == list(range(7, 80, 8))
    assert (hp.n_ff_exp, hp.expert_gating, hp.expert_weights_norm) == (9216, "softmax", True)
    assert slopes(hp, 0)[0] == pytest.approx(2 ** -(1 / 8) * (1 + 1e-5))
    assert slopes(hp, 0)[63] == pytest.approx(2**-8 * (1 + 1e-5))
    assert slopes(hp, 79)[0] == pytest.approx(2 ** -(1 / 8) * 1e-5, rel=0.02)
    wide = {"minimax-01.attention.key_length": 320, "minimax-01.attention.value_length": 320}
    with pytest.raises(UnsupportedError, match="linear attention takes equal multiples of 16 up to 256"):
        HParams.from_gguf(metadata | wide, {}, "x.gguf")
