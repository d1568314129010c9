"""Where checkpoints are made while a prompt is computed, for models whose sequences cannot be cut anywhere.

An agent changes the end of a long prompt and wants the rest not to be computed again: that takes a checkpoint before
what changes. Places are the turns that the HTTP side knows of (behind the system prompt, before the last user turn),
every `interval` tokens, a few tokens before the end, and the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ikcli.engine.run.sequences import Keeping
from ikcli.settings.server import ServerConfig


def keeping(config: ServerConfig, n_bytes: int) -> Keeping:
    """How many checkpoints a slot keeps, which may take so many bytes."""
    spread = config.ctx_checkpoints_eviction != "fifo"
    return Keeping(most=config.ctx_checkpoints, n_bytes=n_bytes, spread=spread)


def places(config: ServerConfig, n_past: int, n_prompt: int, turns: Sequence[int]) -> dict[int, bool]:
    """Numbers of tokens after which a checkpoint is made, in ascending order, of a prompt with n_past cached tokens.

    The value tells whether a text is likely to go on from there, so not of those that are only `interval` apart.
    """
    if not config.ctx_checkpoints:
        return {}
    interval, tolerance = config.ctx_checkpoints_interval, config.ctx_checkpoints_tolerance
    found = {*turns, n_prompt}
    if interval > 0:
        found.update(range(n_past - n_past % interval + interval, n_prompt, interval))
    if tolerance > 0:
        found.add(n_prompt - tolerance)
    wanted = sorted(n for n in found if n_past < n <= n_prompt)
    return {n: n in turns or n % max(interval, 1) != 0 for n in wanted}
