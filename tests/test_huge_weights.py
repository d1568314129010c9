"""Weights in huge pages: read into one region, moved beside generation, refused clearly; results do not change."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikcli.engine.run import host_memory, huge_weights, weight_memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.huge_weights import HugeWeights, plentiful, share_in_huge_pages
from ikcli.engine.run.session import Session
from ikcli.engine.run.weight_memory import HUGE, Pages, divided, reserve
from ikcli.errors import FormatError, IkError
from ikcli.gguf.reader import open_gguf
from ikcli.settings.rules import resolve
from ikcli.settings.run import RunConfig, default_model

CONFIG = RunConfig(model=default_model(), n_threads=1, n_threads_batch=1, n_ubatch=16, warmup=False)
MIB = 2**20


def logits_of(config: RunConfig, steps: int = 6) -> tuple[np.ndarray, str]:
    """Return the logits of some steps, and what became of the mapped weights."""
    rows = []
    with Session.open(config, n_ctx=256) as session:
        for i in range(steps):
            rows.append(session.decode(Batch.single([7 + i], pos0=i)).copy())
            huge = session._huge
            if huge is not None and huge._thread is not None:
                huge._thread.join()
        outcome = huge.outcome if huge is not None else ""
        if "copied" in outcome:
            assert session.model.mapped(huge._names) == [] and huge.done
            held = {name: session.model.bytes_of(name).ctypes.data for name in huge._names}
            assert held.items() <= session.runner.host_weights.items()
    return np.concatenate(rows), outcome


def test_regions_are_divided_and_aligned() -> None:
    sizes = {"a": 3 * MIB + 5, "b": 1, "c": 0, "d": 70}
    parts = divided(sizes, Pages())
    assert {name: len(part) for name, part in parts.items()} == sizes
    assert parts["a"].ctypes.data % HUGE == 0 or sys.platform != "linux"
    assert all(part.ctypes.data % 64 == 0 for part in parts.values())
    for i, part in enumerate(parts.values()):
        part[:] = i + 1
    assert [set(part.tolist()) for name, part in parts.items() if name != "a"] == [{2}, set(), {4}]
    assert not reserve(5 * MIB, Pages(huge=False)).any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has MAP_HUGETLB")
def test_reserved_pages(monkeypatch, tmp_path: Path) -> None:
    """Flags and sizes are those of the kernel's interface; without enough pages the error says how to reserve them."""
    asked: list[tuple[int, int]] = []
    real = mmap.mmap

    def fake(fd: int, n: int, flags: int) -> mmap.mmap:
        asked.append((n, flags))
        if n > 3 << 30:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, 4096)

    monkeypatch.setattr(weight_memory.mmap, "mmap", fake)
    reserve(4000, Pages(hugetlb=1 << 30))
    assert asked == [(1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000 | 30 << 26)]
    monkeypatch.setattr(weight_memory, "_RESERVED", tmp_path)
    with pytest.raises(IkError, match="need 4 pages, this system has none of this size; reserve them with echo 4 > "):
        reserve(3 * 2**30 + 1, Pages(hugetlb=1 << 30))
    (tmp_path / "hugepages-2048kB").mkdir()
    (tmp_path / "hugepages-2048kB" / "free_hugepages").write_text("7\n")
    with pytest.raises(IkError, match=r"--hugetlb 2M: the weights need 2048 pages, 7 are free"):
        reserve(4 << 30, Pages(hugetlb=2 << 20))


def test_reserved_pages_turn_mmap_off() -> None:
    assert not resolve(replace(CONFIG, hugetlb="2M"))[0].mmap and resolve(CONFIG)[0].mmap


def test_reading_pieces_of_a_tensor(tmp_path: Path) -> None:
    file = open_gguf(default_model())
    name = max(file.tensors, key=lambda n: file.tensors[n].n_bytes)
    out = np.empty(1000, np.uint8)
    file.read_into(name, 333, out)
    assert np.array_equal(out, file.data(name)[333:1333])
    copy = tmp_path / "short.gguf"
    copy.write_bytes(default_model().read_bytes())
    short = open_gguf(copy)
    with copy.open("r+b") as f:
        f.truncate(short.tensors[name].offset + 400)
    with pytest.raises(FormatError, match=f"the file ends within tensor {name}"):
        short.read_into(name, 333, out)


@pytest.mark.parametrize(("free", "fits"), [(100, 50), (101, 50), (None, 0)])
def test_copies_take_at_most_half_of_the_memory(free: int | None, fits: int, monkeypatch) -> None:
    monkeypatch.setattr(huge_weights, "available_memory", lambda: free)
    assert plentiful(fits) == (free is not None) and not plentiful(fits + 1)


def test_share_in_huge_pages(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-3000 r--s 00000000 08:01 12 /m.gguf\nSize: 8 kB\nRss:  100 kB\nFilePmdMapped:  95 kB\n"
        "VmFlags: rd\n3000-4000 rw-p 00000000 00:00 0\nRss: 900 kB\nFilePmdMapped: 0 kB\n"
    )
    assert share_in_huge_pages([(0x1800, 16)], smaps) == 0.95
    assert share_in_huge_pages([(0x3000, 16)], smaps) == 0
    assert share_in_huge_pages([(0x5000, 16)], smaps) == 0 == share_in_huge_pages([], tmp_path / "none")


