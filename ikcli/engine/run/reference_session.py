"""A session on the NumPy reference backend: model file in, logits out. Slow and exact, the baseline of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.backends.reference import CacheStore, Observer, ReferenceExecutor
from ikcli.engine.run.batch import Batch
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.graph import Graph, Node, Rows
from ikcli.graph.micro_batch import MicroBatch, Segment
from ikcli.models import EXPAND_MIN_TOKENS, GraphConfig, HParams, Weights, check_tensors
from ikcli.models.heads import mtp
from ikcli.models.mla import DerivedSpec, derive
from ikcli.models.tensors import TensorLike
from ikcli.quant.decode import dequantize


class ModelFile(Protocol):
    """An opened model: metadata, tensors and their bytes."""

    @property
    def paths(self) -> list[Path]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    def data(self, name: str) -> npt.NDArray[np.uint8]: ...


class ReferenceSession:
    """Decodes batches of up to `n_seq_max` sequences, each with cfg.n_ctx // n_seq_max cells.

    `dtype` is the type of all arithmetic (float32 or float64); `observe(node, value)` sees every node. With
    `cfg.n_heads`, `head` runs the heads that predict further tokens.
    """

    def __init__(
        self,
        model: str | Path | ModelFile,
        cfg: GraphConfig | None = None,
        *,
        n_seq_max: int = 1,
        dtype: type = np.float32,
        observe: Observer | None = None,
    ) -> None:
        cfg = cfg or GraphConfig()
        file: ModelFile = open_gguf(model) if isinstance(model, str | Path) else model
        source = str(file.paths[0])
        self.hp = HParams.from_gguf(file.metadata, file.tensors, source)
        self.cfg = cfg
        self._file = file
        module = models.find(self.hp.arch, source)
        check_tensors(module.tensor_shapes(self.hp), file.tensors, source)
        further = mtp.read_further(file.metadata, file.tensors, source) if cfg.n_heads else None
        self._derived = derive(file, further or self.hp, cfg)
        infos: dict[str, TensorLike] = dict(file.tensors)
        infos |= {name: DerivedSpec(t, shape) for name, (t, shape, _) in self._derived.items()}
        weights = Weights(infos, source, self._load)
        self._graphs: list[Graph] = []
        self._factors = weights.factors(module.tensor_shapes(self.hp))
        for expand in (False, True):
            graph = Graph(factors=self._factors, wants_states=Rows.TOKENS if cfg.n_heads else None)
            module.build(graph, self.hp, weights, replace(cfg, expand=expand))
            self._graphs.append(graph)
        self._heads = self._record_heads(module, weights) if cfg.n_heads else []
        self.n_ctx_seq = cfg.n_ctx // n_seq_max
        self._observe = observe
        self._executor = ReferenceExecutor(self._load, CacheStore(cfg.n_ctx, n_seq_max), dtype, self._see)
        self.states = np.empty((0, self.hp.n_embd), np.float32)  # of all tokens of the last micro-batch, with heads
        self._n_past = [0] * n_seq_max

    def decode(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the logits (n_out, n_vocab) of the tokens that asked for them, in batch order."""
        parts = [self._run(batch.slice(i, i + self.cfg.n_ubatch)) for i in range(0, len(batch), self.cfg.n_ubatch)]
        return np.concatenate(parts) if parts else np.empty((0, self.hp.n_vocab), np.float32)

    def head(self, i: int, batch: Batch, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the logits of head i for consecutive positions, given their states and the tokens after them.

        Its own states are `states` of this session afterwards.
        """
        state = replace(self._state(batch, follows=False), given=states)
        return self._executor.run(self._heads[i], state).astype(np.float32, copy=False)

    def _record_heads(self, module: models.ModelModule, weights: Weights) -> list[Graph]:
        mtp.check_heads(module, self.hp, self._file.tensors)
        assert isinstance(module, mtp.HasLayers)
        further = mtp.read_further(self._file.metadata, self._file.tensors, self.hp.source)
        check_tensors(mtp.tensor_shapes(module, further, self._file.tensors), self._file.tensors, self.hp.source)
        graphs = [Graph(factors=self._factors) for _ in range(self.cfg.n_heads)]
        for i, graph in enumerate(graphs):
            mtp.build(graph, module, further, weights, self.cfg, i)
        return graphs

    def _see(self, node: Node, value: npt.NDArray[Any]) -> None:
        if any(node is graph.states for graph in (*self._graphs, *self._heads)):
            self.states = np.array(value, np.float32)
        if self._observe is not None:
            self._observe(node, value)

    def clear(self) -> None:
        """Drop all sequences."""
        self._n_past = [0] * len(self._n_past)

    def truncate(self, seq: int, n: int) -> None:
        """Drop positions from n on.

        States stay those of the last position, so this is for models without states.
        """
        self._n_past[seq] = min(self._n_past[seq], n)

    def _run(self, batch: Batch) -> npt.NDArray[np.float32]:
        graph = self._graphs[len(batch) >= EXPAND_MIN_TOKENS]
        return self._executor.run(graph, self._state(batch)).astype(np.float32, copy=False)

    def _state(self, batch: Batch, follows: bool = True) -> MicroBatch:
        if len(batch) and not 0 <= batch.tokens.min() <= batch.tokens.max() < self.hp.n_vocab:
            raise IkError(f"a token id is outside the vocabulary of {self.hp.n_vocab}")
        starts = [0, *(np.flatnonzero(np.diff(batch.seq)) + 1).tolist(), len(batch)]
        segments = tuple(self._segment(batch, a, b, follows) for a, b in pairwise(starts))
        cells = batch.seq.astype(np.int64) * self.n_ctx_seq + batch.pos
        return MicroBatch(batch.tokens, batch.pos, cells, np.flatnonzero(batch.logits), segments)

    def _segment(self, batch: Batch, start: int, stop: int, follows: bool = True) -> Segment:
        seq, pos, n = int(batch.seq[start]), int(batch.pos[start]), stop - start
        if not follows:
            return Segment(start, n, seq * self.n_ctx_seq, pos, seq)
        if not 0 <= seq < len(self._n_past):
            raise IkError(f"sequence {seq} does not exist; the session was made for {len(self._n_past)}")
        if pos != self._n_past[seq] or (np.diff(batch.pos[start:stop]) != 1).any():
            raise IkError(f"sequence {seq}: position {pos} does not follow the {self._n_past[seq]} cached ones")
        if pos + n > self.n_ctx_seq:
            raise IkError(f"sequence {seq}: {pos + n} tokens do not fit its context of {self.n_ctx_seq}; raise -c")
        self._n_past[seq] = pos + n
        return Segment(start, n, seq * self.n_ctx_seq, pos, seq)

    def _load(self, name: str) -> npt.NDArray[np.float32]:
        if name in self._derived:
            type_, shape, data = self._derived[name]
            return dequantize(data, type_, shape)
        info = self._file.tensors[name]
        if info.type is GGMLType.I32:  # a table of ids
            return self._file.data(name).view(np.int32).reshape(tuple(reversed(info.shape))).astype(np.float32)
        return dequantize(self._file.data(name), info.type, tuple(info.shape))
