"""The TOML file of `ik serve --models`: checked as a whole before anything is loaded, errors name file and key.

`[models.NAME]` holds options of `ik serve` by their long names, and `aliases`, `preload` and `ttl`; `[defaults]` the
same options for all models; `[groups.NAME]` members and `together`; `memory`, `gpu-memory` and `ttl` are at the top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikcli.commands._argv import canonical_name, toml_option
from ikcli.commands._fronts import OF_THE_FRONT
from ikcli.commands._model import find_model
from ikcli.commands._options import Parsed, names_of, parse
from ikcli.commands._suggest import nearest
from ikcli.config import default_model
from ikcli.config_values import parse_size, toml_table
from ikcli.engine.devices import find_machine
from ikcli.engine.placement import CPU
from ikcli.engine.pooling import served_pooling
from ikcli.engine.run_device import RESERVE_BYTES
from ikcli.engine.startup import prepare
from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import file_type_label
from ikcli.server.router.entries import Group, ModelEntry, ModelFacts, ModelsFile

_OF_THE_FRONT = OF_THE_FRONT | {"server.models", "verbose", "verbosity"}
_OF_REPLICAS = frozenset(("server.replicas", "server.replica_gpus", "server.first_slot", "fleet.ray"))
_TOP = ("memory", "gpu-memory", "ttl", "defaults", "models", "groups")
_CACHE_RAM = 256
"""MiB that a model's prompt cache takes unless the file says otherwise: a share of free memory fits one server only."""


def check_front(parsed: Parsed) -> None:
    """UsageError for options of models on the command line, where nobody could tell which model they are for."""
    wrong = sorted(parsed.given & _OF_REPLICAS)
    if wrong:
        names = " ".join(_option_name(path) for path in wrong)
        raise UsageError(f"{names} cannot be used beside --models, where every model has one process")
    wrong = sorted(parsed.given - _OF_THE_FRONT)
    if wrong:
        names = " ".join(_option_name(path) for path in wrong)
        raise UsageError(f"{names} cannot be used beside --models; write it into a model of the file, or [defaults]")


def _option_name(path: str) -> str:
    return next(bound.option.primary for bound, _ in names_of("serve").values() if bound.path == path)


def read_models(path: Path) -> ModelsFile:
    """The models of a file, checked against their files; UsageError naming the file and the key."""
    table = toml_table(path)
    _known(path, table, _TOP, "")
    models = _table(path, table, "models")
    if not models:
        raise UsageError(f"{path} names no model; it needs a table [models.NAME] with model = FILE")
    defaults = _options(path, "defaults", _table(path, table, "defaults"))
    ttl = _seconds(path, "ttl", table.get("ttl", 0))
    entries = {name: _entry(path, name, value, defaults, ttl) for name, value in models.items()}
    _check_names(path, entries)
    file = ModelsFile(path, entries, _groups(path, table, entries), _budget(path, table, entries))
    _check_room(path, table, file)
    return file


def _known(path: Path, table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key.replace("_", "-") not in keys:
            near = nearest(key, keys)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(keys)}"
            raise UsageError(f"{path}: unknown key {where}{key}; {hint}")


def _table(path: Path, table: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {key} must be a table, [{key}]")
    return value


def _options(path: Path, where: str, table: Mapping[str, Any]) -> list[str]:
    """Tokens of the options in a table."""
    names = names_of("serve")
    tokens: list[str] = []
    for key, value in table.items():
        found = names.get(canonical_name(f"--{key}"))
        if found is None:
            near = nearest(f"--{key}", [name for name in names if name.startswith("--")])
            hint = f"did you mean {near.removeprefix('--')}?" if near else "see ik serve --help"
            raise UsageError(f"{path}: {where}.{key} is no option of ik serve; {hint}")
        if found[0].path in _OF_THE_FRONT:
            raise UsageError(f"{path}: {where}.{key} is for all models together; give it on the command line")
        if found[0].path in _OF_REPLICAS:
            raise UsageError(f"{path}: {where}.{key} cannot be used here; every model of a file has one process")
        if found[0].path == "server.alias":
            raise UsageError(
                f'{path}: {where}.{key}: use aliases = ["NAME"]; the model\'s own name is that of its table'
            )
        try:
            one = toml_option(path, key, value)
            parse("serve", one)
        except UsageError as e:
            raise UsageError(f"{path}: {where}.{key}: {str(e).removeprefix(f'{path}: ')}") from None
        tokens += one
    return tokens


def _entry(path: Path, name: str, table: Any, defaults: list[str], ttl: float) -> ModelEntry:
    where = f"models.{name}"
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {where} must be a table, [{where}]")
    own = {key: value for key, value in table.items() if key not in ("aliases", "preload", "ttl")}
    argv = [*defaults, *_options(path, where, own)]
    aliases, preload = table.get("aliases", []), table.get("preload", False)
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise UsageError(f"{path}: {where}.aliases must be a list of names")
    if not isinstance(preload, bool):
        raise UsageError(f"{path}: {where}.preload must be true or false")
    if not name or any("," in text for text in (name, *aliases)):
        raise UsageError(f"{path}: {where}: names of models must not be empty and have no commas")
    try:
        argv = _with_model(argv)
        parsed = parse("serve", argv)
        if "server.cache_ram" not in parsed.given:
            argv.append(f"--cache-ram={_CACHE_RAM}")
            parsed = parse("serve", argv)
        need, facts = _need(parsed)
    except IkError as e:
        raise UsageError(f"{path}: {where}: {e}") from None
    own_ttl = _seconds(path, f"{where}.ttl", table["ttl"]) if "ttl" in table else ttl
    return ModelEntry(name, tuple(argv), parsed.config, need, tuple(aliases), preload, own_ttl, facts)


def _with_model(argv: list[str]) -> list[str]:
    """The options with the model's file instead of its name on a hub, which is downloaded; tokens of hubs end here."""
    names, config = names_of("serve"), parse("serve", argv).config
    model = find_model(config.model, config.hub) or default_model()
    kept = [token for token in argv if not names[canonical_name(token)][0].path.startswith(("model", "hub."))]
    return [*kept, f"--model={model}"]


def _need(parsed: Parsed) -> tuple[dict[str, int], ModelFacts]:
    """Bytes by device, as `ik plan` tells them, with the prompt cache and what a GPU takes beside its parts; facts."""
    startup = prepare(parsed.config, parsed.given)
    planner, config = startup.planner, startup.config
    memory = planner.plan(config).memory
    need = {device: memory.total(device) + (0 if device == CPU else RESERVE_BYTES) for device in memory.parts}
    need[CPU] += max(config.server.cache_ram or 0, 0) << 20
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
    )
    return need, facts


