"""Train the bundled demo model: text folder in, ikcli/data/demo.gguf and ikcli/data/demo.txt out.

The architecture is DeepSeek-V2's (arXiv:2405.04434) in miniature: latent attention with the real 512 + 64 cache row and
192/128 heads, one dense block, then blocks of routed experts with a shared one. Every row length is a multiple of 256,
so that every quantized format applies. PyTorch is needed here and nowhere else in the project:

    pip install torch gguf tokenizers numpy
    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb doc
    python tools/train_demo.py --text doc/usr/share/doc/python3.11/html/_sources

The same text, seed, thread count and library versions give the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from demo_text import BYTE_ORDER, CHAT_TEMPLATE, SPECIAL, Corpus, prepare
from torch import Tensor, nn

DATA = Path(__file__).resolve().parents[1] / "ikcli" / "data"


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


# ---------------------------------------------------------------- model


def linear(n_in: int, n_out: int, *lead: int, gain: float = 1.0) -> nn.Parameter:
    """A weight of shape (*lead, n_out, n_in), GGUF's row order."""
    return nn.Parameter(torch.randn(*lead, n_out, n_in) * (gain / math.sqrt(n_in)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(cfg: Config) -> tuple[Tensor, Tensor]:
    inverse = cfg.rope_freq_base ** (-torch.arange(0, cfg.n_rot, 2).double() / cfg.n_rot)
    angle = torch.arange(cfg.n_ctx_train).double()[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs: x is (batch, head, time, n_rot), the tables are (time, n_rot / 2)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


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
        """Let head h begin by attending to offsets[h] tokens back, None: anywhere.

        Small models spend most of a short training before they find such heads. `common`, shared by all embeddings,
        is the constant that a purely positional score needs; only the fastest rotations tell neighbours apart.
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
        # spelled out: on a CPU these products are faster than the fused kernel
        scores = q @ torch.cat((k_nope, k_pe), -1).transpose(-1, -2)
        future = torch.full((time_, time_), -math.inf).triu(1)
        probs = torch.softmax(scores.float() * cfg.key_length**-0.5 + future, -1)
        y = (probs.to(v.dtype) @ v).transpose(1, 2).reshape(batch, time_, -1)
        return F.linear(y, self.attn_output)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, cfg: Config, n_ff: int) -> None:
        super().__init__()
        self.gate, self.up = linear(cfg.n_embd, n_ff), linear(cfg.n_embd, n_ff)
        self.down = linear(n_ff, cfg.n_embd, gain=(2 * cfg.n_layer) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Moe(nn.Module):
    """Softmax router, the best n_expert_used experts weighted by their probabilities, plus the shared expert."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.router = linear(cfg.n_embd, cfg.n_expert)
        self.gate = linear(cfg.n_embd, cfg.n_ff_exp, cfg.n_expert)
        self.up = linear(cfg.n_embd, cfg.n_ff_exp, cfg.n_expert)
        self.down = linear(cfg.n_ff_exp, cfg.n_embd, cfg.n_expert, gain=(2 * cfg.n_layer) ** -0.5)
        self.shared = Mlp(cfg, cfg.n_ff_exp * cfg.n_expert_shared)
        self.balance = torch.zeros(())
        self.usage = torch.zeros(cfg.n_expert)

    def forward(self, x: Tensor) -> Tensor:
        cfg, flat = self.cfg, x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(flat.float(), self.router).softmax(-1)
        weight, chosen = probs.topk(cfg.n_expert_used, -1)
        order = chosen.flatten().argsort(stable=True)
        count = chosen.flatten().bincount(minlength=cfg.n_expert)
        rows = order // cfg.n_expert_used
        parts = flat[rows].split(count.tolist())
        outs = [
            F.linear(F.silu(F.linear(p, self.gate[e])) * F.linear(p, self.up[e]), self.down[e])
            for e, p in enumerate(parts)
        ]
        y = torch.cat(outs).float() * weight.flatten()[order, None]
        share = count / chosen.numel()
        self.balance = cfg.n_expert * (share * probs.mean(0)).sum()
        self.usage += count.detach()
        return self.shared(x) + torch.zeros_like(flat, dtype=y.dtype).index_add(0, rows, y).view(x.shape)


class Model(nn.Module):
    """token_embd -> blocks -> output_norm -> output; logits for (batch, time) token ids."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        common = torch.randn(cfg.n_embd) * 0.5
        self.token_embd = nn.Parameter(torch.randn(cfg.n_vocab, cfg.n_embd) * 0.5 + common)
        self.attn = nn.ModuleList(Attention(cfg) for _ in range(cfg.n_layer))
        self.ffn_norm = nn.ParameterList(nn.Parameter(torch.ones(cfg.n_embd)) for _ in range(cfg.n_layer))
        lead = cfg.n_layer_dense_lead
        self.ffn = nn.ModuleList(Mlp(cfg, cfg.n_ff) if i < lead else Moe(cfg) for i in range(cfg.n_layer))
        self.output_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.output = linear(cfg.n_embd, cfg.n_vocab, gain=0.5)
        for attn, offsets in zip(self.attn, ((1, 2), (1, None)), strict=False):
            attn.look_back(common, offsets)
        cos, sin = rope_tables(cfg)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, n = self.token_embd[tokens], tokens.shape[1]
        for attn, norm, ffn in zip(self.attn, self.ffn_norm, self.ffn, strict=True):
            x = x + attn(x, self.cos[:n], self.sin[:n])
            x = x + ffn(rms_norm(x, norm, self.cfg.norm_eps))
        return F.linear(rms_norm(x, self.output_norm, self.cfg.norm_eps), self.output)

    def experts(self) -> list[Moe]:
        return [m for m in self.ffn if isinstance(m, Moe)]


# ---------------------------------------------------------------- training


class Batches:
    """Endless windows over the token lists: every pass is a new shuffle, lists follow each other without a gap."""

    def __init__(self, items: list[np.ndarray], rng: np.random.Generator) -> None:
        self.items, self.rng = items, rng
        self.queue: list[int] = []
        self.rest = np.empty(0, np.int64)

    def refill(self) -> None:
        while len(self.queue) < 64:
            self.queue += self.rng.permutation(len(self.items)).tolist()
        head, self.queue = self.queue[:64], self.queue[64:]
        self.rest = np.concatenate([self.rest, *(self.items[i] for i in head)])

    def take(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each (batch, length)."""
        need = batch * length
        while len(self.rest) <= need:
            self.refill()
        x, y = (torch.from_numpy(self.rest[i : i + need].reshape(batch, length).copy()) for i in (0, 1))
        x[:, 0] = 0  # every window begins with <|bos|>, as it does at run time
        self.rest = self.rest[need:]
        return x, y


def schedule(step: int, steps: int, warmup: int = 50) -> float:
    """Factor on the learning rates: a linear rise, 1, and over the last 40 % of the steps a linear fall to 0.02."""
    return min((step + 1) / warmup, max(min(1.0, 2.5 * (steps - step) / steps), 0.02))


def orthogonal(x: Tensor) -> Tensor:
    """Each matrix of (n, rows, cols) with its singular values moved near 1, by five Newton-Schulz steps."""
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x if wide else x.mT).float()


class Muon:
    """Momentum with orthogonalised updates (Jordan et al., 2024); matrices of one shape are stepped together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.average: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        lr = self.lr * factor
        for shape, params in self.groups.items():
            grad = torch.cat([p.grad.view(-1, *shape) for p in params])
            average = self.average.setdefault(shape, torch.zeros_like(grad)).lerp_(grad, 1 - self.momentum)
            update = orthogonal(grad.lerp(average, self.momentum)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(params, update.split([p.numel() // math.prod(shape) for p in params]), strict=True):
                p.mul_(1 - lr * self.decay).add_(u.view_as(p), alpha=-lr)


def train(model: Model, items: list[np.ndarray], args: argparse.Namespace) -> None:
    """Windows of --length tokens, then for the last eighth windows of n_ctx_train.

    Muon for the matrices of the blocks; AdamW for the embedding, output, routers and norms.
    """
    inner = {n for n, p in model.named_parameters() if n.startswith(("attn.", "ffn.")) and p.ndim > 1}
    inner -= {n for n in inner if n.endswith("router")}
    muon = Muon([p for n, p in model.named_parameters() if n in inner], args.muon_lr)
    rates = {n: args.lr * (5 if n == "token_embd" else 1) for n, _ in model.named_parameters() if n not in inner}
    groups = [{"params": [model.get_parameter(n)], "lr": lr, "peak": lr} for n, lr in rates.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    source, start, running = Batches(items, np.random.default_rng(args.seed)), time.time(), 0.0
    for step in range(args.steps):
        length = args.length if step < args.steps * 7 // 8 else model.cfg.n_ctx_train
        x, y = source.take(max(args.batch * args.length // length, 1), length)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(step, args.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.f32):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        balance = torch.stack([m.balance for m in model.experts()]).sum()
        model.zero_grad(set_to_none=True)
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        muon.step(schedule(step, args.steps))
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if step % 20 == 0 or step == args.steps - 1:
            done = time.time() - start
            print(f"step {step:5d}  loss {running:.4f}  balance {balance.item():.3f}  {done:7.1f} s", flush=True)


@torch.no_grad()
def evaluate(model: Model, tokens: np.ndarray, window: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the scored tokens, their bits): the second half of each window, as llama-perplexity scores it."""
    count, half = len(tokens) // window, window // 2
    index, bits = [], []
    for m in model.experts():
        m.usage.zero_()
    for i in range(count):
        x = torch.from_numpy(tokens[i * window : (i + 1) * window].copy())[None]
        targets = x[0, half + 1 :].clone()
        x[0, 0] = 0
        logits = model(x)[0, half : window - 1].float()
        bits.append(F.cross_entropy(logits, targets, reduction="none").double().numpy() / math.log(2))
        index.append(np.arange(i * window + half + 1, (i + 1) * window))
    return np.concatenate(index), np.concatenate(bits)


def report(label: str, model: Model, corpus: Corpus) -> None:
    """Print held-out perplexity per token and per byte, next to the byte model's on exactly the same bytes."""
    index, bits = evaluate(model, corpus.tokens)
    sizes, stop = corpus.sizes, np.cumsum(corpus.sizes)
    n_bytes = int(sizes[index].sum())
    per_byte = bits.sum() / n_bytes
    baseline = sum(corpus.byte_bits[stop[i] - sizes[i] : stop[i]].sum() for i in index) / n_bytes
    print(
        f"{label}: {len(index)} tokens, {n_bytes} bytes scored; perplexity per token {2 ** bits.mean():.4f}, "
        f"{per_byte:.4f} bits per byte (perplexity per byte {2**per_byte:.4f}); "
        f"order-{BYTE_ORDER} byte model {baseline:.4f} bits per byte (perplexity per byte {2**baseline:.4f})"
    )
    for i, m in enumerate(model.experts()):
        print(f"  expert share, block {model.cfg.n_layer_dense_lead + i}: {(m.usage / m.usage.sum()).numpy().round(3)}")


# ---------------------------------------------------------------- GGUF


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """(GGUF tensor name, value) in file order."""
    yield "token_embd", model.token_embd
    for il, (attn, norm, ffn) in enumerate(zip(model.attn, model.ffn_norm, model.ffn, strict=True)):
        yield from ((f"blk.{il}.{name}", value) for name, value in attn.named_parameters())
        yield f"blk.{il}.ffn_norm", norm
        dense = ffn.shared if isinstance(ffn, Moe) else ffn
        if isinstance(ffn, Moe):
            yield f"blk.{il}.ffn_gate_inp", ffn.router
            yield from ((f"blk.{il}.ffn_{name}_exps", getattr(ffn, name)) for name in ("gate", "up", "down"))
        suffix = "_shexp" if isinstance(ffn, Moe) else ""
        yield from ((f"blk.{il}.ffn_{name}{suffix}", getattr(dense, name)) for name in ("gate", "up", "down"))
    yield "output_norm", model.output_norm
    yield "output", model.output


def is_bf16(name: str, value: Tensor) -> bool:
    return value.ndim > 1 and "gate_inp" not in name


def write_metadata(w: gguf.GGUFWriter, cfg: Config, tokenizer_json: dict) -> None:
    """Hyper-parameters and vocabulary."""
    w.add_name("ik demo")
    w.add_description("Small DeepSeek-V2-architecture model trained on the Python documentation (text: PSF-2.0)")
    w.add_license("MIT")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    w.add_block_count(cfg.n_layer)
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
    vocab = sorted(tokenizer_json["vocab"], key=tokenizer_json["vocab"].__getitem__)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(vocab)
    w.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in vocab])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer_json["merges"]])
    bos, eos, _, im_end = (vocab.index(t) for t in SPECIAL)
    w.add_bos_token_id(bos)
    w.add_eos_token_id(eos)
    w.add_eot_token_id(im_end)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)


