"""Tiny random encoders, with a vocabulary of words where texts are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from factories import N_VOCAB, MemoryModel, tiny_model
from gguf_files import write_model
from tiny_architectures import LAYER_NORM

BERT_KEYS = LAYER_NORM | {"attention.head_count_kv": 4}
RMS_NORM = ("eurobert", "gemma-embedding", "neo-bert", "t5encoder")
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["a", "castle", "dog", "where", "do", "kings", "live", "?"]


def tiny(arch: str, **keys: Any) -> MemoryModel:
    """All numbers are random; biases of q and the feed-forward part are there."""
    own = {"attention.head_count_kv": 4} if arch in RMS_NORM else BERT_KEYS
    if arch in ("gemma-embedding", "modern-bert"):
        own = own | {"attention.sliding_window": 24, "attention.sliding_window_pattern": 2}
    if arch == "nomic-bert-moe":
        own = own | {"expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2}
    if arch == "t5encoder":
        own = own | {"attention.relative_buckets_count": 32}
    return tiny_model(arch, optional=("attn_q.bias", "ffn_up.bias", "ffn_gate.weight"), **(own | keys))


def with_words(model: MemoryModel) -> MemoryModel:
    """The model with a WordPiece vocabulary of WORDS and single letters."""
    tokens = SPECIAL + ["\u2581" + word for word in WORDS] + [chr(ord("a") + i) for i in range(26)]
    tokens += [f"[unused{i}]" for i in range(N_VOCAB - len(tokens))]
    keys = {
        "model": "bert", "pre": "default", "tokens": tokens,
        "token_type": np.array([3] * len(SPECIAL) + [1] * (N_VOCAB - len(SPECIAL)), np.int32),
        "padding_token_id": PAD, "unknown_token_id": UNK, "bos_token_id": CLS, "cls_token_id": CLS,
        "eos_token_id": SEP, "seperator_token_id": SEP, "mask_token_id": MASK,
    }  # fmt: skip
    model.metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return model


def encoder_file(path: Path, *, ranks: bool = False) -> Path:
    """A BERT that reads words, with mean pooling or a head that ranks."""
    model = with_words(tiny("bert", pooling_type=4 if ranks else 1))
    if ranks:
        rng = np.random.default_rng(8)
        model.set("token_types.weight", rng.standard_normal((2, 64)) / 8)
        model.set("cls.weight", rng.standard_normal((64, 64)) / 4)
        model.set("cls.bias", rng.standard_normal(64) / 4)
        model.set("cls.output.weight", rng.standard_normal((1, 64)) / 4)
    return write_model(model, path)
