"""How a run of the console starts: the request, the mode, and the input and output."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from ikcli.console.answers import AnswerSource, cache_path_problem
from ikcli.errors import IkError, UsageError
from ikcli.measure.text import unescape
from ikcli.sampling.params import SamplerParams
from ikcli.server.http.params import defaults_of
from ikcli.server.http.templates import chat_defaults
from ikcli.settings.option import iter_options
from ikcli.settings.run import RunConfig
from ikcli.text_files import as_measured, read_measured, read_text


def unescaped(config: RunConfig) -> RunConfig:
    """Return the settings with escapes in their texts processed, unless --no-escape forbids that."""
    prompt, chat, escape = config.prompt, config.chat, config.prompt.escape
    reverse = tuple(_unescaped(text, escape) for text in prompt.reverse_prompt)
    prefix, suffix = _unescaped(chat.in_prefix, escape), _unescaped(chat.in_suffix, escape)
    return replace(
        config,
        prompt=replace(prompt, reverse_prompt=reverse, prompt=_unescaped(prompt.prompt, escape)),
        chat=replace(chat, in_prefix=prefix, in_suffix=suffix, system=_unescaped(chat.system, escape)),
    )


def given_prompt(config: RunConfig, given: Collection[str]) -> str | None:
    """Return the text of -p or -f, None if there is none; the newline at the end of a file is dropped."""
    if config.prompt.file is not None:
        text = read_measured(config.prompt.file, "; name a readable file with -f").decode("utf-8", "surrogateescape")
        return _unescaped(text.removesuffix("\n"), config.prompt.escape)
    return config.prompt.prompt if "prompt.prompt" in given else None


def piped_text() -> str:
    """Return all of standard input, without its last newline."""
    return as_measured(sys.stdin.buffer.read(), "standard input").decode("utf-8", "replace").removesuffix("\n")


def system_prompt(config: RunConfig) -> str:
    """Return the text of -sys or -sysf."""
    if config.chat.system_file is not None:
        return read_text(config.chat.system_file, "--system-prompt-file", IkError).removesuffix("\n")
    return config.chat.system


def is_conversation(config: RunConfig, source: AnswerSource, prompt: str | None, *, terminal: bool) -> bool:
    """Return whether to talk in turns with the template; UsageError for options that exclude each other."""
    chat = config.chat
    if config.vision.images and (chat.conversation is False or takes_turns(config) or not source.has_template):
        raise UsageError("--image belongs to a conversation with a chat template; name one with --chat-template")
    if chat.conversation is False:
        if chat.single_turn:
            raise UsageError("-st is one turn of a conversation and -no-cnv forbids those; leave one of them out")
        return False
    if takes_turns(config):
        return False
    if chat.conversation or chat.single_turn:
        if not source.has_template:
            raise IkError("the model has no chat template; name one with --chat-template, or use -no-cnv")
        return True
    return source.has_template and (bool(config.vision.images) or (terminal and prompt is None))


def takes_turns(config: RunConfig) -> bool:
    """Return whether a user takes turns without a template, which texts around inputs also request, as in llama-cli."""
    chat = config.chat
    own_form = bool(chat.conversation and (chat.in_prefix or chat.in_suffix))
    return chat.interactive or chat.interactive_first or own_form


def check_options(config: RunConfig, given: Collection[str]) -> None:
    """Raise UsageError for options that cannot work, before a model is loaded."""
    chat, prompt = config.chat, config.prompt
    if prompt.prompt and prompt.file is not None:
        raise UsageError("-p and -f both give the prompt; leave one of them out")
    if prompt.prompt and chat.conversation is False and config.vision.images:
        raise UsageError("--image belongs to a conversation and -no-cnv forbids those; leave one of them out")
    if chat.system and chat.system_file is not None:
        raise UsageError("-sys and -sysf both give the system prompt; leave one of them out")
    if chat.prompt_cache is not None:
        problem = cache_path_problem(chat.prompt_cache, read_only=chat.prompt_cache_ro)
        if problem:
            raise UsageError(problem)
    elif chat.prompt_cache_all or chat.prompt_cache_ro:
        name = "--prompt-cache-all" if chat.prompt_cache_all else "--prompt-cache-ro"
        raise UsageError(f"{name} needs the file that it applies to: --prompt-cache FILE")
    if chat.url:
        local = {
            "model": "-m",
            "chat.prompt_cache": "--prompt-cache",
            "chat.special": "--special",
            "chat.verbose_prompt": "--verbose-prompt",
            "chat.in_prefix_bos": "--in-prefix-bos",
            "dry_run": "--dry-run",
        }
        for path, name in local.items():
            if path in given:
                raise UsageError(f"{name} applies to a model in this process and cannot be used with --url")


def request_fields(config: RunConfig, given: Collection[str]) -> dict[str, Any]:
    """Return the given options as fields of a request to a server."""
    defaults = defaults_of(config)
    out: dict[str, Any] = {}
    for field in fields(SamplerParams):
        if f"sampling.{field.name}" in given:
            value = getattr(defaults, field.name)
            out[field.name] = list(value) if isinstance(value, tuple) else value
    if "seed" in given:
        out["seed"] = config.seed
    if "sampling.sampler_seq" in given:
        out["samplers"] = list(defaults.samplers)
    if "sampling.logit_bias" in given:
        out["logit_bias"] = [[token, bias] for token, bias in defaults.logit_bias]
    if "n_predict" in given:
        out["n_predict"] = config.n_predict
    if "prompt.keep" in given:
        out["n_keep"] = config.prompt.keep
    if defaults.stop:
        out["stop"] = list(defaults.stop)
    if defaults.grammar:
        out["grammar"] = defaults.grammar
    if defaults.json_schema is not None:
        out["json_schema"] = defaults.json_schema
    if defaults.banned_strings:
        out |= {"banned_strings": list(defaults.banned_strings), "banned_n": defaults.banned_n}
    if "server.reasoning" in given and config.server.reasoning != "auto":
        out["enable_thinking"] = config.server.reasoning == "on"
    if "server.reasoning_budget" in given:
        out["reasoning_budget_tokens"] = config.server.reasoning_budget
    if "server.reasoning_format" in given:
        out["reasoning_format"] = config.server.reasoning_format
    if any(f"server.{option}" in given for option in _TEMPLATE_OPTIONS):
        out["chat_template_kwargs"] = dict(chat_defaults(config).template_kwargs)
    if config.server.reasoning_effort == "none":
        out["reasoning_effort"] = "none"
    if "server.cache_prompt" in given:
        out["cache_prompt"] = config.server.cache_prompt
    return out


_TEMPLATE_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "reasoning_preserve")
_SENT = ("seed", "n_predict", "verbose", "verbosity")
_SENT_OF_SERVER = ("api_key", "banned_string_file", "banned_n", "reasoning", "reasoning_budget", "reasoning_format",
                   "cache_prompt", *_TEMPLATE_OPTIONS)  # fmt: skip


def unused_with_url(given: Collection[str]) -> list[str]:
    """Return the given options that only a model in this process could follow."""
    names = {bound.path: bound.option.names[0] for bound in iter_options(RunConfig)}
    used = {*_SENT, *(f"server.{name}" for name in _SENT_OF_SERVER)}
    groups = ("chat.", "prompt.", "sampling.")
    unused = [path for path in names if path in given and path not in used and not path.startswith(groups)]
    lookup = [path for path in names if path in given and path.startswith("sampling.lookup_cache")]
    return [names[path] for path in unused + lookup]


def _unescaped(text: str, escape: bool) -> str:
    if not escape:
        return text
    return unescape(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
