"""Options of the prompt, and of conversations in a terminal."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.values import (
    parse_text_item,
)

# One partial per topic, with the values that its options share.
_chat = partial(opt, topic="chat", commands="C")
_prompt = partial(opt, topic="prompt", commands="CPIE")


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Text to start from (chat, perplexity, imatrix)."""

    prompt: str = _prompt("", "-p --prompt", "str", form="TEXT", example='-p "Once upon a time"', text=True,
        help="the prompt")
    file: Path | None = _prompt(None, "-f --file", "path", form="FILE", example="-f wiki.test.raw",
        help="read the text from a file; gzip, bzip2 and xz files are decompressed")
    binary_file: Path | None = _prompt(None, "-bf --binary-file", "path", commands="P", form="FILE",
        example="-bf arc-easy-validation.bin",
        help="same as -f, but the file is used unchanged: no escapes, and no line end is dropped")
    escape: bool = _prompt(True, "-e --escape", "switch", negative="--no-escape", example="-e",
        help="interpret \\n, \\t and so on in the prompt")
    parse_special: bool = _prompt(False, "--parse-special", "switch", commands="PI", example="--parse-special",
        help="parse names of control tokens in the text, such as those of a chat template, as these tokens")
    reverse_prompt: tuple[str, ...] = _prompt((), "-r --reverse-prompt", "custom", commands="CS", form="TEXT",
        example='-r "User:"', parse=parse_text_item, repeat=True, text=True,
        help="stop generation at this text (in chat, then ask for input); repeatable")
    keep: int = _prompt(0, "--keep", "int", commands="CS", form="N", example="--keep 32",
        help="prompt tokens to keep when the context is full; -1 = all")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """chat: continue a text or hold a conversation in a terminal."""

    conversation: bool | None = _chat(None, "-cnv --conversation", "switch", negative="-no-cnv --no-conversation",
        example="-cnv",
        help="answer turn by turn with the chat template. Default: on in a terminal, if the model has a template and "
        "no prompt is given")
    single_turn: bool = _chat(False, "-st --single-turn", "switch", example="-st",
        help="answer the prompt as the only turn of a conversation, then stop")
    system: str = _chat("", "-sys --system-prompt", "str", form="TEXT", example='-sys "Answer in rhymes."', text=True,
        help="system prompt: instructions that a conversation begins with")
    system_file: Path | None = _chat(None, "-sysf --system-prompt-file -spf", "path", form="FILE",
        example="-sysf system.txt", help="file with the system prompt")
    url: str = _chat("", "--url", "str", form="URL", example="--url http://127.0.0.1:8080",
        help="talk to this running server instead of loading a model")
    interactive: bool = _chat(False, "-i --interactive", "switch", example="-i",
        help="without a template: ask for input when generation stops")
    interactive_first: bool = _chat(False, "-if --interactive-first", "switch", example="-if",
        help="same as -i, but ask for input immediately")
    in_prefix: str = _chat("", "--in-prefix", "str", form="TEXT", example='--in-prefix " "', text=True,
        help="text put before every input of -i")
    in_suffix: str = _chat("", "--in-suffix", "str", form="TEXT", example='--in-suffix "Bot:"', text=True,
        help="text put after every input of -i")
    in_prefix_bos: bool = _chat(False, "--in-prefix-bos", "switch", example="--in-prefix-bos",
        help="begin every input of -i with the BOS token")
    multiline: bool = _chat(False, "-mli --multiline-input", "switch", example="-mli",
        help="Enter begins a new line, Alt-Enter sends (without a line editor: a line that ends with / sends)")
    special: bool = _chat(False, "-sp --special", "switch", commands="SC", example="-sp",
        help="show control tokens in the text; a server also sends them")
    display_prompt: bool = _chat(True, "--display-prompt", "switch", negative="--no-display-prompt",
        example="--no-display-prompt", help="print the prompt before the text that continues it")
    verbose_prompt: bool = _chat(False, "--verbose-prompt", "switch", example="--verbose-prompt",
        help="list the tokens of the prompt")
    color: bool | None = _chat(None, "-co --color", "optswitch", negative="--no-color", example="--color off",
        help="colours and Markdown. Default: on in a terminal")
    simple_io: bool = _chat(False, "--simple-io", "switch", example="--simple-io",
        help="plain lines in and out, without line editor, colours and Markdown")
    prompt_cache: Path | None = _chat(None, "--prompt-cache", "path", form="FILE", example="--prompt-cache prompt.bin",
        help="file for the cache of the prompt: read at the start if it exists, written when the prompt has been "
        "computed")
    prompt_cache_all: bool = _chat(False, "--prompt-cache-all", "switch", example="--prompt-cache-all",
        help="write the file at the end, with inputs and answers")
    prompt_cache_ro: bool = _chat(False, "--prompt-cache-ro", "switch", example="--prompt-cache-ro",
        help="never write the file")
