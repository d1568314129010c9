"""What a front with replicas costs and gains, as Markdown: latency it adds, throughput of 1, 2, 4 replicas, one killed.

    python benchmarks/replicas.py [latency] [throughput] [killed] [--ray local] [--share 0.5] [-m MODEL]

latency: the same streams from one server asked directly, which has the processors of one replica, and through a front
with two replicas, here and with --ray on Ray too, in turns; `added` is what a token, the first token, and what lies
around the computation take longer. throughput: as many streaming clients as slots of all
replicas; each replica is kept to its share of a core by stopping it when it has used that, so that the ratios hold on a
machine with few cores (one replica on this machine is a server without a front). killed: one of two replicas is killed
with SIGKILL at a third of the requests; lost are answers that did not come whole, before and after their first token.
With --ray replicas are on Ray, without on this machine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet import Governor, workers_of
from serve import DEMO, Answer, Stream, load, make_requests, percentile, server

from ikcli.hostinfo import shares

_TICK = 0.005  # seconds
_SLOTS = 2  # of a replica
PARTS = ("latency", "throughput", "killed")


def ask(port: int, path: str) -> list[dict[str, str]]:
    """Return the answer of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return list(json.load(answer))


def pids(port: int) -> list[int]:
    """Return the processes of replicas, once all are ready, or that of a server without a front."""
    while True:
        try:
            found = ask(port, "/replicas")
        except urllib.error.HTTPError:
            return workers_of(os.getpid())[-1:]
        if all(one["state"] == "ready" for one in found):
            return [int(one["where"].rpartition("process ")[2]) for one in found]
        time.sleep(0.1)


@contextmanager
def serving(arguments: Namespace, n: int, ray: str | None) -> Iterator[int]:
    """Run a front with n replicas of a thread each, or one server without a front (n = 0); yield the port."""
    each = Namespace(**vars(arguments))
    each.threads = n if ray in (None, "local") and n else 1
    each.extra = [*(["--replicas", str(n)] if n else []), *(["--ray", ray] if ray and n else []), "--temp", "0"]
    with server([sys.executable, "-m", "ikcli", "serve"], arguments.model, each, _SLOTS) as port:
        pids(port)
        yield port


@contextmanager
def on_processors(cpus: Collection[int]) -> Iterator[None]:
    """Run processes that start in this context on these CPUs alone, if any are given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def governed(processes: Sequence[int], share: float) -> Iterator[None]:
    """Keep every process to a share of a core."""
    done, governor = Event(), Governor(share)

    def work() -> None:
        try:
            while not done.wait(_TICK):
                governor.tick(processes)
        finally:
            governor.release()

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- latency ----------------------------------------------------------------------------------------------------------
def figures(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Return medians in microseconds: per token after the first, to the first token, and outside of the computation.

    The last is per token.
    """
    per_token = [(a.events[-1] - a.events[0]) / max(1, len(a.events) - 1) for a in answers]
    first = [a.events[0] - a.sent for a in answers]
    around = [(a.end - a.sent - a.engine_ms / 1e3) / max(1, a.n_tokens) for a in answers]
    return tuple(1e6 * statistics.median(values) for values in (per_token, first, around))  # type: ignore[return-value]


def latency(arguments: Namespace) -> None:
    """Measure with one client; all servers wait for it all the time."""
    with ExitStack() as stack:
        with on_processors(shares(2)[0]):
            ports = {"direct": stack.enter_context(serving(arguments, 0, None))}
        ports["front"] = stack.enter_context(serving(arguments, 2, None))
        if arguments.ray:
            ports["front, Ray"] = stack.enter_context(serving(arguments, 2, arguments.ray))
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ports}
        for i in range(-1, arguments.repetitions):  # the first time does not count
            for name, port in ports.items():
                requests = make_requests(arguments.requests, arguments, seed=max(i, 0))
                answers, _ = asyncio.run(load(port, requests, 1))
                if i >= 0:
                    runs[name].append(figures(answers))
    print("| one client | per token us | first token us | all around the computation, us per token |")
    print("|:---|---:|---:|---:|")
    found = {name: [statistics.median(run[k] for run in values) for k in range(3)] for name, values in runs.items()}
    for name in [*found][1:]:
        found[f"added by {name}"] = [b - a for a, b in zip(found["direct"], found[name], strict=True)]
    for name, values in found.items():
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |", flush=True)


