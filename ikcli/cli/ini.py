"""Read INI files: sections of `key = value`; a comment begins with `;` or `#` at a line start or after a blank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ikcli.errors import UsageError
from ikcli.text_files import read_text

_COMMENT = re.compile(r"(^|\s)[;#].*")


@dataclass(frozen=True, slots=True)
class Key:
    """One line; the value has no quotes around it."""

    name: str
    value: str
    line: int


def read_ini(path: Path) -> dict[str, list[Key]]:
    """Return keys by section in the order of the file; raise UsageError that names the line.

    "" holds the keys before the first section.
    """
    sections: dict[str, list[Key]] = {"": []}
    keys = sections[""]
    for number, raw in enumerate(read_text(path, otherwise="not an INI file").split("\n"), 1):
        line = _COMMENT.sub("", raw).strip()
        if line.startswith("["):
            name = line[1:-1].strip()
            if not line.endswith("]") or not name:
                raise UsageError(f"{path}: line {number}: a section is written [NAME]")
            if name in sections:
                raise UsageError(f"{path}: line {number}: there is a section [{name}] already")
            keys = sections.setdefault(name, [])
        elif line:
            key, equals, value = (piece.strip() for piece in line.partition("="))
            if not equals or not key:
                raise UsageError(f"{path}: line {number}: this is neither [NAME] nor KEY = VALUE: {line[:60]}")
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            keys.append(Key(key, value, number))
    return sections
