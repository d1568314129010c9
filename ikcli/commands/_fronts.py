"""Options of a server in front of others: which are its own, and how the rest is passed on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from ikcli.commands._argv import canonical_name, read_tokens
from ikcli.commands._environment import variables
from ikcli.commands._options import Given, Scanner, all_options, names_of, takes_value

OF_THE_FRONT = frozenset(
    "server." + name
    for name in ("host", "port", "api_key", "api_key_file", "keys", "timeout", "threads_http", "metrics", "path",
                 "log_format", "webui", "ui", "api_prefix", "ssl_key_file", "ssl_cert_file", "shutdown_timeout",
                 "cors_origins")
)  # fmt: skip
"""Fields that are about the port in front, not about the processes behind it."""


def passed_on(command: str, argv: Sequence[str], without: Callable[[str], bool]) -> list[str]:
    """The options of a command line, of the files that it names and of the environment, for another process.

    `without` says of a field whether its option is left out; so are those that the command ignores.
    """
    names = {name: bound.option.text for name, (bound, _) in names_of(command).items()}
    tokens = read_tokens(argv, command, functools.partial(takes_value, command), names)
    line, files = Scanner(command, tokens.line).given, Scanner(command, tokens.files).given
    environment = [
        Given(bound, bound.option.primary, text, negative=False)
        for bound, _, text in variables(command, all_options(command))
    ]
    single = [given for given in environment + files + line if not given.bound.option.repeat]
    lists = [given for given in line + files if given.bound.option.repeat]
    used = [one for one in single + lists if one.bound.option.used_by(command) and not without(one.bound.path)]
    return [token for given in used for token in _tokens(given, names)]


def _tokens(given: Given, names: Mapping[str, bool]) -> list[str]:
    if given.text is None:
        return [given.name]
    if given.bound.option.text and canonical_name(given.text) not in names:
        return [given.name, given.text]  # separators in a text stay what they are
    return [f"{given.name}={given.text}"]
