"""Training, evaluation and GGUF output that train_demo.py and train_judges.py share.

A model is a module with the embedding `token_embd`, matrices of its blocks under `attn.` and `ffn.`, and logits for
(batch, time) token ids; BOS is token 0.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from demo_text import CHAT_TEMPLATE, SPECIAL
from torch import Tensor, nn
from training_blocks import Moe


class Trainable(nn.Module):
    """The interface of a model that this module trains."""

    n_ctx_train: int
    token_embd: nn.Parameter

    def experts(self) -> list[Moe]:
        """Return the blocks of experts, in order."""
        return [m for m in self.modules() if isinstance(m, Moe)]


class Batches:
    """Endless windows over the token lists: every pass is a new shuffle, and lists follow each other without a gap."""

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
        """Return (inputs, targets), each (batch, length)."""
        need = batch * length
        while len(self.rest) <= need:
            self.refill()
        x, y = (torch.from_numpy(self.rest[i : i + need].reshape(batch, length).copy()) for i in (0, 1))
        x[:, 0] = 0  # every window begins with <|bos|>, as it does at run time
        self.rest = self.rest[need:]
        return x, y


def schedule(step: int, steps: int) -> float:
    """Return the learning rate factor: a rise over at most 50 steps, 1, then a linear fall to 0.02 (last 40 %)."""
    warmup = max(min(steps // 10, 50), 1)
    return min((step + 1) / warmup, max(min(1.0, 2.5 * (steps - step) / steps), 0.02))


def orthogonal(x: Tensor) -> Tensor:
    """Return each matrix of (n, rows, cols) with singular values near 1, by five Newton-Schulz steps."""
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


def train(model: Trainable, items: list[np.ndarray], args: argparse.Namespace) -> None:
    """Train on windows of --length tokens, then for the last eighth on windows of n_ctx_train.

    Muon optimizes the matrices of the blocks; AdamW the embedding, output, routers and norms.
    """
    inner = {n for n, p in model.named_parameters() if n.startswith(("attn.", "ffn.")) and p.ndim > 1}
    inner -= {n for n in inner if n.endswith("router")}
    muon = Muon([p for n, p in model.named_parameters() if n in inner], args.muon_lr)
    rates = {n: args.lr * (5 if n == "token_embd" else 1) for n, _ in model.named_parameters() if n not in inner}
    groups = [{"params": [model.get_parameter(n)], "lr": lr, "peak": lr} for n, lr in rates.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    source, start, running = Batches(items, np.random.default_rng(args.seed)), time.time(), 0.0
    for step in range(args.steps):
        length = args.length if step < args.steps * 7 // 8 else model.n_ctx_train
        x, y = source.take(max(args.batch * args.length // length, 1), length)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(step, args.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.f32):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        balance = sum((m.balance for m in model.experts()), torch.zeros(()))
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
def evaluate(model: Trainable, tokens: np.ndarray, window: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices of the scored tokens, their bits): the second half of each window, as in llama-perplexity."""
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


# ---------------------------------------------------------------- GGUF


def is_bf16(name: str, value: Tensor) -> bool:
    return value.ndim > 1 and "gate_inp" not in name


@torch.no_grad()
def round_as_stored(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Round the matrices to the values that the file will hold."""
    for name, value in tensors:
        if is_bf16(name, value):
            value.data = value.data.bfloat16().float()


def write_vocabulary(w: gguf.GGUFWriter, tokenizer_json: dict[str, Any]) -> None:
    """Write tokens, merges, special tokens and chat template."""
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


def write_tensors(w: gguf.GGUFWriter, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Finish the file: matrices BF16, norms and routers F32."""
    for name, value in tensors:
        data = value.detach().float().numpy()
        kind = gguf.GGMLQuantizationType.BF16 if is_bf16(name, value) else gguf.GGMLQuantizationType.F32
        w.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `train` reads beside steps, batch and length."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak rate of AdamW; the embedding's is five times that")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--f32", action="store_true", help="no BF16 products while training")
