"""From the states of tokens to the vector of a text: pooling, norms, and the head of models that rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.model import Model
from ikcli.errors import FormatError, UnsupportedError
from ikcli.graph.activations import gelu_erf
from ikcli.settings.run import RunConfig

FloatRows = npt.NDArray[np.float32]


class Pooling(IntEnum):
    """How the states of a text become one vector; the numbers are those of `{arch}.pooling_type`."""

    NONE = 0  # a row per token
    MEAN = 1
    CLS = 2  # the first token
    LAST = 3
    RANK = 4  # the last token (of encoders the first one, or the mean), through the classification head: a score

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that `--pooling` accepts."""
        return tuple(p.name.lower() for p in cls)


def pooling_of(name: str, metadata: Mapping[str, Any], arch: str, otherwise: Pooling) -> Pooling:
    """Return the pooling of `--pooling` (empty: not given), else that of the model file, else `otherwise`."""
    if name:
        return Pooling[name.upper()]
    stored = metadata.get(f"{arch}.pooling_type")
    if stored is None or stored == -1:
        return otherwise
    if stored not in list(Pooling):
        raise FormatError(f"{arch}.pooling_type is {stored}, which is none of 0 to 4; choose one with --pooling")
    return Pooling(int(stored))


def served_pooling(config: RunConfig, metadata: Mapping[str, Any], arch: str) -> Pooling:
    """Return the pooling of a server: by the last token where neither options nor the model name one."""
    return pooling_of("rank" if config.server.reranking else config.embed.pooling, metadata, arch, Pooling.LAST)


def rank_pooling(model: Model) -> Pooling:
    """Return which states a classification head reads: only the last token of a causal model has seen the whole text.

    `{arch}.classifier.pooling_type` says so for encoders; without it, ModernBERT's is the mean.
    """
    hp = model.hp
    if hp.causal:
        return Pooling.LAST
    otherwise = Pooling.MEAN if hp.arch == "modern-bert" else Pooling.CLS
    return pooling_of("", model.file.metadata, f"{hp.arch}.classifier", otherwise)


class PoolState:
    """Collects the states of one text, piece by piece."""

    def __init__(self, pooling: Pooling, n_tokens: int) -> None:
        """Create an empty state of any pooling but RANK, of which `rank_pooling` says what it is."""
        self._pooling, self._n, self._at = pooling, n_tokens, 0 if pooling is Pooling.CLS else n_tokens - 1
        self._seen = 0
        self._parts: list[FloatRows] = []
        self._sum: npt.NDArray[np.float64] | None = None

    def wanted(self, n: int) -> range:
        """Return which of the next n tokens' states are needed."""
        if self._pooling in (Pooling.NONE, Pooling.MEAN):
            return range(n)
        at = self._at - self._seen
        return range(at, at + 1) if 0 <= at < n else range(0)

    def add(self, n: int, rows: FloatRows) -> None:
        """Add the states of those of the next n tokens that were wanted."""
        self._seen += n
        if self._pooling is Pooling.MEAN:
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
        elif len(rows):
            self._parts.append(rows.copy())

    @property
    def done(self) -> bool:
        """Return whether all tokens were seen."""
        return self._seen >= self._n

    def result(self) -> FloatRows:
        """Return the rows of the text: one, or without pooling one per token."""
        if self._sum is not None:
            return (self._sum / self._n).astype(np.float32)[None]
        return np.concatenate(self._parts)


