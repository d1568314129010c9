"""Conversations as JSON files with messages in OpenAI's form, which other programs can read and write."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ikcli.chat.images import Images
from ikcli.chat.messages import parse_messages, parse_tools
from ikcli.console.conversation import Conversation
from ikcli.errors import FormatError, IkError
from ikcli.files import written_whole
from ikcli.text_files import read_text

_LARGEST = 256 << 20


def save(conversation: Conversation, path: Path) -> None:
    """Write a conversation; if that fails, raise IkError and leave an existing file intact."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    out = {
        "model": conversation.source.name,
        "messages": [*system, *conversation.messages],
        "tools": conversation.tools,
        "settings": conversation.fields,
    }
    write_json(path, out)


def save_settings(settings: dict[str, Any], model: str, path: Path) -> None:
    """Write settings alone; IkError as from `save`."""
    write_json(path, {"model": model, "settings": settings})


def load_settings(conversation: Conversation, path: Path, known: Collection[str]) -> dict[str, Any]:
    """Read and check settings from such a file, from a conversation, or from a file that holds nothing else."""
    found = read_json(path)
    fields = found.get("settings", found) if isinstance(found, dict) else found
    if not isinstance(fields, dict):
        raise FormatError(f"{path} has no settings: they are an object, by the names that /settings lists")
    strange = next((name for name in fields if name not in known), None)
    if strange is not None:
        raise FormatError(f"{path}: {strange} is not a setting that can be changed; /settings lists them")
    if fields.get("grammar") and conversation.tools:
        raise IkError(f"{path} has a grammar, which excludes tools; /tools off first")
    _check(conversation, fields, path)
    return dict(fields)


def _check(conversation: Conversation, fields: dict[str, Any], path: Path) -> None:
    try:
        conversation.source.check(fields)
    except IkError as e:
        raise FormatError(f"{path}: {e}") from None


def write_json(path: Path, out: Any) -> None:
    """Write a JSON file; if that fails, raise IkError and leave an existing file intact."""
    text = json.dumps(out, ensure_ascii=False, indent=2) + "\n"
    try:
        with written_whole(path, private=True) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    except OSError as e:
        raise IkError(f"cannot write {path}: {e.strerror or e}") from None


def load(conversation: Conversation, path: Path) -> None:
    """Replace a conversation by the content of a file; a file that cannot be read changes nothing."""
    found = read_json(path)
    data: dict[str, Any] = {"messages": found} if isinstance(found, list) else found
    if not isinstance(data, dict) or "messages" not in data:
        raise FormatError(f"{path} is not a conversation: it has no list of messages")
    messages, tools, fields = data["messages"], data.get("tools") or [], data.get("settings") or {}
    try:
        if messages:
            parse_messages(messages, images=Images(reads=True))
        parse_tools(tools)
    except IkError as e:
        raise FormatError(f"{path}: {e}") from None
    if not isinstance(messages, list) or not isinstance(fields, dict):
        raise FormatError(f"{path} is not a conversation: messages must be a list, settings an object")
    _check(conversation, fields, path)
    system = messages[0] if messages and messages[0]["role"] == "system" else None
    conversation.clear()
    conversation.system = str(system.get("content") or "") if system else ""
    conversation.messages = messages[1:] if system else list(messages)
    conversation.tools, conversation.fields = list(tools), dict(fields)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; errors name it."""
    try:
        if path.stat().st_size > _LARGEST:
            raise FormatError(f"{path} is larger than {_LARGEST >> 20} MiB")
        return json.loads(read_text(path, error=IkError))
    except OSError as e:
        raise IkError(f"cannot read {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path} is not JSON: {e}") from None
