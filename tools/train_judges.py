"""Train the judge models: small models of two families on which encoders are compared by KL divergence.

`judge-moe` is a Qwen3-MoE trained on documentation, `judge-dense` a Llama with a larger vocabulary trained on the
running interpreter's standard library. Each comes with a text to evaluate and another one for the importance matrix,
neither of which it was trained on: NAME.gguf, NAME.eval.txt, NAME.calib.txt. Every row length is a multiple of 256, so
that every quantized format applies. Needs what train_demo.py needs, and the same documentation:

    python tools/train_judges.py --text doc/usr/share/doc/python3.11/html/_sources --out FOLDER

The same texts, seed, thread count and library versions give the same models. Used by benchmarks/divergence.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F
from demo_text import read_documents
from judge_text import JudgeText, read_sources, split, tokenize
from torch import Tensor, nn
from training import Trainable, evaluate, round_as_stored, train, training_options, write_tensors, write_vocabulary
from training_blocks import Mlp, Moe, attend, linear, rms_norm, rope, rope_halves, rope_tables


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named as in the GGUF metadata, and the number and length of training steps."""

    arch: str
    about: str
    n_vocab: int
    n_layer: int
    n_embd: int
    n_ff: int
    n_steps: int
    n_batch: int
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 128
    n_expert: int = 0
    n_expert_used: int = 0
    n_ctx_train: int = 512
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def residual_gain(self) -> float:
        """Return the factor on additions to the residual stream, so that its size does not grow with depth."""
        return (2 * self.n_layer) ** -0.5


JUDGES = {
    "judge-moe": Config(
        "qwen3moe", "the Python documentation", 2048, 4, 256, 256, 260, 16, n_expert=8, n_expert_used=2
    ),
    "judge-dense": Config("llama", "the Python standard library", 8192, 3, 512, 1024, 240, 8),
}


