"""Run the splits of one GPU: plan them, give programs memory, launch them, keep captured graphs.

A split (`GraphSplit`) is a run of nodes that one device computes before another device goes on. Everything of a step is
queued on one stream: the step block, then per split the values from other devices, the launches, and the values for
other devices. The first step of a bucket (`Counts.bucket`) runs launch by launch; from the second on every split is one
captured graph. A step allocates nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda.attention import reads_places
from ikcli.backends.cuda.device import Device, DeviceMemory, Event, Graph, NoGraphMemory, Pinned, Stream
from ikcli.backends.cuda.lower import ALIGN, Counts, DeviceLimits, GpuLowering, GpuProgram, all_rules
from ikcli.backends.cuda.rules_layers import plan_layout
from ikcli.backends.cuda.transfer import Transfer
from ikcli.backends.cuda.upload import device_bytes
from ikcli.backends.cuda.used_experts import ExpertTable, Mask, UsedExperts, runs
from ikcli.backends.rules import Rules
from ikcli.backends.step_block import SEG_WORDS, StepBlock
from ikcli.graph import Cache, Node, Rows, Weight
from ikcli.graph.micro_batch import PLACE_WORDS
from ikcli.graph.ops_experts import ExpertProduct
from ikcli.graph.split import GraphSplit
from ikcli.log import notice_once

Bytes = npt.NDArray[np.uint8]
# Captured graphs of one program: the second where it has many turns, the third where it has many launches.
MAX_BUCKETS, MAX_GRAPHS, MAX_GRAPH_LAUNCHES = 24, 512, 32768
# Most tokens of a captured step. Launches of larger ones take longer on the device than on the host, which stays ahead;
# making their graphs cost 20 ms of a prompt of 512 tokens on an H100.
MAX_GRAPH_TOKENS = 128
_HEAD, _PLACES = 128, 14  # bytes of the step block's words, and the word that says where places are


@dataclass(slots=True)
class Span:
    """Ops first..stop-1 of one split, values that come in before it and go out after it."""

    first: int
    stop: int
    imports: tuple[Node, ...]
    exports: tuple[Node, ...]
    loads: tuple[tuple[int, tuple[Weight, ...]], ...] = ()  # before which op which weights come from the host


@dataclass(slots=True, eq=False)
class CudaProgram:
    """The splits of one device, lowered."""

    program: GpuProgram
    spans: list[Span]
    most: Mapping[Rows, int]
    reads_kv_rows: bool
    reads_places: bool
    loaded: frozenset[Weight]  # come from the host in every step
    tables: Mapping[str, ExpertTable]  # of those with experts: which of them a step uses
    places: Mapping[Node, Bytes] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    graphs: OrderedDict[Counts, dict[int, Graph]] = field(default_factory=OrderedDict)
    eager: set[Counts] = field(default_factory=set)  # buckets without memory for graphs

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes

    @property
    def most_buckets(self) -> int:
        """Return the number of buckets whose graphs are kept."""
        fitting = min(MAX_GRAPHS // len(self.spans), MAX_GRAPH_LAUNCHES // max(len(self.program.ops), 1))
        return max(min(MAX_BUCKETS, fitting), 2)

    def has_output(self, node: Node) -> bool:
        """Return whether the node's value can be shown."""
        return self.program.has_output(node)


