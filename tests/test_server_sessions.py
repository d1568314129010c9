"""Conversations that are kept on disk: across restarts, within the limit, whatever is wrong with folder or files."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_client import ask, serving, until

from ikcli.errors import UsageError
from ikcli.server.slots import reuse
from ikcli.server.slots.sessions import SUFFIX, Sessions, Stored, make_folder

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
FIRST, SECOND = list(range(100, 160)), list(range(300, 360))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)


def session_of(folder: Path, prompt: list[int], **changes: Any) -> list[int]:
    """Ask once with a server of its own; returns the whole conversation."""
    with serving(1, server={"sessions": folder}, **SETTINGS | changes) as engine:
        return prompt + [token.id for token in ask(engine, prompt, 8).tokens]


def test_conversations_go_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "sessions"
    with serving(2, server={"sessions": folder}, **SETTINGS) as engine:
        first, second = ask(engine, FIRST, 8, id_slot=0), ask(engine, SECOND, 8, id_slot=1)
    assert len(files(folder)) == 2 and folder.stat().st_mode & 0o777 == 0o700
    assert all(path.suffix == SUFFIX and path.stat().st_mode & 0o77 == 0 for path in files(folder))
    longer = [FIRST + [token.id for token in first.tokens] + [7, 8, 9], [*SECOND[:50], 1, 2, 3]]
    with serving(1, **SETTINGS) as engine:
        fresh = [[token.id for token in ask(engine, prompt, 8, cache_prompt=False).tokens] for prompt in longer]
    with serving(1, server={"sessions": folder}, **SETTINGS) as engine:
        found = [ask(engine, prompt, 8) for prompt in longer]
        assert [[token.id for token in one.tokens] for one in found] == fresh
        assert [one.timings.cache_n for one in found] == [67, 50]
        assert [one.timings.prompt_n for one in found] == [4, 3]
    texts = len(files(folder))
    assert texts == 3, "the first one goes on in a new file, the second one in two directions"
    with serving(1, server={"sessions": folder}, **SETTINGS) as engine:
        assert ask(engine, longer[0], 2).timings.cache_n == len(longer[0]) - 1
        assert ask(engine, SECOND, 2).timings.cache_n == len(SECOND) - 1
    assert second.timings.cache_n == 0


def test_what_leaves_its_slot_is_kept(tmp_path: Path) -> None:
    with serving(1, server={"sessions": tmp_path, "cache_ram": 0}, **SETTINGS) as engine:
        ask(engine, FIRST, 2)
        ask(engine, SECOND, 2)
        until(lambda: len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1)
        time.sleep(0.2)  # it has its name just before it is known
        assert ask(engine, FIRST, 2).timings.cache_n == len(FIRST) - 1
        ask(engine, [1, 2, 3], 2)  # too short to be worth a file
    assert len(files(tmp_path)) == 2


def test_quiet_conversations_are_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse.Reuse.__init__, "__defaults__", (0.05,))
    with serving(1, server={"sessions": tmp_path}, **SETTINGS) as engine:
        ask(engine, FIRST, 2)
        until(lambda: len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1)
        (path,) = files(tmp_path)
        written = path.stat().st_mtime_ns
        ask(engine, FIRST, 2)
        time.sleep(0.3)
        assert path.stat().st_mtime_ns == written, "what is there is not written again"


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    """By the times of the files, whatever their names and the order in which they are found; the newest stays."""
    made = Sessions.__new__(Sessions)
    made._folder, made._limit, made._lock = tmp_path, 250, threading.Lock()
    paths = {name: tmp_path / f"{name}{SUFFIX}" for name in ("a", "b", "c", "d", "e")}
    for age, name in enumerate(("c", "a", "e", "b", "d")):  # c was used just now, d long ago
        paths[name].write_bytes(bytes(100))
        os.utime(paths[name], ns=(0, 10**15 - age * 10**10))
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    made._stored = [Stored(path, None) for path in paths.values()]  # type: ignore[arg-type]
    made._make_room(paths["d"])  # just written, if with an old time
    assert {path.name[0] for path in tmp_path.glob(f"*{SUFFIX}")} == {"c", "d"} and (tmp_path / "notes.txt").exists()
    assert {one.path for one in made._stored} == {paths["c"], paths["d"]}
    made._limit = 200
    made._make_room(paths["c"])
    assert {path.name[0] for path in tmp_path.glob(f"*{SUFFIX}")} == {"c", "d"}
    made._limit = 199
    made._make_room(paths["d"])
    assert {path.name[0] for path in tmp_path.glob(f"*{SUFFIX}")} == {"d"}


def test_the_limit(tmp_path: Path) -> None:
    starts = [list(range(k, k + 120)) for k in (100, 300, 500, 700)]
    with serving(1, server={"sessions": tmp_path, "sessions_limit": 1}, **SETTINGS) as engine:
        for i, prompt in enumerate(starts):
            ask(engine, prompt, 2)
            if i == 2:
                until(lambda: len(list(tmp_path.glob(f"*{SUFFIX}"))) == 2)
                assert ask(engine, starts[0], 2).timings.cache_n  # from RAM, and its file is the oldest one
    left = files(tmp_path)
    assert sum(path.stat().st_size for path in left) <= 1 << 20
    assert 1 <= len(left) < len(starts)
    with serving(1, server={"sessions": tmp_path}, **SETTINGS) as engine:
        assert ask(engine, starts[3], 2).timings.cache_n == 119
        assert ask(engine, starts[0], 2).timings.cache_n == 119, "used again after the second one was"
        assert ask(engine, starts[1], 2).timings.cache_n == 0


def test_other_settings_leave_files_alone(tmp_path: Path) -> None:
    session_of(tmp_path, FIRST)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    for changes in ({"type_k": "q8_0"}, {"override_kv": ("llama.rope.freq_base=float:5000",)}):
        with serving(1, server={"sessions": tmp_path}, **SETTINGS | changes) as engine:
            assert ask(engine, FIRST, 2).timings.cache_n == 0
    assert path.read_bytes() == data and len(files(tmp_path)) == 3
    with serving(1, server={"sessions": tmp_path}, **SETTINGS) as engine:
        assert ask(engine, FIRST, 2).timings.cache_n == len(FIRST) - 1


def test_damaged_files_are_not_used(tmp_path: Path) -> None:
    conversation = session_of(tmp_path, FIRST)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    (tmp_path / f"other{SUFFIX}").write_bytes(b"no session")
    (tmp_path / f"cut{SUFFIX}").write_bytes(data[:40])
    with serving(1, server={"sessions": tmp_path}, **SETTINGS) as engine:
        found = ask(engine, FIRST, 8)
        assert found.timings.cache_n == 0 and FIRST + [token.id for token in found.tokens] == conversation
        assert not path.exists()
    assert session_of(tmp_path, FIRST) == conversation


def test_a_full_disk_costs_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with serving(1, server={"sessions": tmp_path}, **SETTINGS) as engine:
        ask(engine, FIRST, 2)
        ask(engine, SECOND, 2)
        assert ask(engine, FIRST, 2).timings.cache_n == len(FIRST) - 1  # from RAM
    assert not files(tmp_path)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/sessions")):
        with pytest.raises(UsageError, match="--sessions") as found:
            make_folder(path)
        assert str(path) in str(found.value)
