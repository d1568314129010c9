"""Where replicas run: processes of this machine that share its processors, memory and GPUs, or nodes of Ray."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ikcli.engine.plan.devices import available_memory
from ikcli.errors import UsageError
from ikcli.hostinfo import shares
from ikcli.server.http.logs import ServerLog
from ikcli.server.replicas.crew import Process
from ikcli.server.router.child import Child
from ikcli.server.router.environment import environment_behind
from ikcli.server.slots.prompt_cache import default_limit
from ikcli.settings.run import RunConfig

_ENVIRONMENT = "LLAMA_ARG_"
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How replicas are started. `argv`: the options of all; `config`: what they and those of the front mean.

    Paths in `argv` are absolute, and words of their own; `inputs` are those that are read. `given`: the options that
    were given.
    """

    config: RunConfig
    argv: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    def options(self, index: int, n_threads: int, n_threads_batch: int) -> list[str]:
        """The options of one. What the front does is switched off there."""
        server = self.config.server
        return [
            *self.argv,
            f"--threads={n_threads}",
            f"--threads-batch={n_threads_batch}",
            f"--first-slot={index * self.config.n_parallel}",
            f"--log-format={server.log_format}",
            "--no-webui",
            "--metrics",
            f"--timeout={server.timeout}",
            f"--shutdown-timeout={server.shutdown_timeout}",
        ]

    def shared(self, index: int) -> list[str]:
        """The options of one that shares this machine with the others: its threads and its part of the RAM."""
        config, n = self.config, self.config.server.replicas
        options = self.options(index, max(1, config.n_threads // n), max(1, config.n_threads_batch // n))
        if "server.cache_ram" not in self.given:
            options.append(f"--cache-ram={(default_limit(None, available_memory()) >> 20) // n}")
        return options


class Places(Protocol):
    """A way to run replicas."""

    one_first: bool

    def open(self) -> None:
        """IkError if that cannot be; UnsupportedError if it needs what is not installed."""

    def make(self, index: int, n: int) -> Process:
        """The process of a replica that is started for the n-th time."""

    def renew(self) -> None:
        """All are to be started anew, with the files as they are now; IkError if that cannot be."""

    def close(self) -> None:
        """When all processes have ended."""


class Here:
    """Processes of this machine. Options of threads are for all together; so is the default of --cache-ram."""

    one_first = True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, config = recipe, recipe.config
        n = config.server.replicas
        self._cpus = shares(n) if hasattr(os, "sched_setaffinity") else [frozenset()] * n
        self._gpus = gpu_shares(n, config.server.replica_gpus, os.environ)
        self._options = [recipe.shared(index) for index in range(n)]

    def open(self) -> None:
        """Make the folder of their sockets, which only this user can enter."""
        self._folder = tempfile.TemporaryDirectory(prefix="ik-")

    def make(self, index: int, n: int) -> Child:
        """See Places."""
        server = self._recipe.config.server
        environment = plain_environment()
        if self._gpus:
            environment[GPUS] = self._gpus[index]
        return Child(
            f"replica {index}", self._options[index], Path(self._folder.name) / f"{index}-{n}.sock",
            grace=float(server.shutdown_timeout), prefix=server.log_format != "json", cpus=self._cpus[index],
            environment=environment,
        )  # fmt: skip

    def renew(self) -> None:
        """Every process reads the files anew."""

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


def plain_environment() -> dict[str, str]:
    """That of this process without options, which replicas get as arguments, and without keys of clients."""
    return environment_behind(_ENVIRONMENT)


def gpu_shares(n: int, each: int, environment: Mapping[str, str]) -> Sequence[str]:
    """Which GPUs every replica sees, none if they all see all; UsageError if there are not enough that are visible."""
    if not each:
        return ()
    visible = environment.get(GPUS)
    names = [str(i) for i in range(n * each)] if visible is None else [text for text in visible.split(",") if text]
    if len(names) < n * each:
        raise UsageError(f"--replica-gpus {each} times {n} replicas are more GPUs than {GPUS}={visible} has")
    return [",".join(names[i * each : (i + 1) * each]) for i in range(n)]


def places_of(recipe: Recipe, log: ServerLog) -> Places:
    """Where the options say."""
    if recipe.config.fleet.ray is not None:
        from ikcli.server.replicas.ray_places import RayPlaces

        return RayPlaces(recipe, log)
    return Here(recipe)
