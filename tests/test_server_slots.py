"""Slots without a model: what a step computes, where a full context is cut, what is fetched and kept."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sequence_memory import CELLS, Arrays
from test_server_generation import generation

from ikcli.engine.run.adapters import NOTHING
from ikcli.engine.run.sequences import Sequences as EngineSequences
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.log import silent
from ikcli.server.slots.messages import GenerationRequest
from ikcli.server.slots.reuse import KEEP_AT_LEAST, Reuse
from ikcli.server.slots.scheduler import prompt_pieces
from ikcli.server.slots.slot import PROMPT, Slot, Task


@dataclass
class Work:
    name: str
    n_whole: int
    t_served: int = 0
    wants_prompt_logits: bool = False
    n_at_once: int = 0


@pytest.mark.parametrize(
    ("waiting", "pieces"),
    [
        ([Work("a", 100)], [("a", 32)]),
        ([Work("a", 32), Work("b", 1)], [("a", 32)]),
        ([Work("a", 20), Work("b", 12), Work("c", 1)], [("a", 20), ("b", 12)]),
        ([Work("a", 20), Work("b", 13), Work("c", 5)], [("a", 20)]),  # c does not overtake b
        ([Work("a", 5, 7), Work("b", 6, 3), Work("c", 7, 5)], [("b", 6), ("c", 7), ("a", 5)]),
        ([Work("a", 100, 2), Work("b", 100, 1)], [("b", 32)]),
        ([Work("a", 100, n_at_once=50)], [("a", 50)]),  # an image is computed as a whole
        ([Work("a", 5), Work("b", 100, 1, n_at_once=50), Work("c", 5, 2)], [("a", 5)]),
        ([Work("a", 90, n_at_once=20), Work("b", 12, 1)], [("a", 20), ("b", 12)]),
        ([], []),
    ],
)
def test_pieces_of_prompts(waiting: list[Work], pieces: list[tuple[str, int]]) -> None:
    assert [(p.slot.name, p.n_tokens) for p in prompt_pieces(waiting, 32)] == pieces


def test_pieces_with_all_logits_are_small() -> None:
    wants = Work("a", 500, wants_prompt_logits=True)
    assert [p.n_tokens for p in prompt_pieces([wants, Work("b", 100, 1)], 512)] == [64, 100]
    assert [p.n_tokens for p in prompt_pieces([wants], 16)] == [16]


def working(n_past: int, n_ctx: int = 20, **changes: Any) -> Slot:
    """A slot with tokens 0, 1, ... in its cache; the token taken last is 99."""
    slot = Slot(0, n_ctx)
    g = generation(**{"prompt": (1, 2, 3, 4, 5, 6), **changes})
    slot.begin(Task(1, g.request, lambda event: None), g, Reused(), {})
    slot.adopt(np.arange(n_past, dtype=np.int32))
    slot.last = 99
    return slot


@pytest.mark.parametrize(
    ("request_fields", "add_bos", "kept", "rest"),
    [
        ({}, False, 0, 10),  # half of what is there
        ({}, True, 1, 10),
        ({"n_keep": 4}, False, 4, 12),
        ({"n_keep": 4}, True, 5, 12),
        ({"n_keep": -1}, True, 6, 13),  # the prompt
        ({"n_keep": 100}, False, 16, 18),
        ({"n_keep": 4, "n_discard": 3}, False, 4, 7),
        ({"n_keep": 4, "n_discard": 100}, False, 4, 20),
        ({"n_keep": 15}, True, 16, 18),
    ],
)
def test_a_full_context_is_cut(request_fields: dict[str, Any], add_bos: bool, kept: int, rest: int) -> None:
    slot = working(20, **request_fields)
    slot.shift(add_bos)
    assert slot.generation is not None and slot.generation.truncated
    assert slot.target.tolist() == [*range(kept), *range(rest, 20), 99]
    assert (slot.n_past, slot.state, slot.in_prompt) == (kept, PROMPT, False) and slot.n_todo == len(slot.target) - kept


def test_prompts_stop_at_checkpoints() -> None:
    slot = working(0, n_ctx=30)
    assert slot.task is not None
    slot.target, slot.places = np.arange(25, dtype=np.int32), {10: True, 18: False}
    for n_past, n in ((0, 10), (9, 1), (10, 8), (17, 1), (18, 7), (24, 1)):
        slot.n_past = n_past
        assert (slot.n_whole, slot.n_todo) == (n, 25 - n_past)
    slot.repeat_from(4, slot.target)  # not the prompt: checkpoints are there
    assert slot.n_whole == 21


class Sequences(EngineSequences):
    """Counts on every row, and notes what is moved."""

    def __init__(self, n_seq: int) -> None:
        caches = (CELLS,)
        super().__init__(Arrays(caches, 200 * n_seq, n_seq, 0), caches, 200 * n_seq, n_seq, "00")  # type: ignore[arg-type]
        self.done: list[tuple[Any, ...]] = []

    def reach(self, seq: int, n: int) -> int:
        return n

    def _check(self, seq: int, n: int = 0) -> None:
        pass

    def read(self, seq: int, first: int, n: int) -> tuple[Any, ...]:
        self.done.append(("read", seq, first, n))
        return super().read(seq, first, n)

    def write(self, seq: int, first: int, parts: Any) -> None:
        self.done.append(("write", seq, first, len(parts[0])))
        super().write(seq, first, parts)

    def copy(self, src: int, dst: int, first: int, n_tokens: int) -> int:
        self.done.append(("copy", src, dst, first, n_tokens))
        return n_tokens


def reuse(*held: Any, cache_ram: int = 1) -> tuple[Reuse, list[Slot], Sequences]:
    sequences = Sequences(len(held))
    config = SimpleNamespace(server=SimpleNamespace(cache_ram=cache_ram, cache_disk=None, cache_rest="cache"))
    slots = []
    for i, tokens in enumerate(held):
        slot = Slot(i, 200)
        slot.adopt(np.array(tokens, np.int32))
        slots.append(slot)
    session: Any = SimpleNamespace(config=config, sequences=sequences)
    return Reuse(session, slots, silent), slots, sequences


PROMPT_TOKENS = np.arange(60, dtype=np.int32)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    found, slots, _ = reuse(range(60))
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 59
    assert found.fetch(slots[0], PROMPT_TOKENS[:30], NOTHING).n == 29
    found, slots, _ = reuse(range(40))
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 40


def test_rows_of_another_slot_are_worth_copying_from_17_tokens_on() -> None:
    for n, copied in ((KEEP_AT_LEAST, False), (KEEP_AT_LEAST + 1, True)):
        found, slots, sequences = reuse([0, 1, 2], range(3 + n))
        assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == (3 + n if copied else 3)
        assert sequences.done == ([("copy", 1, 0, 3, 3 + n)] if copied else [])
        if copied:
            assert slots[0].cached.tolist() == list(range(3 + n))
    found, slots, sequences = reuse([], range(50), range(30))
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 50 and sequences.done == [("copy", 1, 0, 0, 50)]


def test_what_was_computed_with_something_else_added_is_not_reused() -> None:
    found, slots, sequences = reuse([0, 1, 2], range(50))
    slots[1].added = SimpleNamespace()  # type: ignore[assignment]
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 3 and sequences.done == []


def test_rows_are_kept_from_16_tokens_on() -> None:
    for n, kept in ((KEEP_AT_LEAST - 1, 0), (KEEP_AT_LEAST, 1)):
        found, slots, _ = reuse([0, 1, *range(100, 100 + n)])
        assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 2 and len(found.store) == kept
    found, slots, _ = reuse(range(100, 150), cache_ram=0)
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 0 and len(found.store) == 0


def test_stored_rows_come_back_if_no_slot_has_more() -> None:
    found, slots, sequences = reuse(range(50), range(100, 140))
    found.fetch(slots[0], np.arange(500, 520, dtype=np.int32), NOTHING)
    slots[0].adopt(np.arange(500, 520, dtype=np.int32))
    assert found.fetch(slots[1], PROMPT_TOKENS, NOTHING).n == 50
    assert sequences.done[-1] == ("write", 1, 0, 50) and slots[1].cached.tolist() == list(range(50))
    slots[1].adopt(np.arange(55, dtype=np.int32))  # now a slot has more than what is stored
    sequences.done.clear()
    assert found.fetch(slots[0], PROMPT_TOKENS, NOTHING).n == 55
    assert [d for d in sequences.done if d[0] != "read"] == [("copy", 1, 0, 0, 55)]


def test_requests_say_what_a_slot_waits_for() -> None:
    slot = working(3)
    assert not slot.wants_prompt_logits
    slot = working(3, prompt_logprobs=True)
    assert slot.wants_prompt_logits
    slot.repeat_from(2, slot.target)
    assert not slot.wants_prompt_logits
    slot.release()
    assert slot.task is None and slot.n_past == 2
    assert GenerationRequest(prompt=(1,), sampling=generation().request.sampling).id_slot == -1