@pytest.fixture
def small_pages(monkeypatch) -> None:
    """Let the demo model be worth moving at the second step, on a kernel with THP that cannot collapse its pages."""
    monkeypatch.setattr(host_memory, "_LEAST", 0)
    monkeypatch.setattr(host_memory, "thp_state", lambda: "madvise")
    monkeypatch.setattr(huge_weights, "share_in_huge_pages", lambda ranges: 0.0)
    monkeypatch.setattr(huge_weights, "PAYS_AFTER", 1)
    monkeypatch.setattr(huge_weights, "gain", lambda mapped, copies, stopped: 1.1)
    monkeypatch.setattr(huge_weights, "advise", lambda memory, advice: advice != huge_weights.COLLAPSE)


@pytest.mark.parametrize("changes", [{}, {"thp": True}, {"mmap": False}, {"thp": False}], ids=str)
def test_results_stay_the_same(changes, small_pages, monkeypatch) -> None:
    plain, _ = logits_of(replace(CONFIG, thp=False))
    moved, outcome = logits_of(replace(CONFIG, **changes), 12)
    assert np.array_equal(plain, moved[: len(plain)])
    assert ("copied" in outcome) == (not changes)


def test_weights_settle_before_a_benchmark(small_pages) -> None:
    """Also where the thread has begun; all that follows reads the copies, and a second call changes nothing."""
    plain, _ = logits_of(replace(CONFIG, thp=False))
    for steps in (0, 2):
        with Session.open(CONFIG, n_ctx=256) as session:
            for i in range(steps):
                session.decode(Batch.single([7 + i], pos0=i))
            session.clear()
            session.settle_weights()
            huge = session._huge
            assert huge is not None and huge.done and session.model.mapped(huge._names) == []
            session.settle_weights()
            rows = [session.decode(Batch.single([7 + i], pos0=i)).copy() for i in range(6)]
        assert np.array_equal(np.concatenate(rows), plain)


def test_copies_that_do_not_pay_are_not_made(small_pages, monkeypatch) -> None:
    read: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    monkeypatch.setattr(huge_weights, "gain", lambda mapped, copies, stopped: read.append((mapped, copies)) or 1.01)
    monkeypatch.setattr(huge_weights, "_SAMPLE", 1)
    with Session.open(CONFIG, n_ctx=256) as session:
        huge = HugeWeights(session.model, session.runner)
        huge._left = 1
        assert not huge.step()
        huge._thread.join()
        assert (
            not huge.step()
            and huge.done
            and huge.outcome.endswith("stay where the file is mapped: copies are read 1.01 times as fast")
        )
        (mapped,), (copy,) = read[0]
        assert np.array_equal(mapped, copy) and session.model.mapped(huge._names) == huge._names


def test_the_gain_is_that_of_the_shortest_reads(monkeypatch) -> None:
    times = iter([0, 4, 4, 6, 6, 9, 9, 13])  # reads of 4 and 2, then of 3 and 4 seconds
    monkeypatch.setattr(huge_weights.time, "perf_counter", lambda: next(times))
    assert huge_weights.gain([np.zeros(13, np.uint8)], [np.zeros(8, np.uint8)], lambda: False, 2) == 1.5
    assert huge_weights.gain([], [], lambda: True) == 0


def test_pages_that_can_be_collapsed_are_not_copied(small_pages, monkeypatch) -> None:
    collapsed = []
    monkeypatch.setattr(huge_weights, "advise", lambda memory, advice: collapsed.append(memory) or True)
    _, outcome = logits_of(CONFIG, 12)
    assert "collapsed" in outcome or not collapsed


def test_what_the_switch_says(small_pages, monkeypatch, capsys) -> None:
    def said() -> str:
        Session.open(replace(CONFIG, thp=True), n_ctx=256).close()
        return capsys.readouterr().err

    assert "-thp: the " in (text := said()) and "were copied into huge pages" in text
    monkeypatch.setattr(huge_weights, "plentiful", lambda n: False)
    assert "keep small pages" in said()
    monkeypatch.setattr(huge_weights, "share_in_huge_pages", lambda ranges: 1.0)
    assert "the page cache holds the" in said()
    monkeypatch.setattr(host_memory, "thp_state", lambda: "never")
    assert "-thp has no effect: they are switched off on this system" in said()


@pytest.mark.parametrize(("thp", "enough", "asked"), [(None, True, True), (None, False, False), (True, False, True),
                                                      (False, True, False)])  # fmt: skip
def test_cache_and_buffers_are_in_huge_pages_if_there_is_room(thp, enough, asked, monkeypatch) -> None:
    ranges = []
    monkeypatch.setattr(host_memory, "thp_state", lambda: "madvise")
    monkeypatch.setattr(host_memory, "plentiful", lambda n_bytes: enough)
    monkeypatch.setattr(host_memory, "advise", lambda memory, advice: ranges.append((memory, advice)))
    with Session.open(replace(CONFIG, thp=thp, mmap=False), n_ctx=256) as session:
        buffers = [(int(b.ctypes.data), b.nbytes) for b in session.runner.host_buffers]
    assert ranges == ([(b, host_memory.HUGE_PAGE) for b in buffers] if asked else [])


def test_experts_wait_until_all_of_them_were_read(monkeypatch) -> None:
    with Session.open(CONFIG, n_ctx=256) as session:
        huge = HugeWeights(session.model, session.runner)
        hp = session.model.hp
        assert hp.n_expert and huge_weights.PAYS_AFTER < huge._left < huge_weights.PAYS_AFTER * hp.n_expert
        assert "token_embd.weight" not in huge._names and huge.n_bytes > 0
