"""`LLAMA_ARG_*` variables: settings of containers and service files; option files and command lines override them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ikcli.cli.upstream import VARIABLES
from ikcli.settings.option import BoundOption

PREFIX = "LLAMA_ARG_"
_NOT_READ = frozenset({"bench", "quantize", "repack"})
"""Commands whose options are lists of tests, or whose model is an argument; the variables belong to a single run."""


def variables(command: str, options: Iterable[BoundOption]) -> Iterator[tuple[BoundOption, str, str]]:
    """Return (option, variable, value) of every variable of an option of the command that is set and not empty."""
    for bound in options:
        name = next((name for name in bound.option.variables if os.environ.get(name)), "")
        if name and bound.option.used_by(command) and command not in _NOT_READ:
            yield bound, name, os.environ[name]


def tokens_of_variables(command: str) -> list[str]:
    """Return the variables of options that have another form here, as tokens of a command line."""
    if command in _NOT_READ:
        return []
    return [f"{option}={os.environ[name]}" for name, option in VARIABLES.items() if os.environ.get(name)]


def unknown_variables(command: str, options: Iterable[BoundOption]) -> list[str]:
    """Return names that begin like a setting but are not known."""
    known = {name for bound in options for name in bound.option.variables} | VARIABLES.keys()
    if command in _NOT_READ:
        return []
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known and os.environ[name])
