"""The front of replicas, with stand-ins for processes: routing, forwarding, and replicas that die."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_processes import Answer, Bench, FakeProcess, chat, chunk, head, says_who, whole
from proxies import run

from ikcli.server.front import replicas as replicas_module
from ikcli.server.front.prefixes import blocks_of
from ikcli.server.front.replica import Replica
from ikcli.server.front.supervisor import DOWN, READY
from ikcli.server.front.upstream import Exchange, UpstreamError
from ikcli.server.http.users import Users, _user


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_LONGEST_PAUSE", 0.05)


def test_conversations_stay_where_they_began() -> None:
    async def work() -> None:
        async with Bench().running() as b:
            a = await b.who("/v1/chat/completions", chat("a" * 500))
            c = await b.who("/v1/chat/completions", chat("c" * 500))
            assert {a, c} == {0, 1}
            for _ in range(3):
                assert await b.who("/v1/chat/completions", chat("a" * 500, "yes", "more" * 20)) == a
                assert await b.who("/v1/chat/completions", chat("c" * 500, "no")) == c
            assert {await b.who("/tokenize", {"content": "x"}) for _ in range(2)} == {0, 1}

    run(work)


def test_another_process_holds_nothing() -> None:
    """What was computed in the one before is gone with it."""

    async def work() -> None:
        async with Bench().running() as b:
            body = chat("a" * 500)
            owner = b.supervisor.replicas[await b.who("/v1/chat/completions", body)]
            assert owner.held.shared(blocks_of(body)) == len(blocks_of(body)) > 2
            b.process(owner.index).kill()
            await b.until(lambda: owner.n_starts == 2 and owner.usable)
            assert owner.held.shared(blocks_of(body)) == 0

    run(work)


def test_a_busy_replica_is_spared() -> None:
    gate = asyncio.Event()

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await says_who(process, method, path, body, writer)

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            assert (await b.ask("/health?fail_on_no_slot=1")).json()["slots_idle"] == 4
            asked = [Answer(b.app, "/completion", {"prompt": "p" * 500}) for _ in range(4)]
            await b.until(lambda: sum(one.n_running for one in b.supervisor.replicas) == 4)
            assert [one.n_running for one in b.supervisor.replicas] == [2, 2], (
                "both slots of the holder, then the other"
            )
            health = (await b.ask("/health")).json()
            assert health["slots_idle"] == 0 and health["replicas"] == {"ready": 2}
            assert (await b.ask("/health?fail_on_no_slot=1")).status == 503
            asked.append(Answer(b.app, "/completion", {"prompt": "p" * 500}))
            await b.until(lambda: sum(one.n_running for one in b.supervisor.replicas) == 5)
            health = (await b.ask("/health")).json()
            assert (health["slots_idle"], health["slots_processing"]) == (0, 4), "one waits"
            gate.set()
            await asyncio.gather(*(one.work for one in asked))
            assert [one.n_running for one in b.supervisor.replicas] == [0, 0]

    run(work)


def test_numbers_of_slots_name_replicas(tmp_path: Path) -> None:
    async def work() -> None:
        async with Bench(3).running() as b:
            for slot, owner in ((0, 0), (0, 0), (1, 0), (2, 1), (0, 0), (5, 2)):
                assert await b.who("/completion", {"prompt": "p", "id_slot": slot}) == owner
                assert await b.who(f"/slots/{slot}?action=save", {"filename": "f"}) == owner
            assert b.process(2).asked == [
                ("POST /completion", b'{"prompt": "p", "id_slot": 5}'),
                ("POST /slots/5?action=save", b'{"filename": "f"}'),
            ]
            wrong = await b.ask("/completion", {"prompt": "p", "id_slot": 6})
            assert wrong.status == 400 and "the slots are 0 to 5" in wrong.json()["error"]["message"]
            for slot in ("6", "x", "99999999999"):
                assert (await b.ask(f"/slots/{slot}?action=erase", {})).status == 400

    run(work)


def test_streams_pass_byte_by_byte() -> None:
    steps = [asyncio.Event() for _ in range(3)]

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        for i, step in enumerate(steps):
            await step.wait()
            writer.write(chunk(b"piece %d\n" % i))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            answer = Answer(b.app, "/completion", {"prompt": "p", "stream": True})
            for n, step in enumerate(steps):
                await asyncio.sleep(0.02)
                assert len(answer.pieces) == n and not answer.ended
                step.set()
                await b.until(lambda n=n: len(answer.pieces) == n + 1)  # type: ignore[misc]
            await answer.work
            assert answer.ended and answer.body == b"piece 0\npiece 1\npiece 2\n" and answer.status == 200

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_not_begun_is_answered_by_another_one(stream: bool) -> None:
    """Also after the head of a stream, behind which nothing came."""

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if process.index == 0 and path == "/completion":
            if stream:
                writer.write(head())
                await writer.drain()
            process.kill()
        else:
            await says_who(process, method, path, body, writer)

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            first = b.process(0)
            assert await b.who("/completion", {"prompt": "p", "stream": stream}) == 1
            assert len(first.asked) == 1 and b.supervisor.replicas[0].n_unanswered == 1
            await b.until(lambda: b.supervisor.replicas[0].usable)
            assert b.journal == ["+0", "+1", "-0", "+0"] and b.process(0) is not first

    run(work)


def test_what_has_begun_is_cut() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + chunk(b"one"))
        await writer.drain()
        await asyncio.sleep(0.05)
        process.kill()

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            answer = await b.ask("/completion", {"prompt": "p", "stream": True})
            assert answer.body == b"one" and not answer.ended
            assert sum(one.n_unanswered for one in b.supervisor.replicas) == 1

    run(work)


def test_a_request_that_ends_all_replicas_is_given_up() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        process.kill()

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            answer = await b.ask("/completion", {"prompt": "p"})
            assert answer.status == 502 and "it was killed" in answer.json()["error"]["message"]
            assert sum(one.n_unanswered for one in b.supervisor.replicas) == 3
            await b.until(lambda: all(one.usable for one in b.supervisor.replicas))

    run(work)


def test_status_503_goes_to_another_one() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await whole(writer, {"replica": process.index}, 503 if process.index == 0 or path == "/x" else 200)

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            assert await b.who("/completion", {"prompt": "p"}) == 1

    run(work)


def test_departing_clients_end_their_requests() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"stream" in body:
            writer.write(head() + chunk(b"one"))
        await asyncio.Event().wait()

    async def work() -> None:
        async with Bench(1, handler=handler).running() as b:
            for body in ({"prompt": "p"}, {"prompt": "p", "stream": True}):
                answer = Answer(b.app, "/completion", body)
                await b.until(lambda: b.supervisor.replicas[0].n_running == 1 and bool(b.process(0).asked))
                await asyncio.sleep(0.02)
                answer.leave()
                await answer.work
                await b.until(lambda body=body: b.process(0).gone[-1:] == [json.dumps(body).encode()])  # type: ignore[misc]
                assert b.supervisor.replicas[0].n_running == 0 and b.supervisor.replicas[0].usable

    run(work)


def test_one_that_failed_a_request_is_asked_how_it_is_before_the_next() -> None:
    """Also by a request that no other replica can answer."""
    drops = True

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if drops and process.index == 0:
            writer.close()
        else:
            await says_who(process, method, path, body, writer)

    async def work() -> None:
        nonlocal drops
        async with Bench(handler=handler).running() as b:
            b.process(0).healthy_now = False
            pinned = Answer(b.app, "/completion", {"prompt": "p", "id_slot": 0})
            await b.until(lambda: bool(b.process(0).asked) and b.supervisor.replicas[0].n_unanswered > 0)
            for _ in range(3):
                assert await b.who("/completion", {"prompt": "p"}) == 1
            assert len(b.process(0).asked) == 1 and not pinned.work.done()
            drops, b.process(0).healthy_now = False, True
            await b.supervisor._check(b.supervisor.replicas[0])
            await pinned.work
            assert pinned.json() == {"replica": 0} and b.supervisor.replicas[0].usable and b.journal == ["+0", "+1"]

    run(work)


def test_one_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_CHECK", 0.02)

    async def work() -> None:
        async with Bench().running() as b:
            first = b.process(0)
            first.healthy_now = False
            await b.until(lambda: b.supervisor.replicas[0].process is not first and b.supervisor.replicas[0].usable)
            assert "does not answer" in b.log.getvalue() and "-0" in b.journal and "-1" not in b.journal

    run(work)


def test_machines_that_are_gone_end_their_exchanges() -> None:
    """Nobody closes their connections; whoever knows that they are gone cuts them."""

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        async with Bench(1, handler=handler).running() as b:
            process = b.process(0)

            async def ask() -> None:
                async with Exchange(process, "GET", b"/x"):
                    pass

            asked = asyncio.ensure_future(ask())
            await b.until(lambda: bool(process.asked))
            process.cut()
            with pytest.raises(UpstreamError, match="ended within an answer"):
                await asked
            assert not process.open
            with pytest.raises(UpstreamError, match="no answer within"):
                await process.ask("GET", b"/y", timeout=0.02)
            assert not process.open

    run(work)


def test_rolling_restart() -> None:
    """One after the other, each when its requests are done; what comes meanwhile goes to the others."""
    gate = asyncio.Event()

    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"wait" in body:
            await gate.wait()
        await says_who(process, method, path, body, writer)

    async def work() -> None:
        async with Bench(handler=handler, api_key="admin").running() as b:
            await b.ask("/lora-adapters", [], key="admin")
            vectors: list[tuple[str, Any]] = [
                ("load", {"path": "a"}), ("apply", [{"id": 0, "scale": 2}]), ("apply", [{"id": 0, "scale": 2}]),
                ("load", {"path": "b"}), ("unload", {"id": 0}),
            ]  # fmt: skip
            for name, body in vectors:
                await b.ask(f"/control-vectors/{name}", body, key="admin")
            running = Answer(b.app, "/completion", {"prompt": "wait", "id_slot": 0}, key="admin")
            await b.until(lambda: b.supervisor.replicas[0].n_running == 1)
            restarted = Answer(b.app, "/replicas/restart", {}, key="admin")
            await b.until(lambda: b.supervisor.replicas[0].state == "draining")
            assert (await b.ask("/replicas/restart", {}, key="admin")).status == 409
            for _ in range(3):
                assert (await b.ask("/completion", {"prompt": "p"}, key="admin")).json() == {"replica": 1}
            pinned = Answer(b.app, "/completion", {"prompt": "p", "id_slot": 1}, key="admin")
            await asyncio.sleep(0.05)
            assert b.journal == ["+0", "+1"] and not running.work.done() and not pinned.work.done()
            gate.set()
            await asyncio.gather(running.work, restarted.work, pinned.work)
            assert running.json() == pinned.json() == {"replica": 0} and restarted.json() == {"success": True}
            assert b.journal == ["+0", "+1", "-0", "+0", "-1", "+1"]
            assert ("POST /lora-adapters", b"[]") in b.process(0).asked, "settings of all are made again"
            again = [path for path, _ in b.process(0).asked if "vectors" in path]
            assert again == [f"POST /control-vectors/{name}" for name in ("load", "apply", "load", "unload")]
            shown = (await b.ask("/replicas", key="admin")).json()
            assert [(one["id"], one["state"], one["starts"], one["slots"]) for one in shown] == [
                (0, "ready", 2, [0, 1]), (1, "ready", 2, [2, 3]),
            ]  # fmt: skip

    run(work)


def test_a_rolling_restart_ends_at_the_first_that_does_not_come_back() -> None:
    async def work() -> None:
        async with Bench(api_key="admin").running() as b:
            b.broken = {0}
            answer = await b.ask("/replicas/restart", {}, key="admin")
            assert answer.status == 500 and "replica 0 did not come back" in answer.json()["error"]["message"]
            assert "the file is broken" in answer.json()["error"]["message"] and "-1" not in b.journal
            for _ in range(2):
                assert (await b.ask("/completion", {"prompt": "p"}, key="admin")).json() == {"replica": 1}
            b.broken = set()
            await b.until(lambda: b.supervisor.replicas[0].usable)

    run(work)


def test_who_may_restart() -> None:
    async def work() -> None:
        async with Bench().running() as b:
            refused = await b.ask("/replicas/restart", {})
            assert refused.status == 403 and "SIGHUP" in refused.json()["error"]["message"]
        async with Bench(api_key="admin").running() as b:
            b.state.users = Users([_user(Path("keys"), "anna", {"key": "a"})])
            assert (await b.ask("/replicas/restart", {})).status == 401
            assert (await b.ask("/replicas/restart", {}, key="a")).status == 403

    run(work)


def test_users_are_counted_in_front() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path.startswith("/usage"):
            await whole(writer, {"prompt_tokens": 7, "completion_tokens": 3})
        else:
            await says_who(process, method, path, body, writer)

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            users = b.state.users = Users([_user(Path("keys"), "anna", {"key": "a", "tokens-per-day": 15})])
            assert (await b.ask("/completion", {"prompt": "p"}, key="b")).status == 401
            for status in (200, 200, 429):
                assert (await b.ask("/completion", {"prompt": "p"}, key="a")).status == status
            assert (users.accounts[0].n_prompt, users.accounts[0].n_predicted) == (14, 6)

    run(work)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    async def work() -> None:
        b = Bench(broken=(0, 1))
        ended = asyncio.Event()
        b.supervisor.on_failure = ended.set
        async with b.running():
            await ended.wait()
            assert b.supervisor.failure == "the file is broken" and b.journal[:2] == ["+0", "-0"]
            assert (await b.ask("/completion", {"prompt": "p"})).status == 500

    run(work)


def test_one_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_LONGEST_PAUSE", 0.01)

    async def work() -> None:
        async with Bench(broken=(1,)).running() as b:
            await b.until(lambda: b.supervisor.replicas[1].n_ended > 2)
            assert b.supervisor.replicas[1].state in (DOWN, "starting") and b.supervisor.replicas[0].state == READY
            assert await b.who("/completion", {"prompt": "p"}) == 0
            shown = (await b.ask("/replicas")).json()[1]
            assert shown["error"] == "the file is broken" and not b.supervisor.failure
            b.broken = set()
            await b.until(lambda: b.supervisor.replicas[1].usable)

    run(work)


def test_requests_wait_for_a_replica_but_not_for_ever() -> None:
    async def work() -> None:
        async with Bench(1).running() as b:
            replica: Replica = b.supervisor.replicas[0]
            b.broken = {0}
            b.process(0).kill()
            waiting = Answer(b.app, "/completion", {"prompt": "p"})
            await b.until(lambda: replica.n_ended > 1)
            assert not waiting.work.done()
            b.broken = set()
            await waiting.work
            assert waiting.json() == {"replica": 0}
        b = Bench(1, timeout=1)
        async with b.running():
            b.broken = {0}
            b.process(0).kill()
            answer = await b.ask("/completion", {"prompt": "p"})
            assert (
                answer.status == 503 and "no replica became ready within 1 seconds" in answer.json()["error"]["message"]
            )

    run(work)


def test_lists_of_all_replicas() -> None:
    async def handler(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        i = process.index
        answers: dict[str, Any] = {
            "/slots": [{"id": 2 * i + j, "is_processing": j == 0} for j in range(2)],
            "/slots/list": [{"slot_id": 2 * i + j} for j in range(2)],
            "/list": [{"filename": name} for name in ("ab" if i == 0 else "bc")],
            "/props": {"total_slots": 2, "model_alias": "m"},
            "/models": {"data": [i]},
            "/lora-adapters": {"success": True},
            "/openapi.json": {"paths": {}},
            "/v1/chat/completions/control": {"success": i == 1},
        }
        if path == "/delete_prompt":
            here = (b'"c"' if i else b'"a"') in body
            await whole(writer, {"replica": i} if here else {"error": {}}, 200 if here else 404)
        else:
            await whole(writer, answers.get(path, {"error": {}}), 200 if path in answers else 404)

    async def work() -> None:
        async with Bench(handler=handler).running() as b:
            slots = (await b.ask("/slots?fail_on_no_slot=1")).json()
            assert [(slot["id"], slot["replica"]) for slot in slots] == [(0, 0), (1, 0), (2, 1), (3, 1)]
            assert [slot["replica"] for slot in (await b.ask("/slots/list")).json()] == [0, 0, 1, 1]
            assert len((await b.ask("/health?include_slots")).json()["slots"]) == 4
            assert [item["filename"] for item in (await b.ask("/list")).json()] == ["a", "b", "c"]
            assert (await b.ask("/delete_prompt", {"filename": "c"})).json() == {"replica": 1}
            assert (await b.ask("/delete_prompt", {"filename": "x"})).status == 404
            props = (await b.ask("/props")).json()
            assert props == {"total_slots": 4, "model_alias": "m", "replicas": 2, "ui_settings": {}}
            assert (await b.ask("/models")).json()["data"] in ([0], [1])
            assert (await b.ask("/openapi.json")).json() == {"paths": {}}
            assert (await b.ask("/lora-adapters", [{"id": 0}])).json() == {"success": True}
            assert all(("POST /lora-adapters", b'[{"id": 0}]') in b.process(i).asked for i in range(2))
            assert (await b.ask("/v1/chat/completions/control", {"id": "x"})).json() == {"success": True}
            assert (await b.ask("/nothing")).status == 404 and (await b.ask("/metrics")).status == 501

    run(work)


def test_while_the_model_loads() -> None:
    async def work() -> None:
        b = Bench()
        assert (await b.ask("/completion", {"prompt": "p"})).status == 503
        models = (await b.ask("/v1/models")).json()
        assert models["data"][0]["id"] == "m" and models["data"][0]["meta"] is None
        assert (await b.ask("/api/tags")).json()["models"][0]["name"] == "m"
        assert replace(b.state.config).server.alias == "m"

    run(work)
