"""Read the pooling of a sentence-transformers checkpoint: how token states become one vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ikcli.convert.json_files import read_object, read_text
from ikcli.errors import FormatError, UnsupportedError

_MODES = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
_NAMES = {"mean": 1, "cls": 2, "lasttoken": 3}


def pooling_type(directory: Path) -> int | None:
    """Return the number of the pooling type to which `modules.json` leads, or None without one."""
    path = directory / "modules.json"
    text = read_text(path)
    if text is None:
        return None
    try:
        modules = [m for m in json.loads(text) if str(m["type"]).endswith(".Pooling")]
        folders = [str(m["path"]) for m in modules]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise FormatError(f"{path}: is not a list of modules with type and path") from None
    if not folders:
        return None
    if any(part in ("..", "") for part in Path(folders[0]).parts) or Path(folders[0]).is_absolute():
        raise FormatError(f"{path}: {folders[0]!r} is not a subdirectory of this directory")
    return _of_config(directory / folders[0] / "config.json")


def _of_config(path: Path) -> int:
    config: dict[str, Any] | None = read_object(path)
    if config is None:
        raise FormatError(f"{path}: is missing, modules.json names its folder")
    found = [number for key, number in _MODES.items() if config.get(key) is True]
    found = found or [_NAMES[name] for name in (config.get("pooling_mode"),) if name in _NAMES]
    if len(found) != 1:
        modes = ", ".join(key for key, value in config.items() if key.startswith("pooling_mode") and value)
        raise UnsupportedError(
            f"{path}: the pooling ({modes or 'none'}) is not supported, only mean, cls or last token"
        )
    return found[0]
