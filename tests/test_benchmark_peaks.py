"""The kernels that measure what a machine can do at best do all of the work they are credited with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from benchmark_scripts import load
from kernel_harness import Harness, Segment
from leaves import Custom

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.params_peaks import SCRATCH_BYTES, ProductsParams, ReadParams
from ikcli.backends.cpu.program import CpuLowering
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Node, Weight
from ikcli.hostinfo import visible_cpus
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey

CHAINS = 24  # products of an iteration
WIDTH = CHAINS if isa.current().name == "avx512" else CHAINS // 4  # sums; number i starts from the words i, i + 1, ...


def run(key: KernelKey, threads: int, data: npt.NDArray[np.uint8], n: int) -> npt.NDArray[np.uint8]:
    """What threads leave behind; `data`: the weight for reading, else what the scratch of a thread holds before."""
    reads = key.factory == "make_read"

    def lower(low: CpuLowering, node: Node, op: Custom) -> None:
        scratch = low.out(node, SCRATCH_BYTES * threads)
        w = low.weight(Weight("w", GGMLType.F32, (data.size // 4,)))
        low.emit(key, node.rows, ReadParams(data=w, n_bytes=n, scratch=scratch) if reads
                 else ProductsParams(n=n, scratch=scratch))  # fmt: skip

    harness = Harness(1, 1, RULES.replaced({Custom: lower}))
    node = harness.graph.record(Custom(harness.input("x", 16), 64), "peak")
    harness.compile(node, threads, {"w": data} if reads else None)
    harness.prepare([Segment(1)], {})
    out = harness.program.raw(harness.arena, node, 0, 32 * threads).view(np.uint8)
    if not reads:
        out[:] = np.tile(data, threads)
    harness.execute()
    return out.reshape(threads, 256)[:, :64]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_byte_is_read(threads: int) -> None:
    n = 256 * 37
    data = np.random.default_rng(1).integers(0, 256, n + 40000, dtype=np.uint8)
    found = run(KernelKey("peaks", "make_read"), threads, data, n)
    np.testing.assert_array_equal(np.bitwise_xor.reduce(found), np.bitwise_xor.reduce(data[:n].reshape(-1, 64)))


@pytest.mark.parametrize(("kind", "one"), [("i8", 4), ("i16", 2 * 257**2)])
def test_every_product_of_integers_counts(kind: str, one: int) -> None:
    data = np.ones(256, np.uint8)
    found = run(KernelKey("peaks", "make_products", (kind,)), 2, data, 5).view(np.int32)
    starts = int(data.view(np.int32)[:WIDTH].sum(dtype=np.int64))
    np.testing.assert_array_equal(found, np.full((2, 16), starts + one * 5 * CHAINS))


@pytest.mark.parametrize(("kind", "one", "per_lane"), [("f32", 0x3F800000, 1), ("bf16", 0x3F803F80, 2)])
def test_every_product_of_floats_counts(kind: str, one: int, per_lane: int) -> None:
    if kind == "bf16" and "avx512bf16" not in isa.current().features:
        pytest.skip("this CPU has no products of bfloat16")
    ones = np.repeat(np.array([one, 0], np.uint32), [16, 48])
    found = run(KernelKey("peaks", "make_products", (kind,)), 1, ones.view(np.uint8), 5).view(np.float32)[0]
    starts = [ones.view(np.float32)[lane : lane + WIDTH].sum() for lane in range(16)]
    np.testing.assert_allclose(found, np.add(starts, per_lane * 5 * CHAINS), rtol=1e-6)


def test_work_is_counted_as_it_is_done() -> None:
    """The numbers that peaks are computed from are those of the kernels."""
    from ikcli.backends.cpu import peaks
    from ikcli.backends.cpu.kernels import peaks as kernels

    assert {kind: ops for kind, (_, ops, _) in kernels.KINDS.items()} == peaks.OPS
    assert {sums.n for sums, _, _ in kernels.KINDS.values()} == {peaks.LANES}
    assert peaks.CHAINS == kernels.CHAINS


@pytest.mark.parametrize("threads", [1, 2])
def test_peaks_are_measured(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikcli.backends.cpu import peaks

    monkeypatch.setattr(peaks, "_ITERATIONS", 1000)
    assert peaks.product_peak("f32", threads, repeat=2) > 1e6
    cpus = [frozenset(visible_cpus())] * threads
    data = np.zeros(1 << 20, np.uint8)
    rates = peaks.read_rates(data, threads, cpus=cpus if threads > 1 else (), repeat=2)
    assert len(rates) == 2 and min(rates) > 1e6 and data.all()
    data[:] = 0
    assert len(peaks.read_rates(data, threads, fill=False, repeat=1, seconds=0.01)) > 1 and not data.any()
    monkeypatch.setattr(isa, "current", lambda: isa.ISA("avx2", "haswell", "", frozenset({"avx2"})))
    assert peaks.product_peak("bf16", threads) == 0.0


def test_the_script_prints_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from ikcli.doctor import roofline

    for name, value in {"_LEAST": 1 << 20, "_MOST": 1 << 20, "_PRODUCT_S": 0.0}.items():
        monkeypatch.setattr(roofline, name, value)
    script = load("peaks")
    monkeypatch.setattr(script, "PIECE", 1 << 20)
    monkeypatch.setattr("sys.argv", ["peaks.py", "-t", "2", "--seconds", "0.01"])
    script.main()
    out = capsys.readouterr().out
    assert "| memory | GB/s, 1 thread | GB/s, 2 threads | fastest pass |" in out and "| mapped file | " in out
    assert "| i8 | " in out
