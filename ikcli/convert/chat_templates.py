"""Collect the chat templates of a checkpoint from all files that may hold them, as GGUF keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ikcli.convert.card import optional_object
from ikcli.convert.json_files import read_text
from ikcli.convert.tokenizer_files import TokenizerFiles
from ikcli.errors import IkError
from ikcli.log import warn

_DIRECTORIES = ("additional_chat_templates", "chat_templates")
_KEY = "tokenizer.chat_template"


def chat_template_keys(files: TokenizerFiles) -> dict[str, Any]:
    """Return `tokenizer.chat_template` and the named templates. A template file overrides tokenizer_config.json."""
    found: dict[str, str] = _listed(files, files.settings.get("chat_template"), "tokenizer_config.json")
    alone = optional_object(files.directory / "chat_template.json")
    found |= _listed(files, alone.get("chat_template"), "chat_template.json")
    found |= _of_file(files.directory / "chat_template.jinja", "default")
    for directory in _DIRECTORIES:
        for path in sorted((files.directory / directory).glob("*.jinja")):
            found |= _of_file(path, path.stem)
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


def _of_file(path: Path, name: str) -> dict[str, str]:
    """Return the template in a file, if any; warn about one that cannot be read."""
    try:
        text = read_text(path)
    except IkError as problem:
        warn(f"{problem}; this chat template is left out")
        return {}
    return {} if text is None else {name: text}


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
            warn(
                f"{files.directory / file}: chat_template is neither a text nor a list of named templates; "
                "what is not is left out"
            )
            continue
        found[name] = template
    return found
