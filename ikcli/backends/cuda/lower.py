"""Lower graph nodes to kernel launches over one arena of device memory.

This is the counterpart of `backends/cpu/program.py`. A rule takes (lowering, node) and emits launches by kernel name.
Addresses are `Ref`s, which are resolved when a program is bound. Sizes that depend on the micro-batch (grids, numbers
of parts, which of two kernels) are functions of `Counts`, upper bounds that hold for every step of one bucket: a
captured graph is made once per bucket, and kernels read the real counts from the step block (`low.state`). Rules are in
the modules of `RULE_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import numpy as np

from ikcli.backends.cuda.device import DeviceInfo, Launch
from ikcli.backends.cuda.parameters import place, places
from ikcli.backends.lowering import Buffers, Ref, buffer_index
from ikcli.backends.rules import Rules
from ikcli.backends.step_block import STATE_INDEX
from ikcli.graph import Cache, Node, Per, Rows, RowSpec, Weight

ALIGN = 256  # bytes between buffers of the arena
STATE = -1  # Ref target: the step block
RULE_MODULES = (
    "rules_layers", "rules_recurrent", "rules_streams", "attention", "attention_sparse", "attention_pooled",
    "rules_matmul",
)  # fmt: skip
N_EXACT = 8  # counts up to here have separate buckets


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device that rules use: compute capability, SMs, shared memory of a block, L2 bytes."""

    cc: tuple[int, int]
    n_sm: int
    max_shared: int
    shared_per_sm: int
    l2_bytes: int
    name: str = ""

    @classmethod
    def of(cls, info: DeviceInfo) -> DeviceLimits:
        """Return the limits of a device.

        An SM has 1 KiB more shared memory than one block can get, on 8.0 and 9.0 and later.
        """
        return cls(info.cc, info.n_sm, info.shared_limit, info.shared_limit + 1024, info.l2_bytes, info.name)


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of a micro-batch, or upper bounds of them; `n_kv` over all segments, `longest` of the longest segment.

    `ranged`: tokens see ranges of positions beside what the mask lets them see (images in texts).
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    n_segments: int = 1
    longest: int = 0
    ranged: bool = False

    def __getitem__(self, symbol: Rows) -> int:
        return (self.n_tokens, self.n_outputs, self.n_kv)[STATE_INDEX[symbol]]

    def rows(self, spec: RowSpec) -> int:
        """Return the rows of a value."""
        return self[spec.symbol] * spec.factor

    def bucket(self, most: Mapping[Rows, int]) -> Counts:
        """Return bounds that many steps share, never more than `most`.

        They are exact up to N_EXACT rows and powers of two above (n_kv: from 256 on, with a step half-way).
        """
        n_tokens = min(_power(self.n_tokens), most[Rows.TOKENS])
        n_outputs = min(_power(max(self.n_outputs, 1)), most[Rows.OUTPUTS])
        n_segments = min(_power(self.n_segments), n_tokens)
        n_kv, longest = (min(_kv_bucket(n), most[Rows.KV]) for n in (self.n_kv, self.longest))
        return Counts(n_tokens, n_outputs, n_kv, n_segments, longest, self.ranged)


def _power(n: int) -> int:
    return n if n <= N_EXACT else 1 << (n - 1).bit_length()


def _kv_bucket(n: int) -> int:
    power = 1 << max(n - 1, 255).bit_length()
    return power * 3 // 4 if power > 256 and n <= power * 3 // 4 else power


Scalar = int | np.int32 | np.float32  # device.Argument
Arg = Scalar | Ref | Callable[[Counts], Scalar]
"""A launch argument: int and Ref are passed as 8 bytes; functions of the counts must not hide Refs."""
Dim = int | tuple[int, int, int]
Grid = Dim | Callable[[Counts], Dim]
Shared = int | Callable[[Counts], int]


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """One launch, left out where `when` is false for the counts or the grid is empty.

    `node` is the (first) node it computes, `also` are more nodes that it completes. `instead`: another kernel with the
    same parameters, and the counts that it is for.
    """

    kernel: str
    grid: Grid
    block: int
    shared: Shared
    args: tuple[Arg, ...]
    node: Node
    when: Callable[[Counts], bool] | None = None
    also: tuple[Node, ...] = ()
    instead: tuple[str, Callable[[Counts], bool]] | None = None

    def kernel_for(self, counts: Counts) -> str:
        """Return the kernel that runs."""
        return self.instead[0] if self.instead is not None and self.instead[1](counts) else self.kernel

    def __post_init__(self) -> None:
        names = places(self.kernel)
        if names is not None and len(names) != len(self.args):
            raise TypeError(f"the kernel {self.kernel} has {len(names)} parameters, not {len(self.args)}")

    def arg(self, name: str) -> Arg:
        """Return an argument by the name of its parameter."""
        return self.args[place(self.kernel, name)]

    def named(self, names: str) -> tuple[Arg, ...]:
        """Return arguments by the names of their parameters."""
        return tuple(self.arg(name) for name in names.split())

    def changed(self, **values: Arg) -> GpuLaunch:
        """Return the launch with other arguments, by the names of their parameters."""
        args = list(self.args)
        for name, value in values.items():
            args[place(self.kernel, name)] = value
        return replace(self, args=tuple(args))


