"""Train a head that predicts further tokens (MTP) for the bundled demo model, whose own weights stay as they are.

The head has the layout of DeepSeek-V3's (arXiv:2412.19437): at position p it reads the model's state after the last
norm and the embedding of token p + 1, and one more block of the model's kind predicts token p + 2. Embedding and output
matrix are the model's. It learns the model's own distribution rather than the text, as that is what decides whether a
draft is accepted, and it learns to continue from its own state, as one head drafts several tokens in a row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from demo_model import Attention, Config, Model, block_tensors, feed_forward, write_metadata
from torch import Tensor, nn
from training import Batches, Muon, schedule, write_tensors
from training_blocks import Moe, linear, rms_norm

DEPTH = 3
"""Tokens that the head learns to draft in a row."""


def read_model(path: Path, cfg: Config) -> tuple[Model, gguf.GGUFReader]:
    """Return the model of a file, frozen, and its reader."""
    reader, model = gguf.GGUFReader(path), Model(cfg)
    found = {t.name.removesuffix(".weight"): t for t in reader.tensors}
    for name, value in model.named_tensors():
        data = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        value.data = torch.from_numpy(np.array(data, np.float32)).view(value.shape)
    model.requires_grad_(False)
    return model, reader


class Head(nn.Module):
    """A block after the model's last one; states and logits for (batch, time) states and the tokens after them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        cfg = model.cfg
        self.cfg, self.n_ctx_train = cfg, cfg.n_ctx_train
        self.enorm = nn.Parameter(torch.ones(cfg.n_embd))
        self.hnorm = nn.Parameter(torch.ones(cfg.n_embd))
        self.eh_proj = linear(2 * cfg.n_embd, cfg.n_embd, gain=0.5)
        with torch.no_grad():  # the embedding enters at the scale of the residual stream, the state as it is
            self.eh_proj.mul_(0.2)
            self.eh_proj[:, cfg.n_embd :].add_(torch.eye(cfg.n_embd))
        self.attn = Attention(cfg)
        self.ffn_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.ffn = feed_forward(cfg, cfg.n_layer)
        self.shared_head_norm = nn.Parameter(model.output_norm.detach().clone())

    def forward(self, states: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        eps = self.cfg.norm_eps
        both = torch.cat((rms_norm(embedded, self.enorm, eps), rms_norm(states, self.hnorm, eps)), -1)
        x = F.linear(both, self.eh_proj)
        x = x + self.attn(x, cos, sin)
        x = x + self.ffn(rms_norm(x, self.ffn_norm, eps))
        return rms_norm(x, self.shared_head_norm, eps)

    def experts(self) -> list[Moe]:
        """Return the blocks of experts."""
        return [m for m in self.modules() if isinstance(m, Moe)]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (GGUF tensor name, value) in file order."""
        il = self.cfg.n_layer
        yield from block_tensors(il, self.attn, self.ffn_norm, self.ffn)
        for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm"):
            yield f"blk.{il}.nextn.{name}", getattr(self, name)


def drafts(model: Model, head: Head, states: Tensor, tokens: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield the logits of each draft position: row i of the k-th predicts token i + 2 + k of the rows' tokens.

    `states` are the model's, (batch, time, width); later drafts continue from the head's own states, and each has one
    row less.
    """
    for k in range(depth):
        n = tokens.shape[1] - 1 - k
        embedded = model.token_embd[tokens[:, 1 + k : 1 + k + n]]
        states = head(states[:, :n], embedded, model.cos[:n], model.sin[:n])
        yield F.linear(states, model.output)


def train_head(model: Model, head: Head, items: list[np.ndarray], args: argparse.Namespace) -> None:
    """Train on the model's distribution over each next token, with less weight on later drafts.

    The last eighth of the steps has windows of four times the length.
    """
    rates = {n for n, p in head.named_parameters() if p.ndim > 1 and not n.endswith("router")}
    muon = Muon([p for n, p in head.named_parameters() if n in rates], args.muon_lr)
    rest = [p for n, p in head.named_parameters() if n not in rates]
    optimizer = torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    source, start = Batches(items, np.random.default_rng(args.seed)), time.time()
    weights = [0.6**k for k in range(DEPTH)]
    for step in range(args.steps):
        length = args.length if step < args.steps * 7 // 8 else 4 * args.length
        x, _ = source.take(max(args.batch * args.length // length, 1), length)
        optimizer.param_groups[0]["lr"] = args.lr * schedule(step, args.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.f32):
            with torch.no_grad():
                states = model.states(x)
                wanted = F.linear(states, model.output)
            target, best = wanted.float().softmax(-1), wanted.argmax(-1)
            loss, agree = torch.zeros(()), []
            for k, logits in enumerate(drafts(model, head, states, x, DEPTH)):
                own = slice(1 + k, 1 + k + logits.shape[1])
                loss = loss + weights[k] * F.cross_entropy(logits.float().flatten(0, 1), target[:, own].flatten(0, 1))
                agree.append((logits.argmax(-1) == best[:, own]).float().mean().item())
        balance = sum((m.balance for m in head.experts()), torch.zeros(()))
        head.zero_grad(set_to_none=True)
        (loss / sum(weights) + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        muon.step(schedule(step, args.steps))
        if step % 20 == 0 or step == args.steps - 1:
            shares = " ".join(f"{a:.3f}" for a in agree)
            print(f"head step {step:5d}  loss {loss.item() / sum(weights):.4f}  agreement {shares}  "
                  f"{time.time() - start:7.1f} s", flush=True)  # fmt: skip


@torch.no_grad()
def report_head(label: str, model: Model, head: Head, tokens: np.ndarray, window: int = 512) -> None:
    """Print how often each draft position agrees with the model on held-out text, given the text up to it."""
    hits, n = np.zeros(DEPTH), 0
    for first in range(0, len(tokens) - window + 1, window):
        x = torch.from_numpy(tokens[first : first + window].copy())[None]
        x[0, 0] = 0
        states = model.states(x)
        best = F.linear(states, model.output).argmax(-1)[0]
        for k, logits in enumerate(drafts(model, head, states, x, DEPTH)):
            same = logits.argmax(-1)[0] == best[1 + k : 1 + k + logits.shape[1]]
            hits[k] += same[window // 2 : window - DEPTH].sum().item()
        n += window - DEPTH - window // 2
    print(f"{label}: drafts that are the model's choice, by position: {(hits / n).round(4)} of {n}")


def write_head(path: Path, head: Head, tokenizer_json: dict) -> None:
    """Write the block as a file of its own, in the layout of `ik convert --mtp`."""
    w = gguf.GGUFWriter(path, "deepseek2")
    write_metadata(w, head.cfg, tokenizer_json, n_further=1)
    write_tensors(w, head.named_tensors())
