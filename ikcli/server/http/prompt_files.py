"""Every prompt as a file of its own (`--log-prompts-dir`), to see what a model was really given.

Files are numbered on from those that are there, and for their owner alone, as the folder is.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ikcli.errors import UsageError
from ikcli.server.http.logs import ServerLog

_DIGITS = 12


def make_folder(folder: Path) -> None:
    """Make the folder if it is not there; UsageError if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written")
    except OSError as e:
        raise UsageError(f"--log-prompts-dir {folder} cannot be used: {e.strerror or e}; name another folder") from None


class PromptFiles:
    """Writes prompts; what cannot be written is said in the log, and the request goes on."""

    def __init__(self, folder: Path, log: ServerLog) -> None:
        self._folder, self._log = folder, log
        there = [int(path.stem) for path in folder.glob("*.txt") if path.stem.isdigit()]
        self._numbers = itertools.count(max(there, default=-1) + 1)

    def write(self, text: str) -> None:
        """One file."""
        data = text.encode("utf-8", "replace")
        try:
            while True:  # another server may write into the folder, too
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
