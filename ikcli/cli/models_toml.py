"""The TOML file of `ik serve --models`: checked as a whole before anything is loaded; errors name file and key.

`[models.NAME]` holds options of `ik serve` by their long names, and `aliases`, `preload` and `ttl`. `[defaults]` holds
the same options for all models, `[groups.NAME]` has members and `together`. `memory`, `gpu-memory`, `max` and `ttl` are
at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikcli.cli.argv import canonical_name, toml_option
from ikcli.cli.model_entries import OF_ALL_MODELS, OF_REPLICAS, EntryMaker, ModelSpec, clash, machine_budget
from ikcli.cli.parser import names_of, parse
from ikcli.engine.plan.devices import find_machine
from ikcli.engine.plan.placement import CPU
from ikcli.errors import IkError, UsageError
from ikcli.server.front.models_entries import Group, ModelEntry, ModelsFile
from ikcli.settings.values import parse_size, toml_table
from ikcli.suggest import nearest

_TOP = ("memory", "gpu-memory", "max", "ttl", "defaults", "models", "groups")
_INSTEAD = {
    "server.alias": 'use aliases = ["NAME"]; the model\'s own name is that of its table',
    "server.sleep_idle_seconds": "use ttl = SECONDS",
}


def read_table(path: Path, maker: EntryMaker) -> ModelsFile:
    """Return the models of a file, checked against their files; raise UsageError that names the file and the key."""
    table = toml_table(path)
    _known(path, table, _TOP, "")
    models = _table(path, table, "models")
    if not models:
        raise UsageError(f"{path} names no model; it needs a table [models.NAME] with model = FILE")
    defaults = _options(path, "defaults", _table(path, table, "defaults"))
    ttl = _seconds(path, "ttl", table.get("ttl", 0))
    entries = {name: _entry(path, name, value, defaults, ttl, maker) for name, value in models.items()}
    if (twice := clash(entries.values())) is not None:
        one, name, other = twice
        raise UsageError(f"{path}: models.{one.name}: the name {name} is that of models.{other.name} already")
    most = table.get("max", 0)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise UsageError(f"{path}: max must be the number of models that are loaded at a time, 0 for any")
    groups = _groups(path, table, entries)
    budget, limited = _budget(path, table, next(iter(entries.values())))
    return ModelsFile(path, entries, groups, budget, most, limited)


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
    """Return the tokens of the options in a table."""
    names = names_of("serve")
    tokens: list[str] = []
    for key, value in table.items():
        found = names.get(canonical_name(f"--{key}"))
        if found is None:
            near = nearest(f"--{key}", [name for name in names if name.startswith("--")])
            hint = f"did you mean {near.removeprefix('--')}?" if near else "see ik serve --help"
            raise UsageError(f"{path}: {where}.{key} is not an option of ik serve; {hint}")
        if found[0].path in OF_ALL_MODELS:
            raise UsageError(f"{path}: {where}.{key} is for all models together; give it on the command line")
        if found[0].path in OF_REPLICAS:
            raise UsageError(f"{path}: {where}.{key} cannot be used here; every model of a file has one process")
        if found[0].path in _INSTEAD:
            raise UsageError(f"{path}: {where}.{key}: {_INSTEAD[found[0].path]}")
        try:
            one = toml_option(path, key, value)
            parse("serve", one)
        except UsageError as e:
            raise UsageError(f"{path}: {where}.{key}: {str(e).removeprefix(f'{path}: ')}") from None
        tokens += one
    return tokens


def _entry(path: Path, name: str, table: Any, defaults: list[str], ttl: float, maker: EntryMaker) -> ModelEntry:
    where = f"models.{name}"
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {where} must be a table, [{where}]")
    own = {key: value for key, value in table.items() if key not in ("aliases", "preload", "ttl")}
    options = _options(path, where, own)
    aliases, preload = table.get("aliases", []), table.get("preload", False)
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise UsageError(f"{path}: {where}.aliases must be a list of names")
    if not isinstance(preload, bool):
        raise UsageError(f"{path}: {where}.preload must be true or false")
    own_ttl = _seconds(path, f"{where}.ttl", table["ttl"]) if "ttl" in table else ttl
    try:
        return maker.entry(
            ModelSpec(name, where, (defaults, options), aliases=tuple(aliases), preload=preload, ttl=own_ttl)
        )
    except IkError as e:
        raise UsageError(f"{path}: {where}: {e}") from None


def _seconds(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UsageError(f"{path}: {key} must be a number of seconds, 0 for never")
    return float(value)


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
                raise UsageError(f"{path}: {where}.members: table [models.{member}] does not exist")
        if not isinstance(together, bool):
            raise UsageError(f"{path}: {where}.together must be true or false")
        groups.append(Group(name, tuple(members), together))
    file = ModelsFile(path, entries, tuple(groups))
    for name in entries:
        both = set(file.partners(name, together=True)) & set(file.partners(name, together=False))
        if both:
            raise UsageError(f"{path}: groups: {name} and {min(both)} are to be loaded together and exclude each other")
    return tuple(groups)


def _budget(path: Path, table: Mapping[str, Any], first: ModelEntry) -> tuple[dict[str, int], dict[str, str]]:
    """Return the given budget, else that of the machine, and the key by device that sets it."""
    limited: dict[str, str] = {}
    budget = machine_budget(first.config)
    for key, devices in (("memory", (CPU,)), ("gpu-memory", find_machine(first.config, exact=False).names)):
        value = table.get(key, table.get(key.replace("-", "_")))
        if value is not None:
            try:
                size = parse_size(value if isinstance(value, str) else f"{value}")
            except ValueError as e:
                raise UsageError(f"{path}: {key} {e}") from None
            budget |= dict.fromkeys(devices, size)
            limited |= dict.fromkeys(devices, key)
    return budget, limited


def check_room(file: ModelsFile) -> None:
    """Raise UsageError for a model that can never fit together with the models of its group."""
    for name, entry in file.entries.items():
        belonging = [entry, *(file.entries[one] for one in file.partners(name, together=True))]
        beside = " with its group" if len(belonging) > 1 else ""
        if 0 < file.max < len(belonging):
            raise UsageError(
                f"{file.path}: models.{name}{beside} are {len(belonging)} models, more than {file.max} at a time"
            )
        for device, key in file.limited.items():
            need, limit = sum(one.need.get(device, 0) for one in belonging), file.budget[device]
            if need > limit:
                raise UsageError(
                    f"{file.path}: models.{name}{beside} needs {need / 2**20:.0f} MiB on {device}, more than "
                    f"{key} = {limit / 2**20:.0f} MiB"
                )
