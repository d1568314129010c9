"""Each prompt in a separate file (`--log-prompts-dir`), to see the exact input of the model.

Numbering continues after the existing files. Only their owner can read the files and the folder.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ikcli.server.http.logs import ServerLog

_DIGITS = 12


class PromptFiles:
    """Writer of prompt files; it logs a failed write, and the request continues."""

    def __init__(self, folder: Path, log: ServerLog) -> None:
        self._folder, self._log = folder, log
        there = [int(path.stem) for path in folder.glob("*.txt") if path.stem.isdigit()]
        self._numbers = itertools.count(max(there, default=-1) + 1)

    def write(self, text: str) -> None:
        """Write one prompt."""
        data = text.encode("utf-8", "replace")
        try:
            while True:  # another server may write into the folder too
                path = self._folder / f"{next(self._numbers):0{_DIGITS}d}.txt"
                try:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    break
                except FileExistsError:
                    continue
            with open(file, "wb") as out:
                out.write(data)
        except OSError as e:
            self._log.warn("log_prompt", "prompt not written", folder=str(self._folder), error=e.strerror or str(e))
