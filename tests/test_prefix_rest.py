"""Rows that rest in the prompt cache with 8 bits (`--cache-rest q8_0`): how close they stay, what does not change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_client import ask, serving

from ikcli.engine.run.adapters import NOTHING
from ikcli.engine.run.sequences import Sequences
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import row_n_bytes
from ikcli.graph import Cache, Per
from ikcli.quant.decode import dequantize
from ikcli.server.prefix.disk import Disk
from ikcli.server.prefix.rest import Rest
from ikcli.server.prefix.store import PrefixStore
from ikcli.server.slots.log import silent

N_CTX, WINDOW = 160, 40
K = Cache("k", 0, 64, GGMLType.F16)
V = Cache("v", 0, 96, GGMLType.F16, transposed=True)
ODD = Cache("k", 1, 40, GGMLType.F16)
QUANTIZED = Cache("v", 1, 64, GGMLType.Q8_0)
WINDOWS = Cache("k", 2, 32, GGMLType.F16, per=Per.WINDOW)
STATE = Cache("state", 3, 64, GGMLType.F32, per=Per.SEQUENCE)


class Runner:
    """Cache tensors of random numbers."""

    def __init__(self, caches: tuple[Cache, ...]) -> None:
        rng = np.random.default_rng(5)
        self.rows: dict[Cache, Any] = {}
        for c in caches:
            n = c.rows(2 * N_CTX, 2, N_CTX)
            values = rng.normal(size=(n, c.cols)) * np.exp(rng.normal(size=(n, 1)) * 3)
            if c.type == GGMLType.F16:
                self.rows[c] = values.astype("<f2").view(np.uint8)
            else:
                self.rows[c] = rng.integers(0, 256, (n, row_n_bytes(c.type, c.cols)), np.uint8)

    def read_cells(self, cache: Cache, first: int, n: int) -> Any:
        rows = self.rows[cache][first : first + n]
        return np.ascontiguousarray(rows.view("<u2").T).view(np.uint8) if cache.transposed else rows

    def write_cells(self, cache: Cache, first: int, rows: Any) -> None:
        if cache.transposed:
            rows = np.ascontiguousarray(np.ascontiguousarray(rows).view("<u2").T).view(np.uint8)
        self.rows[cache][first : first + len(rows)] = rows


def made(*caches: Cache) -> tuple[Sequences, Any]:
    runner: Any = Runner(caches)
    sequences = Sequences(runner, caches, 2 * N_CTX, 2, "00", WINDOW, N_CTX)
    return sequences, runner.rows


def is_close(found: Any, wanted: Any, block: int = 32) -> None:
    """Within half a step of the scale of each block, whose last bits are rounded too."""
    a, b = (np.ascontiguousarray(x).view("<f2").astype(np.float32).reshape(-1, block) for x in (found, wanted))
    step = np.abs(b).max(axis=1, keepdims=True) / 127
    assert (np.abs(a - b) <= 0.51 * step + np.abs(b) * 2e-3 + 1e-6).all() and not np.array_equal(a, b)


def test_what_comes_back_is_close_and_takes_half(tmp_path: Path) -> None:
    sequences, rows = made(K, V, ODD, QUANTIZED)
    store = PrefixStore(sequences, 1 << 20, block=32, rest="q8_0")
    store.attach(Disk(tmp_path, 1 << 20, 1 << 20, store.rest.about, store.rest, silent))
    text = np.arange(100, dtype=np.int32)
    sequences.n_past[0] = 100
    assert store.keep(0, text, NOTHING) == 100
    assert store.n_bytes == 100 * (4 + (64 + 96) // 32 * 34 + 2 * 40 + 64 // 32 * 34)
    other = text.copy()
    other[75:] += 1000
    store.keep(0, other, NOTHING)  # splits a node of packed rows
    store.save(wait=True)
    for from_disk in (False, True):
        if from_disk:
            assert store.disk is not None
            store.disk.close()
            store = PrefixStore(sequences, 1 << 20, block=32, rest="q8_0")
            store.attach(Disk(tmp_path, 1 << 20, 1 << 20, store.rest.about, store.rest, silent))
        for c in rows:
            rows[c][N_CTX:] = 0
        sequences.truncate(1, 0)
        assert store.load(1, store.find(text[:90], NOTHING), 0) == (90, 90 * from_disk)
        for c in (K, V):
            is_close(rows[c][N_CTX : N_CTX + 90], rows[c][:90])
        for c in (ODD, QUANTIZED):
            assert np.array_equal(rows[c][N_CTX : N_CTX + 90], rows[c][:90])
        assert not rows[K][N_CTX + 90 :].any()
    assert store.disk is not None
    store.disk.close()


@pytest.mark.parametrize("kind", [(K, WINDOWS), (V, STATE), (K, WINDOWS, STATE)])
def test_checkpoints(kind: tuple[Cache, ...]) -> None:
    """Rows of windows rest with 8 bits, states as they are."""
    sequences, rows = made(*kind)
    store = PrefixStore(sequences, 1 << 20, rest="q8_0")
    text = np.arange(100, dtype=np.int32)
    sequences.n_past[0] = 60
    sequences.checkpoint(0)
    sequences.n_past[0] = 100
    store.keep(0, text, NOTHING)
    before = {c: rows[c].copy() for c in kind}
    for n in (60, 80) if STATE not in kind else (60,):
        sequences.truncate(1, 0)
        assert store.load(1, store.find(text[:n], NOTHING), 0)[0] == n
        is_close(rows[kind[0]][N_CTX : N_CTX + n], before[kind[0]][:n])
        if WINDOWS in kind:
            at = sequences.window_cell(1)
            is_close(rows[WINDOWS][at + n - WINDOW + 1 : at + n], before[WINDOWS][n - WINDOW + 1 : n])
        if STATE in kind:
            assert np.array_equal(rows[STATE][1], before[STATE][0])


def test_numbers_of_any_size() -> None:
    """Zeros, numbers too small for a scale, the largest ones: finite, and never further than the largest of a block."""
    sequences, rows = made(K)
    values = np.zeros((8, 64), "<f2")
    values[1] = 6e-8
    values[2, ::2] = -65504
    values[3] = np.linspace(-1e-5, 1e-5, 64)
    values[4] = np.linspace(-1e-3, 1e-3, 64)
    rows[K][:8] = values.view(np.uint8)
    sequences.n_past[0] = 8
    rest = Rest(sequences, "q8_0")
    (packed,) = rest.read(0, 0, 8)
    rest.write(1, 0, (packed,))
    found = rows[K][N_CTX : N_CTX + 8].view("<f2").astype(np.float32)
    wanted = values.astype(np.float32)
    assert (
        np.isfinite(found).all()
        and (np.abs(found - wanted) <= 0.005 * np.abs(wanted).max(axis=1)[:, None] + 8e-6).all()
    )
    decoded = np.clip(dequantize(packed, GGMLType.Q8_0, (64, 8)), -65504, 65504)
    assert np.array_equal(decoded.astype("<f2"), found.astype("<f2"))


def test_off_and_caches_of_other_types() -> None:
    for kind, caches in (("cache", (K, V)), ("q8_0", (QUANTIZED, ODD, STATE))):
        sequences, _ = made(*caches)
        rest = Rest(sequences, kind)
        assert not rest.packs and not rest.about
        assert all(np.array_equal(a, b) for a, b in zip(rest.read(0, 0, 0), sequences.read(0, 0, 0), strict=True))


def test_a_server_that_stores_8_bits() -> None:
    first, second = list(range(100, 200)), list(range(300, 400))
    n_bytes = []
    for rest in ("cache", "q8_0"):
        with serving(1, n_ctx=512, n_threads=1, n_threads_batch=1, server={"cache_rest": rest}) as engine:
            for prompt in (first, second):
                ask(engine, prompt, 1)
            n_bytes.append(engine.metrics(reset=False).prompt_cache_bytes)
            assert ask(engine, first, 1).timings.cache_ram_n == 99
    assert 0.52 < n_bytes[1] / n_bytes[0] < 0.54


def test_a_cache_without_such_rows_is_said() -> None:
    from ikcli.server.slots.reuse import Reuse

    lines: list[str] = []
    sequences, _ = made(QUANTIZED)
    server = SimpleNamespace(cache_ram=1, cache_disk=None, cache_rest="q8_0")
    session: Any = SimpleNamespace(config=SimpleNamespace(server=server), sequences=sequences)
    Reuse(session, [], lambda level, function, message, fields: lines.append(message))
    assert lines == ["--cache-rest q8_0 changes nothing: the cache has no f16 rows of a multiple of 32 elements"]
