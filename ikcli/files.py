"""Files and folders that get their name only once they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ikcli.errors import UsageError


@contextmanager
def written_whole(path: Path, private: bool = False) -> Iterator[Path]:
    """Give a path to write a file or folder to, which becomes `path` when the block ends.

    If the block raises, what it wrote is removed, and what was at `path` is still there. Only the user can read a
    `private` file.
    """
    # The thread is part of the name because a server may write the same file for two requests.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        if private:
            temporary.touch(0o600)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def make_private_folder(folder: Path, option: str) -> None:
    """Create the folder of an option if it does not exist, for its owner alone.

    Raises UsageError if files cannot be written into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UsageError(f"{option} {folder} cannot be used: {e.strerror or e}; name another folder") from None
