"""The runner of a session: programs divided between the CPU and other devices, or on the CPU alone.

A recorded graph is divided into splits (`graph/split.py`). Every device lowers its splits into one program with one
arena, so values stay in place between splits. Values pass from one device to another through hand-over memory (pinned),
whose places are reused by liveness. The host walks the splits: it starts those of GPUs and goes on, executes those of
the CPU, and waits only for the inputs of a split. On the CPU alone there is one split, which is one call of the
executor, and nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.memory import aligned_zeros
from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.cpu_device import CpuDevice, CpuSplits
from ikcli.engine.run.expert_cache import MOST_TOKENS, ExpertCache
from ikcli.engine.run.handover import handover_places
from ikcli.engine.run.run_device import CPU, Beside, Bytes, Observer, RunDevice, WeightSource
from ikcli.engine.run.stream_trial import StreamTrial
from ikcli.engine.run.timed_ops import TimedOp
from ikcli.graph import Cache, Graph, Node, Rows, Weight
from ikcli.graph.ops_experts import IN_SLOTS
from ikcli.graph.split import GraphSplit, NodePlaces, assign, schedule
from ikcli.log import log


@dataclass(slots=True)
class DividedProgram:
    """A graph divided between devices: splits in order, each with its number on its device."""

    graph: Graph
    result: Node
    splits: list[GraphSplit]
    numbers: list[int]
    parts: dict[str, Any]
    places: dict[Node, tuple[int, int]]  # hand-over memory: (first byte, bytes)
    handover_bytes: int
    memory: dict[Node, Bytes] = field(default_factory=dict)
    streamed: frozenset[str] = frozenset()  # weights in RAM that GPUs use in this program
    variants: list[tuple[int, DividedProgram]] = field(default_factory=list)  # for this many tokens and more
    cached: DividedProgram | None = None  # for few tokens: GPUs compute the experts that are in their slots
    chosen: DividedProgram | None = None  # the program that ran in the last step: this, a variant, or the cached one
    states: Node | None = None  # a second value that can be read after a step
    alone: bool = field(init=False)  # the CPU computes all of it

    def __post_init__(self) -> None:
        self.alone = len(self.splits) == 1 and self.splits[0].device == CPU

    def variant(self, n_tokens: int) -> DividedProgram:
        """Return the program for a micro-batch of n_tokens."""
        return next((p for least, p in reversed(self.variants) if n_tokens >= least), self)

    @property
    def all(self) -> list[DividedProgram]:
        """Return this program and its variants."""
        return [self, *(p for _, p in self.variants), *([self.cached] if self.cached is not None else [])]

    @property
    def arena_bytes(self) -> int:
        """Return the work memory on the CPU, without hand-over memory."""
        return self.parts[CPU].arena_bytes if CPU in self.parts else 0


@dataclass(frozen=True, slots=True)
class Offload:
    """When a GPU computes products with weights in RAM, which are copied to it in every step.

    `device(node, weight, n_tokens)` returns the GPU for micro-batches of n_tokens, or None. `thresholds` are the token
    counts at which its result changes. `trial`: of the last of them, that of experts, if times may overrule it.
    """

    thresholds: tuple[int, ...]
    device: Callable[[Node, Weight, int], str | None]
    trial: StreamTrial | None = None


def all_on_cpu() -> NodePlaces:
    """Return places that put everything on the CPU."""
    return NodePlaces(lambda node, weight: CPU, lambda il: CPU, lambda il: CPU)


class Runner:
    """Runs the programs of one session on the CPU and perhaps other devices."""

    def __init__(
        self,
        cpu: CpuDevice,
        others: Mapping[str, RunDevice] | None = None,
        places: NodePlaces | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.cpu = cpu
        self.expert_cache: ExpertCache | None = None
        self.parts: dict[str, RunDevice] = {CPU: cpu, **(others or {})}
        self._places, self._offload = places or all_on_cpu(), offload
        self._n_cells, self._n_seq, self._n_window = 0, 1, 0
        self._handover: Bytes = aligned_zeros(0)
        self._weights: dict[str, Mapping[str, int]] = {}
        self._caches: dict[str, Mapping[Cache, int]] = {}
        self.allocate: Callable[[int], Bytes] = aligned_zeros  # of hand-over memory

    def add_cache(self, cache: ExpertCache) -> None:
        """Let GPUs hold experts beside those in RAM; call it before programs are planned."""
        self._places, self.expert_cache = cache.places(self._places, self.parts), cache

    def plan(
        self,
        graph: Graph,
        result: Node,
        n_tokens: int,
        n_outputs: int,
        n_cells: int,
        n_seq: int = 1,
        n_window: int = 0,
        *,
        batch_invariant: bool = False,
        offload: bool = True,
    ) -> DividedProgram:
        """Divide and lower a graph for at most this many rows; nothing is allocated. See `CpuDevice.plan`.

        The states of the graph stay readable beside the result. `offload`: add variants for many tokens. All programs
        of a runner share caches of `n_cells` cells, and for each of `n_seq` sequences states and `n_window` cells of
        windows.
        """
        rows = {Rows.TOKENS: n_tokens, Rows.OUTPUTS: n_outputs, Rows.KV: n_cells}
        self._n_cells, self._n_seq, self._n_window = n_cells, n_seq, n_window
        program = self._plan(graph, result, rows, batch_invariant, self._places, frozenset())
        streamed = program.streamed
        for least in self._offload.thresholds if self._offload and offload and not batch_invariant else ():
            places, names = self._offloaded(graph, least)
            if least <= n_tokens and names != streamed:
                program.variants.append((least, self._plan(graph, result, rows, False, places, names)))
                streamed = names
        return program

    def plan_cached(
        self, program: DividedProgram, graph: Graph, result: Node, n_tokens: int, n_outputs: int, batch_invariant: bool
    ) -> None:
        """Add the twin of a program for few tokens that uses the cache of experts, as its graph says."""
        few = min(n_tokens, MOST_TOKENS), min(n_outputs, MOST_TOKENS)
        rows = {Rows.TOKENS: few[0], Rows.OUTPUTS: few[1], Rows.KV: self._n_cells}
        program.cached = self._plan(graph, result, rows, batch_invariant, self._places, frozenset())

    def _offloaded(self, graph: Graph, n_tokens: int) -> tuple[NodePlaces, frozenset[str]]:
        """Return the places for micro-batches of n_tokens, and the names of the weights that are copied."""
        assert self._offload is not None
        weight, device = self._places.weight, self._offload.device

        def place(node: Node, w: Weight) -> str:
            found = weight(node, w)
            return (device(node, w, n_tokens) or CPU) if found == CPU else found

        pairs = ((n, w) for n in graph.nodes for w in n.weights())
        names = frozenset(w.name for n, w in pairs if weight(n, w) == CPU and place(n, w) != CPU)
        return replace(self._places, weight=place), names

    def _plan(
        self,
        graph: Graph,
        result: Node,
        rows: Mapping[Rows, int],
        batch_invariant: bool,
        places: NodePlaces,
        streamed: frozenset[str],
    ) -> DividedProgram:
        cut = [name for name, part in self.parts.items() if part.asynchronous]
        states = graph.states if graph.wants_states else None
        splits = schedule(graph, assign(graph, places), result, cut=cut, states=states)
        if len(splits) == 1 and splits[0].device == CPU:
            whole = self.cpu.plan(splits, rows, self._n_cells, batch_invariant, result=result, states=states)
            return DividedProgram(graph, result, splits, [0], {CPU: whole}, {}, 0, streamed=streamed, states=states)
        counts = dict.fromkeys(self.parts, 0)
        numbers = []
        for split in splits:
            numbers.append(counts[split.device])
            counts[split.device] += 1
        parts = {
            name: part.plan(
                [t for t in splits if t.device == name],
                rows,
                self._n_cells,
                batch_invariant,
                streamed,
                self._n_seq * self._n_window,
            )
            for name, part in self.parts.items()
            if counts[name]
        }
        kept = [node for node in (result, states) if node is not None]
        handover, n_bytes = handover_places(splits, rows, kept, self.parts)
        return DividedProgram(
            graph, result, splits, numbers, parts, handover, n_bytes, streamed=streamed, states=states
        )

    def prepare(self, programs: Sequence[DividedProgram], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of all devices, compiling those that the cache lacks.

        `progress` covers the kernels of the CPU.
        """
        for name, part in self.parts.items():
            part.prepare([p.parts[name] for p in _with_variants(programs) if name in p.parts], progress)

    def n_missing(self, programs: Sequence[DividedProgram]) -> int:
        """Return the number of kernels that have to be compiled first."""
        return self.cpu.n_missing(_cpu_programs(programs))

    def weight_names(self, programs: Sequence[DividedProgram]) -> dict[str, list[str]]:
        """Return the names of the weights that each device needs, in the order of their use."""
        names: dict[str, dict[str, None]] = {name: {} for name in self.parts}
        for p in _with_variants(programs):
            for split in p.splits:
                used = (w.name for node in split.nodes for w in node.weights() if not w.name.endswith(IN_SLOTS))
                names[split.device].update(dict.fromkeys(n for n in used if split.device == CPU or n not in p.streamed))
        return {device: list(found) for device, found in names.items()}

    def cache_device(self, cache: Cache) -> str:
        """Return the device that holds a cache tensor."""
        return self._places.cache(cache.il)

    def cache_tensors(self, programs: Sequence[DividedProgram]) -> dict[str, list[Cache]]:
        """Return the cache tensors of each device."""
        caches = {c: None for p in programs for c in p.graph.caches.values()}
        return {name: [c for c in caches if self.cache_device(c) == name] for name in self.parts}

    def cache_rows(self, cache: Cache) -> int:
        """Return the rows of a cache tensor."""
        return cache.rows(self._n_cells, self._n_seq, self._n_window)

    def memory(self, programs: Sequence[DividedProgram], model: WeightSource) -> dict[str, dict[str, int]]:
        """Return bytes by device and part: weights, KV, compute (on the CPU with hand-over memory)."""
        weights, caches = self.weight_names(programs), self.cache_tensors(programs)
        sizes = {}
        for name, part in self.parts.items():
            own = [p.parts[name] for p in _with_variants(programs) if name in p.parts]
            kv = sum(part.cache_bytes(c, self.cache_rows(c)) for c in caches[name])
            sizes[name] = {"weights": part.weight_bytes(model, weights[name]), "KV": kv,
                           "compute": part.compute_bytes(own)}  # fmt: skip
        if self.expert_cache is not None:
            for name in self.expert_cache.slots.devices:
                sizes[name]["expert cache"] = self.expert_cache.slots.slot_bytes(name)
        sizes[CPU]["compute"] += max(p.handover_bytes for p in _with_variants(programs))
        return sizes

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the names of the other devices."""
        return tuple(part.name for part in self.parts.values() if part.asynchronous)

    def n_splits(self, programs: Sequence[DividedProgram]) -> int:
        """Return the splits of the program that has most."""
        return max(len(p.splits) for p in programs)

    def notes(self, programs: Sequence[DividedProgram]) -> list[str]:
        """Return log lines on the placement of the model."""
        owners = (self.cpu.experts, self.expert_cache)
        return [owner.slots.line() for owner in owners if owner is not None]

    @property
    def host_weights(self) -> Mapping[str, int]:
        """Return the addresses of the weights in RAM, without those on disk."""
        found = self._weights.get(CPU, {})
        if self.cpu.experts is None:
            return found
        on_disk = self.cpu.experts.slots.on_disk
        return {name: address for name, address in found.items() if name not in on_disk}

    def move_weights(self, addresses: Mapping[str, int]) -> None:
        """Use weights at other addresses from the next `bind` on."""
        self._weights[CPU] = {**self._weights[CPU], **addresses}

    @property
    def host_buffers(self) -> list[Bytes]:
        """Return memory in RAM that is still untouched when it is bound."""
        return [*self.cpu.caches.values(), self.cpu.arena]

    def load(
        self, programs: Sequence[DividedProgram], model: WeightSource, mmap: bool, beside: Beside | None = None
    ) -> None:
        """Load the weights on every device, if all devices have enough memory for everything that follows."""
        for name, sizes in self.memory(programs, model).items():
            self.parts[name].check_memory(sizes | dict((beside or {}).get(name, {})))
        for name, names in self.weight_names(programs).items():
            self._weights[name] = self.parts[name].load_weights(model, names, mmap)
        if self.expert_cache is not None:
            for name, found in self.expert_cache.load().items():
                self._weights[name] = {**self._weights[name], **found}

    def update_weights(self, model: WeightSource, names: Sequence[str]) -> None:
        """Take over loaded weights that the model changed in RAM."""
        for part in self.parts.values():
            part.update_weights(model, names)

    def make_caches(self, programs: Sequence[DividedProgram]) -> None:
        """Make the cache tensors on every device."""
        for name, caches in self.cache_tensors(programs).items():
            self._caches[name] = self.parts[name].make_caches({c: self.cache_rows(c) for c in caches})

    def read_cells(self, cache: Cache, first: int, n: int) -> Bytes:
        """Return rows of a cache tensor on any device; see `RunDevice.read_cells`."""
        return self.parts[self.cache_device(cache)].read_cells(cache, self.cache_rows(cache), first, n)

    def write_cells(self, cache: Cache, first: int, rows: Bytes) -> None:
        """Replace rows of a cache tensor; see `RunDevice.write_cells`."""
        self.parts[self.cache_device(cache)].write_cells(cache, self.cache_rows(cache), first, rows)

    def move_cells(self, cache: Cache, source: int, first: int, n: int) -> None:
        """Copy n rows of a cache tensor to another place, which may overlap."""
        self.write_cells(cache, first, self.read_cells(cache, source, n))

    def bind(self, programs: Sequence[DividedProgram], state: StepBlock) -> None:
        """Give the programs memory, after `load`."""
        programs = _with_variants(programs)
        n_bytes = max(p.handover_bytes for p in programs)
        if len(self._handover) < n_bytes:
            self._handover = self.allocate(n_bytes)
        for p in programs:
            p.memory = {node: self._handover[at : at + size] for node, (at, size) in p.places.items()}
        for name, part in self.parts.items():
            own = [p for p in programs if name in p.parts]
            part.bind([p.parts[name] for p in own], state, self._weights.get(name, {}), self._caches.get(name, {}),
                      [p.memory for p in own])  # fmt: skip

    def run(self, program: DividedProgram, n_threads: int, state: StepBlock) -> None:
        """Execute a bound program; all devices are done when it returns."""
        chosen = self._choose(program, state, may_measure=True)
        if chosen.alone:
            whole = chosen.parts[CPU].program
            self.cpu.run_ops(whole, 0, len(whole.ops), n_threads)
            return
        parts = self.parts
        for name, part in chosen.parts.items():
            parts[name].begin(part, state)
        for split, number in zip(chosen.splits, chosen.numbers, strict=True):
            self._wait_for(chosen, split)
            parts[split.device].run(chosen.parts[split.device], number, n_threads)
        for name in chosen.parts:
            parts[name].finish()
        if program.cached is not None and self.expert_cache is not None:
            self.expert_cache.end()
        if (trial := self._trial(program)) is not None:
            trial.end()
            for text in trial.news:
                log(text)
            trial.news.clear()

    def _trial(self, program: DividedProgram) -> StreamTrial | None:
        """Return what times the variant that copies experts."""
        trial = self._offload.trial if self._offload is not None else None
        return trial if trial is not None and program.variants and program.variants[-1][0] == trial.least else None

    def _variant(self, program: DividedProgram, n_tokens: int, *, measured: bool) -> DividedProgram:
        trial = self._trial(program)
        if trial is None or not measured:
            return program.variant(n_tokens)
        if trial.begin(n_tokens):
            return program.variants[-1][1]
        return program.variant(min(n_tokens, trial.least - 1))

    def _choose(self, program: DividedProgram, state: StepBlock, *, may_measure: bool = False) -> DividedProgram:
        """Return the program for a step. With `may_measure`, measured times may decide."""
        if program.cached is None and not program.variants:
            return program
        n_tokens, cache = state.rows[Rows.TOKENS], self.expert_cache if may_measure else None
        if program.cached is not None and cache is not None and cache.begin(n_tokens):
            program.chosen = program.cached
        else:
            program.chosen = self._variant(program, n_tokens, measured=may_measure)
        return program.chosen

    def _wait_for(self, program: DividedProgram, split: GraphSplit) -> None:
        for i in split.after:
            name = program.splits[i].device
            self.parts[name].wait(program.parts[name], program.numbers[i])

    @property
    def depth(self) -> int:
        """Return how many micro-batches can be in flight.

        Call `run` this often, then `result`, which returns that of the oldest first.
        """
        return 1

    def run_observed(self, program: DividedProgram, n_threads: int, state: StepBlock, observer: Observer) -> None:
        """Execute node by node; the observer sees every output once, right after it was computed."""
        self._observe(self._choose(program, state), n_threads, state, observer)

    def _observe(self, program: DividedProgram, n_threads: int, state: StepBlock, observer: Observer) -> None:
        seen: set[Node] = set()
        for name, part in program.parts.items():
            self.parts[name].begin(part, state)
        for split, number in zip(program.splits, program.numbers, strict=True):
            self._wait_for(program, split)
            values = self.parts[split.device].values
            for node, value in values(program.parts[split.device], number, n_threads, state):
                if node not in seen:
                    seen.add(node)
                    observer(node, value)
        for name in program.parts:
            self.parts[name].finish()

    def explain(self, program: DividedProgram, n_threads: int, state: StepBlock, observer: Observer) -> None:
        """Compute the last finished micro-batch again and show every node to an observer that raises."""
        self._observe(program.chosen or program, n_threads, state, observer)

    def timed(self, program: DividedProgram, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]:
        """Execute op by op under a clock."""
        chosen = self._choose(program, state, may_measure=True)
        for name, part in chosen.parts.items():
            self.parts[name].begin(part, state)
        for split, number in zip(chosen.splits, chosen.numbers, strict=True):
            self._wait_for(chosen, split)
            yield from self.parts[split.device].timed(chosen.parts[split.device], number, n_threads, state, show)
        for name in chosen.parts:
            self.parts[name].finish()
        if program.cached is not None and self.expert_cache is not None:
            self.expert_cache.end()

    def result(self, program: DividedProgram, n_rows: int) -> npt.NDArray[np.float32]:
        """Return the program's value, in memory that the next run overwrites."""
        ran = program.chosen or program
        return self._value(ran, ran.result, n_rows)

    def states(self, program: DividedProgram, n_rows: int) -> npt.NDArray[np.float32]:
        """Return the states that the program leaves beside its value; the next run overwrites them."""
        ran = program.chosen or program
        assert ran.states is not None
        return self._value(ran, ran.states, n_rows)

    def _value(self, ran: DividedProgram, node: Node, n_rows: int) -> npt.NDArray[np.float32]:
        if ran.alone:
            return self.cpu.result(ran.parts[CPU], node, n_rows)
        return ran.memory[node][: 4 * n_rows * node.cols].view(np.float32).reshape(n_rows, node.cols)

    def close(self) -> None:
        """Release everything."""
        if self.expert_cache is not None:
            self.expert_cache.close()
        for part in self.parts.values():
            part.close()
        self._handover = aligned_zeros(0)


def _cpu_programs(programs: Sequence[DividedProgram]) -> list[CpuSplits]:
    return [p.parts[CPU] for p in _with_variants(programs) if CPU in p.parts]


def _with_variants(programs: Sequence[DividedProgram]) -> list[DividedProgram]:
    return [x for p in programs for x in p.all]