@dataclass(slots=True)
class GpuLowering(Buffers):
    """The target of lowering rules."""

    n_cells: int  # cells of the KV cache over all sequences
    device: DeviceLimits
    window_cells: int = 0  # of the caches of windows
    batch_invariant: bool = False  # up to N_EXACT tokens, the result of one must not depend on the others
    ops: list[GpuLaunch] = field(default_factory=list)
    constants: dict[int, bytes] = field(default_factory=dict)
    pinned: dict[int, tuple[int, int]] = field(default_factory=dict)  # buffer -> ops between which it must live too
    streamed: dict[str, int] = field(default_factory=dict)  # weights that come from the host in every step: buffers
    turn_start: int = 0  # first op of the current split: ops before it may not be moved

    @property
    def state(self) -> Ref:
        """Return the step block: first argument of every kernel that depends on the micro-batch."""
        return Ref(STATE)

    def row_args(self, spec: RowSpec) -> tuple[np.int32, np.int32]:
        """Return (word of the step block, factor), from which a kernel learns its number of rows."""
        return np.int32(STATE_INDEX[spec.symbol]), np.int32(spec.factor)

    def buffer(self, n_bytes: int) -> Ref:
        """Return temporary memory, aligned to 256 bytes, alive from the first to the last op that names it."""
        return Ref(self.new_buffer(-(-max(n_bytes, 1) // ALIGN) * ALIGN))

    def constant(self, data: bytes) -> Ref:
        """Return read-only data that lives as long as the program."""
        ref = self.buffer(0)
        self.constants[buffer_index(ref)] = data
        return ref

    def weight(self, w: Weight, row_bytes: int = 0) -> Ref:
        """Return the weight's data on the device (upload format).

        It starts at the weight's first row if rows have `row_bytes` bytes there.
        """
        return Ref(self.streamed.get(w.name, w.name), w.row0 * row_bytes)

    def stream(self, w: Weight, n_bytes: int) -> None:
        """Copy a weight from the host before its first use, into a buffer of the arena."""
        if w.name not in self.streamed:
            self.streamed[w.name] = buffer_index(self.buffer(n_bytes))

    def first_use(self, buffer: int) -> int:
        """Return the first op that names a buffer."""
        return next(
            i for i, op in enumerate(self.ops) if any(isinstance(a, Ref) and a.target == buffer for a in op.args)
        )

    def cache(self, cache: Cache) -> Ref:
        """Return a cache tensor on the device."""
        return Ref(cache)

    def cells(self, cache: Cache) -> int:
        """Return the rows of a cache tensor."""
        return self.window_cells if cache.per is Per.WINDOW else self.n_cells

    def keep(self, node: Node, first: int, last: int) -> None:
        """Keep a node's buffer alive also from op `first` to op `last`, for values that cross devices."""
        target = buffer_index(self.out(node))
        a, b = self.pinned.get(target, (first, last))
        self.pinned[target] = min(a, first), max(b, last)

    def emit(
        self,
        kernel: str,
        grid: Grid,
        block: int,
        shared: Shared,
        *args: Arg,
        when: Callable[[Counts], bool] | None = None,
        instead: tuple[str, Callable[[Counts], bool]] | None = None,
    ) -> None:
        """Append a launch. Grids are upper bounds: blocks beyond the rows of the step block return."""
        assert self._current is not None
        self.ops.append(GpuLaunch(kernel, grid, block, shared, args, self._current, when, instead=instead))


class GpuProgram:
    """The ops of one device in execution order, later bound to memory."""

    def __init__(self, lowering: GpuLowering, results: Sequence[Node] = ()) -> None:
        """Take over a lowering; `results` are read after the last op."""
        for node in results:
            lowering.keep(node, len(lowering.ops), len(lowering.ops))
        self.ops = lowering.ops
        self.lowering = lowering
        self._offsets, self.arena_bytes = self._plan()
        self._addresses: dict[int, int] = {}
        self._weights: Mapping[str, int] = {}
        self._caches: Mapping[Cache, int] = {}

    @property
    def kernels(self) -> list[str]:
        """Return every kernel that the program may launch."""
        return list(dict.fromkeys(k for op in self.ops for k in (op.kernel, *(op.instead or ())[:1])))

    @property
    def constants(self) -> Mapping[int, bytes]:
        """Return read-only data by buffer."""
        return self.lowering.constants

    @property
    def constant_bytes(self) -> int:
        """Return the device memory of the constants, each aligned."""
        return sum(-(-len(data) // ALIGN) * ALIGN for data in self.constants.values())

    def _plan(self) -> tuple[list[int], int]:
        low = self.lowering
        return low.place([op.args for op in self.ops], low.pinned, low.constants)

    def bind(
        self,
        state: int,
        arena: int,
        constants: Mapping[int, int],
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
    ) -> None:
        """Give addresses to everything that ops name; `arena` must hold `arena_bytes`."""
        self._addresses = {b: arena + at for b, at in enumerate(self._offsets)} | dict(constants) | {STATE: state}
        self._weights, self._caches = weights, caches

    def address(self, ref: Ref) -> int:
        """Return the address of a Ref."""
        if isinstance(ref.target, int):
            return self._addresses[ref.target] + ref.offset
        return (self._weights[ref.target] if isinstance(ref.target, str) else self._caches[ref.target]) + ref.offset

    def streamed_address(self, name: str) -> int:
        """Return the address to which a step copies a weight."""
        return self._addresses[self.lowering.streamed[name]]

    def node_address(self, node: Node) -> int:
        """Return the device address of a node's output."""
        return self._addresses[self.lowering._node_buffers[node]]

    def has_output(self, node: Node) -> bool:
        """Return whether the node has a separate buffer."""
        return self.lowering.has_out(node) and node.cols > 0

    def launches(self, counts: Counts, first: int = 0, stop: int = -1) -> Iterator[Launch]:
        """Yield the launches of ops first..stop-1 for these counts."""
        for op in self.ops[first : len(self.ops) if stop < 0 else stop]:
            if op.when is not None and not op.when(counts):
                continue
            dim = op.grid(counts) if callable(op.grid) else op.grid
            grid = (dim, 1, 1) if isinstance(dim, int) else dim
            if min(grid) < 1:
                continue
            shared = op.shared(counts) if callable(op.shared) else op.shared
            args = tuple(self._scalar(arg, counts) for arg in op.args)
            yield Launch(op.kernel_for(counts), grid, op.block, shared, args)

    def _scalar(self, arg: Arg, counts: Counts) -> Scalar:
        if isinstance(arg, Ref):
            return self.address(arg)
        return arg(counts) if callable(arg) else arg

    def node_ops(self) -> list[tuple[Node, int, int]]:
        """Return (node, first op, one past its last op) in execution order, without nodes that have no ops.

        Nodes that an op of another node completes have an empty range at that op.
        """
        spans: list[tuple[Node, int, int]] = []
        for i, op in enumerate(self.ops):
            if spans and spans[-1][0] is op.node and spans[-1][2] == i:
                spans[-1] = (op.node, spans[-1][1], i + 1)
            else:
                spans.append((op.node, i, i + 1))
            spans += [(node, i, i) for node in op.also]
        return spans


RULES: Rules[GpuLowering] = Rules("the CUDA backend", "compute the layer on the CPU with -ot or a smaller -ngl")


def all_rules() -> Rules[GpuLowering]:
    """Return the rules of every op, which their modules register on import."""
    for module in RULE_MODULES:
        import_module(f"ikcli.backends.cuda.{module}")
    return RULES


def lower(
    nodes: Sequence[Node], results: Sequence[Node], lowering: GpuLowering, rules: Rules[GpuLowering]
) -> GpuProgram:
    """Lower every node by its op's rule; `results` stay readable to the end."""
    rules.check(nodes)
    for node in nodes:
        lowering.begin(node)
        rules.lower(lowering, node)
    return GpuProgram(lowering, results)
