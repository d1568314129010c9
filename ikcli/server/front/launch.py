"""How replicas are started: the options that each gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.engine.plan.devices import available_memory
from ikcli.server.front.environment import options_behind
from ikcli.server.slots.prompt_cache import default_limit
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How replicas are started. `argv`: the options of all; `config`: what they and those of the front mean.

    Paths in `argv` are absolute, and words of their own; `inputs` are those that are read. `given`: the options that
    were given.
    """

    config: RunConfig
    argv: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    def options(self, index: int, n_threads: int, n_threads_batch: int) -> list[str]:
        """The options of one."""
        return [
            *self.argv,
            f"--threads={n_threads}",
            f"--threads-batch={n_threads_batch}",
            f"--first-slot={index * self.config.n_parallel}",
            *options_behind(self.config.server),
        ]

    def shared(self, index: int) -> list[str]:
        """The options of one that shares this machine with the others: its threads and its part of the RAM."""
        config, n = self.config, self.config.server.replicas
        options = self.options(index, max(1, config.n_threads // n), max(1, config.n_threads_batch // n))
        if "server.cache_ram" not in self.given:
            options.append(f"--cache-ram={(default_limit(None, available_memory()) >> 20) // n}")
        return options
