"""Options of a server in front of others: those of the front itself, and how to pass on the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ikcli.cli.argv import canonical_name, read_tokens
from ikcli.cli.environment import variables
from ikcli.cli.parser import Given, Scanner, all_options, names_of, takes_value
from ikcli.settings.records import ScaledFile
from ikcli.settings.run import RunConfig

_INPUTS = frozenset(
    (
        "model", "server.model_draft", "server.chat_template_file", "server.banned_string_file",
        "sampling.grammar_file", "sampling.json_schema_file", "sampling.lookup_cache_static", "adapters.lora",
        "adapters.lora_scaled", "adapters.control_vector", "adapters.control_vector_scaled",
    )
)  # fmt: skip
PATHS = _INPUTS | {
    "server.slot_save_path", "server.cache_disk", "server.log_prompts_dir",
    "sampling.lookup_cache_dynamic", "adapters.control_vector_path",
}  # fmt: skip
"""Fields with files that a server reads, and those with folders and files of its machine."""


def passed_on(
    command: str, argv: Sequence[str], without: Callable[[str], bool], *, environment: bool = True
) -> list[str]:
    """Return the options of a command line, of its option files and of the environment, for another process.

    `without` tells whether to leave out the option of a field; options that the command ignores are also left out.
    Without `environment`, the process itself reads the variables, as it sees the same ones.
    """
    names = _texts(command)
    tokens = read_tokens(argv, command, functools.partial(takes_value, command), names)
    line, files = Scanner(command, tokens.line).given, Scanner(command, tokens.files).given
    found = variables(command, all_options(command)) if environment else ()
    variable = [Given(bound, bound.option.primary, text, negative=False) for bound, _, text in found]
    single = [given for given in variable + files + line if not given.bound.option.repeat]
    lists = [given for given in line + files if given.bound.option.repeat]
    used = [one for one in single + lists if one.bound.option.used_by(command) and not without(one.bound.path)]
    return [token for given in used for token in _tokens(given, names)]


def layered(command: str, *sets: Sequence[str], without: Callable[[str], bool] = lambda path: False) -> list[str]:
    """Merge several sets of options: the value of a field in a later set replaces earlier ones.

    `without` tells whether to leave out a field.
    """
    names = _texts(command)
    layers: list[list[str]] = []
    said: set[str] = set()
    for tokens in reversed(sets):
        given = [one for one in Scanner(command, tokens).given if one.bound.path not in said]
        said |= {one.bound.path for one in given}
        layers.append([t for one in given if not without(one.bound.path) for t in _tokens(one, names)])
    return [token for layer in reversed(layers) for token in layer]


def _texts(command: str) -> dict[str, bool]:
    """Return the names of options, and whether their value may be any text."""
    return {name: bound.option.text for name, (bound, _) in names_of(command).items()}


def paths_passed_on(command: str, config: RunConfig) -> tuple[list[str], list[Path]]:
    """Return the options for a process in another folder, with every path as a separate word, and the files to read."""
    words: list[str] = []
    inputs: list[Path] = []
    for bound in all_options(command):
        if bound.path not in PATHS:
            continue
        value: Any = config
        for name in bound.path.split("."):
            value = getattr(value, name)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            scale = [repr(item.scale)] if isinstance(item, ScaledFile) else []
            path = (item.path if isinstance(item, ScaledFile) else item).absolute()
            words += [bound.option.primary, str(path), *scale]
            if bound.path in _INPUTS:
                inputs.append(path)
    return words, inputs


def _tokens(given: Given, names: Mapping[str, bool]) -> list[str]:
    name = given.name if given.negative else given.bound.option.primary
    if given.text is None:
        return [name]
    if given.bound.option.text and canonical_name(given.text) not in names:
        return [name, given.text]  # separators in a text stay unchanged
    return [f"{name}={given.text}"]
