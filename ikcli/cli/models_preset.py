"""The INI file of `ik serve --models-preset`: preset files of llama.cpp. Errors name file, section and key.

`[*]` holds options of all models, every other section those of one. Keys are option names without dashes, long or
short, or their variables (LLAMA_ARG_...), and a few keys that are not options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ikcli import log
from ikcli.cli.argv import canonical_name
from ikcli.cli.environment import PREFIX
from ikcli.cli.ini import Key, read_ini
from ikcli.cli.model_entries import NAMES_A_MODEL, OF_ALL_MODELS, OF_REPLICAS
from ikcli.cli.parser import all_options, names_of, parse
from ikcli.cli.upstream import IGNORED, INSTEAD, REFUSED, VARIABLES, words_instead
from ikcli.cli.values import switch_state
from ikcli.errors import UsageError
from ikcli.suggest import nearest

ALL = "*"
_OWN = ("load-on-startup", "stop-timeout", "dedup-cache-models", "tags")


@dataclass
class Section:
    """The content of a section; None: not set."""

    name: str
    options: list[str] = field(default_factory=list)
    names_model: bool = False
    repo: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    preload: bool | None = None
    stop_timeout: float | None = None
    dedup: bool | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A file: the section for all models, and the others by name."""

    path: Path
    defaults: Section
    sections: dict[str, Section]

    def where(self, name: str) -> str:
        """Name a section in messages."""
        return f"{self.path}: [{name}]"


def read_preset(path: Path) -> Preset:
    """Read a preset file; raise UsageError for nonsense, and print a notice of keys without effect here."""
    ini = read_ini(path)
    for key in ini.pop(""):
        if key.name != "version":
            raise UsageError(f"{path}: line {key.line}: {key.name} stands before any section; put it below [*]")
        if key.value != "1":
            raise UsageError(f"{path}: line {key.line}: version {key.value} is not known here, only 1")
    reader = _Reader(path)
    sections = {name: reader.section(name, keys) for name, keys in ini.items()}
    for ignored, why in ((reader.of_front, "are for all models together"), (reader.without, "have no effect here")):
        if ignored:
            log.notice_once(f"{path}: ignored, as they {why}: {', '.join(dict.fromkeys(ignored))}")
    defaults = sections.pop(ALL, Section(ALL))
    return Preset(path, defaults, sections)


class _Reader:
    """Reads sections; `of_front` and `without` are keys that are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = names_of("serve")
        self._variables = {v: b.option.primary for b in all_options("serve") for v in b.option.variables} | VARIABLES
        self.of_front: list[str] = []
        self.without: list[str] = []

    def section(self, name: str, keys: Sequence[Key]) -> Section:
        """Read one section."""
        section = Section(name)
        seen: dict[str, str] = {}
        for key in keys:
            where = f"{self._path}: [{name}] {key.name}"
            if not key.value:
                raise UsageError(f"{where} has no value")
            if key.name in _OWN:
                path = key.name
                self._own(section, where, key)
            else:
                path = self._option(section, where, key)
            if path and path in seen:
                raise UsageError(f"{where}: {seen[path]} has the same meaning; drop one of them")
            bound = next((b for b in all_options("serve") if b.path == path), None)
            if path and (bound is None or not bound.option.repeat):
                seen[path] = key.name
        return section

    def _own(self, section: Section, where: str, key: Key) -> None:
        """Set a key that does not name an option."""
        if key.name == "tags":
            section.tags = _list(key.value)
        elif key.name == "stop-timeout":
            if not key.value.isdecimal() or len(key.value) > 9:
                raise UsageError(f"{where} must be a whole number of seconds, not {key.value}")
            section.stop_timeout = float(key.value)
        elif key.name == "load-on-startup":
            section.preload = _state(where, key.value)
        else:
            section.dedup = _state(where, key.value)

    def _option(self, section: Section, where: str, key: Key) -> str:
        """Take an option; return the field that it sets, or an empty text if it is ignored."""
        name, value = self._name(where, key), key.value
        if name in self._opposites(key):
            value = {True: "off", False: "on"}[_state(where, value)]
        if not name:
            self.without.append(key.name)
            return ""
        if name in REFUSED:
            raise UsageError(f"{where}: {REFUSED[name]}")
        if name in INSTEAD:
            try:
                words = words_instead(name, value, (), lists=False)
            except UsageError as e:
                raise UsageError(f"{where}: {e}") from None
            section.options += _checked(where, words)
            return name
        bound, negative = self._names[name]
        if bound.path in OF_REPLICAS:
            raise UsageError(f"{where} cannot be used here; every model has one process")
        if bound.path in OF_ALL_MODELS:
            self.of_front.append(key.name)
            return ""
        if not bound.option.used_by("serve") or bound.option.noop:
            self.without.append(key.name)
            return ""
        if section.name == ALL and bound.path in NAMES_A_MODEL | {"server.alias"}:
            raise UsageError(f"{where} applies to one model; write it into the section of that model")
        if bound.path == "server.alias":
            section.aliases = _list(key.value)
            return bound.path
        section.options += _checked(where, [f"{name if negative else bound.option.primary}={value}"])
        section.names_model |= bound.path in NAMES_A_MODEL
        section.repo = key.value if bound.path == "hub.repo" else section.repo
        return bound.path

    def _spellings(self, key: Key) -> list[str]:
        if key.name.startswith(PREFIX):
            plain = key.name.removeprefix(PREFIX).lower()
            return [self._variables.get(key.name, ""), canonical_name(f"--{plain}")]
        return [canonical_name(f"--{key.name}"), f"-{key.name}"]

    def _opposites(self, key: Key) -> list[str]:
        """Return the negative spellings of a key, for example --no-kv-offload of kv-offload."""
        return [f"--no-{name[2:]}" for name in self._spellings(key) if name.startswith("--")]

    def _name(self, where: str, key: Key) -> str:
        """Return the spelling that the parser knows, or an empty text for an ignored option of other programs."""
        tried = [*self._spellings(key), *self._opposites(key)]
        for name in tried:
            if name in self._names or name in INSTEAD or name in REFUSED:
                return name
        if any(name in IGNORED for name in tried):
            return ""
        names = [name.lstrip("-") for name in self._names] + [*_OWN]
        if key.name.startswith(PREFIX):
            names = [*self._variables]
        near = nearest(key.name, names)
        hint = f"did you mean {near}?" if near else "see ik serve --help"
        raise UsageError(f"{where} is not an option of ik serve; {hint}")


def _checked(where: str, tokens: list[str]) -> list[str]:
    """Check tokens with the parser of `ik serve`."""
    try:
        parse("serve", tokens)
    except UsageError as e:
        raise UsageError(f"{where}: {e}") from None
    return tokens


def _state(where: str, text: str) -> bool:
    try:
        return switch_state(text, None)
    except ValueError:
        raise UsageError(f"{where} must be true or false, not {text}") from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(piece for item in text.split(",") if (piece := item.strip()))
