"""`ik rm`: remove downloaded models from the cache, after a question on a terminal."""

from __future__ import annotations

import sys

from ikcli import log
from ikcli.errors import UsageError
from ikcli.hub.cache import Removal, plan_removal, remove
from ikcli.log import shown_size
from ikcli.settings.tools import RemoveConfig


def run(config: RemoveConfig) -> int:
    """Remove models by name: `user/repo:quant`, a whole `user/repo`, a URL, or the path of `ik list`."""
    if not config.args:
        raise UsageError("rm: name a model as ik list does: ik rm user/repo:quant")
    removals = [plan_removal(name) for name in config.args]
    if not config.yes and not _confirmed(removals):
        log.log("nothing removed")
        return 1
    for removal in removals:
        remove(removal)
        print(f"removed {', '.join(removal.names)} ({shown_size(removal.n_bytes)})")
    return 0


def _confirmed(removals: list[Removal]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm asks before it removes, which needs a terminal; add -y")
    names = ", ".join(name for removal in removals for name in removal.names)
    log.log(f"remove {names} ({shown_size(sum(removal.n_bytes for removal in removals))})? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