def write_gguf(path: Path, model: Model, tokenizer_json: dict) -> None:
    """The model as GGUF: matrices BF16, norms and routers F32."""
    w = gguf.GGUFWriter(path, "deepseek2")
    write_metadata(w, model.cfg, tokenizer_json)
    for name, value in tensors(model):
        data = value.detach().float().numpy()
        kind = gguf.GGMLQuantizationType.BF16 if is_bf16(name, value) else gguf.GGMLQuantizationType.F32
        w.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of .rst or .rst.txt documents")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for demo.gguf and demo.txt")
    parser.add_argument("--checkpoint", type=Path, help="keeps the trained weights; if it exists, nothing is trained")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak rate of AdamW; the embedding's is five times that")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--f32", action="store_true", help="no BF16 products while training")
    return parser.parse_args()


def main() -> None:
    args, cfg = parse_args(), Config()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus, model = prepare(args.text, cfg.n_vocab, args.seed), Model(cfg)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    if args.checkpoint and args.checkpoint.exists():
        model.load_state_dict(torch.load(args.checkpoint, weights_only=True))
    else:
        train(model, corpus.items, args)
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)
    report("as trained", model, corpus)
    for name, value in tensors(model):
        if is_bf16(name, value):
            value.data = value.data.bfloat16().float()
    report("as stored", model, corpus)
    (args.out / "demo.txt").write_text(corpus.held_out, encoding="utf-8", newline="\n")
    write_gguf(args.out / "demo.gguf", model, json.loads(corpus.tokenizer.to_str())["model"])


if __name__ == "__main__":
    main()
