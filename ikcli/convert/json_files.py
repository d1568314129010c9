"""Text and JSON files of a checkpoint, read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ikcli.errors import FormatError, IkError

_MAX_JSON = 1 << 30


def read_text(path: Path) -> str | None:
    """The text of a file; None if there is none. IkError if it cannot be read."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _MAX_JSON:
            raise FormatError(f"{path}: is too large for a file of this kind")
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise IkError(f"{path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: is not UTF-8 text") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file."""
    text = read_text(path)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: is not JSON") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: is not a JSON object")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file that must be there."""
    found = read_object(path)
    if found is None:
        raise IkError(f"{path}: no such file; a checkpoint directory has one")
    return found
