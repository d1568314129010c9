"""Argument parser of the commands that convert files: options anywhere among the positional arguments.

Same spelling rules as the commands that run models: `_` equals `-` after `--`, `--name=value`, `@FILE` and `--config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikcli.commands._argv import canonical_name, looks_like_option, read_tokens
from ikcli.commands._suggest import nearest
from ikcli.errors import UsageError

HELP_NAMES = frozenset({"-h", "--help", "--usage"})
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class ToolOption:
    """One option: all its names, the form of its value (empty: a switch), help, and whether it may be repeated."""

    names: tuple[str, ...]
    form: str
    help: str
    repeat: bool = False
    example: str = ""

    @property
    def key(self) -> str:
        return self.names[0].lstrip("-").replace("-", "_")


@dataclass(slots=True)
class ToolArguments:
    """Values by option key (the last one wins, or all of a repeated option), positional arguments, warnings."""

    values: dict[str, list[str]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    help: bool = False

    def has(self, key: str) -> bool:
        return key in self.values

    def one(self, key: str) -> str | None:
        found = self.values.get(key)
        return found[-1] if found else None

    def all(self, key: str) -> tuple[str, ...]:
        return tuple(self.values.get(key, ()))


def parse_tool(command: str, options: Sequence[ToolOption], argv: Sequence[str]) -> ToolArguments:
    """Read the arguments of one command; UsageError for unknown options and missing values."""
    names = {name: option for option in options for name in option.names}

    def takes_value(name: str) -> bool:
        return name in names and bool(names[name].form)

    out = ToolArguments()
    if HELP_NAMES & set(argv):
        out.help = True
        return out
    tokens = read_tokens(argv, command, takes_value)
    out.warnings = tokens.warnings
    for rest in (list(tokens.files), list(tokens.line)):
        while rest:
            token = rest.pop(0)
            if not looks_like_option(token):
                out.positional.append(token)
                continue
            option = names.get(canonical_name(token.partition("=")[0]))
            if option is None:
                raise _unknown(command, token, names)
            value = _value(option, token, rest)
            if value is not None:
                out.values.setdefault(option.key, []).append(value)
    return out


def _unknown(command: str, token: str, names: dict[str, ToolOption]) -> UsageError:
    name = token.partition("=")[0]
    near = nearest(name, [*names, *HELP_NAMES])
    return UsageError(f"unknown option {name}" + (f"; did you mean {near}?" if near else f"; see ik {command} --help"))


def _value(option: ToolOption, token: str, rest: list[str]) -> str | None:
    """The value of an option; None for a switch that is turned off (`--pure=off`)."""
    name, equals, attached = token.partition("=")
    if not option.form:
        if attached.lower() in ("", "on", "true", "1"):
            return "on"
        if attached.lower() in ("off", "false", "0"):
            return None
        raise UsageError(f"{name} takes no value")
    if equals:
        return attached
    if rest:
        return rest.pop(0)
    raise UsageError(f"{name} needs {option.form}; example: {name} {option.example or option.form}")


def whole_number(name: str, text: str, least: int = 1) -> int:
    """A whole number of at least `least`; UsageError that names the option otherwise."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f'{name}: "{text}" is not a whole number') from None
    if number < least:
        raise UsageError(f"{name}: {number} is too small, the least is {least}")
    return number


def tool_help(usage: str, summary: str, options: Sequence[ToolOption], notes: Sequence[str] = ()) -> str:
    """Help text: usage, options with wrapped explanations, notes."""
    import textwrap

    lines = [f"usage: {usage}", "", summary, "", "Options:"]
    for option in options:
        head = "  " + " ".join((", ".join(option.names), option.form)).rstrip()
        text = textwrap.wrap(option.help + (" (repeatable)" if option.repeat else ""), _WIDTH - 36)
        if len(head) > 34:
            lines.append(head)
            head = ""
        lines += [f"{head if i == 0 else '':<36}{line}" for i, line in enumerate(text)]
    for note in notes:
        lines += ["", *textwrap.wrap(note, _WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)
