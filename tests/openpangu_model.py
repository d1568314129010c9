"""A small openPangu with layers of both kinds, and its forward pass in plain NumPy after the graph of ik_llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
from factories import MemoryModel, tiny_model

HEADS, NOPE, ROT, VALUE, Q_RANK, RANK, N_STREAM, N_SINK, TOP_K, EPS = 4, 32, 16, 32, 48, 64, 4, 5, 12, 1e-6
WINDOWS = {0: 16, 2: 16}
KEYS: dict[str, Any] = {
    "block_count": 4, "context_length": 512, "attention.head_count": HEADS, "attention.head_count_kv": HEADS,
    "attention.key_length": NOPE + ROT, "attention.value_length": VALUE, "rope.dimension_count": ROT,
    "attention.q_lora_rank": Q_RANK, "attention.kv_lora_rank": RANK, "leading_dense_block_count": 1,
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2, "mhc_num_stream": N_STREAM,
    "mhc_recur_norm": 5, "param_sink_number": N_SINK, "swa_layers": np.array([*WINDOWS, 4]),
    "sliding_window_list": np.array([*WINDOWS.values(), 64]), "attention.sliding_window": 16,
    "attention.indexer.head_count": 4, "attention.indexer.key_length": 32, "attention.indexer.top_k": TOP_K,
}  # fmt: skip
OPTIONAL = ("exp_probs_b.bias", "attn_k_b.weight", "attn_v_b.weight", "blk.1.block_post_norm.weight")


def tiny_openpangu(**changes: Any) -> MemoryModel:
    """The model with these keys replaced."""
    return tiny_model("openpangu", optional=OPTIONAL, **(KEYS | changes))


def forward(
    model: MemoryModel, tokens: np.ndarray, top_k: int = TOP_K, steered: dict[int, np.ndarray] | None = None
) -> np.ndarray:
    """Return the logits of all positions; `steered`: what is added to every stream after these layers."""
    return _Forward(model, len(tokens), top_k, steered or {}).run(tokens)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain


class _Forward:
    def __init__(self, model: MemoryModel, n: int, top_k: int, steered: dict[int, np.ndarray]) -> None:
        self.steered = steered
        self.w = {name: model.values(name).astype(np.float64) for name in model.tensors}
        self.n, self.top_k = n, top_k

    def of(self, il: int, name: str) -> np.ndarray:
        return self.w[f"blk.{il}.{name}"]

    def run(self, tokens: np.ndarray) -> np.ndarray:
        streams = np.repeat(self.w["token_embd.weight"][tokens][:, None], N_STREAM, axis=1)
        for il in range(4):
            for part, norm, post, layer in (
                ("attn", "attn_norm", "post_attention_norm", self.attention),
                ("mlp", "ffn_norm", "post_ffw_norm", self.feed_forward),
            ):
                before, after, mixing = self.stream_weights(il, part, streams)
                x = (before[:, :, None] * streams).sum(1)
                y = _rms(layer(il, _rms(x, self.of(il, f"{norm}.weight"))), self.of(il, f"{post}.weight"))
                mixed = np.zeros_like(streams)
                for source in range(N_STREAM):
                    for target in range(N_STREAM):
                        mixed[:, target] += mixing[:, source, target, None] * streams[:, source]
                streams = mixed + after[:, :, None] * y[:, None]
            if f"blk.{il}.block_post_norm.weight" in self.w:
                flat = streams.reshape(self.n, -1)
                streams = _rms(flat, self.of(il, "block_post_norm.weight")).reshape(streams.shape)
            streams = streams + self.steered.get(il, 0.0)
        normed = _rms(streams.reshape(self.n, -1), self.w["merge_mhc_gamma"])
        logits = normed @ self.w["merge_mhc_phi.weight"].T
        weights = _sigmoid(logits * self.w["merge_mhc_alpha"][0] + self.w["merge_mhc_beta"])
        x = (weights[:, :, None] * streams).sum(1)
        return _rms(x, self.w["output_norm.weight"]) @ self.w["output.weight"].T

    def stream_weights(self, il: int, part: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        phi, alpha, beta, gamma = (self.of(il, f"{part}_mhc_{x}") for x in ("phi.weight", "alpha", "beta", "gamma"))
        x = _rms(streams.reshape(self.n, -1), gamma) @ phi.T
        s = N_STREAM
        before = _sigmoid(x[:, :s] * alpha[0] + beta[:s])
        after = 2 * _sigmoid(x[:, s : 2 * s] * alpha[1] + beta[s : 2 * s])
        m = (x[:, 2 * s :] * alpha[2] + beta[2 * s :]).reshape(-1, s, s)
        m = np.exp(m - m.max(axis=2, keepdims=True))
        for _ in range(5):  # rows, then columns
            m /= m.sum(axis=2, keepdims=True)
            m /= m.sum(axis=1, keepdims=True)
        return before, after, m

    def conv(self, il: int, site: str, x: np.ndarray) -> np.ndarray:
        taps = self.of(il, f"attn_{site}_conv.weight").reshape(-1, 3)
        padded = np.concatenate([np.zeros((2, x.shape[1])), x])
        return x + sum(padded[i : i + self.n] * taps[:, i] for i in range(3))

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Rotate halves of the last axis, positions on the first one."""
        half = x.shape[-1] // 2
        angles = np.arange(self.n)[:, None] * 10000.0 ** (-np.arange(half) / half)
        angles = angles.reshape(self.n, *[1] * (x.ndim - 2), half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def attention(self, il: int, x: np.ndarray) -> np.ndarray:
        n = self.n
        q_a = _rms(self.conv(il, "qa", x @ self.of(il, "attn_q_a.weight").T), self.of(il, "attn_q_a_norm.weight"))
        q = (q_a @ self.of(il, "attn_q_b.weight").T).reshape(n, HEADS, NOPE + ROT)
        kv = x @ self.of(il, "attn_kv_a_mqa.weight").T
        latent_norm = self.of(il, "attn_kv_a_norm.weight")
        latent = _rms(self.conv(il, "compresskv", kv[:, :RANK]), latent_norm)
        rows = np.concatenate([latent, self.rotated(kv[:, RANK:])], axis=1)
        sinks = np.concatenate([_rms(self.of(il, "attn_param_sink_kv"), latent_norm),
                                self.of(il, "attn_param_sink_k_pe")], axis=1)  # fmt: skip
        seen = np.tril(np.ones((n, n), bool))
        if il in WINDOWS:
            seen &= np.arange(n)[:, None] - np.arange(n) < WINDOWS[il]
        elif self.top_k:
            seen &= self.chosen(il, x, q_a, seen)
        everything = np.concatenate([sinks, rows])
        visible = np.concatenate([np.ones((n, N_SINK), bool), seen], axis=1)
        k_b = self.of(il, "attn_k_b.weight").reshape(HEADS, RANK, NOPE)
        v_b = self.of(il, "attn_v_b.weight").reshape(HEADS, VALUE, RANK)
        heads = []
        for h in range(HEADS):
            keys = np.concatenate([q[:, h, :NOPE] @ k_b[h].T, self.rotated(q[:, h, NOPE:])], axis=1)
            scores = np.where(visible, keys @ everything.T / np.sqrt(NOPE + ROT), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            heads.append(weights @ everything[:, :RANK] @ v_b[h].T)
        return self.conv(il, "o", np.concatenate(heads, axis=1)) @ self.of(il, "attn_output.weight").T

    def chosen(self, il: int, x: np.ndarray, q_a: np.ndarray, seen: np.ndarray) -> np.ndarray:
        width, n_head = KEYS["attention.indexer.key_length"], KEYS["attention.indexer.head_count"]
        k = _rms(x @ self.of(il, "attn_indexer_k.weight").T, self.of(il, "attn_indexer_k_norm.weight"))
        q = (q_a @ self.of(il, "attn_indexer_q_b.weight").T).reshape(self.n, n_head, width)
        k, q = (np.concatenate([self.rotated(y[..., :ROT]), y[..., ROT:]], axis=-1) for y in (k, q))
        per_head = x @ self.of(il, "attn_indexer_weights_proj.weight").T
        scores = np.einsum("th,ths->ts", per_head, np.maximum(np.einsum("thd,sd->ths", q, k), 0))
        scores = np.where(seen, scores, -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.top_k]
        out = np.zeros_like(seen)
        np.put_along_axis(out, best, True, axis=1)
        return out

    def feed_forward(self, il: int, x: np.ndarray) -> np.ndarray:
        if il == 0:
            return self.gated(x, *(self.of(il, f"ffn_{p}.weight") for p in ("gate", "up", "down")))
        probs = _sigmoid(x @ self.of(il, "ffn_gate_inp.weight").T)
        best = np.argsort(-(probs + self.of(il, "exp_probs_b.bias")), axis=1)[:, :2]
        out = self.gated(x, *(self.of(il, f"ffn_{p}_shexp.weight") for p in ("gate", "up", "down")))
        gate, up, down = (self.of(il, f"ffn_{p}_exps.weight") for p in ("gate", "up", "down"))
        for t in range(self.n):
            total = probs[t, best[t]].sum()
            for e in best[t]:
                out[t] += 1.5 * probs[t, e] / total * self.gated(x[t], gate[e], up[e], down[e])
        return out

    def gated(self, x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (_silu(x @ gate.T) * (x @ up.T)) @ down.T
