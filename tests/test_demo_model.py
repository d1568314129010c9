"""The bundled demo model: size, metadata, vocabulary, shapes, and that it has learnt its text; and the text tools."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "ikcli" / "data"
ROW = 256


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(DATA / "demo.gguf")


@pytest.fixture(scope="module")
def meta(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def weights(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


@pytest.fixture(scope="module")
def tokens(meta: dict[str, Any]) -> list[int]:
    """The held-out text as token ids, <|bos|> first."""
    vocab = {t: i for i, t in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    text = (DATA / "demo.txt").read_text(encoding="utf-8")
    return [meta["tokenizer.ggml.bos_token_id"], *tokenizer.encode(text).ids]


@cache
def demo_text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_text", ROOT / "tools" / "demo_text.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_file_is_small() -> None:
    assert (DATA / "demo.gguf").stat().st_size <= 12_000_000


def test_geometry(meta: dict[str, Any]) -> None:
    key = {k.removeprefix("deepseek2."): v for k, v in meta.items()}
    assert meta["general.architecture"] == "deepseek2"
    assert (key["attention.kv_lora_rank"], key["rope.dimension_count"]) == (512, 64)
    assert (key["attention.key_length"], key["attention.value_length"]) == (192, 128)
    assert 0 < key["leading_dense_block_count"] < key["block_count"]
    assert 0 < key["expert_used_count"] < key["expert_count"]
    assert key["expert_shared_count"] > 0
    assert key["context_length"] >= 2048
    assert meta["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


def test_matrices_are_bf16_with_rows_of_whole_blocks(reader: gguf.GGUFReader) -> None:
    bf16 = [t for t in reader.tensors if t.tensor_type == gguf.GGMLQuantizationType.BF16]
    others = [t for t in reader.tensors if t.tensor_type != gguf.GGMLQuantizationType.BF16]
    assert all(t.shape[0] % ROW == 0 for t in bf16)
    assert all("norm" in t.name or "ffn_gate_inp" in t.name for t in others)
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in others)
    assert {t.name for t in bf16} >= {"token_embd.weight", "output.weight", "blk.1.ffn_down_exps.weight"}


def test_weights_are_finite_and_no_expert_is_empty(weights: dict[str, np.ndarray]) -> None:
    for name, w in weights.items():
        assert np.isfinite(w).all(), name
        spread = w.std(axis=(-2, -1)) if "_exps" in name else w.std()
        assert np.min(spread) > 1e-3, name


def test_vocabulary(meta: dict[str, Any]) -> None:
    vocab, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    assert len(vocab) == len(set(vocab)) == len(types) == meta["deepseek2.vocab_size"]
    assert len(vocab) % ROW == 0
    assert (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)
    control = {t for t, kind in zip(vocab, types, strict=True) if kind == gguf.TokenType.CONTROL}
    assert control == {"<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"}
    ids = [meta[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot")]
    assert [vocab[i] for i in ids] == ["<|bos|>", "<|eos|>", "<|im_end|>"]
    known = set(vocab)
    for merge in meta["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


def test_chat_template(meta: dict[str, Any]) -> None:
    template = jinja2.Environment().from_string(meta["tokenizer.chat_template"])
    messages = [{"role": "user", "content": "Hi"}]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_held_out_text(tokens: list[int]) -> None:
    assert len(tokens) >= 20 * 512
    text = (DATA / "demo.txt").read_text(encoding="utf-8")
    assert "\r" not in text
    assert "\x00" not in text


def test_licence_texts_are_present() -> None:
    licence = (DATA / "LICENSE-python-docs.txt").read_text(encoding="utf-8")
    assert "PSF LICENSE AGREEMENT FOR PYTHON 3.11.2" in licence
    assert "LICENSE-python-docs.txt" in (ROOT / "NOTICE").read_text(encoding="utf-8")


def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x: np.ndarray, base: float) -> np.ndarray:
    """RoPE on neighbouring pairs of x (time, ..., n_rot)."""
    time, n_rot = x.shape[0], x.shape[-1]
    angle = np.arange(time)[:, None] * base ** (-np.arange(0, n_rot, 2) / n_rot)
    turn = np.exp(1j * angle).reshape(time, *[1] * (x.ndim - 2), n_rot // 2)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def attention(x: np.ndarray, w: dict[str, np.ndarray], key: dict[str, Any]) -> np.ndarray:
    time, heads, rank, n_rot = len(x), key["attention.head_count"], key["attention.kv_lora_rank"], 64
    q = (norm(x @ w["attn_q_a"].T, w["attn_q_a_norm"]) @ w["attn_q_b"].T).reshape(time, heads, -1)
    latent = x @ w["attn_kv_a_mqa"].T
    kv = (norm(latent[:, :rank], w["attn_kv_a_norm"]) @ w["attn_kv_b"].T).reshape(time, heads, -1)
    k_pe, base = rotate(latent[:, rank:], key["rope.freq_base"]), key["rope.freq_base"]
    scores = np.einsum("thd,shd->hts", q[..., :128], kv[..., :128])
    scores += np.einsum("thd,sd->hts", rotate(q[..., -n_rot:], base), k_pe)
    scores = np.where(np.tri(time, dtype=bool), scores / np.sqrt(128 + n_rot), -np.inf)
    return np.einsum("hts,shd->thd", softmax(scores), kv[..., 128:]).reshape(time, -1) @ w["attn_output"].T


def experts(x: np.ndarray, w: dict[str, np.ndarray], n_used: int) -> np.ndarray:
    probs = softmax(x @ w["ffn_gate_inp"].T)
    weight = np.where(probs >= np.sort(probs)[:, -n_used, None], probs, 0)
    y = swiglu(x, w["ffn_gate_shexp"], w["ffn_up_shexp"], w["ffn_down_shexp"])
    for e in range(probs.shape[1]):
        y += weight[:, e, None] * swiglu(x, w["ffn_gate_exps"][e], w["ffn_up_exps"][e], w["ffn_down_exps"][e])
    return y


def test_has_learnt_its_text(meta: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> None:
    """A forward pass written out in NumPy: well below the 2.12 bits per byte of an order-3 byte model."""
    key = {k.removeprefix("deepseek2."): v for k, v in meta.items()}
    w = {k.removesuffix(".weight"): v.astype(np.float64) for k, v in weights.items()}
    bits, n_bytes = 0.0, 0
    for start in (0, 20_000, 40_000):
        ids = np.array([tokens[0], *tokens[start + 1 : start + 384]])
        x = w["token_embd"][ids]
        for il in range(key["block_count"]):
            block = {k.removeprefix(f"blk.{il}."): v for k, v in w.items() if k.startswith(f"blk.{il}.")}
            x = x + attention(norm(x, block["attn_norm"]), block, key)
            h = norm(x, block["ffn_norm"])
            if il < key["leading_dense_block_count"]:
                x = x + swiglu(h, block["ffn_gate"], block["ffn_up"], block["ffn_down"])
            else:
                x = x + experts(h, block, key["expert_used_count"])
        probs = softmax(norm(x, w["output_norm"]) @ w["output"].T)[127:-1]
        bits -= np.log2(probs[np.arange(len(probs)), ids[128:]]).sum()
        n_bytes += sum(len(meta["tokenizer.ggml.tokens"][i]) for i in ids[128:])
    assert bits / n_bytes < 1.7


def test_cleaning_keeps_text_and_drops_markup() -> None:
    source = (
        ".. _label:\n\nTitle\n=====\n\n.. index:: single: a\n\n.. index::\n   single: b\n   pair: c; d\n\n"
        "See :func:`~os.path.join`,  :term:`an iterable <iterable>` and :c:type:`PyObject`.   \r\n\n\n\n* kept\n"
    )
    expected = "Title\n=====\n\nSee `os.path.join`,  an iterable and `PyObject`.\n\n* kept\n"
    assert demo_text().clean(source) == expected


def test_hold_out_takes_whole_documents_up_to_the_size() -> None:
    documents = {f"d{i}": "x" * (2_000 + 500 * i) for i in range(60)}
    names = demo_text().hold_out(documents)
    sizes = [len(documents[n]) for n in names]
    assert min(sizes) >= 3_000
    assert sum(sizes) - sizes[-1] < demo_text().HELD_OUT_BYTES <= sum(sizes)
    assert names == demo_text().hold_out(dict(reversed(documents.items())))


def test_chats_follow_the_template() -> None:
    body = "Join one or more path segments intelligently, and return\n   the result. Example::\n\n      code"
    documents = {"m": f".. function:: join(a, *b)\n\n   {body}\n\n.. data:: sep\n\n   Short.\n\nText.\n"}
    conversations = "".join(demo_text().chats(documents, random.Random(0)))
    answer = "Join one or more path segments intelligently, and return the result."
    assert f"<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n" in conversations
    assert "Short." not in conversations
    assert conversations.count("<|im_start|>") == conversations.count("<|im_end|>\n")


def reference_bits(padded: bytes, context: bytes, byte: int) -> float:
    """Witten-Bell by its definition, from order 0 up; counts are over the positions after the two padding bytes."""
    p = 1 / 256
    for n in range(len(context) + 1):
        tail = context[len(context) - n :]
        followers = Counter(padded[i] for i in range(2, len(padded)) if padded[i - n : i] == tail)
        total = sum(followers.values())
        p = (followers[byte] + len(followers) * p) / (total + len(followers)) if total else p
    return -np.log2(p)


def test_byte_model_matches_its_definition(rng: np.random.Generator) -> None:
    train, test = (bytes(rng.choice(list(b"abcde "), size=n)) for n in (400, 60))
    bits = demo_text().byte_model_bits(train, test + b"z", 2)
    padded, text = b"\n\n" + train, b"\n\n" + test + b"z"
    for i in range(2, len(text)):
        expected = reference_bits(padded, text[i - 2 : i], text[i])
        assert bits[i - 2] == pytest.approx(expected, rel=1e-12)
