"""An engine without a model: it answers with a script, in a thread, with the interface of the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ikcli.engine.run.control_vectors import ControlVectors, VectorUse
from ikcli.server.slots.messages import (
    Candidate,
    Delta,
    Embedded,
    EmbeddingRequest,
    Event,
    Failure,
    Final,
    GenerationRequest,
    PromptProgress,
    RequestTimings,
    TokenInfo,
)
from ikcli.server.slots.pictures import PictureReader
from ikcli.server.slots.states import EngineError, EngineMetrics, ModelInfo, SlotActionResult, SlotState
from ikcli.server.slots.vectors import ServedVectors
from ikcli.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LONGEST = 20.0
"""Seconds after which a generation that nobody ends fails, so that a test which waits for its end does not hang."""


@dataclass
class Script:
    """What a generation says: pieces of text, how it ends, and how long it takes before every piece."""

    pieces: tuple[str, ...] = ("Hello", ", ", "wörld", "!")
    stop: str = "eos"
    word: str = ""
    delay: float = 0.0
    failure: Failure | None = None
    fail_after: int = 0
    endless: bool = False
    progress: bool = False


@dataclass
class FakeTicket:
    """Remembers whether it was cancelled, and how many pieces were sent."""

    id_task: int
    n_sent: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """`script` is what the next requests get; `requests` and `tickets` are those that came."""

    def __init__(self, tokenizer: Tokenizer, *, n_slots: int = 2, n_ctx: int = 256) -> None:
        self.state = "ready"
        self.load_error = None
        self.pictures: PictureReader | None = None
        self.tokenizer = tokenizer
        self.n_slots = n_slots
        self.model = ModelInfo(
            path="/models/fake.gguf", alias="fake", arch="llama", description="fake", n_vocab=tokenizer.n_vocab,
            n_ctx_train=n_ctx, n_embd=8, n_params=1000, size=4000, n_ctx=n_ctx * n_slots, n_ctx_slot=n_ctx,
            n_slots=n_slots, vocab_type=2, metadata={"tokenizer.chat_template": TEMPLATE},
        )  # fmt: skip
        self.scales: tuple[float, ...] = ()
        self.used: tuple[VectorUse, ...] = ()  # control vectors
        sizes = SimpleNamespace(n_layer=4, n_embd=8)
        self.vectors = ServedVectors(ControlVectors(), sizes, staged=False, changed=self._use)  # type: ignore[arg-type]
        self.script = Script()
        self.requests: list[GenerationRequest] = []
        self.embedded: list[EmbeddingRequest] = []
        self.tickets: list[FakeTicket] = []
        self.busy: set[int] = set()
        self.saved: dict[Path, int] = {}

    def set_scales(self, scales: tuple[float, ...]) -> None:
        self.scales = scales

    def _use(self, uses: tuple[VectorUse, ...]) -> None:
        self.used = uses

    def start(self) -> None:
        pass

    def shutdown(self, *, drain: bool) -> None:
        self.state = "stopped"

    def submit(self, request: GenerationRequest | EmbeddingRequest, on_event: Callable[[Event], None]) -> FakeTicket:
        ticket = FakeTicket(len(self.tickets))
        if isinstance(request, EmbeddingRequest):
            self.embedded.append(request)
            on_event(self._embed(request))
            return ticket
        self.requests.append(request)
        self.tickets.append(ticket)
        threading.Thread(target=self._play, args=(request, self.script, ticket, on_event), daemon=True).start()
        return ticket

    def _embed(self, request: EmbeddingRequest) -> Event:
        """The vector of a text: its first token and its length, without pooling a row per token; with rank scores."""
        if any(len(tokens) > self.model.n_ctx_slot for tokens in request.texts):
            return Failure(400, "exceed_context_size_error", "the text exceeds the available context size")
        rows = [np.array([[t[0], len(t), 0, 0, 0, 0, 0, 0]], np.float32) for t in request.texts]
        if self.model.pooling == "none":
            rows = [np.repeat(x, len(t), axis=0) for x, t in zip(rows, request.texts, strict=True)]
        if self.model.pooling == "rank":
            rows = [np.array([[1 / len(t), 0]], np.float32) for t in request.texts]
        return Embedded(tuple(rows), RequestTimings(prompt_n=sum(map(len, request.texts)), prompt_ms=1.0))

    def _play(
        self, request: GenerationRequest, script: Script, ticket: FakeTicket, on_event: Callable[[Event], None]
    ) -> None:
        n_prompt = len(request.prompt)
        if n_prompt > self.model.n_ctx_slot:
            details = {"n_prompt_tokens": n_prompt, "n_ctx": self.model.n_ctx_slot}
            on_event(
                Failure(400, "exceed_context_size_error", "the prompt exceeds the available context size", details)
            )
            return
        if request.report_progress:
            for done in (1, n_prompt):
                on_event(PromptProgress(n_prompt, 1, done, 1.0))
        tokens: list[TokenInfo] = []
        text = ""
        pieces = script.pieces[: request.n_predict] if request.n_predict >= 0 else script.pieces
        limited = 0 <= request.n_predict <= len(script.pieces) and not script.endless
        n, end = 0, time.monotonic() + LONGEST
        while n < len(pieces) or script.endless:
            if ticket.cancelled.is_set():
                return
            if script.endless and time.monotonic() > end:
                on_event(Failure(500, "server_error", f"nobody ended this generation within {LONGEST:g} seconds"))
                return
            if script.delay:
                time.sleep(script.delay)
            if script.failure is not None and n >= script.fail_after:
                on_event(script.failure)
                return
            piece = pieces[n % len(pieces)]
            info = self._token(piece, request.sampling.n_probs)
            tokens.append(info)
            text += piece
            n += 1
            if script.endless or n < len(pieces):
                on_event(Delta(piece, (info,), self._timings(request, n), 0))
                ticket.n_sent = n
        tail = (
            Delta(pieces[-1], (tokens[-1],), self._timings(request, n), 0)
            if tokens
            else Delta("", (), RequestTimings(), 0)
        )
        prompt = tuple(self._token_id(t, 1) for t in request.prompt[1:]) if request.prompt_logprobs else ()
        on_event(
            Final(
                text=text, tokens=tuple(tokens), tail=tail, stop_type="limit" if limited else script.stop,
                stopping_word="" if limited else script.word, truncated=False, has_new_line="\n" in text, id_slot=0,
                timings=self._timings(request, n), prompt_logprobs=prompt,
            )
        )  # fmt: skip

    def _token(self, piece: str, n_probs: int) -> TokenInfo:
        return self._token_id(self.tokenizer.encode(piece, add_special=False)[0], n_probs)

    def _token_id(self, token: int, n_probs: int) -> TokenInfo:
        top = tuple(Candidate((token + i) % self.tokenizer.n_vocab, -0.5 - i) for i in range(n_probs))
        return TokenInfo(token, -0.5, top)

    def _timings(self, request: GenerationRequest, n: int) -> RequestTimings:
        n_prompt = len(request.prompt)
        return RequestTimings(cache_n=1, prompt_n=n_prompt - 1, prompt_ms=2.0, predicted_n=n, predicted_ms=4.0,
                       n_past=n_prompt + n, n_ctx=self.model.n_ctx_slot)  # fmt: skip

    def slots(self) -> list[SlotState]:
        request = self.requests[-1] if self.requests else None
        return [
            SlotState(
                id=i, id_task=-1, is_processing=i in self.busy, state="idle", n_ctx=self.model.n_ctx_slot, n_past=0,
                prompt=(1, 2), request=request, text="", n_decoded=0, n_remain=-1, has_next_token=False,
                has_new_line=False, truncated=False, stop_type="none", stopping_word="", next_token=0,
                timings=RequestTimings(),
            )
            for i in range(self.n_slots)
        ]  # fmt: skip

    def slot_action(self, id_slot: int, action: str, path: Path | None = None) -> Future[SlotActionResult]:
        future: Future[SlotActionResult] = Future()
        if action == "save" and path is not None:
            self.saved[path] = 7
        if action == "restore" and path not in self.saved:
            future.set_exception(EngineError(400, "invalid_request_error", "cannot read the slot file"))
        else:
            future.set_result(SlotActionResult(id_slot, 7, 1000, 1.5))
        return future

    def metrics(self, *, reset: bool = False) -> EngineMetrics:
        return EngineMetrics(prompt_tokens_total=12, prompt_seconds_total=0.5, requests_processing=1, t_start=1000.0)


def fake_tokenizer(**keys: Any) -> Tokenizer:
    """A small BPE vocabulary with chat tokens."""
    from tokenizer_vocabs import CONTROL, bpe_metadata

    extra = {"<|bos|>": CONTROL, "<|eos|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    merges = ["H e", "l l", "He ll", "Hell o"]
    n = 256 + len(merges)
    ids = {"bos_token_id": n, "eos_token_id": n + 1, "add_bos_token": True}
    return Tokenizer.from_metadata(bpe_metadata(merges, "gpt-2", extra | keys.pop("extra", {}), **ids, **keys), "fake")
