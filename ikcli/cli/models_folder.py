"""The models of a folder (`ik serve --models-dir`): GGUF files by their names, folders of one model by theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ikcli import log
from ikcli.errors import UsageError
from ikcli.hub.names import part_of


def folder_models(folder: Path) -> dict[str, Path]:
    """Return the (first) files of models by name; raise UsageError if the folder cannot be read."""
    found: dict[str, Path] = {}
    try:
        members = sorted(folder.iterdir(), key=lambda path: path.name)
        below = {path: sorted(path.iterdir()) for path in members if path.is_dir() and not path.name.startswith(".")}
    except OSError as problem:
        raise UsageError(f"--models-dir {folder}: cannot read {problem.filename}: {problem.strerror}") from problem
    for path in members:
        inside = [(path, name) for name, path in _models(below.get(path, []))]
        named = [(path.name if len(inside) == 1 else f"{path.name}/{name}", file) for file, name in inside]
        for name, file in named or ([(name, file) for name, file in _models([path])] if path.is_file() else []):
            if name in found:
                log.notice_once(f"{file} is left out: {found[name]} has the name {name} already")
            else:
                found[name] = file
    return found


def projector_in(folder: Path) -> Path | None:
    """Return the projector (mmproj*.gguf) in the folder of one model; F16 comes first."""
    found = [path for path in folder.glob("*.gguf") if path.name.lower().startswith("mmproj")]
    return min(found, key=lambda path: ("f16" not in path.name.lower().replace("bf16", ""), path.name), default=None)


def _models(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and (first) file of every model among files."""
    for path in paths:
        low = path.name.lower()
        if not low.endswith(".gguf") or low.startswith(("mmproj", ".")) or not path.is_file():
            continue
        name, number, _ = part_of(path.name)
        if number == 1:
            yield name, path
