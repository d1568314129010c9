"""Conversion of MiniMax-M3: names and configuration of the released checkpoint, and a checkpoint without indexer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import drawn, write_checkpoint

from ikcli.convert.tool import OpenCheckpoint, open_checkpoint

ANSWERS = json.loads((Path(__file__).parent / "data" / "convert_answers.json").read_text())
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