def _seconds(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UsageError(f"{path}: {key} must be a number of seconds, 0 for never")
    return float(value)


def _check_names(path: Path, entries: Mapping[str, ModelEntry]) -> None:
    owner: dict[str, str] = {}
    for entry in entries.values():
        for name in entry.names:
            if name in owner:
                raise UsageError(
                    f"{path}: models.{entry.name}: the name {name} is that of models.{owner[name]} already"
                )
            owner[name] = entry.name


def _groups(path: Path, table: Mapping[str, Any], entries: Mapping[str, ModelEntry]) -> tuple[Group, ...]:
    groups = []
    for name, value in _table(path, table, "groups").items():
        where = f"groups.{name}"
        if not isinstance(value, dict):
            raise UsageError(f"{path}: {where} must be a table, [{where}]")
        _known(path, value, ("members", "together"), f"{where}.")
        members, together = value.get("members", []), value.get("together", False)
        if not isinstance(members, list) or len(members) < 2 or not all(isinstance(one, str) for one in members):
            raise UsageError(f"{path}: {where}.members must be a list of two models or more")
        for member in members:
            if member not in entries:
                raise UsageError(f"{path}: {where}.members: there is no table [models.{member}]")
        if not isinstance(together, bool):
            raise UsageError(f"{path}: {where}.together must be true or false")
        groups.append(Group(name, tuple(members), together))
    file = ModelsFile(path, entries, tuple(groups))
    for name in entries:
        both = set(file.partners(name, together=True)) & set(file.partners(name, together=False))
        if both:
            raise UsageError(f"{path}: groups: {name} and {min(both)} are to be loaded together and exclude each other")
    return tuple(groups)


def _budget(path: Path, table: Mapping[str, Any], entries: Mapping[str, ModelEntry]) -> dict[str, int]:
    """What is given, else what the machine has."""
    machine = find_machine(next(iter(entries.values())).config, exact=False)
    budget = {gpu.name: gpu.free for gpu in machine.gpus}
    if machine.ram is not None:
        budget[CPU] = machine.ram
    for key, devices in (("memory", (CPU,)), ("gpu-memory", machine.names)):
        value = table.get(key, table.get(key.replace("-", "_")))
        if value is not None:
            try:
                size = parse_size(value if isinstance(value, str) else f"{value}")
            except ValueError as e:
                raise UsageError(f"{path}: {key} {e}") from None
            budget |= dict.fromkeys(devices, size)
    return budget


def _check_room(path: Path, table: Mapping[str, Any], file: ModelsFile) -> None:
    """A model, with those that are loaded together with it, must fit a budget that the file gives."""
    given = {CPU: "memory" in table}
    for name, entry in file.entries.items():
        belonging = [entry, *(file.entries[one] for one in file.partners(name, together=True))]
        for device, limit in file.budget.items():
            need = sum(one.need.get(device, 0) for one in belonging)
            if need > limit and given.get(device, "gpu-memory" in table or "gpu_memory" in table):
                key = "memory" if device == CPU else "gpu-memory"
                beside = " with its group" if len(belonging) > 1 else ""
                raise UsageError(
                    f"{path}: models.{name}{beside} needs {need / 2**20:.0f} MiB on {device}, more than "
                    f"{key} = {limit / 2**20:.0f} MiB"
                )
