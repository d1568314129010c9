"""Snapshots of the engine for other threads: the model, its slots, counters. They never wait for the engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikcli.engine.experts.residency import ExpertPlace
from ikcli.engine.plan.placement import CPU
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import file_type_label
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.messages import GenerationRequest, RequestTimings, StopType


class EngineError(Exception):
    """A request that cannot be served: HTTP status, OpenAI-style error type and a sentence."""

    def __init__(self, status: int, type: str, message: str) -> None:
        super().__init__(message)
        self.status, self.type, self.message = status, type, message


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model. The slots share `n_ctx` cells, and each takes `n_ctx_slot` tokens."""

    path: str
    alias: str
    arch: str
    description: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    n_ctx: int
    n_ctx_slot: int
    n_slots: int
    vocab_type: int  # llama.cpp's number: 0 none, 1 SPM, 2 BPE, 3 WPM
    metadata: Mapping[str, Any] = field(repr=False)
    needs_checkpoints: bool = False  # sequences cannot be truncated at any position
    adapters: tuple[str, ...] = ()  # files of low-rank adapters
    size_gpu: int = 0  # bytes of all kinds on GPUs
    generates: bool = True
    pooling: str = "last"  # the pooling of vectors; "rank": scores instead; empty: no embeddings


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot at one moment; `request` is its last one."""

    id: int
    id_task: int
    is_processing: bool
    state: str  # idle, prompt, generation, embedding
    n_ctx: int
    n_past: int
    prompt: tuple[int, ...]
    request: GenerationRequest | None
    text: str
    n_decoded: int
    n_remain: int
    has_next_token: bool
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    next_token: int
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class SlotActionResult:
    """The outcome of saving, restoring or erasing a slot."""

    id_slot: int
    n_tokens: int
    n_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """llama-server's counters since the start (`*_total`), averages since the last reset, and gauges."""

    prompt_tokens_total: int = 0
    prompt_seconds_total: float = 0.0
    tokens_predicted_total: int = 0
    tokens_predicted_seconds_total: float = 0.0
    n_decode_total: int = 0
    n_busy_slots_total: int = 0
    n_tokens_max: int = 0
    draft_tokens_total: int = 0
    draft_tokens_accepted_total: int = 0
    drafts_total: int = 0
    accepted_by_position: Mapping[int, int] = field(default_factory=dict)  # by their place in the draft
    draft_decisions: Mapping[str, int] = field(default_factory=dict)  # steps by what was decided, and why
    prompt_tokens_seconds: float = 0.0
    predicted_tokens_seconds: float = 0.0
    requests_processing: int = 0
    requests_deferred: int = 0
    slots_idle: int = 0
    kv_cache_tokens: int = 0
    kv_cache_usage_ratio: float = 0.0
    prompt_cache_bytes: int = 0
    prompt_cache_entries: int = 0
    t_start: float = 0.0
    prompt_tokens_slot_total: int = 0
    prompt_tokens_ram_total: int = 0
    prompt_tokens_disk_total: int = 0
    expert_places: Sequence[ExpertPlace] = ()
    expert_uses: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by cache: uses, hits

    @property
    def n_busy_slots_per_decode(self) -> float:
        return self.n_busy_slots_total / self.n_decode_total if self.n_decode_total else 0.0


@dataclass(slots=True)
class Counters:
    """The counters of the engine's thread; a read with reset starts `recent_*` again."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    n_decode: int = 0
    n_busy_slots: int = 0
    n_tokens_max: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    accepted_by_position: Counter[int] = field(default_factory=Counter)
    from_slots: int = 0
    from_ram: int = 0
    from_disk: int = 0
    recent_prompt: tuple[int, float] = (0, 0.0)
    recent_predicted: tuple[int, float] = (0, 0.0)
    t_start: float = field(default_factory=time.time)

    def prompt(self, n: int, seconds: float) -> None:
        """Count a computed prompt."""
        self.prompt_tokens += n
        self.prompt_seconds += seconds
        self.recent_prompt = (self.recent_prompt[0] + n, self.recent_prompt[1] + seconds)

    def reuse(self, reused: Reused) -> None:
        """Count the reused tokens of a prompt."""
        self.from_slots += reused.n_slot
        self.from_ram += reused.n_ram
        self.from_disk += reused.n_disk

    def predicted(self, n: int, seconds: float) -> None:
        """Count a finished generation."""
        self.predicted_tokens += n
        self.predicted_seconds += seconds
        self.recent_predicted = (self.recent_predicted[0] + n, self.recent_predicted[1] + seconds)

    def speculation(self, drafts: int, drafted: int, accepted_by_position: Counter[int]) -> None:
        """Count the drafts of a finished generation."""
        self.drafts += drafts
        self.drafted += drafted
        self.accepted += accepted_by_position.total()
        self.accepted_by_position.update(accepted_by_position)

    def reset_recent(self) -> None:
        self.recent_prompt = self.recent_predicted = (0, 0.0)


def per_second(count: tuple[int, float]) -> float:
    """Return the rate of (tokens, seconds)."""
    return count[0] / count[1] if count[1] > 0 else 0.0


_VOCAB_TYPES = {"none": 0, "spm": 1, "bpe": 2, "wpm": 3, "ugm": 4}


def model_info(session: Session, n_ctx_slot: int, pooling: str = "") -> ModelInfo:
    """Return the attributes of the model that clients may need."""
    model, hp, memory = session.model, session.model.hp, session.run_plan.memory
    tensors = model.file.tensors.values()
    ftype = model.file.get("general.file_type")
    path = str(model.file.paths[0])
    return ModelInfo(
        path=path,
        alias=session.config.server.alias or model.file.paths[0].name,
        arch=hp.arch,
        description=f"{hp.arch} {file_type_label(int(ftype))}" if ftype is not None else hp.arch,
        n_vocab=session.n_vocab,
        n_ctx_train=hp.n_ctx_train,
        n_embd=hp.n_embd,
        n_params=sum(math.prod(t.shape) for t in tensors),
        size=sum(t.n_bytes for t in tensors),
        n_ctx=session.n_ctx,
        n_ctx_slot=n_ctx_slot,
        n_slots=session.n_seq_max,
        vocab_type=_VOCAB_TYPES.get(session.tokenizer.kind, 0),
        metadata=model.file.metadata,
        needs_checkpoints=not session.sequences.kind.is_free,
        adapters=tuple(str(a.path) for a in model.adapters.adapters),
        size_gpu=sum(memory.total(device) for device in memory.parts if device != CPU),
        generates=session.outputs.logits,
        pooling=pooling,
    )
