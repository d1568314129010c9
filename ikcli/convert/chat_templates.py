"""Collect the chat templates of a checkpoint from all files that may hold them, as GGUF keys."""

from __future__ import annotations

import re
from typing import Any

from ikcli.convert.json_files import read_object, read_text
from ikcli.convert.tokenizer_files import TokenizerFiles
from ikcli.errors import FormatError

_DIRECTORIES = ("additional_chat_templates", "chat_templates")
_KEY = "tokenizer.chat_template"


def chat_template_keys(files: TokenizerFiles) -> dict[str, Any]:
    """Return `tokenizer.chat_template` and the named templates. A template file overrides tokenizer_config.json."""
    found: dict[str, str] = _listed(files, files.settings.get("chat_template"), "tokenizer_config.json")
    alone = read_object(files.directory / "chat_template.json")
    if alone is not None:
        found |= _listed(files, alone.get("chat_template"), "chat_template.json")
    text = read_text(files.directory / "chat_template.jinja")
    if text is not None:
        found["default"] = text
    for directory in _DIRECTORIES:
        for path in sorted((files.directory / directory).glob("*.jinja")):
            found[path.stem] = read_text(path) or ""
    keys: dict[str, Any] = {}
    names: list[str] = []
    for name, template in found.items():
        name = re.sub(r"[^A-Za-z0-9]", "_", name)
        if not template or not name:
            continue
        if name == "default":
            keys[_KEY] = template
        elif name not in names:
            names.append(name)
            keys[f"{_KEY}.{name}"] = template
    return keys | ({"tokenizer.chat_templates": names} if names else {})


def _listed(files: TokenizerFiles, value: object, file: str) -> dict[str, str]:
    """Return templates by name from a value: one text, or a list of objects with name and template."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    found = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise FormatError(
                f"{files.directory / file}: chat_template is neither a text nor a list of named templates"
            )
        found[name] = template
    return found
