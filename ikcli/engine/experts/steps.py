"""Where a program on the CPU stops for experts on disk: behind each choice of experts, and before their matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.program import TABLE, CpuProgram
from ikcli.backends.lowering import Ref
from ikcli.engine.experts.store import ExpertStore
from ikcli.engine.plan.expert_slots import GIB, ExpertSlots
from ikcli.engine.run.model import Model
from ikcli.engine.run.routers import NextExperts, Router, routers_of
from ikcli.errors import IkError
from ikcli.graph import Graph, Node
from ikcli.graph.ops_experts import ExpertProduct, MoeSort, sort_of
from ikcli.hostinfo import available_memory
from ikcli.log import progress

GUESS_TOKENS = 32  # most tokens of a step for which the next layer's router is asked


@dataclass(slots=True)
class _Stops:
    """Ops of a program before which experts are requested or waited for.

    `requests`: layer, plan, and whether the rows that its router read are still there. `waits`: layer and weights.
    """

    requests: dict[int, list[tuple[int, Node, bool]]] = field(default_factory=dict)
    waits: dict[int, list[tuple[int, list[str]]]] = field(default_factory=dict)

    @property
    def ops(self) -> list[int]:
        """Return the ops in order."""
        return sorted({*self.requests, *self.waits})


class ExpertSteps:
    """Run programs whose experts are in a store."""

    def __init__(self, slots: ExpertSlots, n_threads: int, *, fill: bool = True) -> None:
        """Make them of a plan; `n_threads` read, `fill`: all slots are filled before the first step."""
        self.slots, self._n_threads, self._fill = slots, n_threads, fill
        self.store: ExpertStore | None = None
        self._stops: dict[CpuProgram, _Stops] = {}
        self._routers: dict[Node, Router] = {}
        self._next = NextExperts.none()
        self._il_of = {m.name: x.il for x in slots.layers for m in x.matrices}

    def load(self) -> None:
        """Allocate the slots, and fill them if wanted; raise IkError without enough memory."""
        n_bytes, room = self.slots.n_bytes, available_memory()
        if room is not None and n_bytes > room:
            raise IkError(
                f"experts in RAM take {n_bytes / GIB:.2f} GiB, but {room / GIB:.2f} GiB are free; lower --expert-ram"
            )
        self.close()
        self.store = ExpertStore(self.slots, self._n_threads)
        if self._fill:
            with progress("reading experts", self.slots.file_bytes) as advance:
                self.store.fill(advance)

    @property
    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tables of addresses, by the names that programs have for them."""
        assert self.store is not None
        return self.store.addresses

    def know(self, model: Model, graph: Graph) -> None:
        """Read the routers of a graph, to guess the next layer's experts."""
        routers = routers_of(graph)
        self._routers |= {r.route: r for r in routers}
        self._next.join(NextExperts(model, routers))

    def bound(self) -> None:
        """Forget where programs stop: they were bound again."""
        self._stops.clear()

    def run(
        self, program: CpuProgram, arena: npt.NDArray[np.uint8], first: int, stop: int, run: Callable[[int, int], None]
    ) -> None:
        """Execute ops first..stop-1 by `run`, in pieces."""
        store = self.store
        assert store is not None
        if store.complete:
            run(first, stop)
            return
        stops = self._stops.get(program)
        if stops is None:
            stops = self._stops[program] = self._find(program)
        at = first
        for op in stops.ops:
            if not first <= op < stop:
                continue
            if op > at:
                run(at, op)
                at = op
            for il, plan, alive in stops.requests.get(op, ()):
                self._request(store, program, arena, il, plan, alive)
            for il, names in stops.waits.get(op, ()):
                store.wait(il, names)
        run(at, stop)

    def _find(self, program: CpuProgram) -> _Stops:
        stops = _Stops()
        plans: dict[Node, int] = {}
        inputs: dict[Node, set[Node]] = {}
        for i, op in enumerate(program.ops):
            if isinstance(op.node.op, MoeSort):
                plans[op.node] = i + 1
            names = [w.target.removesuffix(TABLE) for w in op.words if isinstance(w, Ref) and isinstance(w.target, str)]
            own = [name for name in dict.fromkeys(names) if name in self._il_of]
            if own and isinstance(op.node.op, ExpertProduct):
                inputs.setdefault(op.node.op.plan, set()).add(op.node.op.source)
                il = self._il_of[own[0]]
                stops.waits.setdefault(i, []).append((il, own))
        for plan, i in plans.items():
            if plan in inputs:
                router = self._routers.get(sort_of(plan).route)
                alive = router is not None and router.x in inputs[plan]  # what the router read is still there
                stops.requests.setdefault(i, []).append((plan.il, plan, alive))
        return stops

    def _request(
        self, store: ExpertStore, program: CpuProgram, arena: npt.NDArray[np.uint8], il: int, plan: Node, alive: bool
    ) -> None:
        sort = sort_of(plan)
        ends = program.raw(arena, plan, 8, sort.n_expert + 1)
        uses = np.diff(ends)
        experts, n_tokens = np.flatnonzero(uses), -(-int(ends[-1]) // sort.n_used)
        guess = self._guess(program, arena, sort, n_tokens) if alive else None
        store.request(il, experts, uses[experts], max(n_tokens, 1), guess)

    def _guess(
        self, program: CpuProgram, arena: npt.NDArray[np.uint8], op: MoeSort, n_tokens: int
    ) -> Callable[[], npt.NDArray[np.int64]] | None:
        """Return a function that guesses the next layer's experts from a copy of what this layer's router read."""
        router = self._routers.get(op.route)
        if router is None or router.x is None or not 0 < n_tokens <= GUESS_TOKENS:
            return None
        x = np.array(program.view(arena, router.x, n_tokens))
        guesses, route = self._next, op.route

        def ask() -> npt.NDArray[np.int64]:
            found = guesses.after(route, x)
            ids = np.empty(0, np.int32) if found is None else found[1].T.ravel()  # first choices first
            ids, first = np.unique(ids[ids >= 0], return_index=True)
            return ids[np.argsort(first)].astype(np.int64)

        return ask

    def lines(self) -> list[str]:
        """Return log lines on what was read; none if no step had to ask."""
        return [self.store.counts.line()] if self.store is not None and self.store.counts.uses else []

    def close(self) -> None:
        """Stop reading and free the slots."""
        if self.store is not None:
            self.store.close()
        self.store = None
        self._stops.clear()
