"""The architecture of the bundled demo model: DeepSeek-V2's (arXiv:2405.04434) in miniature, and its file.

It has latent attention with the real 512 + 64 cache row and 192/128 heads, one dense block, then blocks of routed
experts with a shared one. Every row length is a multiple of 256, so that every quantized format applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Trainable, write_vocabulary
from training_blocks import Mlp, Moe, attend, linear, rms_norm, rope, rope_tables


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named as in the GGUF metadata."""

    n_vocab: int = 2048
    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 2
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    n_rot: int = 64
    key_length: int = 192
    value_length: int = 128
    n_ff: int = 256
    n_ff_exp: int = 256
    n_expert: int = 6
    n_expert_used: int = 2
    n_expert_shared: int = 1
    n_layer_dense_lead: int = 1
    n_ctx_train: int = 2048
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form, with a low-rank query."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, heads = cfg, cfg.n_head
        n_nope = cfg.key_length - cfg.n_rot
        self.attn_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.attn_q_a = linear(cfg.n_embd, cfg.q_lora_rank)
        self.attn_q_a_norm = nn.Parameter(torch.ones(cfg.q_lora_rank))
        self.attn_q_b = linear(cfg.q_lora_rank, heads * cfg.key_length)
        self.attn_kv_a_mqa = linear(cfg.n_embd, cfg.kv_lora_rank + cfg.n_rot)
        self.attn_kv_a_norm = nn.Parameter(torch.ones(cfg.kv_lora_rank))
        self.attn_kv_b = linear(cfg.kv_lora_rank, heads * (n_nope + cfg.value_length))
        self.attn_output = linear(heads * cfg.value_length, cfg.n_embd, gain=(2 * cfg.n_layer) ** -0.5)

    @torch.no_grad()
    def look_back(self, common: Tensor, offsets: tuple[int | None, ...], n_pairs: int = 12, gain: float = 6.0) -> None:
        """Initialize head h to attend to offsets[h] tokens back, None: anywhere.

        Small models otherwise spend most of a short training on finding such heads. `common`, shared by all embeddings,
        is the constant that a purely positional score needs; only the fastest rotations distinguish neighbours.
        """
        cfg, scale = self.cfg, 2**0.5 * gain / len(common) ** 0.5
        query = F.normalize(self.attn_q_a @ common, dim=0) * scale
        k_pe = self.attn_kv_a_mqa[cfg.kv_lora_rank :].view(-1, 2, cfg.n_embd)[:n_pairs]
        k_pe[:, 0], k_pe[:, 1] = F.normalize(common, dim=0) * scale, 0.0
        angle = cfg.rope_freq_base ** (-torch.arange(n_pairs) * 2 / cfg.n_rot)
        for head, offset in enumerate(offsets):
            rows = slice((head + 1) * cfg.key_length - cfg.n_rot, (head + 1) * cfg.key_length)
            q_pe = self.attn_q_b[rows].view(-1, 2, cfg.q_lora_rank)[:n_pairs]
            q_pe.zero_()
            if offset is not None:
                q_pe[:, 0], q_pe[:, 1] = (f(-offset * angle)[:, None] * query for f in (torch.cos, torch.sin))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cfg, (batch, time_, _) = self.cfg, x.shape
        n_nope = cfg.key_length - cfg.n_rot
        x = rms_norm(x, self.attn_norm, cfg.norm_eps)
        q = F.linear(rms_norm(F.linear(x, self.attn_q_a), self.attn_q_a_norm, cfg.norm_eps), self.attn_q_b)
        q_nope, q_pe = q.view(batch, time_, cfg.n_head, -1).transpose(1, 2).split([n_nope, cfg.n_rot], -1)
        latent, k_pe = F.linear(x, self.attn_kv_a_mqa).split([cfg.kv_lora_rank, cfg.n_rot], -1)
        kv = F.linear(rms_norm(latent, self.attn_kv_a_norm, cfg.norm_eps), self.attn_kv_b)
        k_nope, v = kv.view(batch, time_, cfg.n_head, -1).transpose(1, 2).split([n_nope, cfg.value_length], -1)
        k_pe = rope(k_pe[:, None], cos, sin).to(v.dtype).expand(-1, cfg.n_head, -1, -1)
        q = torch.cat((q_nope, rope(q_pe, cos, sin).to(v.dtype)), -1)
        return F.linear(attend(q, torch.cat((k_nope, k_pe), -1), v), self.attn_output)


def feed_forward(cfg: Config, il: int) -> Mlp | Moe:
    gain = (2 * cfg.n_layer) ** -0.5
    if il < cfg.n_layer_dense_lead:
        return Mlp(cfg.n_embd, cfg.n_ff, gain)
    shared = cfg.n_ff_exp * cfg.n_expert_shared
    return Moe(cfg.n_embd, cfg.n_ff_exp, cfg.n_expert, cfg.n_expert_used, gain, shared)


