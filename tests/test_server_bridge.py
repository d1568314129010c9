"""Events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pytest

from ikcli.server.http.bridge import Bridge, Job
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
