"""Clean raw arguments: split pasted separators, read options from files, normalize the spelling of names.

`@FILE` holds one option per line. `--config FILE` is TOML with long option names as keys. Both yield the same tokens as
a command line, so one parser handles all three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikcli.cli.table import COMMANDS
from ikcli.errors import UsageError
from ikcli.settings.values import toml_table
from ikcli.text_files import read_text

_GLUE = re.compile("[\u2028\u2029\u00a0\u200b\ufeff]+")
_OPTION = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)
_CONTINUATIONS = frozenset({"`", "\\", "^"})


@dataclass(slots=True)
class Tokens:
    """Arguments of the command line and of the option files it names, with notes on what was cleaned up."""

    line: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_tokens(
    argv: Sequence[str], command: str, takes_value: Callable[[str], bool], names: Mapping[str, bool]
) -> Tokens:
    """Split glued arguments and read `@FILE` and `--config FILE`.

    `takes_value(name)` is true for options with a value. `names` are the known ones, True if the value may be any text.
    """
    tokens = Tokens()
    rest = _unglue(argv, tokens.warnings, names)
    while rest:
        token = rest.pop(0)
        name = canonical_name(token)
        is_value = bool(tokens.line) and takes_value(canonical_name(tokens.line[-1]))
        if token.startswith("@") and len(token) > 1 and not is_value:
            tokens.files += read_option_file(Path(token[1:]))
        elif name == "--config":
            value = token.partition("=")[2] if "=" in token else (rest.pop(0) if rest else "")
            if not value:
                raise UsageError("--config needs FILE, a TOML file with options; example: --config ik.toml")
            tokens.files += read_toml(Path(value), command)
        else:
            tokens.line.append(token)
    return tokens


def canonical_name(token: str) -> str:
    """Return the option name in a token: after `--`, `_` equals `-`; `=VALUE` is removed."""
    if not token.startswith("--"):
        return token
    return "--" + token[2:].partition("=")[0].replace("_", "-")


def looks_like_option(token: str) -> bool:
    """Return whether a token looks like an option: `-x`, `--name` and `--name=value` do.

    `-`, `-1`, `-1,0` and text that starts with a dash do not.
    """
    return _OPTION.fullmatch(token) is not None


def _unglue(argv: Sequence[str], warnings: list[str], names: Mapping[str, bool]) -> list[str]:
    """Treat separators from pasted text as white space where options are glued by them; drop lone continuations."""
    clean: list[str] = []
    for token in argv:
        pieces = [piece for piece in _GLUE.split(token) if piece]
        is_text = bool(clean) and names.get(canonical_name(clean[-1]), False)
        if is_text and not any(canonical_name(piece) in names for piece in pieces):
            clean.append(token)
        elif len(pieces) > 1 and any(looks_like_option(piece) for piece in pieces):
            warnings.append(f"treating a pasted line separator as white space in: {' '.join(pieces)}")
            clean += pieces
        elif len(pieces) == 1 and pieces[0] != token and looks_like_option(pieces[0]):
            warnings.append(f"treating a pasted line separator as white space in: {pieces[0]}")
            clean += pieces
        elif token in _CONTINUATIONS or (token != "" and token.strip() in {"", "`"} and "\n" in token):
            warnings.append("ignoring a line continuation mark between arguments")
        elif not pieces and token:
            warnings.append("ignoring a pasted line separator between arguments")
        else:
            clean.append(token)
    return clean


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file without empty lines and `#` comments (at a line start or after a blank)."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in read_text(path).splitlines())
    return [line for line in lines if line]


def read_option_file(path: Path) -> list[str]:
    """Return the tokens of an `@FILE` with `NAME [VALUE]` on each line.

    The value is the rest of the line, without quotes around it.
    """
    tokens: list[str] = []
    for line in read_lines(path):
        name, *value = line.split(None, 1)
        tokens.append(name)
        if value:
            text = value[0].strip()
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
            tokens.append(text[1:-1] if quoted else text)
    return tokens


def read_toml(path: Path, command: str) -> list[str]:
    """Return the tokens of a TOML file; a table named like a command holds options of that command only."""
    table = toml_table(path)
    tokens: list[str] = []
    commands = [info.name for info in COMMANDS]
    for key, value in table.items():
        if not isinstance(value, dict):
            tokens += toml_option(path, key, value)
        elif key not in commands:
            raise UsageError(f"{path}: table [{key}] is not a command; tables are {', '.join(commands)}")
        elif key == command:
            for name, setting in value.items():
                tokens += toml_option(path, name, setting)
    return tokens


def toml_option(path: Path, key: str, value: Any) -> list[str]:
    """Return the tokens of one key of a TOML file."""
    name = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [f"{name}={'on' if value else 'off'}"]
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return [f"{name}={item}" for item in value]
        return [f"{name}={','.join(str(item) for item in value)}"]
    if isinstance(value, str | int | float):
        return [f"{name}={value}"]
    raise UsageError(f"{path}: {key} is neither text, number, true/false nor a list")
