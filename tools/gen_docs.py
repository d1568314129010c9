"""Write docs/parameters.md from the option declarations; `--check` only compares and exits 1 if it is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from ikcli.commands._help import parameters_markdown

TARGET = Path(__file__).resolve().parents[1] / "docs" / "parameters.md"


def main() -> int:
    text = parameters_markdown()
    if "--check" in sys.argv[1:]:
        current = TARGET.read_text(encoding="utf-8") if TARGET.is_file() else ""
        if current != text:
            print(f"{TARGET.name} is out of date; run python tools/gen_docs.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
