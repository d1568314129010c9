"""Which replica holds most of a prompt: the question, its answer by server and engine, and the choice that follows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_client import Call, ask, request, serving
from factories import tiny_model
from fake_engine import FakeEngine, fake_tokenizer
from fake_processes import Bench, FakeProcess, chat, says_who, whole
from gguf_files import write_model
from proxies import run
from server_client import Client

from ikcli.server.front import asking
from ikcli.server.front.replica import Held, Replica, choose
from ikcli.server.front.supervisor import READY
from ikcli.server.prefix.reused import Reused

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = list(range(100, 160))
ENGINE: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}


# --- the choice -------------------------------------------------------------------------------------------------------
def test_answers_count_more_than_earlier_requests() -> None:
    a, b, c = replicas = [Replica(i, 2, state=READY) for i in range(3)]
    blocks = tuple(range(10))
    a.held.add(blocks)
    assert choose(replicas, blocks, 0.5) is a
    answers = {a: Held(1000, 0, 0, 0), b: Held(1000, 0, 0, 900), c: Held(1000, 500, 200, 0)}
    assert choose(replicas, blocks, 0.5, answers) is b, "the longest, also from disk"
    assert choose(replicas, blocks, 0.5, answers | {c: Held(1000, 900, 0, 0)}) is c, "as long, and at hand"
    assert choose(replicas, blocks, 0.5, answers | {c: Held(1000, 903, 0, 0)}) is c
    b.n_running = 1
    assert choose(replicas, blocks, 0.5, answers | {c: Held(1000, 0, 3, 900)}) is c, "a few tokens more or less"
    b.n_running = 2
    assert choose(replicas, blocks, 0.5, answers) is c, "the longest with a free slot"
    c.n_running = 1
    assert choose(replicas, blocks, 0.9, answers) is a, "too little; the one with the fewest requests"
    del answers[a]
    assert choose(replicas, blocks, 0.9, answers) is a, "it did not answer, so its earlier requests count"


# --- the question -----------------------------------------------------------------------------------------------------
class Holders:
    """Processes that answer the question: `held` by number; without an entry they are silent."""

    def __init__(self, held: dict[int, Any]) -> None:
        self.held = held
        self.asked: list[tuple[int, str, bytes]] = []

    async def __call__(
        self, process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if process.header(writer, "x-ik-held") != "ask":
            await says_who(process, method, path, body, writer)
            return
        self.asked.append((process.index, path, body))
        if process.index not in self.held:
            await asyncio.Event().wait()
        answer = self.held[process.index]
        await whole(writer, answer, 200 if isinstance(answer, dict) else 503)


def counts(n: int, **fields: int) -> dict[str, int]:
    return {"n_prompt": n, "n_slot": 0, "n_ram": 0, "n_disk": 0} | fields


LONG = chat("aaaa " * 400)


def test_the_replica_that_holds_the_prompt_gets_it() -> None:
    holders = Holders({0: counts(500, n_slot=100), 1: counts(500, n_slot=80, n_ram=20), 2: counts(500, n_disk=480)})

    async def work() -> None:
        async with Bench(3, handler=holders).running() as b:
            assert await b.who("/v1/chat/completions?x=1", LONG) == 2
            asked = sorted(holders.asked)
            assert [(i, path) for i, path, _ in asked] == [(i, "/v1/chat/completions?x=1") for i in range(3)]
            assert len({body for _, _, body in asked}) == 1 and b"aaaa" in asked[0][2]
            holders.held[1] = counts(500, n_slot=490)
            assert await b.who("/v1/messages", LONG) == 1, "whatever the requests before"
            holders.asked.clear()
            assert await b.who("/v1/chat/completions", LONG | {"id_slot": 1}) == 0
            await b.who("/v1/chat/completions", chat("short"))
            await b.who("/tokenize", {"content": "a " * 5000})
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (1 << 21)}}
            await b.who("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}, *LONG["messages"]]})
            assert holders.asked == [], "a slot is named, nothing to gain, nothing to compute, images to decode"
            b.supervisor.replicas[0].n_running = b.supervisor.replicas[2].n_running = 2
            assert await b.who("/v1/chat/completions", LONG) == 1 and holders.asked == [], "no choice"

    run(work)


@pytest.mark.parametrize("wrong", [b"503", {}, {"n_prompt": 5}, b"no JSON", counts(500) | {"more": 1}], ids=str)
def test_silent_and_strange_replicas_are_judged_by_earlier_requests(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_PATIENCE", 0.05)
    holders = Holders({0: wrong, 1: wrong})

    async def work() -> None:
        async with Bench(2, handler=holders).running() as b:
            first = await b.who("/v1/chat/completions", LONG)
            await b.who("/v1/chat/completions", chat("b " * 1000))
            assert await b.who("/v1/chat/completions", LONG) == first
            holders.held.clear()  # now they say nothing at all
            assert await b.who("/v1/chat/completions", LONG) == first
            assert len(holders.asked) == 8 and all(one.usable for one in b.supervisor.replicas)
            assert b.supervisor.replicas[0].n_unanswered == 0, "a question that is not answered is no failure"

    run(work)


def test_one_that_dies_of_the_question_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Holders):
        async def __call__(self, process: FakeProcess, *rest: Any) -> None:
            if process.index == 0 and process.header(rest[-1], "x-ik-held"):
                process.kill()
                b.supervisor.replicas[0].doubtful = True
                return
            await super().__call__(process, *rest)

    b = Bench(2, handler=Dying({1: counts(500)}))

    async def work() -> None:
        async with b.running():
            b.supervisor.replicas[1].used = 9.0
            assert await b.who("/v1/chat/completions", LONG) == 1

    run(work)


# --- the server's answer ----------------------------------------------------------------------------------------------
class HoldingEngine(FakeEngine):
    found: Reused | None = Reused(3, 2, 1)

    def held(self, request: Any) -> Reused | None:
        self.seen = request
        return self.found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/completion", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": ["Hello", "x"]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/api/chat", CHAT | {"model": "m"}),
        ("/api/generate", {"prompt": "Hello", "model": "m"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_dialect_tells_what_is_held(path: str, body: dict[str, Any]) -> None:
    engine = HoldingEngine(fake_tokenizer())
    client = Client(engine=engine, host="/tmp/x.sock")
    answer = client.post(path, body, headers={"x-ik-held": "ask"})
    assert answer.status_code == 200 and not engine.requests
    assert answer.json() == {"n_prompt": len(engine.seen.prompt), "n_slot": 3, "n_ram": 2, "n_disk": 1}
    assert client.post(path, body).status_code == 200 and engine.requests[0].prompt == engine.seen.prompt
    assert client.log.getvalue().count("log_server_request") == 1, "questions are not logged"


def test_only_a_server_in_front_may_ask() -> None:
    engine = HoldingEngine(fake_tokenizer())
    answer = Client(engine=engine).post("/completion", {"prompt": "Hello"}, headers={"x-ik-held": "ask"})
    assert "content" in answer.json() and not hasattr(engine, "seen")


def test_a_busy_cache_and_wrong_requests_are_errors() -> None:
    engine = HoldingEngine(fake_tokenizer())
    client, header = Client(engine=engine, host="/tmp/x.sock"), {"x-ik-held": "ask"}
    assert client.post("/completion", {"prompt": 5}, headers=header).status_code == 400
    engine.found = None
    assert client.post("/completion", {"prompt": "Hello"}, headers=header).status_code == 503


# --- the engine's answer ----------------------------------------------------------------------------------------------
def test_an_engine_knows_slots_ram_and_disk(tmp_path: Path) -> None:
    other = list(range(300, 400))
    with serving(1, server={"cache_disk": tmp_path}, **ENGINE) as engine:
        assert engine.held(request(TEXT)) == Reused(0, 0, 0)
        ask(engine, TEXT, 1)
        assert engine.held(request([*TEXT, 5])) == Reused(60, 0, 0) and engine.held(request(TEXT)) == Reused(59, 0, 0)
        ask(engine, [*TEXT[:20], *other], 1)
        assert engine.held(request([*TEXT, 5])) == Reused(20, 40, 0)
        assert engine.held(request([*TEXT, 5], lora=())) == Reused(20, 40, 0)
        assert engine._worker is not None
        with engine._worker._reuse._changing:
            assert engine.held(request(TEXT)) is None, "it is changing"
    with serving(1, server={"cache_disk": tmp_path}, **ENGINE) as engine:
        assert engine.held(request([*TEXT, 5])) == Reused(0, 0, 60)
        assert ask(engine, [*TEXT, 5], 1).timings.cache_disk_n == 60, "what was said is what is used"
        assert engine.held(request([*TEXT[:20], *other, 5])) == Reused(20, 0, 100)


def test_an_engine_with_windows_knows_where_it_can_go_on(tmp_path: Path) -> None:
    model = tiny_model("gemma2", context_length=1024, **{"attention.sliding_window": 24})
    metadata: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    path = write_model(model, tmp_path / "m.gguf", metadata)
    changes = {"n_ctx": 1024, "type_k": "f32", "type_v": "f32"}
    with serving(2, model=path, server={"ctx_checkpoints_interval": 64}, **ENGINE | changes) as engine:
        text = [3 + i % 90 for i in range(250)]
        Call(engine, request(text, 1, id_slot=0)).final  # noqa: B018
        for prompt in (text, text[:100] + [2] * 20, [*text, 7]):
            said = engine.held(request(prompt, 1))
            timings = Call(engine, request(prompt, 1, id_slot=1)).final.timings
            assert said is not None and said.n == timings.cache_n > 0
