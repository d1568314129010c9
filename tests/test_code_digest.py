"""What a kernel is made of: edits that keep its code, and edits that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikcli.native.code_digest import code_digest

SOURCES = {
    "pack.kernel": '''
"""A kernel."""
import numpy as np
from pack import tables
from pack.helpers import add, unused
from pack.filled import TABLE

SIZE, OTHER = 4, 5

def make_one():
    """Makes it."""
    def one(params):
        return add(params, SIZE) + tables.FIRST + TABLE["x"]
    return one

def make_two():
    return OTHER
''',
    "pack.helpers": """
from pack.deeper import deep

@inline
def add(a, b):
    return deep(a) + b  # a comment

def unused():
    return 1
""",
    "pack.deeper": "def deep(a):\n    return a\n\ndef shallow(a):\n    return a\n",
    "pack.tables": "FIRST = 1\nSECOND = 2\n",
    "pack.filled": "TABLE = {}\nfor name in 'xy':\n    TABLE[name] = 1\n",
}


@pytest.mark.parametrize(
    ("module", "old", "new", "changes"),
    [
        ("pack.kernel", "Makes it.", "Makes one.", False),
        ("pack.kernel", '"""A kernel."""\n', "", False),
        ("pack.helpers", "# a comment", "", False),
        ("pack.helpers", "return 1", "return 2", False),
        ("pack.kernel", "return OTHER", "return SIZE", False),
        ("pack.deeper", "def shallow(a):", "def shallow(a, b):", False),
        ("pack.tables", "SECOND = 2", "SECOND = 3", False),
        ("pack.kernel", "SIZE, OTHER = 4, 5", "SIZE, OTHER = 5, 5", True),
        ("pack.helpers", "deep(a) + b", "deep(a) - b", True),
        ("pack.deeper", "return a\n\n", "return -a\n\n", True),
        ("pack.tables", "FIRST = 1", "FIRST = 3", True),
        ("pack.filled", "= 1", "= 2", True),
        ("pack.filled", "'xy'", "'xyz'", True),
        ("pack.helpers", "@inline", "@merge", True),
    ],
)
def test_what_a_factory_reaches(module: str, old: str, new: str, changes: bool, tmp_path: Path) -> None:
    def digest(folder: Path, sources: dict[str, str]) -> str:
        folder.mkdir()
        for name, text in sources.items():
            (folder / f"{name}.py").write_text(text)
        return code_digest("pack.kernel", "make_one", lambda name: folder / f"{name}.py")

    assert old in SOURCES[module]
    edited = SOURCES | {module: SOURCES[module].replace(old, new, 1)}
    assert (digest(tmp_path / "a", SOURCES) != digest(tmp_path / "b", edited)) == changes
