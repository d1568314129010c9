"""Make the entries of `ik serve` with several models from their options, whatever source names them.

Options come in sets: those of all models of a file, those of one model, those of the command line. A field in a later
set replaces that of earlier sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ikcli.cli.environment import variables
from ikcli.cli.front_options import layered
from ikcli.cli.model import find_model, find_projector
from ikcli.cli.parser import Parsed, all_options, names_of, parse
from ikcli.engine.plan.devices import find_machine
from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.startup import prepare
from ikcli.engine.run.pooling import served_pooling
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.errors import UsageError
from ikcli.gguf.constants import file_type_label
from ikcli.hub.client import NetworkError
from ikcli.hub.names import part_names
from ikcli.server.front.environment import OF_THE_FRONT
from ikcli.server.front.models_entries import FILE, ModelEntry, ModelFacts
from ikcli.settings.hub import HubConfig
from ikcli.settings.run import RunConfig, default_model
from ikcli.vision.opening import projector_memory

OF_ALL_MODELS = OF_THE_FRONT | {"verbose", "verbosity"} | {
    "server." + name
    for name in ("models", "models_preset", "models_dir", "models_cache", "models_max", "models_autoload")
}  # fmt: skip
"""Fields that only the command line sets."""
OF_REPLICAS = frozenset(("server.replicas", "server.replica_gpus", "server.first_slot", "fleet.ray"))
NAMES_A_MODEL = frozenset(("model", "hub.repo", "hub.file", "hub.url", "vision.mmproj", "vision.mmproj_url"))
_SEVERAL = frozenset(("server.models", "server.models_preset", "server.models_dir", "server.models_cache"))
_ENDS_HERE = frozenset(("server.alias", "server.sleep_idle_seconds"))
_CACHE_RAM = 256
"""MiB that the prompt cache of one of several models takes unless its options say otherwise: a share of free memory
fits one server only."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its source names it: `where` is that place in messages, `options` its sets of options.

    `path`, `projector`: its files where the options name none.
    `ttl`: seconds without a request, if they do not say so either.
    """

    name: str
    where: str
    options: Sequence[Sequence[str]] = ()
    path: Path | None = None
    projector: Path | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    preload: bool = False
    ttl: float = 0
    stop_timeout: float | None = None
    source: str = FILE


@dataclass
class EntryMaker:
    """Makes entries, and reads a file again only when it has changed.

    `line`: options of the command line that are for models. `alone`: there is one model. `downloads`: models of a hub
    that are not there are fetched.
    """

    line: Sequence[str] = ()
    alone: bool = False
    downloads: bool = True
    _read: dict[object, tuple[RunConfig, dict[str, int], ModelFacts]] = field(default_factory=dict)

    def entry(self, spec: ModelSpec) -> ModelEntry:
        """Return the entry of a model; raise IkError if its options or its file are faulty."""
        if not spec.name or any("," in text for text in (spec.name, *spec.aliases)):
            raise UsageError("names of models must not be empty and have no commas")
        argv = layered("serve", *spec.options, self.line)
        parsed = parse("serve", argv)
        idle = parsed.config.server.sleep_idle_seconds
        sleeps = "server.sleep_idle_seconds" in parsed.given
        model = self._file(parsed.config.model or spec.path, parsed.config.hub)
        argv = [*layered("serve", argv, without=_is_done), f"--model={model}"]
        if (projector := self._projector(parsed.config, spec)) is not None:
            argv.append(f"--mmproj={projector}")
        if "server.cache_ram" not in parsed.given and not self.alone:
            argv.append(f"--cache-ram={_CACHE_RAM}")
        stamp = stamp_of(model)
        config, need, facts = self._known(argv, stamp)
        return ModelEntry(
            spec.name, tuple(argv), config, need, spec.aliases, spec.preload,
            max(idle, 0) if sleeps else spec.ttl, facts, spec.source, spec.tags, spec.stop_timeout, sleeps and idle > 0,
            stamp,
        )  # fmt: skip

    def _file(self, model: Path | None, hub: HubConfig) -> Path:
        if self.downloads:
            return find_model(model, hub) or default_model()
        try:
            return find_model(model, replace(hub, offline=True)) or default_model()
        except NetworkError:
            name = hub.repo or hub.url
            raise UsageError(f"{name} is not in the cache; download it with ik pull {name} before") from None

    def _projector(self, config: RunConfig, spec: ModelSpec) -> Path | None:
        """Return the projector of a model: the one that its options name, or of its repository, or beside its file."""
        hub = config.hub if self.downloads else replace(config.hub, offline=True)
        found = find_projector(replace(config, hub=hub)).vision
        return spec.projector if found.mmproj is None and found.mmproj_auto else found.mmproj

    def _known(self, argv: list[str], stamp: tuple[object, ...]) -> tuple[RunConfig, dict[str, int], ModelFacts]:
        key = (tuple(argv), stamp)
        if key not in self._read:
            parsed = parse("serve", argv)
            self._read[key] = (parsed.config, *_need(parsed))
        return self._read[key]


def _is_done(path: str) -> bool:
    """Return whether an option is done before the process of a model starts; this includes tokens of hubs."""
    return path in _ENDS_HERE or path in NAMES_A_MODEL or path.startswith("hub.")


def stamp_of(model: Path) -> tuple[object, ...]:
    """Return the values by which a replaced file is recognized, including all of its parts."""
    found: list[object] = []
    for name in part_names(str(model)):
        try:
            stat = Path(name).stat()
        except OSError:  # the process that opens it reports the error
            continue
        found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _need(parsed: Parsed) -> tuple[dict[str, int], ModelFacts]:
    """Return bytes by device as `ik plan` computes them, and the facts about a model.

    The bytes include the prompt cache and the reserve of a GPU.
    """
    startup = prepare(parsed.config, parsed.given, beside=projector_memory)
    planner, config = startup.planner, startup.config
    memory = planner.plan(config).memory
    need = {device: memory.total(device) + (0 if device == CPU else RESERVE_BYTES) for device in memory.parts}
    need[CPU] += max(config.server.cache_ram or 0, 0) << 20
    if not planner.beside and config.vision.mmproj is not None and config.vision.mmproj.is_file():
        need[CPU] += config.vision.mmproj.stat().st_size
    tensors, metadata = planner.file.tensors.values(), planner.file.metadata
    ftype, template = metadata.get("general.file_type"), metadata.get("tokenizer.chat_template")
    facts = ModelFacts(
        arch=planner.hp.arch,
        n_params=sum(math.prod(t.shape) for t in tensors),
        size=sum(t.n_bytes for t in tensors),
        n_embd=planner.hp.n_embd,
        n_ctx=min(memory.n_ctx // config.n_parallel, planner.hp.n_ctx_train),
        file_type=file_type_label(int(ftype)) if ftype is not None else "",
        template=template if isinstance(template, str) else "",
        pooling=served_pooling(config, metadata, planner.hp.arch).name.lower(),
        generates=not config.server.only_embeds,
        reads_images=config.vision.mmproj is not None and not config.server.only_embeds,
    )
    return need, facts


def machine_budget(config: RunConfig) -> dict[str, int]:
    """Return the bytes by device that this machine has for all models together, where they are known."""
    machine = find_machine(config, exact=False)
    budget = {gpu.name: gpu.free for gpu in machine.gpus}
    return budget if machine.ram is None else budget | {CPU: machine.ram}


def clash(entries: Iterable[ModelEntry]) -> tuple[ModelEntry, str, ModelEntry] | None:
    """Return the first model with a name that another model already has: (model, name, other model)."""
    owner: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in entry.names:
            if name in owner:
                return entry, name, owner[name]
            owner[name] = entry
    return None


def option_name(path: str) -> str:
    """Return the spelling of the option of a field."""
    return next(bound.option.primary for bound, _ in names_of("serve").values() if bound.path == path)


def check_front(parsed: Parsed) -> None:
    """Raise UsageError for options of the command line that cannot apply to several models."""
    server = parsed.config.server
    others = {"--models-preset": server.models_preset, "--models-dir": server.models_dir}
    beside = [name for name, value in others.items() if value is not None]
    if server.models is not None and beside:
        raise UsageError(f"{beside[0]} cannot be used beside --models, whose file names all models; drop one of them")
    if parsed.config.dry_run:
        raise UsageError("--dry-run cannot be used with several models; ik plan -m FILE tells what one needs")
    if wrong := sorted(parsed.given & OF_REPLICAS):
        raise UsageError(f"{_named(wrong)} cannot be used with several models, each of which has one process")
    if wrong := sorted(parsed.given & (NAMES_A_MODEL | {"server.alias"})):
        by = _named(sorted(parsed.given & _SEVERAL))
        raise UsageError(f"{_named(wrong)} is for one model, and {by} for several; drop one of them")


def _named(paths: Sequence[str]) -> str:
    """Return options by their spelling, and by the variable that sets them."""
    set_by = {bound.path: name for bound, name, _ in variables("serve", all_options("serve"))}
    return " ".join(option_name(path) + (f" ({set_by[path]})" if path in set_by else "") for path in paths)
