"""The list of models: each with its options and memory, groups of models, and the memory that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.settings.run import RunConfig

FILE, PRESET, FOLDER, CACHE = "file", "preset", "folder", "cache"
"""Where an entry comes from: a models file, a preset file, a folder, or the cache of the hub."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model's header for lists; `n_ctx`: tokens of a slot."""

    arch: str = ""
    n_params: int = 0
    size: int = 0
    n_embd: int = 0
    n_ctx: int = 0
    file_type: str = ""
    template: str = ""
    pooling: str = "last"
    generates: bool = True


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model. `argv` are the options of its `ik serve`, `config` what they mean, `need` the bytes by device.

    `ttl`: seconds without a request after which it is unloaded, 0: never; then it is said to sleep if it `sleeps`.
    `source` says what named it. `stop_timeout`: seconds that its requests get when it is
    unloaded, None: all that they need. `stamp` is another one when its file is.
    """

    name: str
    argv: tuple[str, ...]
    config: RunConfig
    need: Mapping[str, int]
    aliases: tuple[str, ...] = ()
    preload: bool = False
    ttl: float = 0
    facts: ModelFacts = ModelFacts()
    source: str = FILE
    tags: tuple[str, ...] = ()
    stop_timeout: float | None = None
    sleeps: bool = False
    stamp: tuple[object, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and aliases."""
        return (self.name, *self.aliases)

    def like(self, other: ModelEntry) -> bool:
        """Return whether a process of the one can go on as that of the other."""
        return (self.names, self.argv, self.stamp) == (other.names, other.argv, other.stamp)


@dataclass(frozen=True, slots=True)
class Group:
    """Models that are loaded and unloaded together, or of which only one is loaded at a time."""

    name: str
    members: tuple[str, ...]
    together: bool = False


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """`budget`: bytes by device that all loaded models may need together, where a limit is known; `limited`: the key of
    the file by device that gives it. `max`: how many models are loaded at a time, 0: any. `downloads`: whether more
    models can be added to the cache."""

    path: Path
    entries: Mapping[str, ModelEntry]
    groups: tuple[Group, ...] = ()
    budget: Mapping[str, int] = field(default_factory=dict)
    max: int = 0
    limited: Mapping[str, str] = field(default_factory=dict)
    downloads: bool = False

    @property
    def default(self) -> ModelEntry | None:
        """The model of requests that name none: the first, if there is one."""
        return next(iter(self.entries.values()), None)

    def find(self, name: str) -> ModelEntry | None:
        """Return the model with this name or alias; `NAME:latest` is NAME."""
        for entry in self.entries.values():
            if name in entry.names:
                return entry
        return self.find(name.removesuffix(":latest")) if name.endswith(":latest") else None

    def partners(self, name: str, *, together: bool) -> tuple[str, ...]:
        """Return the other members of a model's groups of one kind."""
        groups = (group.members for group in self.groups if group.together == together and name in group.members)
        return tuple(dict.fromkeys(member for members in groups for member in members if member != name))
