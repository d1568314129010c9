"""Scenarios that test_cuda_driver.py runs in separate processes, with tests/fake_cuda.c as the driver."""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np
from fake_cuda import Launcher

from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import CudaError, Launch


def work() -> None:
    """Memory, copies, launches, events, a graph; everything is given back."""
    launcher = Launcher()
    device = driver.open_device()
    stream, copies, event = device.stream(), device.stream(), device.event()
    memory = device.alloc(4 * 1000, "weights")
    sums = device.alloc(4 * 4, "compute")
    host = device.pinned(4 * 4, "results")
    assert memory.address % 256 == 0 and device.owners() == {"weights": 4000, "compute": 16}
    free, total = device.memory()
    assert total == 1 << 30 and free == total - 4256
    device.prepare({"util_fill": 0, "util_row_sum": 100000})
    device.launch(stream, Launch("util_fill", (4, 1, 1), 256, 0, (memory.address, 1000, np.float32(0.5))))
    device.launch(stream, Launch("util_row_sum", (4, 1, 1), 256, 100000, (memory.address, sums.address, np.int32(250))))
    device.record(stream, event)
    device.wait(copies, event)
    device.download(copies, host.array, sums.address)
    device.synchronize(copies)
    assert device.done(event) and (host.array.view(np.float32) == 125).all()

    values = np.arange(1000, dtype=np.float32)

    def queue() -> None:
        device.upload(stream, memory.address, values)
        device.launch(stream, Launch("util_row_sum", (4, 1, 1), 256, 0, (memory.address, sums.address, np.int32(250))))
        device.copy(stream, sums.address, sums.address + 4, 4)
        device.fill(stream, sums.address + 12, 0, 4)

    n = len(launcher.launches)
    graph = device.capture(stream, queue)
    assert len(launcher.launches) == n
    start, stop = device.event(timing=True), device.event(timing=True)
    device.record(stream, start)
    for factor in (1, 2):
        values[:] = np.arange(1000) * factor
        device.replay(stream, graph)
        device.download(stream, host.array, sums.address)
        device.synchronize()
        expected = np.arange(1000).reshape(4, 250).sum(1) * factor
        np.testing.assert_allclose(host.array.view(np.float32), [expected[1], expected[1], expected[2], 0])
    device.record(stream, stop)
    device.synchronize(stream)
    assert device.elapsed(start, stop) == 1.5 and len(launcher.launches) == n + 2
    device.free_graph(graph)
    device.free_event(start)
    device.free_event(stop)
    device.free_stream(copies)
    with contextlib.suppress(ZeroDivisionError):
        device.capture(stream, lambda: print(1 // 0))
    device.free(memory)
    assert launcher.live() == [1, 1, 1, 1, 1, 0, 0, 0]
    device.close()
    assert launcher.failure is None and launcher.live() == [0] * 8


def two_devices() -> None:
    """Handles of two devices are used from two threads, each in its own context."""
    launcher = Launcher()
    both = [driver.open_device(i) for i in range(2)]
    streams = [d.stream() for d in both]
    memory = [d.alloc(1024, "compute") for d in both]
    failures: list[Exception] = []

    def use() -> None:
        try:
            for _ in range(3):
                for d, s, m in zip(both, streams, memory, strict=True):
                    d.launch(s, Launch("util_fill", (1, 1, 1), 256, 0, (m.address, 256, np.float32(d.info.index))))
                    d.synchronize(s)
        except CudaError as e:
            failures.append(e)

    threads = [threading.Thread(target=use)]
    for t in threads:
        t.start()
        t.join()
    use()
    out = np.zeros(256, np.float32)
    both[1].download(streams[1], out, memory[1].address)
    both[1].synchronize()
    assert not failures and (out == 1).all() and [d.info.name for d in both] == ["Fake GPU 0", "Fake GPU 1"]
    for d in both:
        d.close()
    assert launcher.live() == [0] * 8 and len(launcher.launches) == 12


def refuse() -> None:
    """The reason why a device cannot be opened."""
    try:
        driver.open_device()
    except CudaError as e:
        print(type(e).__name__, e)
    print(driver.why_none())


def out_of_memory() -> None:
    device = driver.open_device()
    device.alloc(500 << 20, "weights")
    device.alloc(100 << 20, "KV cache")
    try:
        device.alloc(1 << 30, "compute")
    except CudaError as e:
        print(type(e).__name__, e)
    assert device.alloc(1 << 20, "compute").n_bytes == 1 << 20
    device.close()


def no_memory_for_graphs() -> None:
    """The second one is refused, by name, and the stream can be used on."""
    launcher = Launcher()
    device = driver.open_device()
    stream, memory = device.stream(), device.alloc(256, "compute")
    fill = Launch("util_fill", (1, 1, 1), 256, 0, (memory.address, 1, np.float32(1)))
    graph = device.capture(stream, lambda: device.launch(stream, fill))
    try:
        device.capture(stream, lambda: device.launch(stream, fill))
    except CudaError as e:
        print(type(e).__name__, e)
    assert launcher.live()[5:] == [0, 1, 0]
    device.free_graph(graph)
    device.replay(stream, device.capture(stream, lambda: device.launch(stream, fill)))
    device.synchronize()
    assert len(launcher.launches) == 1
    device.close()


def registered() -> None:
    """Host memory that the system lets the driver pin."""
    launcher = Launcher()
    device = driver.open_device()
    pages = np.zeros(3 * 4096, np.uint8)
    start = -(-pages.ctypes.data // 4096) * 4096
    print(device.register(start, 8192), launcher.live()[7])
    if launcher.live()[7]:
        device.unregister(start)
    device.close()
    assert launcher.live() == [0] * 8


def failed_launch() -> None:
    """A kernel that fails shows at the next call; with IK_CUDA_SYNC at the launch itself, also inside of a graph."""
    launcher = Launcher()
    device = driver.open_device()
    stream, small = device.stream(), device.alloc(256, "compute")
    good = Launch("util_fill", (1, 1, 1), 256, 0, (small.address, 1, np.float32(1)))
    bad = Launch("util_fill", (1, 1, 1), 256, 0, (0, 1, np.float32(1)))
    graph = device.capture(stream, lambda: [device.launch(stream, x) for x in (good, bad, good)] and None)
    step = "replay"
    try:
        device.replay(stream, graph)
        step = "synchronise"
        device.synchronize(stream)
    except CudaError as e:
        print(step, len(launcher.launches), type(e).__name__, e)
    device.close()


def wrong_calls() -> None:
    device = driver.open_device()
    stream, memory = device.stream(), device.alloc(256, "compute")
    address = memory.address
    for call in (
        lambda: device.launch(stream, Launch("util_fill", (1, 1, 1), 256, 0, (address, np.int32(1), np.float32(1)))),
        lambda: device.launch(stream, Launch("no_such_kernel", (1, 1, 1), 256, 0, ())),
        lambda: device.prepare({"util_fill": 1 << 20}),
        lambda: device.fill(stream, address, 0, 257),
        lambda: device.upload(stream, address, np.zeros((4, 4))[:, 0]),
        lambda: driver.open_device(3),
    ):
        try:
            call()
        except Exception as e:
            print(type(e).__name__, e)
    device.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
