"""Write help texts from the option declarations: at most 100 columns, no import beyond the config.

`ik --help` lists the commands by task and no options.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import ikcli
from ikcli.cli.table import GROUPS, TOPIC_TITLES, CommandInfo

if TYPE_CHECKING:
    from ikcli.settings.option import BoundOption

WIDTH = 100
_INDENT = 36

_NOTES = {
    "sweep-bench": (
        "Each row is measured at a context depth of N_KV tokens: PP prompt tokens (T_PP seconds, S_PP tokens/s) and TG "
        "generated tokens (T_TG, S_TG). Rows start at N_KV = 0 and step by the ubatch up to the context size.",
    ),
    "sweep-bench-plot": (
        "Reads the jsonl records and the tables of sweep-bench (of ik and of llama-sweep-bench) from bare files and "
        "from whole logs, also quoted with > or wrapped by a console. Several tables in one file become separate "
        "curves, numbered #1, #2. Curves with the same label are averaged per depth and drawn with their standard "
        "deviation.",
        "Tables of batched-bench are skipped: their N_KV is the total number of tokens, not the context depth.",
    ),
    "perplexity": (
        "Without -m and -f it uses the bundled demo model and text. The context (-c) defaults to 512 tokens; -b 2048 "
        "evaluates several chunks side by side. --hellaswag, --winogrande and --multiple-choice score the tasks of a "
        "file instead: texts of at most -c tokens, as many side by side as fit -b.",
    ),
    "batched-bench": (
        "Processes B prompts of PP tokens each, then generates TG tokens per sequence, B per step. Rates count the "
        "tokens of all sequences. N_KV is the number of tokens in the cache at the end. -c limits it (default: what "
        "the largest test needs); larger tests are skipped with a notice.",
    ),
    "chat": (
        "With a prompt (-p, -f or a pipe) it continues that text. In a terminal without a prompt it holds a "
        "conversation with the model's chat template; /help lists the commands. The text goes to stdout, everything "
        "else to stderr. --url talks to a running server instead of loading a model.",
    ),
    "plan": ("Prints rules, bytes per device and the KV cache. Exits with code 1 if the model does not fit.",),
    "quantize": (
        "TYPE is a file type by name (in any case) or by number. Without out.gguf the result is ggml-model-TYPE.gguf "
        "beside the input.",
    ),
    "repack": ("Short for ik quantize --repack, and with --unrepack for the way back; needs no TYPE.",),
}


def _notes(command: str) -> tuple[str, ...]:
    """Return paragraphs about a command, some of them taken from the code that does its work."""
    notes = _NOTES.get(command, ())
    if command == "quantize-stats":
        from ikcli.study.quantize_stats import LEGEND

        notes += tuple(LEGEND)
    return notes


def _types(command: str) -> list[str]:
    """List the values of TYPE, one in a line, so that a search for a property finds names."""
    if command not in ("quantize", "repack"):
        return []
    from ikcli.quant.type_help import type_lines

    return ["", "Types:", *type_lines()]


def version_line() -> str:
    """Return `ik 0.1.0 (commit 1f0c2d9e8b7a)`, without the commit where it is not known."""
    from ikcli.commit import commit

    found = commit()
    return f"ik {ikcli.__version__}" + (f" (commit {found[:12]})" if found else "")


def main_help() -> str:
    """Return the text of `ik --help`."""
    lines = ["usage: ik COMMAND [OPTIONS]", "", "Run, quantize and measure large language models from GGUF files.", ""]
    for title, members in GROUPS:
        lines += [f"{title}:", *(_command_line(info) for info in members), ""]
    lines += [
        "ik COMMAND --help shows the options of a command; all commands that run a model share one set.",
        'Without -m, ik uses the bundled demo model:  ik chat -p "Once upon a time"',
    ]
    return "\n".join(lines)


def _command_line(info: CommandInfo) -> str:
    names = ", ".join((info.name, *info.aliases))
    return f"  {names:<17} {info.summary}"


def command_help(info: CommandInfo) -> str:
    """Return the text of `ik COMMAND --help`.

    Options of a model run are grouped by topic; those of other commands keep the order of their declaration.
    """
    from ikcli.cli.parser import all_options, usage

    lines = [f"usage: {usage(info.name)}", "", f"{_sentence(info.summary)}", ""]
    notes = _notes(info.name)
    own = [bound for bound in all_options(info.name) if bound.option.used_by(info.name)]
    if not info.runs_model:
        lines += ["Options:", *(line for bound in own for line in option_lines(bound)), *_GENERAL]
        return "\n".join([*lines, *("\n" + textwrap.fill(note, WIDTH) for note in notes), *_types(info.name)])
    for note in notes:
        lines += [textwrap.fill(note, WIDTH), ""]
    for topic, title in TOPIC_TITLES:
        members = [bound for bound in own if bound.option.topic == topic]
        if not members:
            continue
        lines.append(f"{title}:")
        if topic == "accepted, no effect":
            lines += _wrap(" ".join(name for m in members for name in m.option.names), "  ")
        else:
            lines += [line for bound in members for line in option_lines(bound)]
            lines += _GENERAL if topic == "general" else ()
        lines.append("")
    return "\n".join([*lines, "Options of other commands are accepted and listed once as ignored."])


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def option_lines(bound: BoundOption) -> list[str]:
    """Return the help entry of one option."""
    option = bound.option
    form = option.form or ("[on|off]" if option.kind == "optswitch" else "")
    head = ", ".join((*option.names, *option.negative)) + (f" {form}" if form else "")
    text = option.help
    default = default_text(bound)
    if default:
        text += f" (default {default})"
    if option.env:
        text += f" ({', '.join(option.variables)})"
    return _entry(head, text)


def default_text(bound: BoundOption) -> str:
    """Return the default as a user would type it, or an empty text if there is none to print."""
    value: Any = bound.default
    if bound.path in ("n_threads", "n_threads_batch"):
        return "auto" if bound.path == "n_threads" else ""
    if bound.option.kind == "switch" or value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _entry(head: str, text: str) -> list[str]:
    body = textwrap.wrap(text, WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    if len(head) <= _INDENT - 4:
        first = f"  {head:<{_INDENT - 2}}{body[0] if body else ''}"
        return [first, *(" " * _INDENT + line for line in body[1:])]
    return [*_wrap(head, "  "), *(" " * _INDENT + line for line in body)]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


_GENERAL = (
    *_entry("--config FILE, @FILE", "more options from a TOML file, or one option per line"),
    *_entry("--version, -h, --help, --usage", "print and stop"),
)
