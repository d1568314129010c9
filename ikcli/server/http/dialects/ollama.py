"""Conversion of Ollama requests to this server's own: options, messages, tools, answer format.

As in Ollama, unknown options are ignored. Options for loading a model have no effect here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict

from ikcli.chat.content import arguments_text, note
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request
from ikcli.server.http.schema import Body, Flag, Text, field, shown_as, whole
from ikcli.server.http.turns import image_text
from ikcli.settings.sampling import sampling_values

_RENAMED = {
    "num_predict": "n_predict",
    "num_keep": "n_keep",
    "penalize_newline": "penalize_nl",
    "stop": "stop",
    "seed": "seed",
} | {item.name: item.name for item, _ in sampling_values() if item.name not in ("n_probs", "post_sampling_probs")}
_EFFORTS = ("low", "medium", "high", "max")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(-?)(?:([0-9]{{1,18}})|((?:{_PART.pattern}){{1,9}}))")
MAX_TOP = 20
"""Maximum number of alternatives per token that `top_logprobs` may ask for."""


class OllamaBody(Body, frozen=True):
    """Fields of Ollama's requests about a model."""

    model: Text = field(..., "name of the model", names="model name")
    stream: Flag = field(True, "JSON lines; default true")
    keep_alive: Annotated[Any, shown_as()] = field(None, "seconds or a duration such as 5m")


class OllamaGenerationBody(OllamaBody, frozen=True):
    """Fields that /api/chat and /api/generate share."""

    options: dict[str, Any] = field({}, "num_predict, temperature, top_k, stop, seed and so on")
    format: Annotated[Any, shown_as()] = field(None, "json, or a JSON schema")
    think: Annotated[Any, shown_as()] = field(None, "true, false, low, medium or high")
    logprobs: Flag = field(False, "return the log-probabilities of the tokens")
    top_logprobs: Annotated[int, Strict(), Ge(0), Le(MAX_TOP), BeforeValidator(whole)] = field(
        0, "return those of this many other tokens at every position"
    )

    @property
    def n_top(self) -> int | None:
        """Number of alternatives per token that the request asks for; None without `logprobs`."""
        return self.top_logprobs if self.logprobs else None


class OllamaChatBody(OllamaGenerationBody, frozen=True):
    """Request body of /api/chat."""

    messages: list[Any] = field([], "the conversation")
    tools: list[Any] = field([], "functions that the model may call")


class OllamaGenerateBody(OllamaGenerationBody, frozen=True):
    """Request body of /api/generate."""

    prompt: Text = field("", "text that is answered or continued")
    suffix: Text = field("", "fill in what is before this text")
    system: Text = field("", "the system prompt")
    images: list[Any] = field([], "pictures before the text, in base64")
    raw: Flag = field(False, "take the prompt as it is, without a chat template")
    context: list[Any] = field([], "that of the last answer")
    template: Annotated[Any, shown_as()] = field(None, "not supported")


def generation_fields(body: OllamaGenerationBody) -> dict[str, Any]:
    """Return the generation fields of `options`, `format`, `logprobs` and `stream`.

    Raise ApiError naming the faulty field.
    """
    out = {_RENAMED[name]: value for name, value in body.options.items() if name in _RENAMED and value is not None}
    n_predict = out.get("n_predict")
    if isinstance(n_predict, int) and (n_predict < -2 or n_predict == 0):
        out["n_predict"] = -1  # as in Ollama, where these values also mean an unlimited answer
    out["stream"] = body.stream
    out |= _format(body.format)
    keep_alive(body.keep_alive)
    if body.n_top is not None:
        out["n_probs"] = max(body.n_top, 1)
    return out


def _format(value: Any) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if value == "json":
        return {"json_schema": {"type": "object"}}
    if not isinstance(value, dict):
        raise bad_request(f'format must be "json" or a JSON schema, not {f.shown(value)}')
    return {"json_schema": value}


