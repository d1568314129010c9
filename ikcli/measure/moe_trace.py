"""Record which experts every token uses, and which ones the next layer's router would have guessed, in a small file.

The file is an .npz archive (read it with `numpy.load`):

| name | content |
|---|---|
| format | "ik expert trace 1" |
| model | architecture and name of the model |
| layers | int32 (layers): numbers of the layers with experts |
| n_expert | experts of a layer |
| experts | (tokens, layers, used): chosen experts, best first; the largest number of the type where there is none |
| guessed | the same: experts that the layer's router chooses for the hidden state one layer earlier |
| starts | int64: tokens at which a window of the text begins |

The last layer chooses experts only for tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.routers import NextExperts, Router, routers_of
from ikcli.errors import FormatError, IkError, UsageError
from ikcli.graph import Node, Rows
from ikcli.graph.ops_experts import route_parts
from ikcli.log import log
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.run.session import Session

FORMAT = "ik expert trace 1"
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExpertTrace:
    """A trace; `experts` and `guessed` are (tokens, layers, used), -1 where there is none."""

    model: str
    layers: I32
    n_expert: int
    experts: I32
    guessed: I32
    starts: npt.NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write the file; raise IkError if that is not possible."""
        small = np.uint8 if self.n_expert < 255 else np.uint16
        try:
            with path.open("wb") as file:  # `savez` would append .npz to another name
                np.savez_compressed(file, format=FORMAT, model=self.model, layers=self.layers, n_expert=self.n_expert,
                                    starts=self.starts, experts=self.experts.astype(small),
                                    guessed=self.guessed.astype(small))  # fmt: skip
        except OSError as e:
            raise IkError(f"{path}: the expert trace cannot be written ({e.strerror or e})") from None


def read_trace(path: Path) -> ExpertTrace:
    """Read a trace; raise FormatError if it is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["format"]) != FORMAT:
                raise FormatError(f"{path}: its format is {str(file['format'])!r}, not {FORMAT!r}")
            experts, guessed = (_signed(file[name]) for name in ("experts", "guessed"))
            trace = ExpertTrace(str(file["model"]), file["layers"], int(file["n_expert"]), experts, guessed,
                                file["starts"])  # fmt: skip
    except (OSError, KeyError, ValueError, EOFError) as e:
        raise FormatError(f"{path}: not an expert trace of `ik perplexity --moe-trace` ({e})") from None
    n = len(trace.layers)
    if experts.ndim != 3 or experts.shape != guessed.shape or experts.shape[1] != n or experts.max() >= trace.n_expert:
        raise FormatError(f"{path}: {n} layers of {trace.n_expert} experts, but choices of shape {experts.shape}")
    return trace


def _signed(ids: npt.NDArray[np.integer]) -> I32:
    found = ids.astype(np.int32)
    found[ids == np.iinfo(ids.dtype).max] = -1
    return found


def check(config: RunConfig) -> None:
    """Raise UsageError for options that `--moe-trace` cannot be combined with."""
    options = config.perplexity
    if options.moe_trace and (options.scores_choices or options.kl_divergence):
        raise UsageError("--moe-trace records the experts of a text: leave out --kl-divergence and choice tasks")
    if options.moe_trace and (options.stride or config.fleet.wanted or config.fleet.stages > 1):
        raise UsageError("--moe-trace needs consecutive windows in one process: leave out --ppl-stride, --workers and "
                         "--stages")  # fmt: skip


def recorder(config: RunConfig, session: object) -> TraceRecorder | None:
    """Return the observer of an opened session that `--moe-trace` wants."""
    from ikcli.engine.run.session import Session

    path = config.perplexity.moe_trace
    if path is None:
        return None
    assert isinstance(session, Session)
    return TraceRecorder(session, path)


class TraceRecorder:
    """The observer of a session that records a trace."""

    def __init__(self, session: Session, path: Path) -> None:
        """Observe a session; raise UsageError if its model has no experts."""
        found = [router for graph, _ in session.graphs.values() for router in routers_of(graph)]
        if not found:
            raise UsageError(f"--moe-trace: {session.model.source} has no experts")
        self._session, self._path = session, path
        self._layers = sorted({router.il for router in found})
        self._routers = {router.route: router for router in found}
        self._guesses = [
            NextExperts(session.model, routers_of(graph)) for graph, _ in session.graphs.values()
        ]  # graphs for prompts and for generation have nodes of their own
        self._inputs = {router.x for router in found if router.x is not None}
        self._held: dict[Node, npt.NDArray[np.float32]] = {}
        self._experts: dict[int, list[I32]] = {il: [] for il in self._layers}
        self._guessed: dict[int, list[I32]] = {il: [] for il in self._layers}
        session.observer = self

    def __call__(self, node: Node, value: npt.NDArray[np.generic]) -> None:
        """Take the output of a node."""
        if node in self._inputs:
            self._held[node] = np.array(value, np.float32)
        router = self._routers.get(node)
        if router is None:
            return
        self._add(self._experts, router, route_parts(np.asarray(value, np.float32), router.op.n_used)[1])
        x = self._held.get(router.x) if router.x is not None else None
        if x is None:
            return
        for guesses in self._guesses:
            found = guesses.after(node, x)
            if found is not None:
                self._add(self._guessed, Router(found[0].il, node, None, None, None), found[1])

    def _add(self, to: dict[int, list[I32]], router: Router, ids: I32) -> None:
        """Append the rows of a micro-batch; the rows of a layer that sees only outputs are those of their tokens."""
        block = self._session.step_block
        rows = np.full((block.rows[Rows.TOKENS], ids.shape[1]), -1, np.int32)
        if router.route.rows.symbol is Rows.OUTPUTS:
            rows[block.out_ids] = ids
        else:
            rows[:] = ids
        to[router.il].append(rows)

    def save(self, window: int) -> None:
        """Write what was recorded; a window of the text has so many tokens."""
        trace = self.trace(window)
        trace.save(self._path)
        n, layers, used = trace.experts.shape
        log(f"perplexity: experts of {n} tokens, {used} in each of {layers} layers, are in {self._path}")

    def trace(self, window: int) -> ExpertTrace:
        """Return what was recorded."""
        experts = np.stack([np.concatenate(self._experts[il]) for il in self._layers], axis=1)
        guessed = np.full_like(experts, -1)
        for i, il in enumerate(self._layers):
            if self._guessed[il]:
                guessed[:, i] = np.concatenate(self._guessed[il])
        model = self._session.model
        name = f"{model.file.arch} {model.file.get('general.name', '')}".strip()
        return ExpertTrace(name, np.array(self._layers, np.int32), model.hp.n_expert, experts, guessed,
                           np.arange(0, len(experts), window))  # fmt: skip
