"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ikcli.files import written_whole


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with written_whole(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_what_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(error), written_whole(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(error), written_whole(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_where_the_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out" / "full").mkdir(parents=True)
    with pytest.raises(OSError), written_whole(tmp_path / "out") as temporary:
        temporary.write_text("a file cannot replace a folder")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_private_file_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for private, mode in ((True, 0o600), (False, 0o644)):
            with written_whole(tmp_path / "f", private=private) as temporary:
                temporary.write_text("text")
            assert (tmp_path / "f").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_two_threads_do_not_share_what_they_write(tmp_path: Path) -> None:
    places: list[Path] = []
    together = threading.Barrier(2)

    def write() -> None:
        with written_whole(tmp_path / "f") as temporary:
            temporary.write_text("text")
            places.append(temporary)
            together.wait()

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places[0] != places[1] and [p.name for p in tmp_path.iterdir()] == ["f"]