class CudaBackend:
    """One GPU of a session. `rules` default to those of all ops."""

    asynchronous = True
    in_place = False

    def __init__(self, device: Device, rules: Rules[GpuLowering] | None = None, *, capture: bool = True) -> None:
        self.device = device
        self.limits = DeviceLimits.of(device.info)
        self._rules = rules
        self._capture = capture
        self._stream: Stream = device.stream()
        self._memory: list[DeviceMemory] = []  # arena, constants and step block of the last `bind`
        self._pinned: list[Pinned] = []
        self._programs: list[CudaProgram] = []
        self._step: Pinned | None = None
        self._step_address = 0
        self._counts = Counts(0, 0, 0)
        self._transfer: Transfer | None = None
        self.sent_between: frozenset[Weight] = frozenset()  # experts that are sent between steps
        self._free, self._ready = None, None  # events: memory of the next weights is free, they are there
        self._used: UsedExperts | None = None
        self.host_bytes: Callable[[str], Bytes] | None = None  # of weights that come from the host in a step

    # --- planning ---------------------------------------------------------------------------------------------------
    def plan(
        self,
        turns: Sequence[GraphSplit],
        rows: Mapping[Rows, int],
        n_cells: int,
        batch_invariant: bool,
        streamed: Collection[str] = (),
        window_cells: int = 0,
    ) -> CudaProgram:
        """Lower the splits one after the other without allocating. `streamed`: weights that stay on the host."""
        rules = self._rules if self._rules is not None else all_rules()
        low = GpuLowering(rows, n_cells, self.limits, window_cells, batch_invariant)
        spans: list[Span] = []
        tables: dict[str, ExpertTable] = {}
        for turn in turns:
            first = low.turn_start = len(low.ops)
            for node in turn.imports:
                low.keep(node, first, first)
            weights = [w for n in turn.nodes for w in n.weights() if w.name in streamed]
            for w in weights:
                low.stream(w, device_bytes(replace(w, row0=0, n_rows=-1)))
            rules.check(turn.nodes)
            for node in turn.nodes:
                low.begin(node)
                rules.lower(low, node)
                if isinstance(node.op, ExpertProduct):
                    table = ExpertTable(node.op.plan, plan_layout(low, node.op.plan).offsets, node.op.sort.n_expert)
                    tables |= {w.name: table for w in node.weights() if w.name in streamed}
            stop = len(low.ops)
            for node in turn.exports:
                low.keep(node, max(stop - 1, 0), max(stop - 1, 0))
            loads = _loads(low, first, weights)
            spans.append(Span(first, stop, tuple(turn.imports), tuple(turn.exports), loads))
        reads = any(n.rows.symbol is Rows.KV for t in turns for n in t.nodes)
        loaded = frozenset(w for span in spans for _, ws in span.loads for w in ws)
        places = reads_places([n for t in turns for n in t.nodes], batch_invariant)
        return CudaProgram(GpuProgram(low), spans, dict(rows), reads, places, loaded, tables)

    def step_bytes(self, programs: Sequence[CudaProgram]) -> int:
        """Return the bytes of the step block of these programs."""
        n = max(p.most[Rows.TOKENS] for p in programs)
        kv = max((p.most[Rows.KV] for p in programs if p.reads_kv_rows), default=0)
        places = 4 * PLACE_WORDS * max((p.most[Rows.TOKENS] for p in programs if p.reads_places), default=0)
        return _HEAD + n * (4 + 4 + 8 + 8 + 8 * SEG_WORDS + 8 + 8 + 8) + 8 * kv + places + 10 * 16

    def compute_bytes(self, programs: Sequence[CudaProgram]) -> int:
        """Return the device memory of these programs: shared work memory, constants, the step block."""
        if not programs:
            return 0
        arena = max(p.arena_bytes for p in programs)
        if sent := _loaded(programs) | self.sent_between:
            arena += Transfer.device_bytes(sent)
        return arena + sum(p.program.constant_bytes for p in programs) + self.step_bytes(programs)

    # --- memory -----------------------------------------------------------------------------------------------------
    def bind(
        self,
        programs: Sequence[CudaProgram],
        state: StepBlock,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None:
        """Give the programs memory: device addresses of weights and caches, hand-over memory per program."""
        self._release()
        self._programs = list(programs)
        if not programs:
            return
        device = self.device
        arena = self._alloc(max(p.arena_bytes for p in programs))
        self._step_address = self._alloc(self.step_bytes(programs))
        self._step = device.pinned(self.step_bytes(programs), "step block")
        self._pinned.append(self._step)
        if sent := _loaded(programs) | self.sent_between:
            self._transfer = Transfer(device, sent)
            self._transfer.pin(self._streamed(programs))
            self._free, self._ready = device.event(), device.event()
        if tables := {t.node: t for p in programs for t in p.tables.values()}:
            self._used = UsedExperts(device, self._stream, tables)
        for p, places in zip(programs, handover, strict=True):
            p.program.bind(self._step_address, arena, self._upload_constants(p.program), weights, caches)
            p.places = places
            p.events = [device.event() for _ in p.spans]
        device.prepare(self.kernels(programs))

    def _streamed(self, programs: Sequence[CudaProgram]) -> Iterator[Bytes]:
        """Yield the streamed weights that are at the same host address in every step."""
        streamed = {w.name for p in programs for span in p.spans for _, ws in span.loads for w in ws}
        for name in streamed | {w.name for w in self.sent_between}:
            assert self.host_bytes is not None
            data = self.host_bytes(name)
            if self.host_bytes(name).ctypes.data == data.ctypes.data:
                yield data

    def _alloc(self, n_bytes: int) -> int:
        self._memory.append(self.device.alloc(max(n_bytes, ALIGN), "compute"))
        return self._memory[-1].address

    def send(self, w: Weight, data: Bytes, address: int) -> None:
        """Queue the copy of a weight that no step reads until `sent` is done; `sent_between` names it."""
        assert self._transfer is not None
        self._transfer.send(w, data, address)

    def sent(self) -> Event:
        """Return a new event that is done when everything that was sent has arrived."""
        assert self._transfer is not None
        event = self.device.event()
        self.device.record(self._transfer.stream, event)
        return event

    def _upload_constants(self, program: GpuProgram) -> dict[int, int]:
        if not program.constants:
            return {}
        block = np.zeros(program.constant_bytes, np.uint8)
        start, at, addresses = self._alloc(len(block)), 0, {}
        for buffer, data in program.constants.items():
            block[at : at + len(data)] = np.frombuffer(data, np.uint8)
            addresses[buffer] = start + at
            at += -(-len(data) // ALIGN) * ALIGN
        self.device.upload(self._stream, start, block)
        self.device.synchronize(self._stream)
        return addresses

    @staticmethod
    def kernels(programs: Sequence[CudaProgram]) -> dict[str, int]:
        """Return every kernel with the most shared memory it may ask for."""
        most: dict[str, int] = {}
        for p in programs:
            sizes = list(_some_counts(p.most))
            for op in p.program.ops:
                needs = [op.shared(c) for c in sizes] if callable(op.shared) else [op.shared]
                most[op.kernel] = max(most.get(op.kernel, 0), *needs)
        return most

    def _release(self) -> None:
        self.device.synchronize()
        events = [e for e in (self._free, self._ready) if e is not None]
        for p in self._programs:
            self._drop_graphs(p, 0)
            events += p.events
            p.events = []
            p.eager.clear()
        for event in events:
            self.device.free_event(event)
        for memory in self._memory:
            self.device.free(memory)
        for pinned in self._pinned:
            self.device.free_pinned(pinned)
        if self._transfer is not None:
            self._transfer.close()
        if self._used is not None:
            self._used.close()
            self._used = None
        self._memory, self._pinned, self._programs, self._step, self._transfer = [], [], [], None, None
        self._free, self._ready = None, None

    def close(self) -> None:
        """Free the memory that `bind` allocated."""
        self._release()

    # --- running ----------------------------------------------------------------------------------------------------
    def begin(self, program: CudaProgram, state: StepBlock) -> None:
        """Begin a micro-batch: send its step block to the device."""
        self._counts = _counts(state).bucket(program.most)
        assert self._step is not None
        if self._used is not None:
            self._used.begin()
        used = self._pack(program, state)
        self.device.upload(self._stream, self._step_address, self._step.array[:used])

    def _pack(self, program: CudaProgram, state: StepBlock) -> int:
        """Write the step block into pinned memory, arrays one after the other; return the bytes used."""
        assert self._step is not None
        words, *arrays = state.arrays()
        memory = self._step.array
        head = memory[:_HEAD].view(np.int64)
        head[:4] = words[:4]
        at = _HEAD
        for i, array in enumerate(arrays):
            head[4 + i] = self._step_address + at
            if i == 5 and not program.reads_kv_rows:
                continue
            n = array.nbytes
            memory[at : at + n] = array.reshape(-1).view(np.uint8)
            at += -(-n // 16) * 16
        if program.reads_places and state.ranged:
            head[_PLACES] = self._step_address + at
            n = state.places.nbytes
            memory[at : at + n] = state.places.reshape(-1).view(np.uint8)
            at += n
        return at

    def run(self, program: CudaProgram, turn: int, n_threads: int) -> None:
        """Queue one split."""
        device, span, counts = self.device, program.spans[turn], self._counts
        graphs = program.graphs.get(counts)
        capture = self._capture and not program.loaded and counts not in program.eager
        capture = capture and counts.n_tokens <= MAX_GRAPH_TOKENS
        if graphs is None or not capture:
            self._queue(program, span)
            if turn == len(program.spans) - 1 and capture:
                program.graphs[counts] = {}
                self._drop_graphs(program, program.most_buckets)
        else:
            program.graphs.move_to_end(counts)
            try:
                graph = graphs.get(turn)
                if graph is None:
                    graph = graphs[turn] = device.capture(self._stream, lambda: self._queue(program, span))
                device.replay(self._stream, graph)
            except NoGraphMemory:
                self._give_up_graphs(program, counts)
                self._queue(program, span)
        device.record(self._stream, program.events[turn])

    def _give_up_graphs(self, program: CudaProgram, counts: Counts) -> None:
        """Free all graphs and launch steps of this bucket one by one from now on."""
        program.eager.add(counts)
        for p in self._programs:
            self._drop_graphs(p, 0)
        tokens = "1 token is" if counts.n_tokens == 1 else f"{counts.n_tokens} tokens are"
        notice_once(
            f"{self.limits.name}: no memory for captured graphs; {tokens} launched kernel by kernel, which is slower"
        )

    def _queue(self, program: CudaProgram, span: Span) -> None:
        """Queue imports, launches and exports of a split."""
        self.take_in(program, span)
        at = span.first
        for i, weights in span.loads:
            self.device.record(self._stream, self._free)
            self._launch(program, at, i)
            self._load(program, weights)
            at = i
        self._launch(program, at, span.stop)
        self.give_out(program, span)

    def _launch(self, program: CudaProgram, first: int, stop: int) -> None:
        for launch in program.program.launches(self._counts, first, stop):
            self.device.launch(self._stream, launch)

    def _load(self, program: CudaProgram, weights: Sequence[Weight]) -> None:
        """Queue copies of weights from the host as soon as `_free` is done; later work on the stream waits for them."""
        assert self._transfer is not None
        self.device.wait(self._transfer.stream, self._free)
        expected: list[tuple[Weight, ExpertTable, Mask]] = []
        for w in weights:
            table = program.tables.get(w.name)
            mask = self._used.expected(table) if table is not None and self._used is not None else None
            self._send_experts(program, w, mask)
            if table is not None and mask is not None:
                expected.append((w, table, mask))
        for table in {t.node: t for w in weights if (t := program.tables.get(w.name)) is not None}.values():
            assert self._used is not None
            self._used.learn(table, program.program.node_address(table.node))
        for w, table, mask in expected:
            assert self._used is not None
            used = self._used.expected(table)
            assert used is not None
            self._send_experts(program, w, used & ~mask)
        self.device.record(self._transfer.stream, self._ready)
        self.device.wait(self._stream, self._ready)

    def _send_experts(self, program: CudaProgram, w: Weight, mask: Mask | None) -> None:
        """Queue copies of a weight to its place: of these experts, or of all."""
        assert self._transfer is not None and self.host_bytes is not None
        data, address = self.host_bytes(w.name), program.program.streamed_address(w.name)
        if mask is None:
            self._transfer.send(w, data, address)
            return
        experts, n_bytes = data.reshape(w.ne2, -1), device_bytes(w) // w.ne2
        for first, stop in runs(mask):
            part = replace(w, shape=(*w.shape[:2], stop - first))
            self._transfer.send(part, experts[first:stop].reshape(-1), address + first * n_bytes)

    def load_for(self, program: CudaProgram, span: Span, first: int, stop: int) -> None:
        """Queue the copies for the ops first..stop-1, without overlap."""
        for i, weights in span.loads:
            if first <= i < stop:
                self.device.record(self._stream, self._free)
                self._load(program, weights)

    def take_in(self, program: CudaProgram, span: Span) -> None:
        """Queue the copies from hand-over memory before a split."""
        for node in span.imports:
            self.device.upload(self._stream, program.program.node_address(node), self._part(program, node))

    def give_out(self, program: CudaProgram, span: Span) -> None:
        """Queue the copies into hand-over memory after a split."""
        for node in span.exports:
            self.device.download(self._stream, self._part(program, node), program.program.node_address(node))

    def _part(self, program: CudaProgram, node: Node) -> Bytes:
        """Return a node's rows of this bucket in hand-over memory."""
        return program.places[node][: 4 * self._counts.rows(node.rows) * node.cols]

    def _drop_graphs(self, program: CudaProgram, keep: int) -> None:
        while len(program.graphs) > keep:
            _, graphs = program.graphs.popitem(last=False)
            if graphs:
                self.device.synchronize(self._stream)
            for graph in graphs.values():
                self.device.free_graph(graph)

    def wait(self, program: CudaProgram, turn: int) -> None:
        """Wait until a queued split is done; other Python threads may run meanwhile."""
        event, done = program.events[turn], self.device.done
        while not done(event):
            time.sleep(0)

    def finish(self) -> None:
        """Wait until everything queued is done."""
        self.device.synchronize(self._stream)

    def values(
        self, program: CudaProgram, turn: int, n_threads: int, state: StepBlock
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]:
        """Run a split node by node and yield copies of the outputs."""
        span, inner, device = program.spans[turn], program.program, self.device
        self.take_in(program, span)
        for node, first, stop in inner.node_ops():
            if not span.first <= first < span.stop:
                continue
            self.load_for(program, span, first, stop)
            self._launch(program, first, stop)
            if inner.has_output(node):
                yield node, self._value(inner, node, state.rows[node.rows.symbol] * node.rows.factor)
        self.give_out(program, span)
        device.record(self._stream, program.events[turn])

    def _value(self, program: GpuProgram, node: Node, n_rows: int) -> npt.NDArray[np.generic]:
        out = np.empty((n_rows, node.cols), np.float32 if node.dtype == "f32" else np.int32)
        if out.size:
            self.device.download(self._stream, out, program.node_address(node))
        self.device.synchronize(self._stream)
        return out


def _loaded(programs: Sequence[CudaProgram]) -> frozenset[Weight]:
    return frozenset[Weight]().union(*(p.loaded for p in programs))


def _loads(low: GpuLowering, first: int, weights: Sequence[Weight]) -> tuple[tuple[int, tuple[Weight, ...]], ...]:
    """Return the weights of a split by the op before which they must be there.

    The copy starts at the group before.
    """
    groups: dict[int, dict[str, Weight]] = {}
    for w in weights:
        use = low.first_use(low.streamed[w.name])
        if use >= first:
            groups.setdefault(use, {})[w.name] = replace(w, row0=0, n_rows=-1)
    start = first
    for use in sorted(groups):
        for name in groups[use]:
            low.pinned[low.streamed[name]] = start, use
        start = use
    return tuple((use, tuple(groups[use].values())) for use in sorted(groups))


def _counts(state: StepBlock) -> Counts:
    rows = state.rows
    segments = state.arrays()[5]
    longest = int(segments[:, 5].max()) if len(segments) else 0
    return Counts(rows[Rows.TOKENS], rows[Rows.OUTPUTS], rows[Rows.KV], state.n_segments, longest, state.ranged)


def _some_counts(most: Mapping[Rows, int]) -> Iterator[Counts]:
    """Yield buckets that can occur, for the extremes of values that depend on them."""
    for n in sorted({*range(1, 9), *(1 << i for i in range(4, 24)), most[Rows.TOKENS]}):
        if n > most[Rows.TOKENS]:
            return
        for kv in {min(256, most[Rows.KV]), most[Rows.KV]}:
            for segments in {1, min(n, most[Rows.TOKENS])}:
                yield Counts(n, min(n, most[Rows.OUTPUTS]), kv, segments, kv).bucket(most)
