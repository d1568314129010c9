"""Small random heads in files of other architectures, and what they compute, in NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from factories import MemoryModel, MemoryTensor, fill
from gguf_files import write_model

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig, HParams
from ikcli.models.heads import external

Floats = npt.NDArray[np.float64]
ROPE_BASES = {True: 500.0, False: 10000.0}  # of tiny Gemma 4: layers with windows, and without


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor that a file is to have."""

    shape: tuple[int, ...]


def random_head(
    arch: str, model: MemoryModel, keys: dict[str, Any], more: Sequence[str] = (), n_ids: int = 0, seed: int = 7
) -> MemoryModel:
    """A random head for a model, as a file of its own has it.

    `more`: endings of optional tensors to add. `n_ids`: its part of the vocabulary (0: all of it).
    """
    hp = HParams.from_gguf(model.metadata, model.tensors, "tiny.gguf")
    head = MemoryModel({"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()})
    module, rng = external.module_of(arch), np.random.default_rng(seed)
    read = module.read(model.metadata | head.metadata, arch, hp, "tiny.gguf")
    there = dict.fromkeys(more, Shape((16,))) | ({"d2t": Shape((n_ids,))} if n_ids else {})
    fill(head, module.tensor_shapes(read, hp, there, ""), rng, tuple(more))
    if n_ids:
        ids = np.sort(rng.choice(hp.n_vocab, n_ids, replace=False)).astype(np.int64)
        head.tensors["d2t"] = MemoryTensor(GGMLType.I64, (n_ids,), ids.view(np.uint8))
    return head


def assistant(arch: str, model: MemoryModel, **keys: Any) -> MemoryModel:
    """An assistant of a tiny Gemma 4: three layers, two of them with windows."""
    width = "backbone_embedding_length" if arch == "gemma4_mtp" else "embedding_length_out"
    names = () if arch == "gemma4_mtp" else ("nextn.pre_projection.weight", "nextn.post_projection.weight")
    values: dict[str, Any] = {
        "block_count": 3, "embedding_length": 32, "context_length": 2048, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": np.int32([2, 2, 4]),
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 8, "attention.key_length": 32,
        "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "attention.sliding_window_pattern": np.array([True, True, False]), "rope.dimension_count_swa": 16,
        width: model.metadata["gemma4.embedding_length"],
    }  # fmt: skip
    if arch == "gemma4-assistant":
        values |= {"nextn_predict_layers": 3, "attention.shared_kv_layers": 3}
    return random_head(arch, model, values | keys, more=("layer_output_scale.weight", *names))


def eagle3(model: MemoryModel, n_ids: int = 0, more: Sequence[str] = (), **keys: Any) -> MemoryModel:
    """An EAGLE-3 head of a tiny model, which reads the inputs of its layers 1, 2 and 3."""
    arch = model.metadata["general.architecture"]
    values: dict[str, Any] = {
        "block_count": 1, "embedding_length": model.metadata[f"{arch}.embedding_length"], "context_length": 2048,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32, "rope.freq_base": 700.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "extract_layers": np.int32([1, 2, 3]),
        "target_hidden_size": model.metadata[f"{arch}.embedding_length"],
    }  # fmt: skip
    return random_head("eagle3", model, values | keys, more, n_ids)


def written(model: MemoryModel, folder: Path, name: str) -> Path:
    """A file of a model or a head, without a tokenizer."""
    tokens = (
        {"tokenizer.ggml.model": "none"}
        if f"{model.metadata['general.architecture']}.vocab_size" in (model.metadata)
        else {}
    )
    return write_model(model, folder / name, model.metadata | tokens)


class Seen:
    """Values inside of a model for all tokens of a text, by the names of nodes."""

    def __init__(self, path: Path, tokens: npt.NDArray[np.int32]) -> None:
        self.values: dict[str, Floats] = {}
        cfg = GraphConfig(n_ctx=256, type_k=GGMLType.F32, type_v=GGMLType.F32)
        session = ReferenceSession(path, cfg, observe=self._note)
        self.n_layer = session.hp.n_layer
        session.decode(Batch.single(tokens, logits="all"))

    def _note(self, node: Any, value: npt.NDArray[Any]) -> None:
        self.values[node.name] = np.array(value, np.float64)


def rms(x: Floats, w: Floats | float, eps: float = 1e-6) -> Floats:
    """RMS norm of the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def rotated(x: Floats, pos: npt.NDArray[Any], freqs: Floats) -> Floats:
    """NeoX-style rotation of heads (rows, heads, columns)."""
    angle = pos[:, None, None] * freqs
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def softmax(x: Floats) -> Floats:
    """Soft-max of the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x: Floats) -> Floats:
    """GELU, by tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dflash(model: MemoryModel, more: Sequence[str] = (), **keys: Any) -> MemoryModel:
    """A DFlash head of two layers for a tiny model, which reads what its layers 0 and 2 put out."""
    arch = model.metadata["general.architecture"]
    width = model.metadata[f"{arch}.embedding_length"]
    values: dict[str, Any] = {
        "block_count": 2, "embedding_length": width, "context_length": 2048, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "rope.dimension_count": 32, "rope.freq_base": 700.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "dflash.block_size": 6, "dflash.mask_token_id": 7,
        "dflash.target_layer_ids": np.int32([0, 2]), "dflash.n_target_features": 2 * width,
    }  # fmt: skip
    return random_head("dflash-draft", model, values | keys, more)


def dflash_logits(head: MemoryModel, model: MemoryModel, seen: Seen, token: int, n_past: int, n: int) -> Floats:
    """Logits of the n tokens of a block that a token at n_past begins."""
    w, eps = {name: np.asarray(head.values(name), np.float64) for name in head.tensors}, 1e-5
    key = {k.removeprefix("dflash-draft."): v for k, v in head.metadata.items()}
    given = np.concatenate([seen.values[f"l_out-{il}"][:n_past] for il in key["dflash.target_layer_ids"]], 1)
    given = rms(given @ w["dflash_fc.weight"].T, w["dflash_hidden_norm.weight"], eps)
    bases = key.get("dflash.backbone_rotary_base", 700.0), 700.0
    table = w.get("token_embd.weight", model.values("token_embd.weight").astype(np.float64))
    x = table[[token, *[key["dflash.mask_token_id"]] * n]]
    is_chain = "markov_w1.weight" in w
    x = x[: n + 1 - is_chain]
    n -= is_chain
    for b in ("blk.0.", "blk.1."):
        own = rms(x, w[b + "attn_norm.weight"], eps)
        keys, values = [], []
        for rows, pos, base in ((given, np.arange(n_past), bases[0]), (own, n_past + np.arange(n + 1), bases[1])):
            freqs = base ** (-np.arange(0, 32, 2) / 32)
            k = (rows @ w[b + "attn_k.weight"].T + w.get(b + "attn_k.bias", 0.0)).reshape(len(rows), -1, 32)
            v = (rows @ w[b + "attn_v.weight"].T + w.get(b + "attn_v.bias", 0.0)).reshape(len(rows), -1, 32)
            keys.append(rotated(rms(k, w[b + "attn_k_norm.weight"], eps), pos, freqs))
            values.append(v * key.get("attention.value_scale", 1.0))
        q = (own @ w[b + "attn_q.weight"].T + w.get(b + "attn_q.bias", 0.0)).reshape(n + 1, -1, 32)
        q = rotated(rms(q, w[b + "attn_q_norm.weight"], eps), n_past + np.arange(n + 1), freqs)
        k, v = (np.repeat(np.concatenate(parts), 2, 1) for parts in (keys, values))
        p = softmax(np.einsum("ihd,jhd->hij", q, k) / np.sqrt(32))
        x = x + np.einsum("hij,jhd->ihd", p, v).reshape(n + 1, -1) @ w[b + "attn_output.weight"].T
        y = rms(x, w[b + "post_attention_norm.weight"], eps)
        gate = y @ w[b + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
    matrix = w.get("output.weight", model.values("output.weight").astype(np.float64))
    logits: Floats = rms(x, w["output_norm.weight"], eps) @ matrix.T
    if "markov_w1.weight" not in w:
        return logits[1:]
    for row in logits:  # the tokens are those after the rows
        row += w["markov_w2.weight"] @ w["markov_w1.weight"][token]
        token = int(row.argmax())
    return logits


def eagle3_rows(head: MemoryModel, model: MemoryModel, tokens: Sequence[int], states: Floats) -> tuple[Floats, Floats]:
    """Logits and states of an EAGLE-3 head at the positions 0.., with the tokens after them, from the states there."""
    w = {name: np.asarray(head.values(name), np.float64) for name in head.tensors if name != "d2t"}
    embd = w.get("token_embd.weight", model.values("token_embd.weight").astype(np.float64))[list(tokens)]
    eps, b, n = 1e-5, "blk.0.", len(tokens)
    h = rms(states, w[b + "attn_norm_2.weight"], eps)
    both = np.concatenate([rms(embd, w[b + "attn_norm.weight"], eps), h], 1)
    q, k, v = ((both @ w[f"{b}attn_{x}.weight"].T).reshape(n, -1, 32) for x in "qkv")
    freqs = 700.0 ** (-np.arange(0, 32, 2) / 32) / w.get("rope_freqs.weight", 1.0)
    q, k = (in_pairs(x, np.arange(n), freqs) for x in (q, k))
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, 1)) / np.sqrt(32)
    p = softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf))
    cur = np.einsum("hij,jhd->ihd", p, np.repeat(v, 2, 1)).reshape(n, -1) @ w[b + "attn_output.weight"].T
    x = cur + (h if head.metadata.get("eagle3.norm_before_residual") else states)
    y = rms(x, w[b + "ffn_norm.weight"], eps)
    gate = y @ w[b + "ffn_gate.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
    matrix = w["output.weight"] if "output.weight" in w else model.values("output.weight").astype(np.float64)
    return rms(x, w["output_norm.weight"], eps) @ matrix.T, x


def eagle3_states(head: MemoryModel, seen: Seen) -> Floats:
    """What an EAGLE-3 head reads of all tokens of a text."""
    x = np.concatenate([seen.values[f"l_out-{il - 1}"] for il in head.metadata["eagle3.extract_layers"]], 1)
    if head.metadata.get("eagle3.norm_before_fc"):
        x = rms(x, head.values("enc.output_norm.weight").astype(np.float64), 1e-5)
    states: Floats = x @ head.values("fc.weight").astype(np.float64).T
    return states


def in_pairs(x: Floats, pos: npt.NDArray[Any], freqs: Floats) -> Floats:
    """Rotation of adjacent pairs of columns of heads (rows, heads, columns)."""
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * pos[:, None, None] * freqs)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def assistant_logits(
    head: MemoryModel, model: MemoryModel, seen: Seen, token: int, state: Floats, n_past: int, window: int
) -> tuple[Floats, Floats]:
    """Logits and state of an assistant of a tiny Gemma 4 for a token at n_past; the cache has the positions before."""
    w = {name: np.asarray(head.values(name), np.float64) for name in head.tensors}
    embd = model.values("token_embd.weight").astype(np.float64)
    pre = next(w[n] for n in w if "pre_proj" in n)
    x = pre @ np.concatenate([embd[token] * np.sqrt(embd.shape[1]), state])
    pattern = head.metadata[f"{head.metadata['general.architecture']}.attention.sliding_window_pattern"]
    for i, is_window in enumerate(pattern):
        il, d = (2, 16) if is_window else (3, 32)  # the last layers of each kind that store keys
        at = np.arange(max(0, n_past - window + 1) if is_window else 0, n_past)
        k, v = (seen.values[f"{kind}cur-{il}"].reshape(len(seen.values[f"Kcur-{il}"]), -1, d)[at] for kind in "KV")
        freqs = ROPE_BASES[bool(is_window)] ** (-np.arange(0, d, 2) / d)
        if not is_window:
            freqs = freqs / model.values("rope_freqs.weight")
        b = f"blk.{i}."
        q = (w[b + "attn_q.weight"] @ rms(x, w[b + "attn_norm.weight"])).reshape(1, 4, d)
        q = rotated(rms(q, w[b + "attn_q_norm.weight"]), np.array([n_past]), freqs)[0]
        group = 4 // k.shape[1]
        heads = [softmax(k[:, h // group] @ q[h]) @ v[:, h // group] for h in range(4)]
        x = x + rms(w[b + "attn_output.weight"] @ np.concatenate(heads), w[b + "post_attention_norm.weight"])
        y = rms(x, w[b + "ffn_norm.weight"])
        y = w[b + "ffn_down.weight"] @ (gelu(w[b + "ffn_gate.weight"] @ y) * (w[b + "ffn_up.weight"] @ y))
        x = (x + rms(y, w[b + "post_ffw_norm.weight"])) * w[b + "layer_output_scale.weight"]
    x = rms(x, w["output_norm.weight"])
    return w["token_embd.weight"] @ x, next(w[n] for n in w if "post_proj" in n) @ x
