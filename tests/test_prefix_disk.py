"""The prompt cache on disk: across restarts and kills, within its limit, whatever is wrong with folder or files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import ask, serving, until
from sequence_memory import CELLS, STATES, WINDOWS, Shelf

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.errors import UsageError
from ikcli.files import make_private_folder
from ikcli.server.http.server import check_cache_disk
from ikcli.server.prefix import node_file
from ikcli.server.prefix.disk import Disk
from ikcli.server.prefix.store import PrefixStore
from ikcli.server.slots import reuse
from ikcli.settings.server import ServerConfig

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
FIRST, SECOND = list(range(100, 160)), list(range(300, 360))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.rows"))


class Lines:
    """A log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, level: str, function: str, message: str, fields: object) -> None:
        self.lines.append(f"{level} {message}")


def opened(
    folder: Path, shelf: Shelf, limit: int = 1 << 20, on_disk: int = 1 << 20, about: str = "a", log: Any = None
) -> PrefixStore:
    store = PrefixStore(shelf.sequences, limit, block=16)
    store.attach(Disk(folder, on_disk, limit // 4, {"model": about}, store.rest, log or Lines()))
    return store


def kept(store: PrefixStore, shelf: Shelf, text: list[int] | range, added: Added = NOTHING) -> None:
    shelf.truncate(0, 0)
    shelf.add(0, text)
    store.keep(0, np.array(text, np.int32), added)
    store.save(wait=True)


def close(store: PrefixStore) -> None:
    assert store.disk is not None
    store.save(wait=True)
    store.disk.close()


def loaded(store: PrefixStore, shelf: Shelf, text: list[int] | range) -> tuple[int, int]:
    """Tokens that come back into a slot, and those of them that come from disk."""
    shelf.truncate(1, 0)
    found = store.load(1, store.find(np.array(text, np.int32), NOTHING), 0)
    shelf.holds(1, tuple(text[: found[0]]))
    return found


def test_what_leaves_ram_comes_back_from_disk(tmp_path: Path) -> None:
    shelf = Shelf(CELLS)
    store = opened(tmp_path, shelf, limit=100 * 12)
    for start in (1000, 2000, 3000):
        kept(store, shelf, range(start, start + 80))
    assert store.n_bytes <= store.limit and len(store) == 3 and len(files(tmp_path)) == 15
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))
    assert [loaded(store, shelf, range(k, k + 80)) for k in (3000, 1000)] == [(80, 0), (80, 80)]
    kept(store, shelf, range(1000, 1090))
    assert loaded(store, shelf, range(1000, 1090)) == (90, 0), "rows of a slot return to RAM"
    close(store)


def test_branches_share_files_after_a_restart(tmp_path: Path) -> None:
    shelf = Shelf(CELLS, STATES)
    store = opened(tmp_path, shelf)
    texts = [[*range(40), *range(tail, tail + 20)] for tail in (500, 600)]
    texts += [[*range(25), *range(700, 720)], [*range(40), *range(500, 520), *range(900, 910)]]
    for text in texts:
        kept(store, shelf, text)
    n = len(files(tmp_path))
    close(store)
    store = opened(tmp_path, shelf)
    assert [loaded(store, shelf, text)[1] for text in texts] == [len(text) for text in texts]
    kept(store, shelf, texts[0])
    assert len(files(tmp_path)) == n, "what is there is not written again"
    close(store)


def checkpointed(store: PrefixStore, shelf: Shelf, n: int, *places: int) -> None:
    """Keep a text whose sequence has checkpoints at these positions."""
    shelf.truncate(0, 0)
    for a, b in pairwise((0, *places, n)):
        shelf.add(0, range(a, b))
        shelf.checkpoint(0)
    store.keep(0, np.arange(n, dtype=np.int32), NOTHING)
    store.save(wait=True)


@pytest.mark.parametrize("kind", [(CELLS, STATES), (STATES,), (CELLS, WINDOWS)])
def test_checkpoints_that_are_made_after_the_rows_were_written(kind: Any, tmp_path: Path) -> None:
    shelf, log = Shelf(*kind), Lines()
    store = opened(tmp_path, shelf, log=log)
    checkpointed(store, shelf, 80)
    n = len(files(tmp_path))
    checkpointed(store, shelf, 80, 40)
    kept(store, shelf, [*range(44), *range(500, 530)])  # splits the node of the new checkpoint
    checkpointed(store, shelf, 80, 43, 50)
    sizes = {path.name: path.stat().st_size for path in files(tmp_path)}
    checkpointed(store, shelf, 80, 43, 50)
    assert sizes == {path.name: path.stat().st_size for path in files(tmp_path)}, "what is there is not written again"
    assert not any(node.is_written_now for node in store.tree.nodes()) and n == 5
    close(store)
    store = opened(tmp_path, shelf)
    for text, wanted in ((42, 40), (44, 43), (62, 50), (80, 80)):
        n, n_disk = loaded(store, shelf, range(text))
        assert n == n_disk and (n == wanted or (n == text and WINDOWS in kind))
    close(store)
    assert not [line for line in log.lines if line.startswith("WARN")]


