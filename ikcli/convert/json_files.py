"""Read and check the text and JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ikcli import text_files
from ikcli.errors import FormatError, IkError


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if it does not exist; raise an IkError if it cannot be read."""
    return text_files.read_text(path, error=FormatError) if path.is_file() else None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file does not exist."""
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
    """Return the JSON object of a file that must exist."""
    found = read_object(path)
    if found is None:
        raise IkError(f"{path}: no such file; a checkpoint directory has one")
    return found
