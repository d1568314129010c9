"""Option records: every flag is declared once, as metadata of a config field.

A config field created by `opt()` has its spellings, value form, topic, commands, help and an example. The parser, the
"ignored here" notice, suggestions, `--help`, completion and docs/parameters.md are all generated from these records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["switch", "optswitch", "int", "float", "str", "path", "type", "choice", "custom"]

ALL = "SCWBPILDE"
"""Letters of the commands.

Server, Chat, sweep-bench (W), Bench, Perplexity, Imatrix, pLan and warmup (L), batcheD-bench, Embed.
"""

COMMAND_LETTERS = {
    "serve": "S",
    "chat": "C",
    "sweep-bench": "W",
    "bench": "B",
    "perplexity": "P",
    "imatrix": "I",
    "plan": "L",
    "warmup": "L",
    "batched-bench": "D",
    "embed": "E",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One flag.

    `names` set the field (a switch to True); `negative` spellings take no value and set it to False. `form` is the text
    of the value in help and errors; `parse` converts a custom value and raises ValueError. `repeat` options collect
    their values in command-line order; `noop` is the reason why an accepted option does nothing. The value of a `text`
    option may begin with a dash. `env` names environment variables that also set it. `n_values` words form one value,
    joined by blanks. `joined` holds the letters of commands that join the values of a repeated option into one
    comma-separated text.
    """

    names: tuple[str, ...]
    kind: Kind
    help: str
    topic: str
    commands: str = ALL
    negative: tuple[str, ...] = ()
    form: str = ""
    example: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    repeat: bool = False
    bench_list: bool = True
    minimum: float | None = None
    noop: str = ""
    text: bool = False
    env: str = ""
    n_values: int = 1
    joined: str = ""

    @property
    def takes_value(self) -> bool:
        """Whether the token after the name always belongs to the option."""
        return self.kind not in ("switch", "optswitch")

    def used_by(self, command: str) -> bool:
        """Return whether `command` acts on this option; if not, it accepts the option and lists it as ignored.

        Commands without a letter have separate declarations and act on all of them.
        """
        return COMMAND_LETTERS.get(command, "") in self.commands

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables of the option; the first one that is set counts."""
        return tuple(self.env.split())

    @property
    def primary(self) -> str:
        """Name used in messages: the first long spelling, or else the first one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a command besides options: their form in the usage line and their number (None: any)."""

    form: str
    most: int | None = None


@dataclass(frozen=True, slots=True)
class BoundOption:
    """An option together with the config field it sets; `path` is like `n_ctx` or `sweep.pp`."""

    path: str
    option: Option
    default: Any


def opt(
    default: Any,
    names: str,
    kind: Kind,
    help: str,
    *,
    topic: str = "",
    factory: Callable[[], Any] | None = None,
    negative: str = "",
    **extra: Any,
) -> Any:
    """Return a dataclass field with an Option; `names` and `negative` are spellings separated by blanks."""
    option = Option(tuple(names.split()), kind, help, topic, negative=tuple(negative.split()), **extra)
    metadata = {"option": option}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def arguments(form: str, most: int | None = None) -> Any:
    """Return the dataclass field for arguments that are not options: a tuple of texts, called `args`."""
    return field(default=(), metadata={"arguments": Arguments(form, most)})


def arguments_of(config_type: type) -> Arguments | None:
    """Return the arguments of a command with this config besides options; None if it takes none."""
    found = [item.metadata["arguments"] for item in dataclasses.fields(config_type) if "arguments" in item.metadata]
    return found[0] if found else None


def iter_options(config_type: type, prefix: str = "") -> Iterator[BoundOption]:
    """Yield all options of a config dataclass in declaration order, nested groups included."""
    for item in dataclasses.fields(config_type):
        option = item.metadata.get("option")
        if option is not None:
            default = item.default if item.default is not dataclasses.MISSING else None
            yield BoundOption(prefix + item.name, option, default)
        elif "group" in item.metadata:
            yield from iter_options(item.metadata["group"], f"{prefix}{item.name}.")


def group(config_type: type) -> Any:
    """Return a dataclass field with a nested group of options."""
    return field(default_factory=config_type, metadata={"group": config_type})
