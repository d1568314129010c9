"""Launch spec of a replica: the options that each one gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.hostinfo import available_memory
from ikcli.server.front.environment import options_behind
from ikcli.server.prefix.keys import default_limit
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Launch spec of replicas.

    `argv` holds the common options, `config` their values together with those of the front. Paths in `argv` are
    absolute and separate words; `inputs` are the paths that are read. `given` are the options on the command line.
    """

    config: RunConfig
    argv: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    def options(self, index: int, n_threads: int, n_threads_batch: int) -> list[str]:
        """Return the options of one replica."""
        return [
            *self.argv,
            f"--threads={n_threads}",
            f"--threads-batch={n_threads_batch}",
            f"--first-slot={index * self.config.n_parallel}",
            *options_behind(self.config.server),
        ]

    def shared(self, index: int) -> list[str]:
        """Return the options of a replica that shares this machine's threads and RAM with the others."""
        config, n = self.config, self.config.server.replicas
        options = self.options(index, max(1, config.n_threads // n), max(1, config.n_threads_batch // n))
        if "server.cache_ram" not in self.given:
            options.append(f"--cache-ram={(default_limit(None, available_memory()) >> 20) // n}")
        return options
