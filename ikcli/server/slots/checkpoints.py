"""Choose where to make checkpoints in a prompt, for models whose sequences cannot be truncated at any position.

An agent changes the end of a long prompt and expects the rest to be reused. That takes a checkpoint before the change.
Checkpoints are made at the turns that the HTTP side knows of (after the system prompt, before the last user turn),
every `interval` tokens, a few tokens before the end, and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ikcli.engine.run.sequences import Keeping
from ikcli.settings.server import ServerConfig


def keeping(config: ServerConfig, n_bytes: int) -> Keeping:
    """Return the limits on checkpoints of a slot, which may take this many bytes."""
    spread = config.ctx_checkpoints_eviction != "fifo"
    return Keeping(most=config.ctx_checkpoints, n_bytes=n_bytes, spread=spread)


def places(config: ServerConfig, n_past: int, n_prompt: int, turns: Sequence[int]) -> dict[int, bool]:
    """Return the token counts after which a checkpoint is made, ascending, for a prompt with n_past cached tokens.

    The value says whether a text is likely to continue from there; this does not hold for those that are only
    `interval` apart.
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
