"""Slash commands of a conversation; `/help` lists them. One function per command, whose docstring is its help."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikcli.chat.messages import parse_tools
from ikcli.console import transcript
from ikcli.console.dialogue import Dialogue
from ikcli.console.render import FOLDED, SHOWN
from ikcli.errors import IkError
from ikcli.server.http.generation_body import WITHOUT_EFFECT, GenerationBody
from ikcli.server.http.schema import names_of
from ikcli.suggest import nearest
from ikcli.text_files import read_text


class Leave(Exception):
    """The user wants to leave."""


@dataclass(frozen=True, slots=True)
class Command:
    """`form` describes what may follow the name; `files`: it is a file."""

    name: str
    run: Callable[[Dialogue, str], None]
    form: str = ""
    files: bool = False

    @property
    def help(self) -> str:
        return (self.run.__doc__ or "").strip()


COMMANDS: dict[str, Command] = {}
_OF_CHATS = ("chat_template_kwargs", "enable_thinking", "parallel_tool_calls", "reasoning_budget_tokens",
             "reasoning_effort", "reasoning_format", "response_format", "tool_choice")  # fmt: skip
_NOT_TO_SET = ("stream", "stream_options", "n_cmpl", "id_slot", "return_tokens", "return_progress", "response_fields",
               "sse_ping_interval", "timings_per_token")  # fmt: skip
_OF_REQUESTS = {names_of(GenerationBody, name)[0] for name in GenerationBody.model_fields}
SETTINGS = tuple(sorted({*_OF_CHATS, *_OF_REQUESTS} - {*_NOT_TO_SET, *WITHOUT_EFFECT}))
"""Fields of a request that a user may set."""
_ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "/retry": "/regen"}


def _command(name: str, form: str = "", *, files: bool = False) -> Callable[[Any], Any]:
    def add(run: Callable[[Dialogue, str], None]) -> Callable[[Dialogue, str], None]:
        COMMANDS[name] = Command(name, run, form, files)
        return run

    return add


def run(dialogue: Dialogue, line: str) -> None:
    """Run a line that begins with /; IkError if the command is unknown or fails."""
    name, _, rest = line.strip().partition(" ")
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        raise IkError(f"unknown command {name}; {f'did you mean {near}?' if near else '/help lists them'}")
    COMMANDS[name].run(dialogue, rest.strip())


def completions(dialogue: Dialogue, before: str) -> Iterator[tuple[str, int, str]]:
    """Return completions of the text before the cursor: commands, names of settings, files."""
    if not before.startswith("/") or "\n" in before:
        return
    name, blank, rest = before.partition(" ")
    if not blank:
        for command in COMMANDS.values():
            if command.name.startswith(name):
                yield command.name, len(name), command.help
    elif name == "/settings" and rest.startswith(("save ", "load ")):
        yield from _files(rest.partition(" ")[2].lstrip())
    elif name == "/settings" and " " not in rest and "=" not in rest:
        for key in ("load", "save", *SETTINGS):
            if key.startswith(rest):
                yield key, len(rest), ""
    elif name in COMMANDS and COMMANDS[name].files:
        yield from _files(rest)


def _files(text: str) -> Iterator[tuple[str, int, str]]:
    folder, slash, start = text.rpartition("/")
    try:
        found = sorted((Path(folder + slash) if slash else Path(".")).expanduser().iterdir())
    except (OSError, RuntimeError):
        return
    for path in found:
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            yield path.name + ("/" if path.is_dir() else ""), len(start), ""


def _file(text: str, command: str) -> Path:
    if not text:
        raise IkError(f"{command} needs the name of a file")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise IkError(f"{text}: {e}") from None


@_command("/help")
def _help(dialogue: Dialogue, rest: str) -> None:
    """list the commands"""
    for command in COMMANDS.values():
        dialogue.note(f"  {f'{command.name} {command.form}'.rstrip():<28} {command.help}")
    dialogue.note(
        "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C twice, leaves. Alt-Enter, or \\ at the end, begins a new line."
    )


@_command("/regen")
def _regen(dialogue: Dialogue, rest: str) -> None:
    """answer the last message again"""
    before, undone = list(dialogue.conversation.messages), dialogue.conversation.undone
    if not dialogue.conversation.drop_answer():
        raise IkError("no message to answer yet")
    if not dialogue.answer():
        dialogue.conversation.messages, dialogue.conversation.undone = before, undone


@_command("/edit", "[TEXT]")
def _edit(dialogue: Dialogue, rest: str) -> None:
    """change the last message, or put TEXT in its place, and answer that"""
    if not rest and not dialogue.edits:
        raise IkError("/edit needs the new text here")
    before = dialogue.conversation.undo()
    if before is None:
        raise IkError("no message to change yet")
    if rest:
        dialogue.say(rest)
    else:
        dialogue.offer(before)


@_command("/undo")
def _undo(dialogue: Dialogue, rest: str) -> None:
    """forget the last message and its answer"""
    if dialogue.conversation.undo() is None:
        raise IkError("no message to forget yet")
    n = len(dialogue.conversation.messages)
    dialogue.note(f"forgotten; {n} message{'' if n == 1 else 's'} left")


@_command("/clear")
def _clear(dialogue: Dialogue, rest: str) -> None:
    """begin a new conversation; system prompt, settings and tools stay"""
    dialogue.conversation.clear()
    dialogue.note("a new conversation")


@_command("/system", "[TEXT|off]")
def _system(dialogue: Dialogue, rest: str) -> None:
    """show, set or remove the system prompt"""
    if rest:
        dialogue.conversation.system = "" if rest == "off" else rest
    dialogue.note(f"system prompt: {dialogue.conversation.system or 'none'}")


@_command("/settings", "[NAME [VALUE]|save FILE|load FILE]")
def _settings(dialogue: Dialogue, rest: str) -> None:
    """show or set fields of requests (temperature, top_k, seed, n_predict, ...); default takes one back"""
    name, _, text = rest.partition(" ")
    if name in ("save", "load"):
        path = _file(text.strip(), f"/settings {name}")
        (_save_settings if name == "save" else _load_settings)(dialogue, path)
        return
    name, _, text = rest.replace("=", " ", 1).partition(" ")
    name, text = {"temp": "temperature"}.get(name, name), text.strip()
    fields = dialogue.conversation.fields
    if text == "default":
        fields.pop(name, None)
    elif text:
        if name not in SETTINGS:
            hint = "it is set with -c when the program starts" if name == "n_ctx" else "/settings lists them"
            raise IkError(f"{name} is not a setting that can be changed; {hint}")
        new = {name: _value(text)}
        dialogue.conversation.source.check(new)
        fields.update(new)
    for key, value in sorted(dialogue.settings().items()):
        if key == name or (not name and key in (*SETTINGS, "n_ctx")):
            dialogue.note(f"  {key:<24} {json.dumps(value, ensure_ascii=False)}{' *' if key in fields else ''}")
    if name and not text and name not in dialogue.settings():
        if name not in SETTINGS:
            raise IkError(f"{name} is not a setting; /settings lists them")
        dialogue.note(f"  {name} is not set")


def _save_settings(dialogue: Dialogue, path: Path) -> None:
    """Save all effective settings: those that were set, and the model's defaults that conversations do not override."""
    fields = dialogue.conversation.fields
    image = {
        name: value
        for name, value in sorted(dialogue.settings().items())
        if name in fields or (name in SETTINGS and name not in _OF_CHATS and value is not None)
    }
    transcript.save_settings(image, dialogue.conversation.source.name, path)
    dialogue.note(f"saved {len(image)} settings to {path}")


