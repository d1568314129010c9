"""Parts of the small models that train_demo.py and train_judges.py train: weights, norms, rotations, MLP, experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(n_in: int, n_out: int, *lead: int, gain: float = 1.0) -> nn.Parameter:
    """Return a weight of shape (*lead, n_out, n_in), GGUF's row order."""
    return nn.Parameter(torch.randn(*lead, n_out, n_in) * (gain / math.sqrt(n_in)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(n_rot: int, n_ctx: int, freq_base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (n_ctx, n_rot / 2)."""
    inverse = freq_base ** (-torch.arange(0, n_rot, 2).double() / n_rot)
    angle = torch.arange(n_ctx).double()[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs: x is (batch, head, time, n_rot), the tables are (time, n_rot / 2)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of the first and the second half (NeoX's order)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of (batch, head, time, width) to (batch, time, heads * width of v).

    The products are written out, as on a CPU they are faster than the fused kernel.
    """
    batch, _, time, width = q.shape
    future = torch.full((time, time), -math.inf).triu(1)
    probs = torch.softmax((q @ k.transpose(-1, -2)).float() * width**-0.5 + future, -1)
    return (probs.to(v.dtype) @ v).transpose(1, 2).reshape(batch, time, -1)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, n_embd: int, n_ff: int, gain: float) -> None:
        super().__init__()
        self.gate, self.up = linear(n_embd, n_ff), linear(n_embd, n_ff)
        self.down = linear(n_ff, n_embd, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Moe(nn.Module):
    """Softmax router, the best n_used experts weighted by their probabilities, plus a shared expert if it has a width.

    `norm`: divide the weights of the chosen experts by their sum.
    """

    def __init__(
        self, n_embd: int, n_ff: int, n_expert: int, n_used: int, gain: float, n_ff_shared: int = 0, norm: bool = False
    ) -> None:
        super().__init__()
        self.n_used, self.norm = n_used, norm
        self.router = linear(n_embd, n_expert)
        self.gate = linear(n_embd, n_ff, n_expert)
        self.up = linear(n_embd, n_ff, n_expert)
        self.down = linear(n_ff, n_embd, n_expert, gain=gain)
        self.shared = Mlp(n_embd, n_ff_shared, gain) if n_ff_shared else None
        self.balance = torch.zeros(())
        self.usage = torch.zeros(n_expert)

    def forward(self, x: Tensor) -> Tensor:
        flat, n_expert = x.reshape(-1, x.shape[-1]), len(self.usage)
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(flat.float(), self.router).softmax(-1)
        weight, chosen = probs.topk(self.n_used, -1)
        if self.norm:
            weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        count = chosen.flatten().bincount(minlength=n_expert)
        rows = order // self.n_used
        parts = flat[rows].split(count.tolist())
        outs = [
            F.linear(F.silu(F.linear(p, self.gate[e])) * F.linear(p, self.up[e]), self.down[e])
            for e, p in enumerate(parts)
        ]
        y = torch.cat(outs).float() * weight.flatten()[order, None]
        share = count / chosen.numel()
        self.balance = n_expert * (share * probs.mean(0)).sum()
        self.usage += count.detach()
        routed = torch.zeros_like(flat, dtype=y.dtype).index_add(0, rows, y).view(x.shape)
        return routed if self.shared is None else self.shared(x) + routed
