"""The commit of this program, where it is known: recorded in a build, or read from the checkout.

No program is run. Only a repository whose root is that of this project counts, so a package inside another repository,
or an environment in a versioned home directory, reports no commit. The build imports this file separately (`setup.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
RECORDED = "data/commit.txt"
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit(package: Path = PACKAGE) -> str:
    """Return the hash of the commit of a package folder; an empty text if it is not known."""
    try:
        text = (package / RECORDED).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return of_checkout(package.parent)
    return text if _HASH.fullmatch(text) else ""


def of_checkout(root: Path) -> str:
    """Return the commit that is checked out in a folder of this project."""
    try:
        if '\nname = "ikcli"\n' not in (root / "pyproject.toml").read_text(encoding="utf-8"):
            return ""
        folder = root / ".git"
        if folder.is_file():  # of a worktree
            folder = root / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        found = _resolved(folder, head.removeprefix("ref:").strip()) if head.startswith("ref:") else head
    except (OSError, ValueError):
        return ""
    return found if _HASH.fullmatch(found) else ""


def _resolved(folder: Path, ref: str) -> str:
    """Return the commit of a branch, from its file or from the packed refs."""
    common = folder / "commondir"
    shared = folder / common.read_text(encoding="utf-8").strip() if common.is_file() else folder
    for place in (folder, shared):
        if (place / ref).is_file():
            return (place / ref).read_text(encoding="utf-8").strip()
    lines = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), "")
