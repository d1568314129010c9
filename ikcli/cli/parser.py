"""The parser of all commands: arguments -> the config of the command, with notes on what was ignored and why.

Names are whole names (`-ngl` is never `-n -g -l`), the last scalar wins, and lists accumulate in command-line order. A
command that runs a model accepts the options of its siblings. Options are declared in `ikcli.settings` (`run` for
commands that run a model, `tools` for the others).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ikcli.cli.argv import canonical_name, looks_like_option, read_tokens
from ikcli.cli.environment import tokens_of_variables, unknown_variables, variables
from ikcli.cli.table import BY_NAME
from ikcli.cli.upstream import IGNORED, INSTEAD, MEANT, OTHER_COMMANDS, REFUSED, words_instead
from ikcli.cli.values import convert, is_switch_value, missing_value, value_warnings
from ikcli.errors import UsageError
from ikcli.settings.option import COMMAND_LETTERS, BoundOption, Option, arguments_of, iter_options
from ikcli.settings.rules import complete
from ikcli.suggest import nearest

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner
    from ikcli.settings.run import RunConfig

HELP_NAMES = frozenset({"-h", "--help", "--usage"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """The result of a parse: `config` is a RunConfig, or the type that TOOLS has for the command.

    `info` is "help", "version" or another command if the user asks for it. `alternatives` are the value lists of bench.
    `given` are the fields that the user set.
    """

    config: Any
    ignored: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    info: str = ""
    given: frozenset[str] = frozenset()
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The input of a command that runs a model: checked settings, and the planner that opened the model file.

    `alternatives`, `given` and `argv` (the words of the command line) are those of Parsed.
    """

    config: RunConfig
    planner: Planner
    alternatives: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """One option as found: its declaration, the name typed, and its value text (None for a bare switch)."""

    bound: BoundOption
    name: str
    text: str | None
    negative: bool


@functools.cache
def all_options(command: str = "") -> tuple[BoundOption, ...]:
    """Return every option that a command accepts; without a command, those of a model run."""
    return tuple(iter_options(config_type(command)))


def runs_model(command: str) -> bool:
    """Return whether a command has the options of a model run; those of other commands are declared in TOOLS."""
    return command not in BY_NAME or BY_NAME[command].runs_model


def config_type(command: str) -> type:
    """Return the config type of a command; the declarations of others are not imported."""
    if runs_model(command):
        from ikcli.settings.run import RunConfig

        return RunConfig
    from ikcli.settings.tools import TOOLS

    return TOOLS[command]


def usage(command: str) -> str:
    """Return the usage line, for example `ik gguf-split [options] IN OUT`."""
    if runs_model(command):
        return f"ik {command} [OPTIONS]"
    takes = arguments_of(config_type(command))
    return f"ik {command} [options] {takes.form if takes else ''}".rstrip()


@functools.cache
def names_of(command: str) -> dict[str, tuple[BoundOption, bool]]:
    """Return spelling -> (option, negative) for a command; of options with the same spelling the command's own wins."""
    table: dict[str, tuple[BoundOption, bool]] = {}
    options = all_options(command)
    own = [bound for bound in options if bound.option.used_by(command)]
    for bound in sorted(own, key=lambda item: len(item.option.commands)) + list(options):
        for name in bound.option.names:
            table.setdefault(name, (bound, False))
        for name in bound.option.negative:
            table.setdefault(name, (bound, True))
    return table


def takes_value(command: str, name: str) -> bool:
    """Return whether the token after `name` belongs to it."""
    known = names_of(command).get(name)
    if known is not None or not runs_model(command):
        return known is not None and known[0].option.takes_value
    return (name in INSTEAD and INSTEAD[name].takes_value) or IGNORED.get(name, 0) > 0


def parse(command: str, argv: Sequence[str]) -> Parsed:
    """Parse the arguments after the command name; raise UsageError with one sentence."""
    names = {name: bound.option.text for name, (bound, _) in names_of(command).items()}
    tokens = read_tokens(argv, command, functools.partial(takes_value, command), names)
    line = Scanner(command, tokens.line)
    files = Scanner(command, tokens_of_variables(command) * runs_model(command) + tokens.files)
    if line.info not in ("", "version"):
        return Parsed(config_type(command)(), info=line.info)
    environment = [Given(*found, negative=False) for found in variables(command, all_options(command))]
    values, alternatives = _collect(command, environment + files.given, line.given)
    used = [given for given in line.given + files.given if given.bound.option.used_by(command)]
    ignored = [g.name for g in line.given + files.given if not g.bound.option.used_by(command)]
    noop = [g.name for g in used if g.bound.option.noop]
    unknown = unknown_variables(command, all_options(command)) if runs_model(command) else []
    if files.args or line.args:
        values["args"] = (*files.args, *line.args)
    config = _build(config_type(command)(), values)
    return Parsed(
        complete(replace(config, command=command), values) if runs_model(command) else config,
        tuple(dict.fromkeys(ignored)),
        tuple(dict.fromkeys([*line.unsupported, *files.unsupported, *noop, *unknown])),
        tuple(tokens.warnings + value_warnings((g.bound, g.name, g.text or "") for g in used)),
        alternatives,
        line.info,
        frozenset(values),
        tuple(argv),
    )


