"""The runner of a pipeline-parallel session: it plans the stages, starts them, feeds the chain and collects results.

The driver holds no weights and no cache. Results arrive in the order in which micro-batches were submitted, so enough
of them can be in flight to keep all stages busy.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import ikcli
from ikcli.backends.step_block import StepBlock
from ikcli.engine.pipeline.options import StageOptions
from ikcli.engine.pipeline.part import StageRunner
from ikcli.engine.pipeline.supervisor import Supervisor
from ikcli.engine.pipeline.wire import Link, LostLinkError, MessageKind, StageListener
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import CPU, Beside, Bytes, Observer, WeightSource
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.engine.run.timed_ops import TimedOp
from ikcli.errors import IkError, NonFiniteError, UnsupportedError
from ikcli.gguf.digests import of_model
from ikcli.graph import Cache, Graph, Node
from ikcli.graph.ops_host import HostRows
from ikcli.settings.run import RunConfig

STAGE = "stage "
_LOADING = 24 * 3600.0
_PATIENCE = 15.0  # seconds in which a stage that lost its neighbour reports it

Address = tuple[str, int]
Supervise = Callable[[RunConfig, Sequence[int]], Supervisor]


class StageLostError(IkError):
    """A stage ended; the session can be started again with empty sequences."""


def stage_name(index: int) -> str:
    """Return the name of a stage among the devices of a plan."""
    return f"{STAGE}{index + 1}"


@dataclass(slots=True)
class _MicroBatch:
    """A micro-batch in flight, which can be computed again node by node."""

    program: int
    threads: int
    outputs: int
    given: int  # columns of the rows that the caller provides
    block: bytes


class PipelineRunner(Runner):
    """Run a model as a pipeline of stages; see the module."""

    def __init__(self, config: RunConfig, sizes: Sizes, split_points: Sequence[int], supervise: Supervise) -> None:
        n_threads = max(config.n_threads, config.n_threads_batch)
        super().__init__(CpuDevice(n_threads))
        self._config, self._sizes, self.split_points, self._supervise = config, sizes, tuple(split_points), supervise
        self.stages = [StageRunner(CpuDevice(n_threads), split_points, i) for i in range(len(split_points) - 1)]
        self.route: Callable[[int, Address], Address] = lambda index, address: address
        """The address under which stage `index` (or, after the last one, the driver) is reached; tests put proxies
        here.
        """
        self._model: Model | None = None
        self.supervisor: Supervisor | None = None
        self.pids: list[int] = []
        """The processes of the stages, each on its machine."""
        self._links: list[Link] = []
        self._onward: Link | None = None
        self._incoming: Link | None = None
        self._receiver: threading.Thread | None = None
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cells: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._in_flight: deque[_MicroBatch] = deque()
        self._collected: _MicroBatch | None = None
        self._lost = ""
        self._numbers: dict[int, int] = {}  # id of a program -> its number in every stage
        self._given: dict[int, int] = {}  # id of a program -> columns of the rows that the caller provides
        self._logits: npt.NDArray[np.float32] | None = None  # that arrived with states and were not asked for yet
        self._states: npt.NDArray[np.float32] | None = None
        self._n_outputs = self._n_planned = 0

    # --- plans --------------------------------------------------------------------------------------------------------
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
        """Plan the programs of all stages in the same way as the stages do."""
        self._n_cells, self._n_seq, self._n_window = n_cells, n_seq, n_window
        if not batch_invariant:
            self._n_planned = max(self._n_planned, n_outputs)
        planned = [
            stage.plan(
                graph,
                result,
                n_tokens,
                n_outputs,
                n_cells,
                n_seq,
                n_window,
                batch_invariant=batch_invariant,
                offload=offload,
            )
            for stage in self.stages
        ]
        splits = [p.splits[0] for p in planned]
        parts = {stage_name(i): p for i, p in enumerate(planned)}
        states = graph.states if graph.wants_states else None
        return DividedProgram(graph, result, splits, [0] * len(splits), parts, {}, 0, states=states)

    def memory(self, programs: Sequence[DividedProgram], model: WeightSource) -> dict[str, dict[str, int]]:
        """Return the bytes by stage and part."""
        found = {CPU: {"weights": 0, "KV": 0, "compute": 0}}
        for i, stage in enumerate(self.stages):
            found[stage_name(i)] = stage.memory([p.parts[stage_name(i)] for p in programs], model)[CPU]
        return found

    def crossing_bytes(self, programs: Sequence[DividedProgram]) -> list[int]:
        """Return the bytes per token that every stage but the last sends on, in the program that sends most."""
        graphs = {id(p.graph): p.graph for p in programs}.values()
        return [
            max(sum(4 * n.cols * n.rows.factor for n in stage.part(graph).leaving) for graph in graphs)
            for stage in self.stages[:-1]
        ]

    def notes(self, programs: Sequence[DividedProgram]) -> list[str]:
        """Describe the layers of every stage and the bytes between them for the log."""
        where = [f"layers {a}-{b - 1}" for a, b in zip(self.split_points, self.split_points[1:], strict=False)]
        sizes = self.crossing_bytes(programs)
        return [f"stages: {', '.join(where)}; {'/'.join(map(str, sizes))} bytes per token between them"]

    def weight_names(self, programs: Sequence[DividedProgram]) -> dict[str, list[str]]:
        """Return no names: the driver needs no weights."""
        return {}

    def n_missing(self, programs: Sequence[DividedProgram]) -> int:
        """Return the number of kernels to compile for stages on this machine; other machines have their own caches."""
        return self.cpu.n_missing(self._lowered(programs))

    def prepare(self, programs: Sequence[DividedProgram], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels that stages of this machine share, once."""
        if self._lowered(programs):
            self.cpu.prepare(self._lowered(programs), progress)

    def _lowered(self, programs: Sequence[DividedProgram]) -> list[Any]:
        if self._config.fleet.ray not in (None, "local"):
            return []
        return [part.parts[CPU] for p in programs for part in p.parts.values()]

    # --- life ---------------------------------------------------------------------------------------------------------
    def load(
        self, programs: Sequence[DividedProgram], model: WeightSource, mmap: bool, beside: Beside | None = None
    ) -> None:
        """Start the stages and wait until all of them have loaded their layers."""
        assert isinstance(model, Model)
        self._model = model
        server, draft = self._config.server, self._config.server.model_draft
        config = replace(
            self._config,
            model=model.file.paths[0].absolute(),
            server=replace(server, model_draft=draft.absolute() if draft is not None else None),
        )
        secret, digest = secrets.token_hex(16), of_model(model.file)
        found = self.supervisor = self._supervise(config, self._parts_bytes(programs))
        try:
            with closing(StageListener(found.host, secret)) as listener:
                found.begin(
                    [
                        StageOptions(
                            config, self._sizes, self.split_points, i, digest, listener.address, secret, found.host
                        )
                        for i in range(len(self.stages))
                    ]
                )
                addresses = self._gather(listener)
                self._connect(listener, addresses, secret)
        except BaseException:
            self._end()
            raise
        self._n_outputs = min(self._sizes.n_seq, self._config.n_ubatch)  # outputs that stages plan for at first
        self._lost = ""

    def _parts_bytes(self, programs: Sequence[DividedProgram]) -> list[int]:
        assert self._model is not None
        return [sum(p.values()) for name, p in self.memory(programs, self._model).items() if name != CPU]

    def _gather(self, listener: StageListener) -> list[Address]:
        """Wait until all stages have loaded; keep their links and return the addresses they listen on."""
        n = len(self.stages)
        links: dict[int, Link] = {}
        addresses: dict[int, Address] = {}
        pids: dict[int, int] = {}
        until = time.monotonic() + _LOADING
        while len(links) < n:
            found = listener.accept(1.0)
            if found is not None:
                link, words = found
                self._links.append(link)  # closed in any case
                if words.get("version") != ikcli.__version__:
                    raise IkError(
                        f"stage {words['index'] + 1} runs ik {words.get('version')}, and this is {ikcli.__version__}; "
                        "install the same version on all machines"
                    )
                links[words["index"]], addresses[words["index"]] = link, (words["host"], words["port"])
                pids[words["index"]] = words["pid"]
            else:  # a stage that ended may have reported why before
                self._check_alive(i for i in range(n) if i not in links)
            if time.monotonic() > until:
                raise IkError("not all stages have started")
        self._links, self.pids = [links[i] for i in range(n)], [pids[i] for i in range(n)]
        for i, link in enumerate(self._links):
            try:
                kind, words, _ = link.receive()
            except LostLinkError:
                raise IkError(f"{self._describe(i)} ended while it was loading: {self._why(i)}") from None
            if kind is MessageKind.FAILED:
                raise IkError(f"{self._describe(i)}: {words['error']}")
        return [addresses[i] for i in range(n)]

    def _check_alive(self, stages: Iterator[int]) -> None:
        assert self.supervisor is not None
        for i in stages:
            why = self.supervisor.died(i)
            if why:
                raise IkError(f"{self._describe(i)} did not start: {why}")

    def _connect(self, listener: StageListener, addresses: list[Address], secret: str) -> None:
        """Connect the stages to a chain."""
        from ikcli.engine.pipeline.wire import connect

        after = [*addresses[1:], listener.address]
        for i, link in enumerate(self._links):
            host, port = self.route(i + 1, after[i])
            link.send(MessageKind.NEXT, {"host": host, "port": port})
        self._onward = connect(self.route(0, addresses[0]), {"secret": secret})
        while True:
            found = listener.accept(10.0)
            if found is not None and found[1].get("index") == len(self.stages) - 1:
                break
            for i in range(len(self.stages)):
                self._check_alive(iter([i]))
        self._incoming = found[0]
        arguments = found[0], self._results, self._cells
        self._receiver = threading.Thread(target=self._receive, args=arguments, daemon=True)
        self._receiver.start()

    @staticmethod
    def _receive(link: Link, results: queue.SimpleQueue[Any], cells: queue.SimpleQueue[Any]) -> None:
        """Sort the messages that leave the chain into results and cells; None means that the chain broke."""
        try:
            while True:
                kind, words, data = link.receive(keep=True)
                if kind is MessageKind.STOP:
                    break
                is_cells = kind in (MessageKind.CELLS, MessageKind.READ) or words.get("of") == MessageKind.READ
                (cells if is_cells else results).put((kind, words, data))
        except LostLinkError:
            pass
        results.put(None)
        cells.put(None)
        link.close()

    def _describe(self, index: int) -> str:
        return f"stage {index + 1} (layers {self.split_points[index]}-{self.split_points[index + 1] - 1})"

    def _why(self, index: int) -> str:
        assert self.supervisor is not None
        for _ in range(20):
            if why := self.supervisor.died(index):
                return why
            time.sleep(0.05)
        return "its machine or the network to it does not answer"

    def _broken(self) -> StageLostError:
        """Return the error for a broken chain: a stage that lost a neighbour reports it before it ends."""
        if not self._lost:
            silent = []
            self.disconnect()  # stages that wait for work see that the chain has ended
            for i, link in enumerate(self._links):
                try:
                    link.receive(timeout=_PATIENCE)
                except LostLinkError:
                    silent.append(i)
            names = [f"{self._describe(i)} was lost: {self._why(i)}" for i in silent]
            self._lost = "; ".join(names) or "the connection between two stages was lost"
            self._end()
        return StageLostError(self._lost)

    def close(self) -> None:
        """Stop all stages."""
        if self._onward is not None and not self._lost:
            with suppress(LostLinkError):
                self._onward.send(MessageKind.STOP, {})
        self._end()
        super().close()

    def disconnect(self) -> None:
        """Break the chain as a lost network would."""
        if self._onward is not None:
            self._onward.close()

    def _end(self) -> None:
        for link in [*self._links, *([self._onward] if self._onward else [])]:
            link.close()
        self._links, self._onward = [], None
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None
        if self._receiver is not None:
            assert self._incoming is not None
            self._incoming.close()
            self._receiver.join()
            self._receiver = None
        self._in_flight.clear()
        self._results, self._cells = queue.SimpleQueue(), queue.SimpleQueue()

    # --- memory of stages ---------------------------------------------------------------------------------------------
    def make_caches(self, programs: Sequence[DividedProgram]) -> None:
        """Do nothing: stages make their own caches."""

    def bind(self, programs: Sequence[DividedProgram], state: StepBlock) -> None:
        """Number the programs; make the stages plan for more logits if that was done here."""
        self._numbers = {id(p): i for i, p in enumerate(programs)}
        self._given = {
            id(p): node.op.n_cols for p in programs for node in p.graph.nodes if isinstance(node.op, HostRows)
        }
        if self._n_planned > self._n_outputs:
            self._n_outputs = self._n_planned
            self._send(MessageKind.OUTPUTS, {"n": self._n_outputs})

    def update_weights(self, model: WeightSource, names: Sequence[str]) -> None:
        """Send new scales of adapters and of control vectors, which all stages have."""
        assert isinstance(model, Model)
        added = model.adapters.added
        self._send(MessageKind.SCALES, {"scales": list(added.scales), "vectors": [list(use) for use in added.vectors]})

    def read_cells(self, cache: Cache, first: int, n: int) -> Bytes:
        """Read rows of a cache tensor from the stage that holds it."""
        self._send(MessageKind.READ, {"kind": cache.kind, "il": cache.il, "first": first, "n": n})
        kind, words, data = self._take(self._cells)
        if kind is not MessageKind.CELLS:
            raise IkError(f"internal error: no stage holds the cache {cache.kind}-{cache.il}")
        return np.frombuffer(data, np.uint8).reshape(words["shape"])

    def write_cells(self, cache: Cache, first: int, rows: Bytes) -> None:
        """Write rows of a cache tensor in the stage that holds it."""
        words = {"kind": cache.kind, "il": cache.il, "first": first, "shape": rows.shape}
        self._send(MessageKind.WRITE, words, [np.ascontiguousarray(rows)])

    def move_cells(self, cache: Cache, source: int, first: int, n: int) -> None:
        """Move rows within the stage that holds them; only the request goes over the network."""
        self._send(MessageKind.MOVE, {"kind": cache.kind, "il": cache.il, "source": source, "first": first, "n": n})

    # --- running ------------------------------------------------------------------------------------------------------
    @property
    def depth(self) -> int:
        """Return one micro-batch for every stage, and one that is on its way; with heads, which read states, one."""
        return 1 if self._given else len(self.stages) + 1

    def _send(self, kind: MessageKind, words: dict[str, Any], payload: Sequence[Any] = ()) -> None:
        if self._onward is None:
            raise StageLostError(self._lost or "the stages are not running")
        try:
            self._onward.send(kind, words, payload)
        except LostLinkError:
            raise self._broken() from None

    def _take(self, source: queue.SimpleQueue[Any]) -> tuple[MessageKind, dict[str, Any], memoryview]:
        if self._onward is None:
            raise StageLostError(self._lost or "the stages are not running")
        found = source.get()
        if found is None:
            raise self._broken()
        kind, words, data = found
        if kind is MessageKind.ERROR:
            raise (NonFiniteError if words["class"] == "NonFiniteError" else IkError)(words["error"])
        return kind, words, data

    def run(self, program: DividedProgram, n_threads: int, state: StepBlock) -> None:
        """Send a micro-batch into the chain; the step block may be overwritten when this returns."""
        from ikcli.graph import Rows

        outputs = state.rows[Rows.OUTPUTS]
        given = self._given.get(id(program), 0)
        block = b"".join(a.tobytes() for a in [*state.packed(), *([state.given] if given else [])])
        batch = _MicroBatch(self._numbers[id(program)], n_threads, outputs, given, block)
        self._logits = self._states = None
        self._begin(batch, look=False)
        self._in_flight.append(batch)

    def _begin(self, batch: _MicroBatch, *, look: bool) -> None:
        words = {
            "program": batch.program, "threads": batch.threads, "outputs": batch.outputs,
            "compact": batch.program < len(self._numbers) - 1, "look": look, "given": batch.given,
        }  # fmt: skip
        self._send(MessageKind.RUN, words, [batch.block])

    def result(self, program: DividedProgram, n_rows: int) -> npt.NDArray[np.float32]:
        """Wait for the result of the oldest micro-batch, unless its states were asked for before."""
        if self._logits is None:
            self._collect(program)
        found, self._logits = self._logits, None
        assert found is not None
        return found[:n_rows]

    def states(self, program: DividedProgram, n_rows: int) -> npt.NDArray[np.float32]:
        """Wait for the states of the only micro-batch, unless its result was asked for before."""
        if self._states is None:
            self._collect(program)
        assert self._states is not None
        return self._states[:n_rows]

    def _collect(self, program: DividedProgram) -> None:
        """Wait for what the oldest micro-batch leaves."""
        if not self._in_flight:
            raise StageLostError(self._lost)
        self._collected = self._in_flight.popleft()
        _, _, data = self._take(self._results)
        cols, rows = program.result.cols, self._collected.outputs
        values = np.frombuffer(data, np.float32)
        self._logits = values[: rows * cols].reshape(rows, cols)
        if program.states is not None:
            self._states = values[rows * cols :].reshape(-1, program.states.cols)

    def explain(self, program: DividedProgram, n_threads: int, state: StepBlock, observer: Observer) -> None:
        """Make the stages compute the last micro-batch again and look for values that are not finite."""
        assert self._collected is not None
        self._begin(self._collected, look=True)
        while self._in_flight:  # micro-batches that were submitted after it
            self._in_flight.popleft()
            self._take(self._results)
        self._take(self._results)

    def run_observed(self, program: DividedProgram, n_threads: int, state: StepBlock, observer: Observer) -> None:
        """Raise UnsupportedError: values of nodes stay in the stages."""
        raise UnsupportedError("values inside of a model are not seen with --stages; leave it out")

    def timed(self, program: DividedProgram, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]:
        """Raise UnsupportedError: stages are not timed op by op."""
        raise UnsupportedError("--profile cannot be used with --stages; leave one of them out")