# --- throughput -------------------------------------------------------------------------------------------------------
def throughput(arguments: Namespace) -> None:
    """Return tokens per second with all slots of all replicas busy."""
    print(f"\n| replicas of {arguments.share:g} cores | clients | tokens/s | ratio | p95 of first token ms |")
    print("|---:|---:|---:|---:|---:|")
    base = 0.0
    for n in arguments.replicas:
        with serving(arguments, n, arguments.ray) as port:
            clients = _SLOTS * n
            asyncio.run(load(port, make_requests(clients, arguments, 1000), clients))
            with governed(pids(port), arguments.share):
                requests = make_requests(arguments.requests * n, arguments, seed=n)
                answers, seconds = asyncio.run(load(port, requests, clients))
        rate = sum(a.n_tokens for a in answers) / seconds
        base = base or rate
        first = percentile([1e3 * (a.events[0] - a.sent) for a in answers], 95)
        print(f"| {n} | {clients} | {rate:.0f} | {rate / base:.2f} | {first:.0f} |", flush=True)


# --- one dies ---------------------------------------------------------------------------------------------------------
def killed(arguments: Namespace) -> None:
    """Report the requests that are lost when a replica dies, and how long it is away."""
    with serving(arguments, 2, arguments.ray) as port:
        processes = pids(port)
        n = 3 * arguments.requests
        with governed(processes, arguments.share):
            whole, before, after, away = asyncio.run(_killed(port, make_requests(n, arguments, 7), processes[0]))
    print("\n| one of two replicas killed | requests | whole | lost before the first token | after it | back after s |")
    print("|:---|---:|---:|---:|---:|---:|")
    print(f"| {arguments.ray or 'this machine'} | {n} | {whole} | {before} | {after} | {away:.1f} |", flush=True)


async def _killed(port: int, requests: Sequence[bytes], victim: int) -> tuple[int, int, int, float]:
    """Return complete answers, those lost before and after their first token, and the seconds until all are ready."""
    loop, waiting, done = asyncio.get_running_loop(), iter(requests), [0, 0, 0]
    killed_at, back = [0.0], asyncio.Event()

    async def watch() -> None:
        killed_at[0] = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while victim in await asyncio.to_thread(pids, port):
            await asyncio.sleep(0.1)
        killed_at[0] = time.monotonic() - killed_at[0]
        back.set()

    async def client() -> None:
        for request in waiting:
            _, stream = await loop.create_connection(lambda r=request: Stream(r), "127.0.0.1", port)  # type: ignore[misc]
            answer = await stream.done
            begun = isinstance(answer, Answer) or bool(stream._answer.events)
            done[0 if isinstance(answer, Answer) else 2 if begun else 1] += 1
            if sum(done) == len(requests) // 3:
                tasks.append(asyncio.ensure_future(watch()))

    tasks: list[asyncio.Task[None]] = []
    await asyncio.gather(*(client() for _ in range(2 * _SLOTS)))
    await asyncio.gather(*tasks)
    return done[0], done[1], done[2], killed_at[0]


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("-m", "--model", type=Path, default=DEMO, help="GGUF file (default: the demo model)")
    parser.add_argument("--ray", help="replicas on Ray: local, auto or an address")
    parser.add_argument("--replicas", default="1,2,4", help="how many (throughput)")
    parser.add_argument("--share", type=float, default=0.5, help="of a core for each replica (throughput, killed)")
    parser.add_argument("--requests", type=int, default=16, help="of every replica in every load")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="of the latencies")
    parser.add_argument("-p", "--n-prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("-n", "--n-gen", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--n-vocab", type=int, default=2000, help="tokens of prompts are below")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that servers may take to start")
    arguments = parser.parse_args()
    arguments.temp = None
    arguments.replicas = [int(n) for n in arguments.replicas.split(",")]
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: unknown part")
    for part in arguments.parts or PARTS:
        globals()[part](arguments)


if __name__ == "__main__":
    main()
