"""SHA256SUMS of a folder: written with it, and updated when files are changed or added later."""

from __future__ import annotations

import re
from pathlib import Path

from ikcli.errors import FormatError, IkError
from ikcli.files import written_whole
from ikcli.gguf import digests
from ikcli.text_files import read_text

SUMS, MADE_OF = "SHA256SUMS", ".ik-publish"


def write_sums(folder: Path) -> None:
    """Write the digests of all files for `sha256sum -c`, except names that begin with a dot."""
    _write(folder, {name: digests.of_file(folder / name) for name in _names(folder)})


def current_sums(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of every file including SHA256SUMS; files newer than it are hashed again.

    FormatError if a file is missing, IkError if the digests cannot be updated.
    """
    sums = folder / SUMS
    try:
        lines, since = read_text(sums, error=FormatError).splitlines(), sums.stat().st_mtime_ns
    except (OSError, FormatError):
        raise FormatError(f"{folder} has no {SUMS}: it was not made by ik publish") from None
    known: dict[str, str] = {}
    for line in lines:
        found = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if found is None:
            raise FormatError(f'{sums}: "{line}" is not a digest and a name')
        known[found[2]] = found[1]
    names = _names(folder)
    missing = [name for name in known if name not in names]
    if missing:
        raise FormatError(f"{folder / missing[0]} is gone, but {SUMS} names it; make the folder again")
    try:
        now = {
            name: known[name]
            if name in known and (folder / name).stat().st_mtime_ns <= since
            else digests.of_file(folder / name)
            for name in names
        }
        if now != known:
            _write(folder, now)
        return {**now, SUMS: digests.of_file(sums)}
    except OSError as problem:
        raise IkError(f"{folder}: {problem.strerror or problem}") from None


def _names(folder: Path) -> list[str]:
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(
        p.as_posix() for p in found if p.as_posix() != SUMS and not any(part.startswith(".") for part in p.parts)
    )


def _write(folder: Path, sums: dict[str, str]) -> None:
    with written_whole(folder / SUMS) as unfinished:
        unfinished.write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
