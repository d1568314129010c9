"""Where results may be written: not over the input or a special file, but into writable folders with enough space."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ikcli.errors import IkError, UsageError
from ikcli.quant.output_check import check_output, check_room, existing_folder, output_paths


def test_paths_of_a_result() -> None:
    out = Path("a/b.gguf")
    assert output_paths(out, 3, False) == [out]
    assert [p.name for p in output_paths(Path("a/b"), 2, True)] == ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    assert [p.name for p in output_paths(Path("a/b"), 0, True)] == ["b-00001-of-00001.gguf"]


def test_the_room_may_be_used_up_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    assert check_room(tmp_path, 1000) == 1000
    with pytest.raises(IkError, match=r"the result needs .*, .* are free"):
        check_room(tmp_path, 1001)


def test_what_cannot_be_written_over(tmp_path: Path) -> None:
    source, link = tmp_path / "in.gguf", tmp_path / "link.gguf"
    source.write_bytes(b"x")
    link.symlink_to(source)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    below = source / "out.gguf"
    for path, words in (
        (source, "is the input"),
        (link, "is the input"),
        (tmp_path, "is a folder"),
        (pipe, "is not a regular file"),
        (below, "is not a directory"),
    ):
        with pytest.raises(UsageError, match=words):
            check_output([tmp_path / "fine.gguf", path], [source])
    check_output([tmp_path / "new" / "folder" / "out.gguf"], [source])
    assert existing_folder(tmp_path / "new" / "folder" / "out.gguf") == tmp_path
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="is write-protected"):
        check_output([folder / "out.gguf"], [])