class Model(Trainable):
    """token_embd -> blocks -> output_norm -> output; logits for (batch, time) token ids."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.n_ctx_train = cfg, cfg.n_ctx_train
        common = torch.randn(cfg.n_embd) * 0.5
        self.token_embd = nn.Parameter(torch.randn(cfg.n_vocab, cfg.n_embd) * 0.5 + common)
        self.attn = nn.ModuleList(Attention(cfg) for _ in range(cfg.n_layer))
        self.ffn_norm = nn.ParameterList(nn.Parameter(torch.ones(cfg.n_embd)) for _ in range(cfg.n_layer))
        self.ffn = nn.ModuleList(feed_forward(cfg, il) for il in range(cfg.n_layer))
        self.output_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.output = linear(cfg.n_embd, cfg.n_vocab, gain=0.5)
        for attn, offsets in zip(self.attn, ((1, 2), (1, None)), strict=False):
            attn.look_back(common, offsets)
        cos, sin = rope_tables(cfg.n_rot, cfg.n_ctx_train, cfg.rope_freq_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def states(self, tokens: Tensor) -> Tensor:
        """Return the states after the last norm, which the output matrix and a head for further tokens read."""
        x, n = self.token_embd[tokens], tokens.shape[1]
        for attn, norm, ffn in zip(self.attn, self.ffn_norm, self.ffn, strict=True):
            x = x + attn(x, self.cos[:n], self.sin[:n])
            x = x + ffn(rms_norm(x, norm, self.cfg.norm_eps))
        return rms_norm(x, self.output_norm, self.cfg.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.states(tokens), self.output)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (GGUF tensor name, value) in file order."""
        yield "token_embd", self.token_embd
        for il, (attn, norm, ffn) in enumerate(zip(self.attn, self.ffn_norm, self.ffn, strict=True)):
            yield from block_tensors(il, attn, norm, ffn)
        yield "output_norm", self.output_norm
        yield "output", self.output


def block_tensors(il: int, attn: Attention, norm: Tensor, ffn: Mlp | Moe) -> Iterator[tuple[str, Tensor]]:
    """Yield (GGUF tensor name, value) of one block."""
    yield from ((f"blk.{il}.{name}", value) for name, value in attn.named_parameters())
    yield f"blk.{il}.ffn_norm", norm
    dense = ffn.shared if isinstance(ffn, Moe) else ffn
    if isinstance(ffn, Moe):
        yield f"blk.{il}.ffn_gate_inp", ffn.router
        yield from ((f"blk.{il}.ffn_{name}_exps", getattr(ffn, name)) for name in ("gate", "up", "down"))
    suffix = "_shexp" if isinstance(ffn, Moe) else ""
    yield from ((f"blk.{il}.ffn_{name}{suffix}", getattr(dense, name)) for name in ("gate", "up", "down"))


def write_metadata(w: gguf.GGUFWriter, cfg: Config, tokenizer_json: dict, n_further: int = 0) -> None:
    """Write hyper-parameters and vocabulary; `n_further` blocks for further tokens follow the model's own."""
    w.add_name("ik demo")
    w.add_description("Small DeepSeek-V2-architecture model trained on the Python documentation (text: PSF-2.0)")
    w.add_license("MIT")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    w.add_block_count(cfg.n_layer + n_further)
    if n_further:
        w.add_nextn_predict_layers(n_further)
    w.add_context_length(cfg.n_ctx_train)
    w.add_embedding_length(cfg.n_embd)
    w.add_feed_forward_length(cfg.n_ff)
    w.add_head_count(cfg.n_head)
    w.add_head_count_kv(cfg.n_head)
    w.add_layer_norm_rms_eps(cfg.norm_eps)
    w.add_vocab_size(cfg.n_vocab)
    w.add_rope_freq_base(cfg.rope_freq_base)
    w.add_rope_dimension_count(cfg.n_rot)
    w.add_leading_dense_block_count(cfg.n_layer_dense_lead)
    w.add_q_lora_rank(cfg.q_lora_rank)
    w.add_kv_lora_rank(cfg.kv_lora_rank)
    w.add_key_length(cfg.key_length)
    w.add_value_length(cfg.value_length)
    w.add_expert_count(cfg.n_expert)
    w.add_expert_used_count(cfg.n_expert_used)
    w.add_expert_shared_count(cfg.n_expert_shared)
    w.add_expert_feed_forward_length(cfg.n_ff_exp)
    w.add_expert_weights_scale(1.0)
    w.add_expert_weights_norm(False)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    write_vocabulary(w, tokenizer_json)