def keep_alive(value: Any) -> float | None:
    """Return `keep_alive` in seconds, or None if absent.

    The field is a number of seconds or a duration like 1h30m; a negative value means forever.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise bad_request(f"keep_alive must be a number of seconds or a duration such as 5m, not {f.shown(value)}")
    sign, number, parts = found.groups()[:3]
    if number:
        return float(sign + number)
    return float(sign + "1") * sum(float(n) * _SECONDS[unit] for n, unit in _PART.findall(parts))


def to_chat(body: OllamaChatBody, images: Images = NO_IMAGES) -> dict[str, Any]:
    """Return the body of an equivalent chat completion request, with its images in `images`."""
    out = generation_fields(body) | thinking(body)
    out["messages"] = _messages(body.messages, images)
    if body.tools:
        out["tools"] = [_tool(item, i) for i, item in enumerate(body.tools)]
    return out


def to_turn(body: OllamaGenerateBody, images: Images = NO_IMAGES) -> dict[str, Any]:
    """Convert as `to_chat` does, with the prompt of /api/generate as the only turn."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    prompt = {"role": "user", "content": _with_images(body.prompt, body.images, "images", images)}
    return generation_fields(body) | thinking(body) | {"messages": [*messages, prompt]}


def thinking(body: OllamaGenerationBody) -> dict[str, Any]:
    """Return the chat template settings that `think` asks for."""
    value = body.think
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value}}
    if value not in _EFFORTS:
        raise bad_request(f"think must be true, false, {', '.join(_EFFORTS)}, not {f.shown(value)}")
    return {"reasoning_effort": value, "chat_template_kwargs": {"enable_thinking": True}}


def _with_images(text: str, sources: list[Any], path: str, images: Images) -> str | list[dict[str, Any]]:
    """Return the content of a turn: its images, then its text."""
    if not sources:
        return text
    markers = [image_text(source, f"{path}[{i}]", images) for i, source in enumerate(sources)]
    return [{"type": "text", "text": part} for part in (*markers, *([text] if text else ()))]


def _messages(messages: list[Any], images: Images) -> list[dict[str, Any]]:
    """Return the messages.

    Ollama's calls have no ids, so results are matched to open calls by name or in order.
    """
    out = []
    open_calls: list[tuple[str, str]] = []
    for i, item in enumerate(messages):
        path = f"messages[{i}]"
        message = f.table(item, path)
        role, text = (
            f.text(message.get("role"), f"{path}.role"),
            f.text(message.get("content") or "", f"{path}.content"),
        )
        entry: dict[str, Any] = {"role": role, "content": text}
        sources = f.array(message.get("images") or [], f"{path}.images")
        if role in ("assistant", "tool") and not images.reads:  # an error would end the conversation
            entry["content"] = "\n".join([text, *[note("image")] * len(sources)]).lstrip("\n")
        else:
            entry["content"] = _with_images(text, sources, f"{path}.images", images)
        if message.get("thinking"):
            entry["reasoning_content"] = f.text(message["thinking"], f"{path}.thinking")
        if message.get("tool_calls"):
            calls = f.array(message["tool_calls"], f"{path}.tool_calls")
            entry["tool_calls"] = [
                _call(call, f"{path}.tool_calls[{k}]", f"call{i}{k}") for k, call in enumerate(calls)
            ]
            open_calls += [(call["id"], call["function"]["name"]) for call in entry["tool_calls"]]
        if entry["role"] == "tool":
            entry |= _answered(message, path, open_calls)
        out.append(entry)
    return out


def _call(item: Any, path: str, id: str) -> dict[str, Any]:
    call = f.table(item, path)
    function = f.table(call.get("function"), f"{path}.function")
    arguments = arguments_text(function.get("arguments"))
    name = f.text(function.get("name"), f"{path}.function.name")
    given = f.text(call.get("id") or "", f"{path}.id")
    return {"id": given or id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answered(message: Mapping[str, Any], path: str, open_calls: list[tuple[str, str]]) -> dict[str, str]:
    """Return the name and id of the call that a result belongs to."""
    name = f.text(message.get("tool_name") or message.get("name") or "", f"{path}.tool_name")
    id = f.text(message.get("tool_call_id") or "", f"{path}.tool_call_id")
    fitting = [call for call in open_calls if (call[0] == id if id else call[1] == name or not name)]
    if fitting:
        open_calls.remove(fitting[0])
        id, name = fitting[0]
    return {key: value for key, value in (("tool_call_id", id), ("name", name)) if value}


def _tool(item: Any, i: int) -> dict[str, Any]:
    """Return a tool as a function of the chat; null fields count as left out."""
    tool = f.table(item, f"tools[{i}]")
    function = f.table(tool.get("function"), f"tools[{i}].function")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
