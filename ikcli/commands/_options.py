"""One parser for all commands that run a model: arguments -> RunConfig, plus what was ignored and why.

Names are whole names (`-ngl` is never `-n -g -l`), the last scalar wins, lists accumulate in command-line order, and
options of other commands are accepted. The options themselves are declared in ikcli/config.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ikcli.commands._argv import canonical_name, looks_like_option, read_tokens
from ikcli.commands._suggest import nearest
from ikcli.commands._upstream import UPSTREAM_ARITY
from ikcli.commands._values import convert, is_switch_value, missing_value
from ikcli.config import RunConfig
from ikcli.errors import UsageError
from ikcli.hostinfo import physical_cores
from ikcli.options import BoundOption, iter_options

HELP_NAMES = frozenset({"-h", "--help", "--usage"})
TEXT_FIELDS = frozenset({"prompt.prompt", "prompt.reverse_prompt", "server.chat_template"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of a parse. `info` is "help" or "version" if asked for; `alternatives` are the value lists of bench;
    `given` are the fields that the user set.
    """

    config: RunConfig
    ignored: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    info: str = ""
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Given:
    """One option as found: its declaration, the name typed, and its value text (None for a bare switch)."""

    bound: BoundOption
    name: str
    text: str | None
    negative: bool


@functools.cache
def all_options() -> tuple[BoundOption, ...]:
    """Every declared option."""
    return tuple(iter_options(RunConfig))


@functools.cache
def names_of(command: str) -> dict[str, tuple[BoundOption, bool]]:
    """Spelling -> (option, negative) for a command; where two options share a spelling, its own one wins."""
    table: dict[str, tuple[BoundOption, bool]] = {}
    own = [bound for bound in all_options() if bound.option.used_by(command)]
    for bound in sorted(own, key=lambda item: len(item.option.commands)) + list(all_options()):
        for name in bound.option.names:
            table.setdefault(name, (bound, False))
        for name in bound.option.negative:
            table.setdefault(name, (bound, True))
    return table


def _takes_value(command: str, name: str) -> bool:
    known = names_of(command).get(name)
    return known[0].option.takes_value if known is not None else UPSTREAM_ARITY.get(name, 0) > 0


def parse(command: str, argv: Sequence[str]) -> Parsed:
    """Parse the arguments after the command name; raises UsageError with one sentence."""
    tokens = read_tokens(argv, command, functools.partial(_takes_value, command))
    line = _Scanner(command, tokens.line)
    files = _Scanner(command, tokens.files)
    values, alternatives = _collect(command, files.given, line.given)
    used = [given for given in line.given + files.given if given.bound.option.used_by(command)]
    ignored = [g.name for g in line.given + files.given if not g.bound.option.used_by(command)]
    noop = [g.name for g in used if g.bound.option.noop]
    config = _finish(_build(values, command), values)
    return Parsed(
        config,
        tuple(dict.fromkeys(ignored)),
        tuple(dict.fromkeys([*line.unsupported, *files.unsupported, *noop])),
        tuple(tokens.warnings + _value_warnings(used)),
        alternatives,
        line.info,
        frozenset(values),
    )


