"""The pages of docs/: data of an installed package, or files of the checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def pages() -> dict[str, Path]:
    """Return the pages by topic, sorted by name."""
    folders = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
    folder = next((f for f in folders if (f / "parameters.md").is_file()), None)
    found = {path.stem: path for path in folder.glob("*.md")} if folder is not None else {}
    return dict(sorted(found.items()))


def title(page: Path) -> str:
    """Return the first heading of a page."""
    with page.open(encoding="utf-8") as file:
        return next((line.lstrip("#").strip() for line in file if line.startswith("#")), page.stem)
