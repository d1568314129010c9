"""Files for nodes that lack them: fetched once, whole and checked, from who has the token."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from factories import tiny_model
from gguf_files import write_model as write_gguf
from quant_models import write_model

from ikcli.errors import IkError
from ikcli.fleet import files
from ikcli.fleet.files import Fetching, FileServer, Needed, fetch, moved, needed_by
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import open_gguf


@dataclass(frozen=True)
class Reads:
    """A factory whose worker says where its files are."""

    model: Path
    text: str

    @property
    def files(self) -> list[tuple[Path, str]]:
        return [(self.model, "d" * 64), (Path(self.text), "e" * 64)]

    def __call__(self) -> Reads:
        return self


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_PIECE", 5000)
    return tmp_path / "cache" / "fleet"


@pytest.fixture
def factory(tmp_path: Path) -> Reads:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.txt").write_text("text " * 3000)
    return Reads(write_model(tmp_path / "here" / "m.gguf", splits=[3, 6, 3]), str(tmp_path / "here" / "text.txt"))


@pytest.fixture
def needed(factory: Reads) -> list[Needed]:
    """As a node sees it that does not have them."""
    found = needed_by(factory)
    return [replace(n, paths=tuple(Path("/nowhere") / p.name for p in n.paths)) for n in found]


@pytest.fixture
def server(needed: list[Needed]) -> Iterator[FileServer]:
    with FileServer("127.0.0.1", needed) as found:
        yield found


def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    out: list[str] = []
    plain = files._piece
    monkeypatch.setattr(files, "_piece", lambda url, token, path: (out.append(path), plain(url, token, path))[1])
    return out


def test_a_worker_gets_all_parts_of_its_files_once(
    factory: Reads, needed: list[Needed], server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [len(n.paths) for n in needed] == [3, 1]
    there = Reads(needed[0].paths[0], str(needed[1].paths[0]))
    requests = asked(monkeypatch)
    workers: list[Any] = []

    def begin() -> None:
        workers.append(Fetching(there, tuple(needed), server.url, server.token)())

    threads = [threading.Thread(target=begin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(workers) == 3 and len(requests) == len(set(requests)) > 4
    for worker in workers:
        assert worker.model == cache / ("d" * 32) / needed[0].paths[0].name
        assert Path(worker.text).read_bytes() == Path(factory.text).read_bytes()
        for source in needed[0].sources:
            assert worker.model.with_name(source.name).read_bytes() == source.read_bytes()
    # what a node has under the same path is used
    requests.clear()
    assert Fetching(factory, tuple(needed_by(factory)), server.url, server.token)() is factory and not requests


def test_a_fetch_goes_on(
    needed: list[Needed], server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = asked(monkeypatch)
    plain = files._piece

    def breaks(url: str, token: str, path: str) -> bytes:
        if path == "/1/0/10000":
            raise IkError("broken")
        return plain(url, token, path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_piece", breaks)
        with pytest.raises(IkError, match="broken"):
            fetch(needed[1], 1, server.url, server.token)
    assert requests == ["/1/0/0", "/1/0/5000"] and not (cache / ("e" * 32)).exists()
    (path,) = fetch(needed[1], 1, server.url, server.token)
    assert requests == ["/1/0/0", "/1/0/5000", "/1/0/10000"]
    assert path.read_bytes() == needed[1].sources[0].read_bytes()


def test_nobody_else_gets_anything(needed: list[Needed], server: FileServer) -> None:
    with pytest.raises(IkError, match="status 403"):
        fetch(needed[1], 1, server.url, "another token")
    for path, token, status in (
        ("/1/0/0", "", 403),
        ("/1/0/0", server.token, 200),
        ("/9/0/0", server.token, 404),
        ("/1/0/-5", server.token, 404),
        ("/../../etc/passwd", server.token, 404),
    ):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (status, status == 200)
        connection.close()


def test_damaged_pieces_and_changed_files(
    needed: list[Needed], server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = http.client.HTTPResponse.read
    damaged = [1, 0, 0, 0]
    monkeypatch.setattr(
        http.client.HTTPResponse,
        "read",
        lambda self, *a: plain(self, *a)[: 4999 if damaged and damaged.pop(0) else None],
    )
    (path,) = fetch(needed[1], 1, server.url, server.token)
    assert path.read_bytes() == needed[1].sources[0].read_bytes()
    damaged[:] = [1] * 9
    with pytest.raises(IkError, match="it arrived damaged"):
        fetch(needed[0], 0, server.url, server.token)
    damaged.clear()
    with pytest.raises(IkError, match="became shorter"):
        fetch(replace(needed[1], sizes=(20000,), digest="f" * 64), 1, server.url, server.token)


def test_no_way_to_the_command(needed: list[Needed]) -> None:
    with pytest.raises(IkError, match="is the port open"):
        fetch(needed[1], 1, "http://127.0.0.1:1", "token")


def test_no_room(needed: list[Needed], server: FileServer) -> None:
    with pytest.raises(IkError, match=r"text.txt needs .* are free"):
        fetch(replace(needed[1], sizes=(1 << 60,)), 1, server.url, server.token)


def test_paths_are_replaced_wherever_they_are() -> None:
    @dataclass(frozen=True, slots=True)
    class Outer:
        inner: tuple[Reads, ...]
        n: int = 1

    places = {Path("/a/m.gguf"): Path("/b/m.gguf")}
    found = moved(Outer((Reads(Path("/a/m.gguf"), "/a/m.gguf"), Reads(Path("/a/x"), "a"))), places)
    assert found == Outer((Reads(Path("/b/m.gguf"), "/b/m.gguf"), Reads(Path("/a/x"), "a")))


def test_numbers_that_count_from_the_end_are_none(needed: list[Needed], server: FileServer) -> None:
    for path in ("/-1/0/0", "/0/-1/0", "/0/3/0", "/0/0", "/0/0/0/0", "/x/0/0"):
        with pytest.raises(IkError, match="status 404"):
            files._piece(server.url, server.token, path)


def test_files_that_were_added_later_have_numbers_of_their_own(
    factory: Reads, needed: list[Needed], cache: Path
) -> None:
    with FileServer("127.0.0.1", needed[:1]) as server:
        first = server.add(needed[1:])
        assert first == 1
        there = Reads(factory.model, str(needed[1].paths[0]))
        worker = Fetching(there, (needed[1],), server.url, server.token, first)()
    assert Path(worker.text).read_bytes() == Path(factory.text).read_bytes() and worker.model == factory.model


def test_a_model_of_which_a_part_is_missing_is_fetched_whole(
    factory: Reads, needed: list[Needed], server: FileServer, tmp_path: Path
) -> None:
    here = tmp_path / "node"
    here.mkdir()
    paths = tuple(here / path.name for path in needed[0].paths)
    for source, path in list(zip(needed[0].sources, paths, strict=True))[:2]:
        path.write_bytes(source.read_bytes())
    worker = Fetching(Reads(paths[0], "none"), (replace(needed[0], paths=paths),), server.url, server.token)()
    assert worker.model.parent != here
    assert [worker.model.with_name(p.name).read_bytes() for p in paths] == [s.read_bytes() for s in needed[0].sources]


def test_what_was_fetched_is_compared_where_that_can_be_done(
    needed: list[Needed], server: FileServer, cache: Path
) -> None:
    with pytest.raises(IkError, match=r"text\.txt changed while it was fetched, or before"):
        fetch(needed[1], 1, server.url, server.token, lambda path: "another")
    assert not [path for path in cache.iterdir() if path.is_dir()], "so that it is fetched anew"
    (path,) = fetch(needed[1], 1, server.url, server.token, lambda path: "e" * 64)
    assert path.read_bytes() == needed[1].sources[0].read_bytes()


def test_a_file_that_grew_is_fetched_anew(needed: list[Needed], server: FileServer, cache: Path) -> None:
    """Not gone on with where it was too long."""
    source = needed[1].sources[0]
    with pytest.raises(IkError, match=r"text\.txt changed while it was fetched"):
        fetch(replace(needed[1], sizes=(12000,)), 1, server.url, server.token)
    source.write_bytes(bytes(range(250)) * 60)
    (path,) = fetch(needed[1], 1, server.url, server.token)
    assert path.read_bytes() == source.read_bytes()


def test_room_is_needed_for_what_is_still_missing(
    needed: list[Needed], server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = cache / ("e" * 32 + ".part")
    begun.mkdir(parents=True)
    data = needed[1].sources[0].read_bytes()
    (begun / "text.txt").write_bytes(data[:5000])
    for free, message in ((9999, r"needs .* are free"), (10000, "")):
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        if message:
            with pytest.raises(IkError, match=message):
                fetch(needed[1], 1, server.url, server.token)
        else:
            (path,) = fetch(needed[1], 1, server.url, server.token)
            assert path.read_bytes() == data


def test_digests_of_models_see_both_ends_of_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types, shapes, a piece at the beginning and one at the end; what a server reads, with the header."""
    monkeypatch.setattr(digest, "_PIECE", 64)
    model = tiny_model("llama")
    path = write_gguf(model, tmp_path / "m.gguf")
    file = open_gguf(path)
    first, whole = digest.of_model(file), digest.of_input(path)
    data = bytearray(path.read_bytes())
    for name in ("token_embd.weight", "output.weight", "blk.1.ffn_down.weight"):
        tensor = file.tensors[name]
        start = path.read_bytes().index(file.data(name).tobytes()[:64])
        for at in (start, start + tensor.n_bytes - 1):
            changed = bytearray(data)
            changed[at] ^= 1
            other = tmp_path / "other.gguf"
            other.write_bytes(changed)
            assert digest.of_model(open_gguf(other)) != first, (name, at)
    renamed = write_gguf(model, tmp_path / "n.gguf", {**model.metadata, "general.name": "another"})
    assert digest.of_model(open_gguf(renamed)) == first and digest.of_input(renamed) != whole
