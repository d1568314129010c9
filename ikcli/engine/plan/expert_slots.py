"""Where experts are in the files, and how many of them have a slot in RAM (`--expert-ram`).

An expert of a layer is a few matrices (gate, up, down) that are read and dropped together. A slot holds one such expert
at the places where direct reads put it: whole blocks of the file around each matrix. Layers whose experts need slots of
one size share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.engine.run.model import Model
from ikcli.errors import UsageError
from ikcli.graph import Graph
from ikcli.graph.ops_ngrams import EmbedIds
from ikcli.graph.ops_rows import Embed

BLOCK = 4096  # bytes: direct reads begin and end at multiples
GIB = 2**30
_PARTS = ("gate_up", "gate", "up", "down")  # in the order in which a layer needs them


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A weight with one matrix per expert: `n_bytes` each, one after the other from `offset` of a file on."""

    name: str
    path: Path
    offset: int
    n_bytes: int

    @property
    def span(self) -> int:
        """Return the bytes in a slot: the blocks that a matrix may touch."""
        return -(-self.n_bytes // BLOCK) * BLOCK + BLOCK


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of a layer."""

    il: int
    n_expert: int
    matrices: tuple[ExpertMatrix, ...]

    @property
    def slot(self) -> int:
        """Return the bytes of a slot."""
        return sum(m.span for m in self.matrices)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all experts in the file."""
        return self.n_expert * sum(m.n_bytes for m in self.matrices)


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """A residency plan: the layers whose experts are on disk, and the number of slots of each size.

    `tables`: embeddings that are read by row, which stay mapped, and their bytes.
    """

    layers: tuple[ExpertLayer, ...]
    counts: Mapping[int, int]  # slots by their size
    tables: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the weights that are read into slots."""
        return frozenset(m.name for layer in self.layers for m in layer.matrices)

    @property
    def on_disk(self) -> frozenset[str]:
        """Return all weights that are not read into RAM as a whole."""
        return self.names | self.tables.keys()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(size * n for size, n in self.counts.items())

    @property
    def file_bytes(self) -> int:
        """Return the bytes of as many experts as there are slots (an estimate if layers differ)."""
        return sum(layer.n_bytes for layer in self.layers) * self.n_slots // max(self.n_experts, 1)

    @property
    def n_experts(self) -> int:
        """Return the experts of all layers."""
        return sum(layer.n_expert for layer in self.layers)

    @property
    def n_slots(self) -> int:
        """Return the number of slots."""
        return sum(self.counts.values())

    @property
    def complete(self) -> bool:
        """Return whether every expert has a slot."""
        return self.n_slots == self.n_experts

    def line(self) -> str:
        """Return the sentence that says what is resident."""
        total, tables = sum(layer.n_bytes for layer in self.layers) / GIB, sum(self.tables.values()) / GIB
        rows = f"rows of embeddings ({tables:.2f} GiB)"
        if self.complete:
            line = f"experts: all {self.n_experts} in {len(self.layers)} layers ({total:.2f} GiB) stay in RAM"
            return f"{line}, {rows} are read from disk" if self.tables else line
        line = f"experts: {self.n_slots} of {self.n_experts} in {len(self.layers)} layers stay in RAM"
        others = f"the others{f' and {rows}' if self.tables else ''} are read from disk when they are used"
        return f"{line} ({self.n_bytes / GIB:.2f} of {total:.2f} GiB), {others}"


def on_disk(model: Model, names: Iterable[str]) -> tuple[ExpertLayer, ...]:
    """Return the layers whose experts can be read into slots: of these weights those used as they are in the file."""
    found: dict[int, list[ExpertMatrix]] = {}
    experts: dict[int, int] = {}
    for name in names:
        info = model.file.tensors.get(name)
        block, _, part = name.partition(".ffn_")
        part = part.removesuffix("_exps.weight")
        if info is None or part not in _PARTS or len(info.shape) != 3 or model.specs[name].type != info.type:
            continue
        il, n = int(block.removeprefix("blk.")), info.shape[2]
        found.setdefault(il, []).append(
            ExpertMatrix(name, model.file.paths[info.file_index], info.offset, info.n_bytes // n)
        )
        experts[il] = n

    def order(m: ExpertMatrix) -> int:
        return _PARTS.index(m.name.partition(".ffn_")[2].removesuffix("_exps.weight"))

    return tuple(ExpertLayer(il, experts[il], tuple(sorted(found[il], key=order))) for il in sorted(found))


def row_tables(graphs: Iterable[Graph], model: Model) -> dict[str, int]:
    """Return the embeddings that are only read by row, and as the file has them, with their bytes."""
    nodes = [node for graph in graphs for node in graph.nodes]
    by_row = {w.name for node in nodes if isinstance(node.op, Embed | EmbedIds) for w in node.weights()}
    whole = {w.name for node in nodes if not isinstance(node.op, Embed | EmbedIds) for w in node.weights()}
    return {name: model.n_bytes([name]) for name in sorted(by_row - whole) if model.as_in_file(name)}


def slots_for(
    layers: tuple[ExpertLayer, ...],
    n_bytes: int,
    option: str = "--expert-ram ",
    tables: Mapping[str, int] | None = None,
) -> ExpertSlots:
    """Divide n_bytes of RAM into slots; raise UsageError if one layer's experts do not fit at once.

    `option`: what begins the message, in front of the size. `tables`: see `ExpertSlots`.
    """
    sizes: dict[int, list[ExpertLayer]] = {}
    for layer in layers:
        sizes.setdefault(layer.slot, []).append(layer)
    least = {size: max(layer.n_expert for layer in own) for size, own in sizes.items()}
    most = {size: sum(layer.n_expert for layer in own) for size, own in sizes.items()}
    needed = sum(size * n for size, n in least.items())
    if n_bytes < needed:
        raise UsageError(
            f"{option}{n_bytes / GIB:.3g} GiB is too little: prompts use all experts of a layer at once, which takes "
            f"{math.ceil(100 * needed / GIB) / 100:.2f} GiB"
        )
    whole = sum(size * n for size, n in most.items())
    share = 1.0 if n_bytes >= whole else (n_bytes - needed) / (whole - needed)
    counts = {size: least[size] + int(share * (most[size] - least[size])) for size in sizes}
    return ExpertSlots(layers, counts, tables or {})