@pytest.mark.parametrize("how", ["full", "removed"])
def test_checkpoints_that_cannot_be_added(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows stay on disk if there is no room, and are written again if their file is gone."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shelf, log = Shelf(CELLS, STATES), Lines()
    store = opened(tmp_path, shelf, log=log)
    checkpointed(store, shelf, 80)
    with monkeypatch.context() as m:
        if how == "full":
            m.setattr(os, "fsync", full)
        else:
            files(tmp_path)[2].unlink()
        checkpointed(store, shelf, 80, 40)
    assert len([line for line in log.lines if line.startswith("WARN")]) == 1
    assert len(files(tmp_path)) == (5 if how == "full" else 4)
    assert loaded(store, shelf, range(60)) == (40, 0)
    checkpointed(store, shelf, 80, 40)
    close(store)
    store = opened(tmp_path, shelf)
    assert [loaded(store, shelf, range(n)) for n in (60, 80)] == [(40, 40), (80, 80)]
    close(store)


def test_files_of_others_are_ignored_with_one_line(tmp_path: Path) -> None:
    shelf, log = Shelf(CELLS), Lines()
    for about, added in (("a", NOTHING), ("b", NOTHING), ("a", Added((0.5,)))):
        store = opened(tmp_path, shelf, about=about)
        kept(store, shelf, range(60), added)
        close(store)
    (tmp_path / "00000000-x.rows").write_bytes(b"something else")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    n = len(files(tmp_path))
    store = opened(tmp_path, shelf, log=log)
    close(store)
    assert log.lines == [
        f"INFO prompt cache on disk: 8 files in {tmp_path}, limit 0.0 GiB; 5 files of another model, version or cache "
        "type are ignored"
    ]
    assert len(files(tmp_path)) == n and len(store.tree.roots) == 2 and (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("how", ["remove", "cut", "change", "header"])
def test_a_damaged_file_costs_what_comes_after_it(how: str, tmp_path: Path) -> None:
    shelf, log = Shelf(CELLS), Lines()
    store = opened(tmp_path, shelf)
    kept(store, shelf, range(80))
    close(store)
    store = opened(tmp_path, shelf, log=log)
    file = files(tmp_path)[2]
    data = file.read_bytes()
    changed = {"cut": data[:-1], "change": data[:-90] + b"x" + data[-89:], "header": data[:20] + b"\0" + data[21:]}
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(changed[how])
    assert loaded(store, shelf, range(80)) == (32, 32)
    assert len(log.lines) == 2 and "its tokens are computed again" in log.lines[1] and file.name in log.lines[1]
    kept(store, shelf, range(80))
    assert loaded(store, shelf, range(80))[0] == 80
    close(store)
    store = opened(tmp_path, shelf)
    assert loaded(store, shelf, range(80)) == (80, 80), "it was written again"
    close(store)


def test_the_least_recently_used_files_go_first_and_never_the_beginning_of_others(tmp_path: Path) -> None:
    shelf = Shelf(CELLS)
    store = opened(tmp_path, shelf)
    kept(store, shelf, range(64))
    size = sum(path.stat().st_size for path in files(tmp_path))
    close(store)
    store = opened(tmp_path, shelf, limit=70 * 12, on_disk=5 * size // 2)
    for start in (1000, 2000):
        kept(store, shelf, range(start, start + 64))
    assert loaded(store, shelf, range(64))[0] in (0, 16, 32)
    assert loaded(store, shelf, range(1000, 1064))[0] == 64
    for start in (3000, 4000, 5000):
        kept(store, shelf, range(start, start + 64))
        assert loaded(store, shelf, range(1000, 1064))[0] == 64, "it is in use"
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * size // 2
    close(store)
    found = [int(path.name[:8]) for path in files(tmp_path)]
    assert found.count(0) >= found.count(16) >= found.count(32) >= found.count(48) > 0


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shelf, log = Shelf(CELLS), Lines()
    store = opened(tmp_path, shelf, log=log)
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        for start in (0, 1000):
            kept(store, shelf, range(start, start + 64))
    assert [line for line in log.lines if "No space" in line] == [
        f"WARN cannot write to {tmp_path}: No space left on device; the prompt cache goes on in RAM"
    ]
    assert loaded(store, shelf, range(64)) == (64, 0) and not list(tmp_path.glob("*")) + list(tmp_path.glob(".*"))
    kept(store, shelf, range(70))
    assert len(files(tmp_path)) == 5, "there is room again"
    close(store)


def test_small_files_that_fit_a_full_disk_are_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a file that does not fit is not written, since it would be of no use."""
    whole, most = node_file.write, 16

    def write(path: Path, about: Any, content: node_file.Content) -> int:
        if len(content.tokens) >= most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, about, content)

    shelf, log = Shelf(CELLS), Lines()
    store = opened(tmp_path, shelf, log=log)
    monkeypatch.setattr(node_file, "write", write)
    for start in (0, 1000, 2000):
        kept(store, shelf, range(start, start + 20))
        kept(store, shelf, range(start + 500, start + 510))
    assert len([line for line in log.lines if "No space" in line]) == 1
    assert [path.name[:8] for path in files(tmp_path)] == ["00000000"] * 3, "the short texts"
    most = 99
    kept(store, shelf, range(3000, 3020))
    most = 16
    kept(store, shelf, range(4000, 4020))
    assert len([line for line in log.lines if "No space" in line]) == 2, "it was not full in between"
    close(store)


def test_conversations_go_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "cache"
    with serving(2, server={"cache_disk": folder}, **SETTINGS) as engine:
        first = ask(engine, FIRST, 8, id_slot=0)
        ask(engine, SECOND, 8, id_slot=1)
    assert files(folder) and folder.stat().st_mode & 0o777 == 0o700
    longer = [FIRST + [token.id for token in first.tokens] + [7, 8, 9], [*SECOND[:50], 1, 2, 3]]
    with serving(1, **SETTINGS) as engine:
        fresh = [[token.id for token in ask(engine, prompt, 8, cache_prompt=False).tokens] for prompt in longer]
    with serving(1, server={"cache_disk": folder}, **SETTINGS) as engine:
        found = [ask(engine, prompt, 8) for prompt in longer]
        assert [[token.id for token in one.tokens] for one in found] == fresh
        assert [one.timings.cache_disk_n for one in found] == [67, 50] == [one.timings.cache_n for one in found]
        assert engine.metrics(reset=False).prompt_tokens_disk_total == 117
    with serving(1, server={"cache_disk": folder}, **SETTINGS | {"type_k": "q8_0"}) as engine:
        assert ask(engine, FIRST, 2).timings.cache_n == 0


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
import numpy as np
from sequence_memory import CELLS, Shelf
from ikcli.engine.run.adapters import NOTHING
from ikcli.server.prefix.disk import Disk
from ikcli.server.prefix.store import PrefixStore
from ikcli.server.slots.log import silent
shelf = Shelf(CELLS)
store = PrefixStore(shelf.sequences, 1 << 20, block=16)
store.attach(Disk(Path({folder!r}), 1 << 20, 1 << 18, {{"model": "a"}}, store.rest, silent))
print("ready", flush=True)
for start in range(0, 10**6, 1000):
    shelf.truncate(0, 0)
    shelf.add(0, range(start, start + 200))
    store.keep(0, np.arange(start, start + 200, dtype=np.int32), NOTHING)
"""


@pytest.mark.slow("kills processes at random moments")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What was written whole is used, and everything that comes back is right."""
    rng, shelf = np.random.default_rng(1), Shelf(CELLS)
    code = textwrap.dedent(KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    total = 0
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.01, 0.3))
            process.send_signal(signal.SIGKILL)
        store = opened(tmp_path, shelf)
        for path in files(tmp_path):
            node_file.read(path, {"model": "a"}, store.rest)
        found = [loaded(store, shelf, range(start, start + 200))[1] for start in range(0, 20_000, 1000)]
        total += sum(found)
        close(store)
    assert total > 0


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="--cache-disk") as found:
            make_private_folder(path, "--cache-disk")
        assert str(path) in str(found.value)
    with pytest.raises(UsageError, match="--cache-disk"):
        check_cache_disk(ServerConfig(cache_disk=tmp_path / "x", cache_ram=0))
    check_cache_disk(ServerConfig(cache_disk=tmp_path / "x"))


def test_settings_that_change_what_is_cached(tmp_path: Path) -> None:
    """Files of other settings are not for this server, and stay."""
    first = SETTINGS | {"server": {"cache_disk": tmp_path}}
    for changes in (
        {},
        {"override_kv": ("deepseek2.rope.freq_base=float:5000",)},
        {"ser": (1, 0.5)},
        {"type_k": "q8_0"},
    ):
        with serving(1, **first | changes) as engine:
            assert ask(engine, FIRST, 2).timings.cache_n == 0, changes
    with serving(1, **first) as engine:
        assert ask(engine, FIRST, 2).timings.cache_n == len(FIRST) - 1


def test_quiet_conversations_are_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse.Reuse.__init__, "__defaults__", (0.05,))
    with serving(1, server={"cache_disk": tmp_path}, **SETTINGS) as engine:
        ask(engine, FIRST, 2)
        until(lambda: len(files(tmp_path)) > 0)