class Scanner:
    """Walk the tokens once and decide which of them are values."""

    def __init__(self, command: str, tokens: Sequence[str]) -> None:
        self.command = command
        self.names = names_of(command)
        self.args: list[str] = []
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
        elif runs_model(self.command) and name in INSTEAD:
            self.rest = words_instead(name, attached, self.rest, lists=self.command == "bench")
        elif runs_model(self.command) and name in IGNORED:
            del self.rest[: IGNORED[name] if attached is None else 0]
            self.unsupported.append(name)
        elif runs_model(self.command) and name in OTHER_COMMANDS:
            self.info = self.info or OTHER_COMMANDS[name]
        elif runs_model(self.command) and name in REFUSED:
            raise UsageError(f"{name}: {REFUSED[name]}")
        elif looks_like_option(token):
            raise self._unknown(token.partition("=")[0])
        else:
            self._take_argument(token)

    def _take_argument(self, token: str) -> None:
        takes = arguments_of(config_type(self.command))
        if takes is not None and (takes.most is None or len(self.args) < takes.most):
            self.args.append(token)
        elif not runs_model(self.command):
            raise UsageError(f'unexpected argument "{token}"; usage: {usage(self.command)}')
        else:
            raise UsageError(
                f'unexpected argument "{token}"; options start with -, a model file is given with -m FILE, '
                "and values that contain blanks need quotes"
            )

    def _split(self, token: str) -> tuple[str, str | None]:
        """Split a token into name and attached value; `-ot=...` is split too, but only after a known name."""
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
            for _ in range(1, option.n_values):
                if self.rest and not looks_like_option(self.rest[0]) and not _parses(option, text):
                    text = f"{text} {self.rest.pop(0)}"
        elif option.kind == "optswitch" and not negative and attached is None:
            lists = self.command == "bench"
            if self.rest and is_switch_value(self.rest[0], lists):
                text = self.rest.pop(0)
        self.given.append(Given(bound, name, text, negative))

    def _is_option(self, bound: BoundOption, token: str) -> bool:
        if bound.option.text:
            return canonical_name(token) in self.names
        return looks_like_option(token)

    def _unknown(self, name: str) -> UsageError:
        own = [n for n, (bound, _) in self.names.items() if bound.option.used_by(self.command)]
        meant = MEANT.get(name.replace("_", "-"))
        near = meant if meant in own else nearest(name, [*own, *self.names, *HELP_NAMES, "--version", "--config"])
        hint = f"; did you mean {near}?" if near else f"; see ik {self.command} --help"
        return UsageError(f"unknown option {name}{hint}")


def _parses(option: Option, text: str) -> bool:
    """Return whether this is already a whole value."""
    try:
        return option.parse is not None and option.parse(text) is not None
    except ValueError:
        return False


def _collect(command: str, files: list[Given], line: list[Given]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return values by field path.

    Scalars: files, then the line (the last wins). Lists: the line first, as first matches win.
    """
    values: dict[str, Any] = {}
    alternatives: dict[str, tuple[Any, ...]] = {}
    for given in files + line:
        option, path = given.bound.option, given.bound.path
        if option.used_by(command) and not option.repeat:
            found = _values_of(command, given)
            if path == "tensor_split" and command == "bench":
                found = alternatives.get(path, ()) + found
            if COMMAND_LETTERS.get(command, "-") in option.joined:
                source = line if given in line else files
                found = (",".join(one.text or "" for one in source if one.name == given.name),)
            alternatives[path] = found
            values[path] = found[0]
    for given in line + files:
        option, path = given.bound.option, given.bound.path
        if option.used_by(command) and option.repeat:
            values[path] = values.get(path, ()) + convert(given.bound, given.name, given.text or "")
    return values, {path: found for path, found in alternatives.items() if len(found) > 1}


def _values_of(command: str, given: Given) -> tuple[Any, ...]:
    """Return the values, in bench the alternatives of a comma list."""
    if given.text is None:
        return (not given.negative,)
    if given.negative:
        return (not convert(given.bound, given.name, given.text),)
    if command == "bench" and given.bound.option.bench_list:
        return tuple(convert(given.bound, given.name, piece) for piece in given.text.split(","))
    return (convert(given.bound, given.name, given.text),)


def _build(config: Any, values: dict[str, Any]) -> Any:
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
