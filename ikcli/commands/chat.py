"""`ik chat`: continue a text or hold a conversation, with a model in this process or with a running server."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import ExitStack

from ikcli.cli.parser import ModelRun, Parsed
from ikcli.console import start
from ikcli.console.answers import AnswerCounts, AnswerSource, PromptCache
from ikcli.console.continuation import Continuation, Turns
from ikcli.console.conversation import Conversation
from ikcli.console.local import FileCache, LocalModel
from ikcli.console.render import Fancy, PlainRenderer, Renderer, end_note
from ikcli.console.repl import Repl
from ikcli.console.slash import completions
from ikcli.console.terminal import Complete, LineEditor, PlainInput, TerminalInput, interruptible
from ikcli.engine.run.session_log import Timings, timing_lines
from ikcli.errors import UsageError
from ikcli.log import hushed, log
from ikcli.settings.run import RunConfig


def run(run: ModelRun) -> int:
    """Chat with a model in this process; return the exit code."""
    start.check_options(run.config, run.given)
    config = start.unescaped(run.config)
    return _Run(config, run.given).with_model(LocalModel(config, run.planner))


def run_remote(parsed: Parsed) -> int:
    """Chat with a running server; return the exit code."""
    from ikcli.console.remote import RemoteModel  # HTTP takes its time to import

    start.check_options(parsed.config, parsed.given)
    config = start.unescaped(parsed.config)
    fields = start.request_fields(config, parsed.given)
    unused = start.unused_with_url(parsed.given)
    if unused:
        log(f"not used with --url, the server has its own: {' '.join(unused)}")
    return _Run(config, parsed.given).with_source(RemoteModel(config.chat.url, config.server.api_key, fields))


def _close(model: LocalModel) -> None:
    """Close the engine without logging its own timings: those of the answers are printed."""
    with hushed():
        model.close()


class _Run:
    """One run: its input, its mode, its final report."""

    def __init__(self, config: RunConfig, given: Collection[str]) -> None:
        self._config, self._chat = config, config.chat
        self._given = given
        self._in_tty, self._out_tty = sys.stdin.isatty(), sys.stdout.isatty()
        self._plain = self._chat.simple_io or not (self._in_tty and self._out_tty) or os.environ.get("TERM") == "dumb"
        self._system = start.system_prompt(config)
        self._prompt = start.given_prompt(config, given)
        wants_lines = self._chat.conversation or start.takes_turns(config)
        if self._prompt is None and not self._in_tty and (self._chat.single_turn or not wants_lines):
            self._prompt = start.piped_text() or None
        shows = bool(config.vision.images) and self._prompt is not None and not self._chat.conversation
        self._single_turn_only = self._chat.single_turn or shows
        self._total = AnswerCounts()

    def with_model(self, model: LocalModel) -> int:
        """Load the model, then continue."""
        talks = self._check(model)
        with hushed(talks and not self._plain and not self._config.verbose):
            model.load()
        with ExitStack() as stack:
            stack.callback(_close, model)
            cache = None
            if self._chat.prompt_cache is not None:
                cache = FileCache(
                    model,
                    self._chat.prompt_cache,
                    all_of_it=self._chat.prompt_cache_all,
                    read_only=self._chat.prompt_cache_ro,
                )
                log(f"prompt cache: {cache.n_tokens} tokens from {self._chat.prompt_cache}")
            if self._chat.verbose_prompt and self._prompt is not None:
                for token, text in model.tokens(self._prompt):
                    log(f"{token:6d} -> {text!r}")
            bos = model.bos if self._chat.in_prefix_bos else None
            code = self.with_source(model, cache, bos)
            if cache is not None:
                cache.finish()
        return code

    def with_source(self, source: AnswerSource, cache: PromptCache | None = None, bos: int | None = None) -> int:
        """Talk or continue a text; then print the timings on stderr."""
        talks = self._check(source)
        try:
            if talks:
                return self._converse(source, cache)
            return self._continue(source, cache, bos)
        finally:
            self._print_timings(source)

    def _check(self, source: AnswerSource) -> bool:
        """Return whether this is a conversation; raise UsageError if something required is missing."""
        terminal = self._in_tty and self._out_tty
        talks = start.is_conversation(self._config, source, self._prompt, terminal=terminal)
        if talks and self._single_turn_only and not self._prompt:
            raise UsageError("-st answers one prompt: give it with -p, -f or through a pipe")
        if not talks and self._prompt is None and not start.takes_turns(self._config):
            lacks = "" if source.has_template else "the model has no chat template, and "
            raise UsageError(f"{lacks}no prompt is given: pass it with -p, -f or through a pipe, or use -i")
        if not talks and self._system:
            raise UsageError("-sys belongs to a conversation; add -cnv or -st, or put the text into the prompt")
        return talks

    # --- conversation -----------------------------------------------------------------------------------------------
    def _converse(self, source: AnswerSource, cache: PromptCache | None) -> int:
        conversation = Conversation(source, self._system, cache=cache)
        for path in self._config.vision.images:
            conversation.attach(path)
        renderer: Renderer = PlainRenderer() if self._plain or self._chat.color is False else Fancy()
        try:
            if self._single_turn_only:
                return self._single_turn(conversation, renderer)
            repl: Repl
            editor = self._input(lambda before: completions(repl, before))
            repl = Repl(conversation, editor, renderer)
            if not self._plain:
                repl.note(f"{source.name}: a conversation; /help lists the commands, Ctrl-D leaves")
            if self._prompt:
                repl.say(self._prompt)
            repl.run()
            return 0
        finally:
            self._total = conversation.total

    def _single_turn(self, conversation: Conversation, renderer: Renderer) -> int:
        conversation.say(self._prompt or "")
        stream = conversation.ask()
        with interruptible(stream.cancel):
            renderer.show(stream)
        conversation.take(stream.answer)
        note = end_note(stream.answer)
        if note:
            log(f"[{note}]")
        return 130 if stream.answer.stop == "cancelled" else 0

    # --- continuation -----------------------------------------------------------------------------------------------
    def _continue(self, source: AnswerSource, cache: PromptCache | None, bos: int | None) -> int:
        turns = start.takes_turns(self._config)
        prompt = self._prompt or ""
        reverse = self._config.prompt.reverse_prompt
        text = Continuation(source, prompt, reverse, cache, display=self._chat.display_prompt)
        try:
            if turns:
                first = self._chat.interactive_first or self._prompt is None
                form = Turns(first, self._chat.in_prefix, self._chat.in_suffix, bos)
                text.converse(self._input(lambda before: ()), form)
                return 0
            answer = text.once()
            if self._out_tty:
                text.end_line()
            return 130 if answer.stop == "cancelled" else 0
        finally:
            self._total = text.total

    def _input(self, complete: Complete) -> TerminalInput:
        if self._plain:
            return PlainInput(multiline=self._chat.multiline, echo_prompt=self._in_tty)
        return LineEditor(complete, multiline=self._chat.multiline, color=self._chat.color is not False)

    def _print_timings(self, source: AnswerSource) -> None:
        t = self._total
        times = Timings(source.load_ms / 1e3, t.prompt_ms / 1e3, t.n_prompt, t.predicted_ms / 1e3, t.n_predicted)
        lines = timing_lines(times)
        if lines:
            log()
        for line in lines:
            log(line)
        if t.n_cached:
            log(f"llama_print_timings:     from cache = {t.n_cached:10d} tokens of prompts")
