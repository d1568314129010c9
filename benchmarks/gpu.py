"""What one GPU does: correctness of the driver calls, rooflines, cost of launches and hand-overs, kernels against both.

    python benchmarks/gpu.py                       everything (about 5 minutes on an H200)
    python benchmarks/gpu.py --only roof,attention --json result.json
    python benchmarks/gpu.py --only attention --batch-invariant --cells 131072
                                                   as in generation with -c 131072
    python benchmarks/gpu.py --tiny                shapes so small that the emulation can run them

Times are medians of graph replays between two events, after warm-up, on random data that cycles through more memory
than the L2 cache holds. ratio = floor / time, floor = the larger of bytes / copy bandwidth and flop / tensor peak, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from ikcli.backends.cuda import driver  # noqa: E402
from ikcli.backends.cuda.device import Device, Launch  # noqa: E402
from ikcli.backends.cuda.kv_layout import cache_bytes, planes, to_device  # noqa: E402
from ikcli.backends.cuda.lower import Counts, DeviceLimits, GpuLowering, GpuProgram, all_rules, lower  # noqa: E402
from ikcli.backends.cuda.modules import Package  # noqa: E402
from ikcli.backends.cuda.transfer import rows_launch  # noqa: E402
from ikcli.backends.cuda.upload import convert, device_bytes, group_moves  # noqa: E402
from ikcli.gguf.constants import GGMLType  # noqa: E402
from ikcli.gguf.types import TYPES  # noqa: E402
from ikcli.graph import Cache, Graph, HeadSlice, Node, Rows, Weight  # noqa: E402
from ikcli.quant.formats import row_size  # noqa: E402

T = GGMLType
Array = npt.NDArray[Any]
GB = 1e9


@dataclass
class Bench:
    """The device, its peaks, and the results."""

    device: Device
    tiny: bool
    seconds: float  # per case, about
    batch_invariant: bool = False  # batch-invariant attention of few tokens, as in generation
    cells: int = 0  # of caches, at least; 0: as many as positions
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    copy_bandwidth: float = 4.3e12  # bytes/s, replaced by the measured peak of `roof`
    peak: dict[str, float] = field(default_factory=lambda: {"f16": 7.9e14, "s8": 1.58e15})  # flop/s
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = self.device.stream()
        self.start, self.stop = self.device.event(timing=True), self.device.event(timing=True)
        self.held: list[Any] = []

    def report(self, subject: str, case: str, **numbers: Any) -> None:
        """Print and keep one line."""
        self.records.append({"subject": subject, "case": case, **numbers})
        text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{subject:10} {case:44} {text}", flush=True)

    def alloc(self, n_bytes: int) -> int:
        """Allocate memory until the end of the subject."""
        self.held.append(self.device.alloc(n_bytes, "compute"))
        return int(self.held[-1].address)

    def upload(self, data: Array, n_bytes: int = 0) -> int:
        """Put an array on the device, repeated until it fills `n_bytes`."""
        n_bytes = max(n_bytes, data.nbytes)
        address = self.alloc(n_bytes)
        self.put(address, data, n_bytes)
        return address

    def put(self, address: int, data: Array, n_bytes: int) -> None:
        """Fill a range with repetitions of an array."""
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)[:n_bytes]
        self.device.upload(self.stream, address, data)
        done = len(data)
        while done < n_bytes:
            n = min(done, n_bytes - done)
            self.device.copy(self.stream, address + done, address, n)
            done += n
        self.device.synchronize(self.stream)

    def release(self) -> None:
        self.device.synchronize()
        for memory in self.held:
            self.device.free(memory)
        self.held = []

    def time(self, launches: list[Launch]) -> float:
        """Return the seconds of the launches as one captured graph."""
        device, stream = self.device, self.stream

        def queue() -> None:
            for launch in launches:
                device.launch(stream, launch)

        queue()  # loads kernels
        device.synchronize(stream)
        graph = device.capture(stream, queue)
        try:
            once = self._replays(graph, 1)
            inner = 1 if self.tiny else max(1, min(200, int(0.002 / max(once, 1e-7))))
            n = 2 if self.tiny else max(5, min(50, int(self.seconds / max(inner * once, 1e-7))))
            for _ in range(1 if self.tiny else 3):
                self._replays(graph, inner)
            return statistics.median(self._replays(graph, inner) for _ in range(n))
        finally:
            device.free_graph(graph)

    def _replays(self, graph: Any, n: int) -> float:
        device, stream = self.device, self.stream
        device.record(stream, self.start)
        for _ in range(n):
            device.replay(stream, graph)
        device.record(stream, self.stop)
        device.synchronize(stream)
        return device.elapsed(self.start, self.stop) / 1e3 / n


# --- driver ----------------------------------------------------------------------------------------------------------
def load(b: Bench) -> None:
    """Load every packaged kernel; report milliseconds of the driver's compiler per file (once per machine)."""
    package, total = Package.installed(), 0.0
    for file in package.files:
        names = [k.name for k in package.kernels.values() if k.file == file]
        start = time.perf_counter()
        b.device.prepare(dict.fromkeys(names, 0))
        took = time.perf_counter() - start
        total += took
        b.report("load", file, kernels=len(names), ms=1e3 * took)
    b.report("load", "all", kernels=len(package.kernels), ms=1e3 * total)


