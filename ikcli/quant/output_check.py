"""Check that output files can be written: not over the input, into a writable folder, with enough free space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ikcli.errors import IkError, UsageError
from ikcli.gguf.writer import split_path
from ikcli.log import shown_size


def output_paths(output: Path, n_parts: int, keep_split: bool) -> list[Path]:
    """Return the files of a result: `output`, or with `keep_split` one per part of the input."""
    if not keep_split:
        return [output]
    return [split_path(output, no, max(1, n_parts)) for no in range(max(1, n_parts))]


def existing_folder(path: Path) -> Path:
    """Return the folder of a file, or its nearest existing parent."""
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_output(paths: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raise UsageError if a file is an input or a directory, or if its folder cannot be created or written to."""
    taken = {p.resolve() for p in inputs}
    for path in paths:
        if path.resolve() in taken:
            raise UsageError(f"{path} is the input; name another output file")
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file; name another output file")
        folder = existing_folder(path)
        if not folder.is_dir():
            raise UsageError(f"{path} cannot be written: {folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{path} cannot be written: the folder {folder} is write-protected; choose another one")


def check_room(folder: Path, need: int) -> int:
    """Return the free bytes of the file system of a folder; raise IkError if there are fewer than `need`."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise IkError(f"{folder}: the result needs {shown_size(need)}, {shown_size(free)} are free")
    return free
