"""Events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ikcli.server.http.bridge import Bridge, Disconnected, Job
from ikcli.server.slots.messages import Delta, Event, Failure, RequestTimings

DELTA = Delta("a", (), RequestTimings(), 0)
END = Failure(500, "server_error", "over")


def test_a_thread_wakes_the_loop_whatever_it_is_doing() -> None:
    async def run() -> list[list[tuple[int, Event]]]:
        bridge = Bridge(asyncio.get_running_loop())
        job = Job(bridge, stream=True)
        gate = threading.Semaphore(0)

        def engine() -> None:
            for event in (DELTA, DELTA, END):
                gate.acquire()
                bridge.push(job, 0, event)

        thread = threading.Thread(target=engine)
        thread.start()
        found = []
        for _ in range(3):
            gate.release()
            found.append(await job.events())
        thread.join()
        return found

    assert asyncio.run(run()) == [[(0, DELTA)], [(0, DELTA)], [(0, END)]]


def test_events_of_one_moment_come_together_and_in_order() -> None:
    async def run() -> list[tuple[int, Event]]:
        bridge = Bridge(asyncio.get_running_loop())
        job = Job(bridge, stream=True)
        for i in range(100):
            bridge.push(job, i, DELTA)
        return await job.events()

    assert asyncio.run(run()) == [(i, DELTA) for i in range(100)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_gets_the_events_that_it_wants(stream: bool) -> None:
    """Ends alone, unless its client reads along; what comes then cancels nothing."""

    class Engine:
        def __init__(self) -> None:
            self.n_cancelled = 0

        def submit(self, request: object, on_event: Any) -> Any:
            for event in (DELTA, DELTA, END):
                on_event(event)
            return SimpleNamespace(id_task=0, cancel=self.cancel)

        def cancel(self) -> None:
            self.n_cancelled += 1

    async def run() -> None:
        engine, gone = Engine(), asyncio.Event()

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        job = Job(Bridge(asyncio.get_running_loop()), stream=stream)
        job.start(engine, [None, None], receive)  # type: ignore[list-item]
        found = await job.events()
        each = [DELTA, DELTA, END] if stream else [END]
        assert found == [(i, event) for i in range(2) for event in each] and job.finished
        job.close()
        assert engine.n_cancelled == 0
        left = Job(Bridge(asyncio.get_running_loop()), stream=stream)
        left.start(SimpleNamespace(submit=lambda *_: SimpleNamespace(cancel=engine.cancel)), [None], receive)  # type: ignore[arg-type,list-item]
        waiting = asyncio.ensure_future(left.events())
        await asyncio.sleep(0)
        gone.set()
        with pytest.raises(Disconnected):
            await waiting
        assert engine.n_cancelled == 1 and not left.finished
        left.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_end_of_a_job_is_told_once() -> None:
    """However often it is closed; with the tokens of all its generations, cached ones included."""
    told: list[object] = []

    async def run() -> None:
        job = Job(Bridge(asyncio.get_running_loop()), stream=True, on_close=lambda *n: told.append(n))
        job.at_end(lambda: told.append("end"))
        for index, n in ((0, 1), (1, 1), (0, 3)):
            job.deliver(index, Delta("a", (), RequestTimings(cache_n=5, prompt_n=2, predicted_n=n), 0))
        assert job.n_tokens == (14, 4)
        job.close()
        job.close()

    asyncio.run(run())
    assert told == [(14, 4), "end"]


def test_a_ping_is_for_quiet_times_alone() -> None:
    """An event since the last one takes its place; the next is due if none came after it."""

    async def run() -> None:
        job = Job(Bridge(asyncio.get_running_loop()), stream=True)
        job.deliver(0, DELTA)
        assert await job.events() == [(0, DELTA)]
        waiting = asyncio.ensure_future(job.events())
        for ticks, done in ((1, False), (2, True)):
            await asyncio.sleep(0)
            job._tick(1000.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert waiting.done() is done, ticks
            assert job._timer is not None
            job._timer.cancel()
        assert waiting.result() == []
        job.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_nobody_minds_events_after_the_loop_and_nothing_stays_open() -> None:
    async def run() -> tuple[Bridge, Job]:
        bridge = Bridge(asyncio.get_running_loop())
        return bridge, Job(bridge, stream=True)

    bridge, job = asyncio.run(run())
    for _ in range(3):
        bridge.push(job, 0, DELTA)
    ends, gone = (bridge._reader, bridge._writer), weakref.ref(bridge)
    del bridge, job
    gc.collect()
    assert gone() is None
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
