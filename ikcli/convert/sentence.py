"""Read the modules of a sentence-transformers checkpoint: how token states become one vector, and what follows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikcli.convert.json_files import read_object, read_text
from ikcli.errors import FormatError, UnsupportedError

_MODES = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
_NAMES = {"mean": 1, "cls": 2, "lasttoken": 3}
_LINEAR = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True, slots=True)
class Sentence:
    """The modules that `modules.json` adds to a checkpoint."""

    pooling: int | None = None  # the number of the pooling type
    dense: tuple[str, ...] = ()  # subdirectories of dense layers
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, directory: Path) -> Sentence:
        """Return what `modules.json` says, if there is one.

        Dense layers with an activation are left out, as GGUF has no key for it, and a note says so.
        """
        path = directory / "modules.json"
        text = read_text(path)
        if text is None:
            return cls()
        try:
            modules = [(str(m["type"]).split(".")[-1], str(m["path"])) for m in json.loads(text)]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise FormatError(f"{path}: is not a list of modules with type and path") from None
        poolings = [_folder(directory, path, folder) for kind, folder in modules if kind == "Pooling"]
        pooling = _of_config(poolings[0]) if poolings else None
        dense, notes = [], []
        for folder in (folder for kind, folder in modules if kind == "Dense"):
            act = _read(_folder(directory, path, folder)).get("activation_function", _LINEAR)
            if act == _LINEAR:
                dense.append(folder)
            else:
                notes.append(f"the dense layer {folder} is left out, because its activation {act} has no place in GGUF")
        return cls(pooling, tuple(dense), tuple(notes))


def _folder(directory: Path, path: Path, folder: str) -> Path:
    """Return the config.json of a module; raise a FormatError for a folder that is not a subdirectory."""
    if len(Path(folder).parts) != 1 or folder in ("..", ".") or Path(folder).is_absolute():
        raise FormatError(f"{path}: {folder!r} is not a subdirectory of this directory")
    return directory / folder / "config.json"


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] | None = read_object(path)
    if config is None:
        raise FormatError(f"{path}: is missing, modules.json names its folder")
    return config


def _of_config(path: Path) -> int:
    config = _read(path)
    found = [number for key, number in _MODES.items() if config.get(key) is True]
    found = found or [_NAMES[name] for name in (config.get("pooling_mode"),) if name in _NAMES]
    if len(found) != 1:
        modes = ", ".join(key for key, value in config.items() if key.startswith("pooling_mode") and value)
        raise UnsupportedError(
            f"{path}: the pooling ({modes or 'none'}) is not supported, only mean, cls or last token"
        )
    return found[0]
