"""How long the texts of an encoder can be."""

from __future__ import annotations

from ikcli.models import HParams


def longest_text(hp: HParams, n_ctx: int, n_ubatch: int) -> int:
    """Return the most tokens of a text: encoders read it in one micro-batch, and have a limited number of positions."""
    return n_ctx if hp.causal else min(n_ctx, n_ubatch, hp.n_positions or n_ctx)


def way_out(hp: HParams, n_ctx: int, n_ubatch: int) -> str:
    """Return what the user can do about a longer text."""
    if hp.causal:
        return "raise -c"
    return "shorten it" if longest_text(hp, n_ctx, n_ubatch) == hp.n_positions else "shorten it, or raise -c and -ub"
