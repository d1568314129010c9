"""Convert option text to values; errors name the flag, the value, the expected form and one example."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ikcli.cli.argv import read_lines
from ikcli.errors import UsageError
from ikcli.settings.option import BoundOption, Option
from ikcli.settings.values import OFF, ON
from ikcli.suggest import nearest

SWITCH_VALUES = frozenset({"on", "off", "auto", "0", "1", "true", "false"})


def is_switch_value(text: str, lists: bool = False) -> bool:
    """Return whether `text` can be the value of an optional-value switch; `lists` also allows `0,1`."""
    pieces = text.lower().split(",") if lists else [text.lower()]
    return all(piece in SWITCH_VALUES for piece in pieces)


def switch_state(text: str, default: Any) -> bool:
    """Convert on/off text to a bool; `auto` is the default of the option. Raise ValueError for anything else."""
    word = text.lower()
    if word in ON:
        return True
    if word in OFF:
        return False
    if word == "auto":
        return bool(default)
    raise ValueError("is neither on nor off")


def convert(bound: BoundOption, name: str, text: str) -> Any:
    """Return the value of one option; raise UsageError naming flag, value, form and an example."""
    option = bound.option
    try:
        if option.parse is not None and text.startswith("@") and bound.path == "override_tensor":
            rules = [option.parse(line) for line in read_lines(Path(text[1:]))]
            return tuple(rule for line in rules for rule in line)
        value = _convert(bound, text)
        if option.minimum is not None and value < option.minimum:
            raise ValueError(f"is less than {option.minimum:g}")
        return value
    except ValueError as problem:
        raise UsageError(f'{name}: "{text}" {problem}{expected(option)}') from None


def missing_value(option: Option, name: str) -> UsageError:
    """Return the error for an option at the end of the line or followed by another option."""
    return UsageError(f"{name} needs a value{expected(option)}")


def expected(option: Option) -> str:
    """Return `; expected -c N, for example: -c 32768`."""
    form = option.form or ("on|off" if option.kind == "optswitch" else "")
    example = f", for example: {option.example}" if option.example else ""
    return f"; expected {option.names[0]} {form}".rstrip() + example


def _convert(bound: BoundOption, text: str) -> Any:
    option = bound.option
    if option.kind in ("switch", "optswitch"):
        return switch_state(text, bound.default)
    if option.kind == "int":
        return _int(text)
    if option.kind == "float":
        return _float(text)
    if option.kind == "path":
        if not text:
            raise ValueError("is empty")
        if "\0" in text:
            raise ValueError("has a byte of zeros, which no file name has")
        try:
            return Path(text).expanduser()
        except RuntimeError:
            raise ValueError("names the home folder of an unknown user") from None
    if option.kind in ("type", "choice"):
        choice = _choice(option, text)
        return int(choice) if isinstance(bound.default, int) else choice
    if option.parse is not None:
        return option.parse(text)
    return text


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a whole number") from None
    if not number.is_integer():
        raise ValueError("is not a whole number")
    return int(number)


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number (write '.' for decimals)") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _choice(option: Option, text: str) -> str:
    for choice in option.choices:
        if choice.lower() == text.lower():
            return choice
    near = nearest(text, option.choices)
    hint = f"; did you mean {near}?" if near else ""
    raise ValueError(f"is not one of {', '.join(option.choices)}{hint}")


def labelled_file(text: str) -> tuple[str, Path]:
    """Split `LABEL=FILE`; a file whose name contains a `=` is meant literally if it exists."""
    label, equals, name = text.partition("=")
    if not equals or Path(text).exists():
        return "", Path(text)
    if not label.strip() or not name:
        raise UsageError(f'"{text}" is not of the form LABEL=FILE')
    return label.strip(), Path(name)


def value_warnings(given: Iterable[tuple[BoundOption, str, str]]) -> list[str]:
    """Return warnings about likely mistakes in values, given (option, name as typed, value)."""
    warnings: list[str] = []
    for bound, name, text in given:
        if " -" in text and not bound.option.text:
            warnings.append(f'the value of {name} contains " -"; is a quote missing? ({_short(text)})')
        if bound.path.startswith("sampling.lookup_cache") and "kv" in text.lower():
            warnings.append(f"{name} is an n-gram cache, not a dump of the KV cache (see --slot-save-path)")
    return warnings


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
