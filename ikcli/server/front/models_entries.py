"""The list of models: each with options and memory, groups of models, and the memory budget they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.settings.run import RunConfig

FILE, PRESET, FOLDER, CACHE = "file", "preset", "folder", "cache"
"""Origin of an entry: a models file, a preset file, a folder, or the hub's cache."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's header for lists; `n_ctx` is the number of tokens in a slot."""

    arch: str = ""
    n_params: int = 0
    size: int = 0
    n_embd: int = 0
    n_ctx: int = 0
    file_type: str = ""
    template: str = ""
    pooling: str = "last"
    generates: bool = True
    reads_images: bool = False


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the list.

    `argv` holds the options of its `ik serve`, `config` their values, `need` the bytes by device. `ttl` is the number
    of seconds without a request after which it is unloaded, 0 for never; if it `sleeps`, it then counts as sleeping.
    `source` is the origin of the entry. `stop_timeout` is the number of seconds that its requests get when it is
    unloaded, None for unlimited. `stamp` changes whenever its file changes.
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
        """Name and aliases."""
        return (self.name, *self.aliases)

    def like(self, other: ModelEntry) -> bool:
        """Return whether a process of one entry can continue as a process of the other."""
        return (self.names, self.argv, self.stamp) == (other.names, other.argv, other.stamp)


@dataclass(frozen=True, slots=True)
class Group:
    """Models that are loaded and unloaded together, or of which only one is loaded at a time."""

    name: str
    members: tuple[str, ...]
    together: bool = False


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """All models, with the limits they share.

    `budget` is the memory in bytes by device that all loaded models may need together, where a limit is known;
    `limited` is the key of the file that sets it, by device. `max` is how many models may be loaded at a time, 0 for
    any number. `downloads`: whether models can be added to the cache.
    """

    path: Path
    entries: Mapping[str, ModelEntry]
    groups: tuple[Group, ...] = ()
    budget: Mapping[str, int] = field(default_factory=dict)
    max: int = 0
    limited: Mapping[str, str] = field(default_factory=dict)
    downloads: bool = False

    @property
    def default(self) -> ModelEntry | None:
        """The model for requests that name none: the first one, if any."""
        return next(iter(self.entries.values()), None)

    def find(self, name: str) -> ModelEntry | None:
        """Return the model with this name or alias; `NAME:latest` means NAME."""
        for entry in self.entries.values():
            if name in entry.names:
                return entry
        return self.find(name.removesuffix(":latest")) if name.endswith(":latest") else None

    def partners(self, name: str, *, together: bool) -> tuple[str, ...]:
        """Return the other members of a model's groups of one kind."""
        groups = (group.members for group in self.groups if group.together == together and name in group.members)
        return tuple(dict.fromkeys(member for members in groups for member in members if member != name))
