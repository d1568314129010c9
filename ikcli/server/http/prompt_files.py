"""Each prompt in a separate file (`--log-prompts-dir`), to see the exact input of the model.

Numbering continues after the existing files. Only their owner can read the files and the folder.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ikcli.errors import UsageError
from ikcli.server.http.logs import ServerLog

_DIGITS = 12


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing. Raise UsageError if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written")
    except OSError as e:
        raise UsageError(f"--log-prompts-dir {folder} cannot be used: {e.strerror or e}; name another folder") from None


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