class _Scanner:
    """Walks the tokens once and decides which of them are values."""

    def __init__(self, command: str, tokens: Sequence[str]) -> None:
        self.command = command
        self.names = names_of(command)
        self.rest = list(tokens)
        self.given: list[Given] = []
        self.unsupported: list[str] = []
        self.info = ""
        while self.rest:
            self._take(self.rest.pop(0))

    def _take(self, token: str) -> None:
        name, attached = self._split(token)
        if name in HELP_NAMES:
            self.info = "help"
        elif name == "--version":
            self.info = self.info or "version"
        elif name in self.names:
            self._take_known(name, attached)
        elif name in UPSTREAM_ARITY:
            count = UPSTREAM_ARITY[name] if attached is None else 0
            del self.rest[:count]
            self.unsupported.append(name)
        elif looks_like_option(token):
            raise self._unknown(token.partition("=")[0])
        else:
            raise UsageError(
                f'unexpected argument "{token}"; options start with -, a model file is given with -m FILE, '
                "and values that contain blanks need quotes"
            )

    def _split(self, token: str) -> tuple[str, str | None]:
        """Name and attached value; `-ot=...` is split too, but only after a known name."""
        name = canonical_name(token)
        if name.startswith("--"):
            return name, token.partition("=")[2] if "=" in token else None
        head, equals, tail = token.partition("=")
        if name not in self.names and equals and head in self.names:
            return head, tail
        return name, None

    def _take_known(self, name: str, attached: str | None) -> None:
        bound, negative = self.names[name]
        option = bound.option
        text = attached
        if option.takes_value and attached is None:
            if not self.rest or self._is_option(bound, self.rest[0]):
                raise missing_value(option, name)
            text = self.rest.pop(0)
        elif option.kind == "optswitch" and not negative and attached is None:
            lists = self.command == "bench"
            if self.rest and is_switch_value(self.rest[0], lists):
                text = self.rest.pop(0)
        self.given.append(Given(bound, name, text, negative))

    def _is_option(self, bound: BoundOption, token: str) -> bool:
        if bound.path in TEXT_FIELDS:
            return canonical_name(token) in self.names
        return looks_like_option(token)

    def _unknown(self, name: str) -> UsageError:
        own = [n for n, (bound, _) in self.names.items() if bound.option.used_by(self.command)]
        near = nearest(name, [*own, *self.names, *HELP_NAMES, "--version", "--config"])
        hint = f"; did you mean {near}?" if near else f"; see ik {self.command} --help"
        return UsageError(f"unknown option {name}{hint}")


def _collect(command: str, files: list[Given], line: list[Given]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Values by field path. Scalars: files, then the line (last wins). Lists: the line first, as first matches win."""
    values: dict[str, Any] = {}
    alternatives: dict[str, tuple[Any, ...]] = {}
    for given in files + line:
        option, path = given.bound.option, given.bound.path
        if option.used_by(command) and not option.repeat:
            found = _values_of(command, given)
            if path == "tensor_split" and command == "bench":
                found = alternatives.get(path, ()) + found
            alternatives[path] = found
            values[path] = found[0]
    for given in line + files:
        option, path = given.bound.option, given.bound.path
        if option.used_by(command) and option.repeat:
            values[path] = values.get(path, ()) + convert(given.bound, given.name, given.text or "")
    return values, {path: found for path, found in alternatives.items() if len(found) > 1}


def _values_of(command: str, given: Given) -> tuple[Any, ...]:
    """The value, or in bench the alternatives of a comma list."""
    if given.text is None:
        return (not given.negative,)
    if given.negative:
        return (not convert(given.bound, given.name, given.text),)
    if command == "bench" and given.bound.option.bench_list:
        return tuple(convert(given.bound, given.name, piece) for piece in given.text.split(","))
    return (convert(given.bound, given.name, given.text),)


def _build(values: dict[str, Any], command: str) -> RunConfig:
    config = RunConfig(command=command)
    groups: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for path, value in values.items():
        head, dot, tail = path.partition(".")
        if dot:
            groups.setdefault(head, {})[tail] = value
        else:
            plain[head] = value
    for head, fields in groups.items():
        plain[head] = replace(getattr(config, head), **fields)
    return replace(config, **plain)


def _finish(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """Defaults that depend on the command or on other options, and combinations that cannot work."""
    n_threads = config.n_threads or physical_cores()
    n_batch_threads = values.get("n_threads_batch", n_threads) or n_threads
    n_ctx = 512 if config.command in ("perplexity", "imatrix") and "n_ctx" not in values else config.n_ctx
    if config.split_mode not in ("none", "layer"):
        raise UsageError(f"-sm {config.split_mode} is not supported; use -sm layer (whole blocks per GPU) or -sm none")
    if config.fit and config.n_cpu_moe:
        raise UsageError("--fit and --n-cpu-moe exclude each other: --fit decides itself which experts stay on the CPU")
    return replace(config, n_threads=n_threads, n_threads_batch=n_batch_threads, n_ctx=n_ctx)


def _value_warnings(given: list[Given]) -> list[str]:
    warnings: list[str] = []
    for item in given:
        if item.text and " -" in item.text and item.bound.path not in TEXT_FIELDS:
            warnings.append(f'the value of {item.name} contains " -"; is a quote missing? ({_short(item.text)})')
        if item.bound.path.startswith("sampling.lookup_cache") and item.text and "kv" in item.text.lower():
            warnings.append(f"{item.name} is an n-gram cache, not a dump of the KV cache (see --slot-save-path)")
    return warnings


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
