"""`--self-test`: compare every op of the first layers on every device with NumPy.

A known prompt and one more token run node by node. The output of an op is compared with the op's own definition,
computed in NumPy from the inputs that were observed. An error is therefore found where it arises: the message names the
op and the device, not everything after it. A value that was not copied to a device, or is stale, shows at the first op
that reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.embedder import states
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, NonFiniteError
from ikcli.graph import Graph, Node
from ikcli.graph.micro_batch import MicroBatch, Segment
from ikcli.graph.ops_attention import Attention
from ikcli.graph.ops_experts import MoeUpGate, MulMatId
from ikcli.graph.ops_rows import MulMat, MulMatHeads
from ikcli.quant.decode import dequantize

Array = npt.NDArray[np.generic]
N_TOKENS, N_LAYERS = 12, 3
PRODUCTS = (MulMat, MulMatHeads, MulMatId, MoeUpGate)
# Relative errors (2-norm of all rows): products round activations to 8 bits, attention queries to f16 or bf16.
PRODUCT_ERROR, ATTENTION_ERROR, OTHER_ERROR = 0.05, 0.02, 0.005


class SelfTestError(IkError):
    """A device computed a wrong result."""


@dataclass(slots=True)
class OpCheck:
    """The nodes of one op on one device, and the worst of them."""

    device: str
    op: str
    bound: float
    nodes: int = 0
    worst: float = 0.0
    name: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the worst error is within the bound; NaN is not."""
        return self.worst <= self.bound

    def __str__(self) -> str:
        worst = f"largest error {self.worst:.1e} of {self.bound:.0e} ({self.name})" if self.name else "no error"
        return f"{self.device}: {self.op:14} {self.nodes:4} nodes, {worst}"


class Checker:
    """The observer of a run."""

    def __init__(self, session: Session) -> None:
        n = N_TOKENS + 1
        self.session = session
        self.families: dict[tuple[str, str], OpCheck] = {}
        self.first_wrong: OpCheck | None = None
        self._run = ReferenceExecutor(self._values, CacheStore(n, 1, n))
        self._places: dict[Node, tuple[str, Graph]] = {}
        self._stored: set[Node] = set()

    def _values(self, name: str) -> npt.NDArray[np.float32]:
        model = self.session.model
        if name in model.file.tensors:
            return model.values(name)
        spec = model.specs[name]  # made of others
        return dequantize(model.bytes_of(name), spec.type, tuple(spec.shape))

    def decode(self, ids: Sequence[int], pos: int) -> None:
        """Compute a micro-batch, observed node by node."""
        session, tokens = self.session, np.array(ids, np.int32)
        at = np.arange(pos, pos + len(ids))
        segments = (Segment(0, len(ids), 0, pos),)
        self._run.state = MicroBatch(tokens, at.astype(np.int32), at, np.arange(len(ids)), segments)
        self._run._values.clear()
        self._stored.clear()
        self._places.clear()
        session.observer = self
        try:
            if session.outputs.logits:
                session.decode(Batch.single(tokens, pos, logits="all"))
            else:
                states(session, 0, [tokens], np.arange(len(ids)), pos)
        finally:
            session.observer = None

    def __call__(self, node: Node, value: Array) -> None:
        run, seen = self._run, np.array(value)
        if node not in self._places:  # the variant is chosen when the run starts
            programs = [p.chosen or p for p in self.session.programs.values()]
            self._places = {n: (t.device, p.graph) for p in programs for t in p.splits for n in t.nodes}
        if node.op.is_table:  # laid out as its device prefers; wrong ones show in the ops that read them
            seen = self._meaning(node)
        elif node.il < N_LAYERS:
            self._store(self._places[node][1], node)
            self._compare(node, seen, self._meaning(node))
        run._values[node.index] = seen
        run._weights.clear()

    def _meaning(self, node: Node) -> Array:
        for x in node.nodes():
            if x.index not in self._run._values:  # a value that the device does not show
                self._run._values[x.index] = self._meaning(x)
        found: Array = node.op.compute(self._run)
        return found

    def _store(self, graph: Graph, reader: Node) -> None:
        """Store in the oracle what was stored before `reader`."""
        caches = set(reader.caches())
        for node in graph.nodes[: reader.index] if caches else ():
            if node.op.stores and node not in self._stored and caches & set(node.caches()):
                self._stored.add(node)
                self._run._values[node.index] = self._meaning(node)

    def _compare(self, node: Node, found: Array, wanted: Array) -> None:
        device, op = self._places[node][0], node.op.name
        family = self.families.setdefault((device, op), OpCheck(device, op, bound_of(node)))
        family.nodes += 1
        error = relative_error(found, wanted)
        if not error <= family.worst:
            family.worst, family.name = error, node.name
        if not error <= family.bound and self.first_wrong is None:
            self.first_wrong = OpCheck(device, op, family.bound, 1, error, node.name)


def bound_of(node: Node) -> float:
    """Return the largest relative error that a node may have."""
    if isinstance(node.op, PRODUCTS):
        return PRODUCT_ERROR
    return ATTENTION_ERROR if isinstance(node.op, Attention) else OTHER_ERROR


def relative_error(found: Array, wanted: Array) -> float:
    """Return the relative error in the 2-norm; 0 if both values are 0."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    norm = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(a))


def check(session: Session) -> list[OpCheck]:
    """Compare, and return the checks by device and op; raise SelfTestError with the first wrong op and its device."""
    ids = [(7919 * i + 3) % session.n_vocab for i in range(N_TOKENS + 1)]
    checker = Checker(session)
    session.clear()
    try:
        checker.decode(ids[:N_TOKENS], 0)
        if session.model.hp.causal:  # encoders read whole texts only
            checker.decode(ids[N_TOKENS:], N_TOKENS)
    except NonFiniteError:
        if checker.first_wrong is None:  # the model's own
            raise
    session.clear()
    families = sorted(checker.families.values(), key=lambda f: (f.device, f.op))
    if (wrong := checker.first_wrong) is not None:
        raise SelfTestError(
            f"self-test: {wrong.op} of {wrong.name} is wrong on {wrong.device} (relative error {wrong.worst:.1e}, at "
            f"most {wrong.bound:.0e} is right); compute it elsewhere with -ot or a smaller -ngl"
        )
    return families
