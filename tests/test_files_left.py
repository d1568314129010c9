"""What runs and downloads leave behind: taken up again where it fits, begun anew and said where it does not."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.placed import PlacedFile
from ikcli.gguf.unfinished import Unfinished, part_path
from ikcli.gguf.writer import NewTensor
from ikcli.hub import cache, download
from ikcli.hub.cache import Removal, remove
from ikcli.hub.names import parse_ref

SPECS = [NewTensor("a.weight", (32,), GGMLType.F32), NewTensor("b.weight", (64,), GGMLType.F32)]
KEYS = {"general.architecture": "llama"}


def left_behind(final: Path, digest: str, header: bytes) -> Unfinished:
    found = Unfinished(final)
    found.open(digest, header, [4]).close()
    found.close(keep=True)
    return found


def test_what_was_to_become_another_file_is_said(tmp_path: Path) -> None:
    final = tmp_path / "m.gguf"
    assert not left_behind(final, "one", b"head").discarded, "there was nothing"
    assert not left_behind(final, "one", b"head").discarded, "the same goes on"
    assert left_behind(final, "two", b"head").discarded
    assert left_behind(final, "two", b"other").discarded
    assert part_path(final).read_bytes() == b"other"


def test_a_placed_file_is_taken_up_if_all_of_it_is_there(tmp_path: Path) -> None:
    made = PlacedFile(tmp_path / "m.gguf", KEYS, SPECS, keep=True)
    made.begin()
    made.write("b.weight", 0, np.ones(64, np.float32).view(np.uint8))
    made.close()
    data = made.partial.read_bytes()
    assert len(data) == made.size and made.holds(made.partial)
    for other, kept in ((data, True), (data[:-1], False), (data + b"x", False), (b"X" + data[1:], False)):
        made.partial.write_bytes(other)
        assert made.holds(made.partial) is kept
        again = PlacedFile(tmp_path / "m.gguf", KEYS, SPECS, keep=True)
        again.begin()
        again.close()
        assert (again.partial.read_bytes() == data) is kept and again.partial.stat().st_size == made.size


def test_downloads_leave_some_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = shutil.disk_usage(tmp_path)
    kept = download._KEPT_FREE
    assert kept > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=kept + 1000))
    download.check_space(tmp_path / "new" / "folder", 1000)
    with pytest.raises(IkError, match="not enough room in"):
        download.check_space(tmp_path, 1001)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=0))
    download.check_space(tmp_path, 0)  # all is there already


def test_a_content_with_another_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one content, as two commits have them: removing one leaves the other whole."""
    monkeypatch.setattr(cache, "hub_dir", lambda: tmp_path / "hub")
    monkeypatch.setattr(cache, "url_dir", lambda: tmp_path / "urls")
    root = tmp_path / "hub" / "models--me--tiny"
    blob = root / "blobs" / "abc"
    names = [root / "snapshots" / commit / "m.gguf" for commit in ("one", "two")]
    for path in (blob, *names):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"content")
    for path in names:
        path.symlink_to(Path("../../blobs/abc"))
    remove(Removal(("me/tiny",), 7, (names[0],)))
    assert not names[0].exists() and names[1].read_bytes() == b"content"
    assert not names[0].parent.exists(), "an empty folder is not kept"
    remove(Removal(("me/tiny",), 7, (names[1],)))
    assert not blob.exists() and (tmp_path / "hub").is_dir()


@pytest.mark.parametrize("text", ["../tiny", "me/..", "me/tiny..x", "a/b/c", "me", ""])
def test_names_that_leave_the_cache_are_refused(text: str) -> None:
    with pytest.raises(IkError):
        parse_ref(text)


@pytest.mark.parametrize(("header", "done", "found"), [("bytes */7", 7, (7, True)), ("bytes */10", 7, (0, False)),
                                                        ("bytes */5", 7, (0, False)), ("", 7, (0, False))])  # fmt: skip
def test_nothing_behind_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, done: int, found: tuple[int, bool]
) -> None:
    """A server says so of a whole file, and of one that has become another one in the meantime."""
    reply = SimpleNamespace(status_code=416, headers={"Content-Range": header} if header else {})
    monkeypatch.setattr(download.client, "stream", lambda *args: nullcontext(reply))
    part = tmp_path / "m.incomplete"
    part.write_bytes(b"x" * done)
    amounts: list[float] = []
    with part.open("ab") as out:
        source = download.Download("http://x/m.gguf", "m.gguf")
        assert download._one_request(source, part, out, done, amounts.append) == found
    assert part.stat().st_size == found[0] and sum(amounts) == found[0] - done


@pytest.mark.parametrize("there", [0, 3, 6, 9])
def test_a_part_longer_than_its_file_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    content = b"12345"

    def stream(url: str, token: str, start: int, stop: int, tag: str) -> Any:
        rest = content[start:]
        headers = {"Content-Length": str(len(rest))}
        return nullcontext(SimpleNamespace(status_code=206, headers=headers, iter_raw=lambda: iter([rest])))

    monkeypatch.setattr(download.client, "stream", stream)
    target = tmp_path / "m.gguf"
    download.incomplete_path(target).write_bytes((content + b"xxxx")[:there])
    amounts: list[float] = []
    download.download(download.Download("http://x/m.gguf", "m.gguf", len(content)), target, amounts.append)
    assert target.read_bytes() == content and sum(amounts) == len(content)
    assert not download.incomplete_path(target).exists()


@pytest.mark.parametrize("there", [0, 3])
def test_a_server_that_sends_nothing_is_asked_five_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """An answer without an error that brings no bytes; those that are there already are kept."""
    asked: list[int] = []

    def stream(url: str, token: str, start: int, stop: int, tag: str) -> Any:
        asked.append(start)
        return nullcontext(SimpleNamespace(status_code=206, headers={}, iter_raw=lambda: iter([])))

    monkeypatch.setattr(download.client, "stream", stream)
    monkeypatch.setattr(download.client, "PAUSE", 0.0)
    target = tmp_path / "m.gguf"
    download.incomplete_path(target).write_bytes(b"abcde"[:there])
    with pytest.raises(IkError, match=r"the server sends nothing more") as raised:
        download.download(download.Download("http://x/m.gguf", "http://x/m.gguf", 5), target)
    assert asked == [there] * 5
    assert ("the same command goes on from there" in str(raised.value)) is bool(there)
    assert download.incomplete_path(target).read_bytes() == b"abcde"[:there]