def _load_settings(dialogue: Dialogue, path: Path) -> None:
    dialogue.conversation.fields = transcript.load_settings(dialogue.conversation, path, SETTINGS)
    dialogue.note(f"loaded {len(dialogue.conversation.fields)} settings from {path}")


def _value(text: str) -> Any:
    """Parse JSON, or return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@_command("/stats")
def _stats(dialogue: Dialogue, rest: str) -> None:
    """tokens and speed of the last answer and of all, and how full the context is"""
    for title, counts in (("last answer", dialogue.conversation.last and dialogue.conversation.last.counts),
                          ("all answers", dialogue.conversation.total)):  # fmt: skip
        if counts:
            prompt = _rate(counts.n_prompt, counts.prompt_ms)
            dialogue.note(
                f"{title}: prompt {counts.n_prompt} tokens{prompt} and {counts.n_cached} cached, "
                f"answer {counts.n_predicted} tokens{_rate(counts.n_predicted, counts.predicted_ms)}"
                + (f", {counts.n_accepted} of {counts.n_drafted} guessed tokens right" if counts.n_drafted else "")
            )
    total = dialogue.conversation.total
    if total.n_ctx:
        dialogue.note(f"context: {total.n_past} of {total.n_ctx} tokens ({100 * total.n_past / total.n_ctx:.0f} %)")
    n = len(dialogue.conversation.messages)
    dialogue.note(f"conversation: {n} message{'' if n == 1 else 's'} with {dialogue.conversation.source.name}")


def _rate(n: int, ms: float) -> str:
    return f" ({1e3 * n / ms:.1f}/s)" if n and ms > 0 else ""


@_command("/think", "[on|off]")
def _think(dialogue: Dialogue, rest: str) -> None:
    """show what the model thought last; on shows thoughts from now on, off folds them"""
    if rest in ("on", "off"):
        dialogue.renderer.thinking = SHOWN if rest == "on" else FOLDED
        dialogue.note(f"thoughts are {dialogue.renderer.thinking}")
    elif rest:
        raise IkError("/think takes on, off or nothing")
    else:
        thoughts = dialogue.conversation.thoughts
        if not thoughts:
            raise IkError("the last answer has no thoughts")
        dialogue.renderer.dim(thoughts)


@_command("/grammar", "[FILE|off]", files=True)
def _grammar(dialogue: Dialogue, rest: str) -> None:
    """let answers follow a GBNF grammar (FILE), or a JSON schema (FILE.json)"""
    fields = dialogue.conversation.fields
    if rest and rest != "off":
        path = _file(rest, "/grammar")
        if path.suffix == ".json":
            new = {"json_schema": transcript.read_json(path)}
        else:
            new = {"grammar": read_text(path, error=IkError)}
        if dialogue.conversation.tools and "grammar" in new:
            raise IkError("a grammar and tools exclude each other; /tools off first")
        dialogue.conversation.source.check(new)
    if rest:
        for name in ("grammar", "json_schema"):
            fields.pop(name, None)
        fields.update({} if rest == "off" else new)
    kind = "GBNF" if fields.get("grammar") else "a JSON schema" if "json_schema" in fields else "none"
    dialogue.note(f"grammar: {kind}")


@_command("/image", "[FILE|off]", files=True)
def _image(dialogue: Dialogue, rest: str) -> None:
    """show the model an image together with your next message; off takes them back"""
    conversation = dialogue.conversation
    if rest == "off":
        conversation.images = []
    elif rest:
        conversation.attach(_file(rest, "/image"))
    n = len(conversation.images)
    dialogue.note(f"{n or 'no'} image{'' if n == 1 else 's'} with the next message")


@_command("/tools", "[FILE.json|off]", files=True)
def _tools(dialogue: Dialogue, rest: str) -> None:
    """show, set or remove the functions that the model may call (a list as OpenAI's API takes it)"""
    if rest == "off":
        dialogue.conversation.tools = []
    elif rest:
        path = _file(rest, "/tools")
        found = transcript.read_json(path)
        tools = found.get("tools") if isinstance(found, dict) and "tools" in found else found
        tools = [found] if isinstance(tools, dict) else tools
        try:
            parse_tools(tools)
        except IkError as e:
            raise IkError(f"{path}: {e}") from None
        if dialogue.conversation.fields.get("grammar"):
            raise IkError("a grammar and tools exclude each other; /grammar off first")
        dialogue.conversation.tools = list(tools or ())
    names = [tool.name for tool in parse_tools(dialogue.conversation.tools or None)]
    dialogue.note(f"tools: {', '.join(names) or 'none'}")


@_command("/save", "FILE", files=True)
def _save(dialogue: Dialogue, rest: str) -> None:
    """write the conversation to FILE (JSON)"""
    path = _file(rest, "/save")
    transcript.save(dialogue.conversation, path)
    dialogue.note(f"saved {len(dialogue.conversation.messages)} messages to {path}")


@_command("/load", "FILE", files=True)
def _load(dialogue: Dialogue, rest: str) -> None:
    """go on with the conversation in FILE"""
    path = _file(rest, "/load")
    transcript.load(dialogue.conversation, path)
    dialogue.note(f"loaded {len(dialogue.conversation.messages)} messages from {path}")


@_command("/exit")
def _exit(dialogue: Dialogue, rest: str) -> None:
    """leave (also /quit, Ctrl-D)"""
    raise Leave