class Attention(nn.Module):
    """Grouped-query attention; Qwen3's norms on every head of q and k, or Llama's rotation of neighbouring pairs."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, width = cfg, cfg.n_head * cfg.head_dim
        self.attn_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.attn_q = linear(cfg.n_embd, width)
        self.attn_k = linear(cfg.n_embd, cfg.n_head_kv * cfg.head_dim)
        self.attn_v = linear(cfg.n_embd, cfg.n_head_kv * cfg.head_dim)
        self.attn_output = linear(width, cfg.n_embd, gain=cfg.residual_gain)
        if cfg.arch != "llama":
            self.attn_q_norm = nn.Parameter(torch.ones(cfg.head_dim))
            self.attn_k_norm = nn.Parameter(torch.ones(cfg.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cfg, (batch, time, _) = self.cfg, x.shape
        x = rms_norm(x, self.attn_norm, cfg.norm_eps)
        q, k, v = (
            F.linear(x, w).view(batch, time, -1, cfg.head_dim).transpose(1, 2)
            for w in (self.attn_q, self.attn_k, self.attn_v)
        )
        if cfg.arch == "llama":
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        else:
            q = rope_halves(rms_norm(q, self.attn_q_norm, cfg.norm_eps), cos, sin)
            k = rope_halves(rms_norm(k, self.attn_k_norm, cfg.norm_eps), cos, sin)
        k, v = (t.repeat_interleave(cfg.n_head // cfg.n_head_kv, 1) for t in (k, v))
        return F.linear(attend(q.to(v.dtype), k.to(v.dtype), v), self.attn_output)


def feed_forward(cfg: Config) -> Mlp | Moe:
    if not cfg.n_expert:
        return Mlp(cfg.n_embd, cfg.n_ff, cfg.residual_gain)
    return Moe(cfg.n_embd, cfg.n_ff, cfg.n_expert, cfg.n_expert_used, cfg.residual_gain, norm=True)


class Model(Trainable):
    """token_embd -> blocks -> output_norm -> output; logits for (batch, time) token ids."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.n_ctx_train = cfg, cfg.n_ctx_train
        self.token_embd = nn.Parameter(torch.randn(cfg.n_vocab, cfg.n_embd) * 0.5)
        self.attn = nn.ModuleList(Attention(cfg) for _ in range(cfg.n_layer))
        self.ffn_norm = nn.ParameterList(nn.Parameter(torch.ones(cfg.n_embd)) for _ in range(cfg.n_layer))
        self.ffn = nn.ModuleList(feed_forward(cfg) for _ in range(cfg.n_layer))
        self.output_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.output = linear(cfg.n_embd, cfg.n_vocab, gain=0.5)
        cos, sin = rope_tables(cfg.head_dim, cfg.n_ctx_train, cfg.rope_freq_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, n = self.token_embd[tokens], tokens.shape[1]
        for attn, norm, ffn in zip(self.attn, self.ffn_norm, self.ffn, strict=True):
            x = x + attn(x, self.cos[:n], self.sin[:n])
            x = x + ffn(rms_norm(x, norm, self.cfg.norm_eps))
        return F.linear(rms_norm(x, self.output_norm, self.cfg.norm_eps), self.output)


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield (GGUF tensor name, value) in file order."""
    yield "token_embd", model.token_embd
    for il, (attn, norm, ffn) in enumerate(zip(model.attn, model.ffn_norm, model.ffn, strict=True)):
        yield from ((f"blk.{il}.{name}", value) for name, value in attn.named_parameters())
        yield f"blk.{il}.ffn_norm", norm
        if isinstance(ffn, Moe):
            yield f"blk.{il}.ffn_gate_inp", ffn.router
        suffix = "_exps" if isinstance(ffn, Moe) else ""
        yield from ((f"blk.{il}.ffn_{name}{suffix}", getattr(ffn, name)) for name in ("gate", "up", "down"))
    yield "output_norm", model.output_norm
    yield "output", model.output


def write_gguf(path: Path, model: Model, text: JudgeText) -> None:
    """Write the model as GGUF."""
    w, cfg = gguf.GGUFWriter(path, model.cfg.arch), model.cfg
    w.add_name(path.stem)
    w.add_description(f"Small model to judge encoders with, trained on {cfg.about}")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    w.add_block_count(cfg.n_layer)
    w.add_context_length(cfg.n_ctx_train)
    w.add_embedding_length(cfg.n_embd)
    w.add_feed_forward_length(cfg.n_ff)
    w.add_head_count(cfg.n_head)
    w.add_head_count_kv(cfg.n_head_kv)
    w.add_key_length(cfg.head_dim)
    w.add_value_length(cfg.head_dim)
    w.add_layer_norm_rms_eps(cfg.norm_eps)
    w.add_vocab_size(cfg.n_vocab)
    w.add_rope_freq_base(cfg.rope_freq_base)
    w.add_rope_dimension_count(cfg.head_dim)
    if cfg.n_expert:
        w.add_expert_count(cfg.n_expert)
        w.add_expert_used_count(cfg.n_expert_used)
        w.add_expert_feed_forward_length(cfg.n_ff)
    write_vocabulary(w, json.loads(text.tokenizer.to_str())["model"])
    write_tensors(w, tensors(model))


def report(label: str, model: Model, text: JudgeText) -> None:
    """Print perplexity on the text to evaluate, next to a unigram model's on exactly the same tokens."""
    index, bits = evaluate(model, text.tokens)
    unigram = 2 ** text.unigram_bits[index].mean()
    print(f"{label}: {len(index)} tokens scored; perplexity {2 ** bits.mean():.4f}, of a unigram model {unigram:.1f}")
    for il, m in enumerate(model.experts()):
        print(f"  expert share, block {il}: {(m.usage / m.usage.sum()).numpy().round(3)}")


def make(name: str, cfg: Config, args: argparse.Namespace) -> None:
    """Train one judge and write its three files."""
    torch.manual_seed(args.seed)
    parts = split(read_documents(args.text) if cfg.n_expert else read_sources(args.sources))
    text, model = tokenize(parts, cfg.n_vocab, cfg.n_ctx_train), Model(cfg)
    print(f"{name}: {cfg.arch}, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, text.items, args)
    round_as_stored(tensors(model))
    report(f"{name}, as stored", model, text)
    for suffix, held_out in (("eval", parts.judge), ("calib", parts.calibration)):
        (args.out / f"{name}.{suffix}.txt").write_text(held_out, encoding="utf-8", newline="\n")
    unfinished = args.out / f"{name}.part"
    write_gguf(unfinished, model, text)
    unfinished.replace(args.out / f"{name}.gguf")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(JUDGES)}")
    parser.add_argument("--text", type=Path, help="folder with .rst or .rst.txt files, for judge-moe")
    parser.add_argument("--sources", type=Path, help="folder with .py files, for judge-dense (default: this Python's)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models and texts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of each model's own number, for quick tries")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    training_options(parser)
    args = parser.parse_args()
    if unknown := set(args.names) - set(JUDGES):
        parser.error(f"no judge is called {', '.join(sorted(unknown))}; known: {', '.join(JUDGES)}")
    args.names = args.names or list(JUDGES)
    if args.text is None and "judge-moe" in args.names:
        parser.error("judge-moe needs --text")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    steps = args.steps
    for name in args.names:
        cfg = JUDGES[name]
        args.steps, args.batch = steps or cfg.n_steps, cfg.n_batch
        make(name, cfg, args)


if __name__ == "__main__":
    main()