def basic(b: Bench) -> None:
    """Check that kernels, copies, events and graphs work."""
    device, stream = b.device, b.stream
    n = 1000 if b.tiny else 1 << 24
    x = b.alloc(4 * n)
    host = device.pinned(4 * n, "results")
    values = host.array.view(np.float32)
    device.launch(stream, Launch("util_fill", (-(-n // 256), 1, 1), 256, 0, (x, n, np.float32(1.25))))
    device.download(stream, values, x)
    event = device.event()
    device.record(stream, event)
    spins = 0
    while not device.done(event):
        spins += 1
    b.report("basic", "fill and download", ok=bool((values == 1.25).all()), spins=spins)
    values[:] = np.arange(n) % 1000
    sums = b.alloc(4 * (n // 1000))
    found = np.zeros(n // 1000, np.float32)

    def work() -> None:
        device.upload(stream, x, values)
        args = (x, sums, np.int32(1000))
        device.launch(stream, Launch("util_row_sum", (n // 1000, 1, 1), 256, 0, args))

    graph = device.capture(stream, work)
    for factor in (1, 2, 3):
        values[:] = np.arange(n) % 1000 * factor
        device.replay(stream, graph)
        device.download(stream, found, sums)
        device.synchronize(stream)
        b.report("basic", f"graph replay {factor}", ok=bool((found == 499500 * factor).all()))
    other = device.stream()
    device.fill(stream, x, 0, 4 * n)
    device.record(stream, event)
    device.wait(other, event)
    device.download(other, values, x)
    device.synchronize(other)
    b.report("basic", "stream waits for stream", ok=not values.any())
    device.free_graph(graph)
    device.free_pinned(host)


def roof(b: Bench) -> None:
    """Measure read and copy bandwidth, tensor core and dp4a peaks."""
    n_bytes = 1 << 16 if b.tiny else 2 << 30
    x, y = b.upload(b.rng.integers(0, 256, min(n_bytes, 1 << 26), np.uint8), n_bytes), b.alloc(n_bytes)
    n_sm = 2 if b.tiny else b.device.info.n_sm
    for name, args, traffic in (
        ("roof_read", (x, y, n_bytes // 16), n_bytes),
        ("roof_copy", (x, y, n_bytes // 16), 2 * n_bytes),
    ):
        best = max((traffic / b.time([Launch(name, (n_sm * k, 1, 1), 512, 0, args)]), k) for k in (2, 4, 8, 16))
        b.report("roof", name, GB_s=best[0] / GB, blocks_per_sm=best[1])
        if name == "roof_copy":
            b.copy_bandwidth = best[0]
    turns = 4 if b.tiny else 20000
    halves = b.rng.standard_normal(384).astype(np.float16)
    single = (b.rng.standard_normal(384).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    any_bits = b.rng.integers(0, 256, 768, np.uint8)
    for name, data, per_warp in (
        ("roof_mma_bf16", single, 8 * 4096), ("roof_mma_f16", halves, 8 * 4096), ("roof_mma_s8", any_bits, 8 * 8192),
        ("roof_dp4a", any_bits, 32 * 16 * 8),
    ):  # fmt: skip
        operands = b.upload(data)
        best = 0.0
        for k in (1, 2, 4):
            launch = Launch(name, (n_sm * k, 1, 1), 256, 0, (operands, y, np.int32(turns)))
            best = max(best, n_sm * k * 8 * turns * per_warp / b.time([launch]))
        b.report("roof", name, T_s=best / 1e12)
        if name == "roof_mma_f16":
            b.peak["f16"] = best
        if name == "roof_mma_s8":
            b.peak["s8"] = best


def launches(b: Bench) -> None:
    """Measure microseconds per launch: eager from Python, and per kernel inside of a graph."""
    device, stream = b.device, b.stream
    x, n = b.alloc(4096), 20 if b.tiny else 1000
    launch = Launch("util_fill", (1, 1, 1), 256, 0, (x, 256, np.float32(1)))
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(n):
            device.launch(stream, launch)
        queued = time.perf_counter() - start
        device.synchronize(stream)
        took = time.perf_counter() - start
    b.report("launch", "eager", queue_us=1e6 * queued / n, us=1e6 * took / n)
    b.report("launch", "in a graph", us=1e6 * b.time([launch] * n) / n)


def handover(b: Bench) -> None:
    """Measure host -> device -> kernel -> host, spinning on an event: microseconds per round trip."""
    device, stream = b.device, b.stream
    event = device.event()
    for kib in (8, 16, 32, 64):
        n = kib << 10
        x, host = b.alloc(n), device.pinned(n, "hand-over")

        def work(x: int = x, host: Any = host, n: int = n) -> None:
            device.upload(stream, x, host.array)
            device.launch(stream, Launch("util_fill", (n // 1024, 1, 1), 256, 0, (x, n // 4, np.float32(2))))
            device.download(stream, host.array, x)

        graph = device.capture(stream, work)
        for name, run in (("eager", work), ("graph", lambda graph=graph: device.replay(stream, graph))):
            times = []
            for _ in range(3 if b.tiny else 300):
                start = time.perf_counter()
                run()
                device.record(stream, event)
                while not device.done(event):
                    pass
                times.append(time.perf_counter() - start)
            b.report("handover", f"{kib} KiB {name}", us=1e6 * statistics.median(times), best_us=1e6 * min(times))
        device.free_graph(graph)
        device.free_pinned(host)


# --- kernels through their lowering rules ----------------------------------------------------------------------------
class Case:
    """A graph of equal nodes over different memory, lowered as in a session."""

    def __init__(self, b: Bench, n_tokens: int, n_kv: int) -> None:
        self.b, self.graph, self.n_tokens, self.n_kv = b, Graph(), n_tokens, n_kv
        self.n_cells = max(n_kv, b.cells)
        self.leaves: list[Node] = []
        self.weights: dict[str, int] = {}
        self.caches: dict[Cache, int] = {}

    def input(self, name: str, cols: int, rows: Rows = Rows.TOKENS) -> Node:
        """Return a leaf of random values."""
        from leaves import leaf

        node = leaf(self.graph, name, cols, rows)
        self.leaves.append(node)
        return node

    def cache(self, kind: str, cols: int, type_: GGMLType) -> Cache:
        """Return a cache of random rows for the current layer."""
        from cuda_attention import random_rows

        cache = self.graph.cache(kind, cols, type_)
        address = self.b.alloc(cache_bytes(cache, self.n_cells))
        rows = random_rows(self.b.rng, min(self.n_kv, 2048), cols, type_)
        for plane, part in zip(planes(cache, self.n_cells), to_device(cache, rows), strict=True):
            self.b.put(address + plane.offset, part, self.n_kv * plane.row_bytes)
        self.caches[cache] = address
        return cache

    def state(self, kind: str, cols: int) -> Cache:
        """Return the state of one sequence for the current layer."""
        cache = self.graph.state(kind, cols)
        self.caches[cache] = self.b.upload(self.b.rng.standard_normal(cols).astype(np.float32))
        return cache

    def weight(self, name: str, type_: GGMLType, shape: tuple[int, ...]) -> Weight:
        """Return random rows of a type, 64 different ones."""
        from weight_bytes import stored

        w, few = Weight(name, type_, shape), Weight(name, type_, (shape[0], 64))
        data = stored(type_, 64, shape[0], len(self.weights) + 1)
        out = np.zeros(device_bytes(few), np.uint8)
        convert(data, few, out)
        self.weights[name] = self.b.upload(out, device_bytes(w))
        return w

    def launches(self, results: list[Node]) -> tuple[GpuProgram, list[Launch]]:
        """Return the launches of one step of all tokens after the cells before them."""
        b, n, n_kv = self.b, self.n_tokens, self.n_kv
        most = {Rows.TOKENS: n, Rows.OUTPUTS: n, Rows.KV: self.n_cells}
        low = GpuLowering(most, self.n_cells, DeviceLimits.of(b.device.info), batch_invariant=b.batch_invariant)
        from leaves import Leaf

        rules = all_rules().replaced({Leaf: lambda low, node, op: low.keep(node, 0, 0)})
        program = lower(self.graph.nodes, [*results, *self.leaves], low, rules)
        arrays = [
            np.zeros(n, np.int32), np.arange(n_kv - n, n_kv, dtype=np.int32), np.arange(n_kv - n, n_kv), np.arange(n),
            np.array([0, n, 0, n_kv - n, 0, n_kv]), np.arange(n_kv),
        ]  # fmt: skip
        words = np.zeros(16, np.int64)
        words[:4] = n, n, n_kv, 1
        words[4:10] = [b.upload(a) for a in arrays]
        words[10] = b.upload(np.zeros(1, np.int64))  # the sequence of the segment
        words[11:13] = words[6], b.upload(np.zeros(1, np.int64))
        constants = {k: b.upload(np.frombuffer(data, np.uint8)) for k, data in program.constants.items()}
        program.bind(b.upload(words), b.alloc(program.arena_bytes), constants, self.weights, self.caches)
        for node in self.leaves:
            rows = n if node.rows.symbol is Rows.TOKENS else n_kv
            some = b.rng.standard_normal((min(rows, 1024), node.cols)).astype(np.float32)
            b.put(program.node_address(node), some, rows * node.cols * 4)
        return program, list(program.launches(Counts(n, n, n_kv, 1, n_kv).bucket(most)))

    def measure(
        self, subject: str, name: str, results: list[Node], n_bytes: float, flop: float, peak: str = "f16"
    ) -> None:
        """Report the time per node; `n_bytes` and `flop` are those of one."""
        b = self.b
        _, launches = self.launches(results)
        seconds = b.time(launches) / len(results)
        floor = max(n_bytes / b.copy_bandwidth, flop / b.peak[peak])
        kernels = "+".join(dict.fromkeys(x.kernel for x in launches))
        b.report(subject, name, us=1e6 * seconds, GB_s=n_bytes / seconds / GB, T_s=flop / seconds / 1e12,
                 ratio=floor / seconds, kernels=kernels)  # fmt: skip


def _copies(b: Bench, n_bytes: float) -> int:
    """Return how many equal nodes make the data larger than twice the L2 cache."""
    return 1 if b.tiny else max(1, min(16, int(2 * b.device.info.l2_bytes / n_bytes) + 1))


def attention_mla(b: Bench) -> None:
    """Measure absorbed MLA, 576/512, with one new token and a few."""
    lengths = (96,) if b.tiny else (4096, 16384, 32768, 65536, 131072)
    for n_head in (16, 128):
        for type_ in (T.F16, T.Q8_0):
            for n_kv in lengths:
                for n_tokens in (1,) if b.tiny or n_kv != 32768 else (1, 2, 4):
                    with subject(b):
                        case = Case(b, n_tokens, n_kv)
                        q, latent = case.input("q", n_head * 192), case.input("q2", n_head * 512)
                        n_bytes = n_kv * cache_bytes(Cache("kv", 0, 576, type_), 1)
                        nodes = []
                        for il in range(_copies(b, n_bytes)):
                            case.graph.il = il
                            cache = case.cache("kv", 576, type_)
                            nodes.append(case.graph.attention(
                                [HeadSlice(q, 128, 64, 192), HeadSlice(latent, 0, 512, 512)],
                                [HeadSlice(cache, 0, 576, 0)], HeadSlice(cache, 64, 512, 0), "kqv", n_head=n_head,
                                n_head_kv=1, scale=192**-0.5, flash=True))  # fmt: skip
                        name = f"{n_head} heads {TYPES[type_].name} n_kv {n_kv} tokens {n_tokens}"
                        flop = 2.0 * (576 + 512) * n_head * n_tokens * n_kv
                        case.measure("mla", name, nodes, n_bytes, flop)


def attention_gqa(b: Bench) -> None:
    """Measure grouped heads with one new token."""
    for width, group in ((64, 8), (128, 4), (128, 8), (128, 12), (256, 8)):
        for type_ in (T.F16, T.Q8_0):
            for n_kv in (96,) if b.tiny else (4096, 32768, 131072):
                with subject(b):
                    n_head_kv = 1 if b.tiny else 8
                    case = Case(b, 1, n_kv)
                    q = case.input("q", n_head_kv * group * width)
                    n_bytes = 2 * n_kv * cache_bytes(Cache("k", 0, n_head_kv * width, type_), 1)
                    nodes = []
                    for il in range(_copies(b, n_bytes)):
                        case.graph.il = il
                        k, v = (case.cache(kind, n_head_kv * width, type_) for kind in ("k", "v"))
                        nodes.append(case.graph.attention(
                            [HeadSlice(q, 0, width, width)], [HeadSlice(k, 0, width, width)],
                            HeadSlice(v, 0, width, width), "kqv", n_head=n_head_kv * group, n_head_kv=n_head_kv,
                            scale=width**-0.5, flash=True))  # fmt: skip
                    name = f"{n_head_kv}x{group} heads of {width} {TYPES[type_].name} n_kv {n_kv}"
                    case.measure("gqa", name, nodes, n_bytes, 4.0 * width * n_head_kv * group * n_kv)


def attention_window(b: Bench) -> None:
    """Measure grouped heads with one new token, with and without a window.

    With a window, the time must not grow with the context.
    """
    width, group, n_head_kv = 128, 4, 1 if b.tiny else 8
    for type_ in (T.F16, T.Q8_0):
        for window in (0, 32) if b.tiny else (0, 1024, 4096):
            for n_kv in (96,) if b.tiny else (8192, 32768, 131072):
                with subject(b):
                    case = Case(b, 1, n_kv)
                    q = case.input("q", n_head_kv * group * width)
                    seen = min(window or n_kv, n_kv)
                    n_bytes = 2 * seen * cache_bytes(Cache("k", 0, n_head_kv * width, type_), 1)
                    nodes = []
                    for il in range(_copies(b, n_bytes)):
                        case.graph.il = il
                        k, v = (case.cache(kind, n_head_kv * width, type_) for kind in ("k", "v"))
                        nodes.append(case.graph.attention(
                            [HeadSlice(q, 0, width, width)], [HeadSlice(k, 0, width, width)],
                            HeadSlice(v, 0, width, width), "kqv", n_head=n_head_kv * group, n_head_kv=n_head_kv,
                            scale=width**-0.5, flash=True, window=window))  # fmt: skip
                    name = f"{n_head_kv}x{group} heads {TYPES[type_].name} window {window or 'none'} n_kv {n_kv}"
                    case.measure("window", name, nodes, n_bytes, 4.0 * width * n_head_kv * group * seen)


def attention_prefill(b: Bench) -> None:
    """Measure prompts: 192/128 (expanded MLA, 16 heads) and grouped heads of 128."""
    sizes = ((40, 8),) if b.tiny else ((512, 0), (2048, 0), (4096, 0), (2048, 16384), (2048, 65536))
    for n_tokens, depth in sizes:
        n_kv = n_tokens + depth
        pairs = n_tokens * depth + n_tokens * (n_tokens + 1) / 2
        with subject(b):
            case, n_head = Case(b, n_tokens, n_kv), 2 if b.tiny else 16
            q, kv = case.input("q", n_head * 192), case.input("kv", n_head * 256, Rows.KV)
            cache = case.cache("kv", 576, T.F16)
            node = case.graph.attention(
                [HeadSlice(q, 128, 64, 192), HeadSlice(q, 0, 128, 192)],
                [HeadSlice(cache, 0, 64, 0), HeadSlice(kv, 0, 128, 256)], HeadSlice(kv, 128, 128, 256), "kqv",
                n_head=n_head, n_head_kv=n_head, scale=192**-0.5, flash=True)  # fmt: skip
            flop = 2.0 * (192 + 128) * n_head * pairs
            case.measure(
                "prefill", f"192/128 {n_head} heads {n_tokens} after {depth}", [node], 4.0 * n_kv * kv.cols, flop
            )
        with subject(b):
            case, n_head_kv = Case(b, n_tokens, n_kv), 1 if b.tiny else 8
            q = case.input("q", n_head_kv * 4 * 128)
            k, v = (case.cache(kind, n_head_kv * 128, T.F16) for kind in ("k", "v"))
            node = case.graph.attention(
                [HeadSlice(q, 0, 128, 128)], [HeadSlice(k, 0, 128, 128)], HeadSlice(v, 0, 128, 128), "kqv",
                n_head=n_head_kv * 4, n_head_kv=n_head_kv, scale=128**-0.5, flash=True)  # fmt: skip
            flop = 4.0 * 128 * n_head_kv * 4 * pairs
            name = f"128/128 {n_head_kv}x4 heads {n_tokens} after {depth}"
            case.measure("prefill", name, [node], 4.0 * n_kv * k.cols, flop)


def delta_rule(b: Bench) -> None:
    """Measure recurrent layers: 32 heads of 128 x 128, a decay per head and per key column; a token, and prompts."""
    n_head, d = (2, 32) if b.tiny else (32, 128)
    for by_column in (False, True):
        for n_tokens in (1, 130) if b.tiny else (1, 512, 2048):
            with subject(b):
                case = Case(b, n_tokens, n_tokens + 1)  # a position is cached, so states are read
                qkv, beta = case.input("qkv", 3 * n_head * d), case.input("beta", n_head)
                decay = case.input("decay", n_head * (d if by_column else 1))
                n_bytes, nodes = 8 * n_head * d * d, []
                for il in range(_copies(b, n_bytes) if n_tokens == 1 else 1):
                    case.graph.il = il
                    state = case.state("delta", n_head * d * d)
                    q, k, v = (HeadSlice(qkv, i * n_head * d, d, d) for i in range(3))
                    nodes.append(case.graph.delta_net(state, q, k, v, decay, beta, "delta_net", n_head=n_head,
                                                      n_head_k=n_head, scale=d**-0.5))  # fmt: skip
                name = f"{n_head} heads of {d}{' by column' * by_column} tokens {n_tokens}"
                case.measure("delta", name, nodes, n_bytes, 7.0 * n_head * d * d * n_tokens)


MATVEC = (T.Q8_0, T.Q4_0, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS, T.IQ4_K, T.IQ4_KS, T.IQ2_XXS, T.IQ3_S, T.IQ2_KT, T.F16)
MATMUL = (T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_XS, T.IQ2_XXS, T.F16, T.BF16)


def _products(b: Bench, name: str, types: tuple[T, ...], tokens: tuple[int, ...]) -> None:
    n_in, n_out = (256, 128) if b.tiny else (7168, 18432)
    for type_ in types:
        for n in tokens:
            with subject(b):
                case = Case(b, n, n)
                x, nodes, n_bytes = case.input("x", n_in), [], 0
                copies = 1
                while len(nodes) < copies:
                    w = case.weight(f"w{len(nodes)}", type_, (n_in, n_out))
                    n_bytes, copies = device_bytes(w), _copies(b, device_bytes(w))
                    nodes.append(case.graph.mul_mat(w, x, f"y{len(nodes)}"))
                flop, peak = 2.0 * n_in * n_out * n, "s8" if n > 8 and type_ not in (T.F16, T.BF16) else "f16"
                case.measure(name, f"{TYPES[type_].name} {n_out}x{n_in} tokens {n}", nodes, n_bytes, flop, peak)


def matvec(b: Bench) -> None:
    """Measure products with 1 to 8 rows."""
    _products(b, "matvec", MATVEC[:2] if b.tiny else MATVEC, (1, 3) if b.tiny else (1, 2, 4, 8))


def matmul(b: Bench) -> None:
    """Measure products with 16 to 4096 rows."""
    _products(b, "matmul", MATMUL[:2] if b.tiny else MATMUL, (16,) if b.tiny else (16, 64, 256, 512, 2048, 4096))


UPLOADED = (T.Q8_0, T.Q8_0_R8, T.Q4_K, T.Q4_K_R4, T.Q3_K_R4, T.IQ4_K_R4, T.IQ2_K_R4, T.IQ2_XXS_R4, T.BF16_R16)


def uploads(b: Bench) -> None:
    """Measure how fast rows of a file become device rows; they come over a bus of 12 to 60 GB/s."""
    for type_ in UPLOADED[:3] if b.tiny else UPLOADED:
        with subject(b):
            w = Weight("w", type_, (4096, 64 if b.tiny else 8192))
            stored, n_rows = row_size(type_, w.ne0), w.shape[1]
            data = np.random.default_rng(1).integers(0, 256, n_rows * stored, dtype=np.uint8)
            source, target = b.upload(data, len(data)), b.alloc(device_bytes(w))
            terms = b.upload(group_moves(type_).terms, 0) if TYPES[type_].rows > 1 else 0
            b.device.prepare({"upload_rows": 0, "upload_groups": 0})
            seconds = b.time([rows_launch(w, source, target, n_rows, terms)])
            b.report("upload", TYPES[type_].name, us=seconds * 1e6, GB_s=len(data) / seconds / 1e9)


class subject:
    """Free the allocations of a case; report a case that fails and continue with the rest."""

    def __init__(self, b: Bench) -> None:
        self.b = b

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        if error is not None:
            self.b.report("FAILED", f"{type(error).__name__}: {str(error)[:200]}")
            traceback.print_exception(error, limit=-4, file=sys.stderr)
        self.b.release()
        return True


SUBJECTS: dict[str, Callable[[Bench], None]] = {
    "load": load, "basic": basic, "roof": roof, "launch": launches, "handover": handover, "mla": attention_mla,
    "gqa": attention_gqa, "window": attention_window, "prefill": attention_prefill, "delta": delta_rule,
    "matvec": matvec, "matmul": matmul, "upload": uploads,
}  # fmt: skip


def chosen(text: str) -> Iterator[str]:
    """Return the subjects of a comma list; `attention` means all three."""
    for name in text.split(","):
        yield from ("mla", "gqa", "prefill") if name == "attention" else (name,)


def main(argv: list[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}, attention")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.1, help="measuring time per case")
    parser.add_argument("--batch-invariant", action="store_true", help="attention as in generation: the result of a "
                        "token must not depend on the others")  # fmt: skip
    parser.add_argument("--cells", type=int, default=0, metavar="N", help="cells of KV caches, at least")
    parser.add_argument("--tiny", action="store_true", help="smallest shapes, two repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records")
    args = parser.parse_args(argv)
    names = list(chosen(args.only))
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"unknown subject {unknown[0]}; known are {', '.join(SUBJECTS)}, attention")
    if device is None:
        reason = driver.why_none()
        if reason is not None:
            print(f"no GPU to measure: {reason}", file=sys.stderr)
            return 1
        device = driver.open_device(args.gpu)
    b = Bench(device, args.tiny, args.seconds, args.batch_invariant, args.cells)
    info = device.info
    cc, cuda = (".".join(map(str, pair)) for pair in (info.cc, info.driver))
    print(f"{info.name}, compute capability {cc}, {info.n_sm} SMs, CUDA {cuda}", flush=True)
    for name in names:
        with subject(b):
            SUBJECTS[name](b)
        if args.json:
            args.json.write_text(json.dumps({"device": str(info), "records": b.records}, indent=1))
    return 1 if any(r["subject"] == "FAILED" or r.get("ok") is False for r in b.records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