def normalized(rows: FloatRows, kind: int) -> FloatRows:
    """Divide every row by its norm, as `--embd-normalize` asks.

    -1: leave rows unchanged; 0: scale the largest value to 32760; p: divide by the p-norm.
    """
    if kind < 0:
        return rows
    size = np.abs(rows.astype(np.float64))
    if kind == 0:
        norm = size.max(axis=-1, keepdims=True) / 32760
    else:  # scaled, so that high powers do not overflow
        largest = np.maximum(size.max(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
        norm = largest * ((size / largest) ** kind).sum(axis=-1, keepdims=True) ** (1 / kind)
    return np.where(norm > 0, rows / np.where(norm > 0, norm, 1), 0).astype(np.float32)


def similarities(rows: FloatRows) -> FloatRows:
    """Return the cosine of every pair of rows; 1 for two rows of zeros, 0 for a single row of zeros."""
    unit = normalized(rows, 2).astype(np.float64)
    empty = ~rows.any(axis=-1)
    return (unit @ unit.T + np.outer(empty, empty)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Projection:
    """The dense layers of a sentence-transformers model, which follow the pooling (EmbeddingGemma)."""

    layers: tuple[tuple[FloatRows, FloatRows | None], ...]

    @classmethod
    def of(cls, model: Model) -> Projection | None:
        """Return the layers of a model, or None if it has none."""
        layers, width = [], model.hp.n_embd
        for name in ("dense_2", "dense_3"):
            tensor = model.file.tensors.get(f"{name}.weight")
            if tensor is None:
                continue
            if tensor.shape[0] != width:
                raise FormatError(f"{model.source}: {name}.weight has rows of {tensor.shape[0]}, not {width}")
            bias = model.values(f"{name}.bias") if f"{name}.bias" in model.file.tensors else None
            layers.append((model.values(f"{name}.weight"), bias))
            width = tensor.shape[1]
        return cls(tuple(layers)) if layers else None

    def __call__(self, rows: FloatRows) -> FloatRows:
        """Return the rows after all layers."""
        for weight, bias in self.layers:
            rows = rows @ weight.T + (0 if bias is None else bias)
        return rows.astype(np.float32)


@dataclass(frozen=True, slots=True)
class RankHead:
    """The classification head of a model that ranks.

    It is an optional dense layer with tanh (ModernBERT: GELU and a norm), then a row per label if the model has labels.
    """

    output: FloatRows | None
    output_bias: FloatRows | None
    dense: FloatRows | None
    dense_bias: FloatRows | None
    norm: FloatRows | None
    norm_eps: float
    normalize: bool  # labels are answers ("yes", "no") that share a probability of 1

    @classmethod
    def of(cls, model: Model) -> RankHead:
        """Return the head of a model; raise UnsupportedError if it has none."""
        names = [name for name in ("cls.weight", "cls.output.weight") if name in model.file.tensors]
        if not names:
            raise UnsupportedError(
                f"{model.source}: the model cannot rank, it has no classification head (cls.output.weight); use a "
                "reranker, or another --pooling"
            )

        def values(name: str) -> FloatRows | None:
            return model.values(name) if name in model.file.tensors else None

        matrices: dict[str, FloatRows] = {}
        for name in names:
            matrices[name] = model.values(name).reshape(-1, model.file.tensors[name].shape[0])
            if matrices[name].shape[1] != model.hp.n_embd:
                width = matrices[name].shape[1]
                raise FormatError(f"{model.source}: {name} has rows of {width}, not {model.hp.n_embd}")
        output, dense = matrices.get("cls.output.weight"), matrices.get("cls.weight")
        several = output is not None and len(output) > 1
        head = values("cls.output.bias"), dense, values("cls.bias"), values("cls.norm.weight"), model.hp.eps
        return cls(output, *head, normalize=model.hp.arch.startswith("qwen3") and several)

    def __call__(self, rows: FloatRows) -> FloatRows:
        """Return (rows, labels) of scores; the first label is the score."""
        if self.dense is not None:
            rows = rows @ self.dense.T + (0 if self.dense_bias is None else self.dense_bias)
            rows = np.tanh(rows) if self.norm is None else self._normed(gelu_erf(rows))
        if self.output is None:
            return rows.astype(np.float32)
        found = rows @ self.output.T + (0 if self.output_bias is None else self.output_bias)
        if self.normalize:
            found = np.exp(found - found.max(axis=-1, keepdims=True))
            found /= found.sum(axis=-1, keepdims=True)
        return found.astype(np.float32)

    def _normed(self, rows: FloatRows) -> FloatRows:
        """Apply the layer norm between both matrices."""
        centred = rows - rows.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + self.norm_eps)
        return (centred / scale * self.norm).astype(np.float32)


Head = RankHead | Projection


def head_of(model: Model, pooling: Pooling) -> Head | None:
    """Return what follows the pooling: the classification head of a model that ranks, or its dense layers."""
    return RankHead.of(model) if pooling is Pooling.RANK else Projection.of(model)
