#!/usr/bin/env python3
"""Load test of `ik serve`, if wanted next to the llama-server of ik_llama.cpp or another ik, as a Markdown table.

Clients stream `/completion` from a server on loopback, each the next request as soon as its last one is done; prompts
are random token ids, so that no cache helps. Both servers get the same options and run in turns; the ratio is the
median of those of the runs. With `--before`, both run at the same time and take every load in turns, within seconds.
TTFT: first event after sending; ITL: time between events of an answer; `around`: wall clock of a request beyond the
prompt and generation times that the server reports, per token (with as many clients as slots or fewer); `client`: the
processor time of this program per token. Options after `--` are given to both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from extra_options import parse_with_extra

PROGRAM = "llama-server"
DEMO = Path(__file__).resolve().parents[1] / "ikcli" / "data" / "demo.gguf"
_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"
_SPARE = 8  # tokens of a slot that are not used


@dataclass(slots=True)
class Answer:
    """One request: times in seconds of `time.perf_counter`, the server's own timings in milliseconds."""

    sent: float
    events: list[float] = field(default_factory=list)
    end: float = 0.0
    n_tokens: int = 0
    engine_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one load; times in milliseconds, the last two in microseconds per token."""

    tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    around: float
    client: float


class Stream(asyncio.Protocol):
    """The client's side of one request, which does little more than to note when events arrive."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[Answer | str] = asyncio.get_running_loop().create_future()
        self._request = request
        self._pieces: list[bytes] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = Answer(time.perf_counter())
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._pieces.append(data)
        self._answer.events += [now] * (self._tail + data).count(_EVENT)
        # Shorter than the mark, so that none is counted twice.
        self._tail = data[-len(_EVENT) + 1 :]
        self._answer.end = now

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        data = b"".join(self._pieces)
        try:
            finish(self._answer, data)
        except (ValueError, KeyError, IndexError) as e:
            start, end = data[:100].decode(errors="replace"), data[-200:].decode(errors="replace")
            self.done.set_result(f"not a whole answer ({e!r}): {start!r} ... {end!r}")
        else:
            self.done.set_result(self._answer)


def finish(answer: Answer, data: bytes) -> None:
    """Read the last event of a stream, which carries no new text; raise ValueError if the stream is not complete."""
    if not data.startswith(b"HTTP/1.1 200") or not data.endswith(_END):
        raise ValueError("status or end")
    # the last event may span several chunks of the transfer encoding, whose frames are removed here
    body = dechunk(data.partition(b"\r\n\r\n")[2])
    last = json.loads(body[body.rindex(_EVENT) + 6 :])
    timings = last["timings"]
    answer.n_tokens = int(last["tokens_predicted"])
    answer.engine_ms = float(timings["prompt_ms"]) + float(timings["predicted_ms"])
    # llama-server sends the end as a separate event, after the one of the last token
    if len(answer.events) > 1:
        answer.events.pop()


def dechunk(body: bytes) -> bytes:
    """Return the content of a body in chunked transfer encoding."""
    out = []
    at = 0
    while True:
        line = body.index(b"\r\n", at)
        n = int(body[at:line], 16)
        if n == 0:
            return b"".join(out)
        out.append(body[line + 2 : line + 2 + n])
        at = line + n + 4


def make_requests(n: int, arguments: argparse.Namespace, seed: int) -> list[bytes]:
    """Make requests with prompts of random tokens; the same seed makes the same ones."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        body = {
            "prompt": [rng.randrange(arguments.n_vocab // 8, arguments.n_vocab) for _ in range(arguments.n_prompt)],
            "n_predict": arguments.n_gen,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": False,
            "seed": seed * 1000 + i,
        }
        if arguments.temp is not None:
            body["temperature"] = arguments.temp
        data = json.dumps(body).encode()
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        out.append(head % len(data) + data)
    return out


async def load(port: int, requests: Sequence[bytes], n_clients: int) -> tuple[list[Answer], float]:
    """Return (answers, seconds): every client takes the next request when its last one is done.

    Answers that break off are reported on stderr and not counted; it is an error if a tenth or more do.
    """
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    answers: list[Answer] = []
    broken: list[str] = []

    async def client() -> None:
        for request in waiting:
            _, stream = await loop.create_connection(lambda r=request: Stream(r), "127.0.0.1", port)
            answer = await stream.done
            if isinstance(answer, str):
                broken.append(answer)
            else:
                answers.append(answer)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(n_clients)))
    seconds = time.perf_counter() - start
    if broken:
        text = f"{len(broken)} of {len(requests)} answers broke off; the first: {broken[0]}"
        if 10 * len(broken) >= len(requests):
            sys.exit(f"error: {text}")
        print(f"warning: {text}", file=sys.stderr)
    return answers, seconds


def summary(answers: Sequence[Answer], seconds: float, cpu: float) -> Result:
    """Return the figures of one load."""
    n_tokens = sum(a.n_tokens for a in answers)
    ttft = [1e3 * (a.events[0] - a.sent) for a in answers]
    itl = [1e3 * (b - a) for x in answers for a, b in zip(x.events, x.events[1:], strict=False)] or [0.0]
    around = [1e3 * (1e3 * (a.end - a.sent) - a.engine_ms) / max(a.n_tokens, 1) for a in answers]
    return Result(
        n_tokens / seconds, percentile(ttft, 50), percentile(ttft, 95), percentile(itl, 50), percentile(itl, 95),
        statistics.median(around), 1e6 * cpu / max(n_tokens, 1),
    )  # fmt: skip


def percentile(values: Sequence[float], p: float) -> float:
    """Return the smallest value that at least p percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(p) // 100) - 1)]


@contextlib.contextmanager
def server(command: list[str], model: Path, arguments: argparse.Namespace, n_slots: int) -> Iterator[int]:
    """Run a server and yield its port; exit with the end of its log if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    n_ctx = n_slots * (arguments.n_prompt + arguments.n_gen + _SPARE)
    options = ["-m", str(model.resolve()), "-c", str(-(-n_ctx // 256) * 256), "-np", str(n_slots)]
    options += ["-t", str(arguments.threads), "--port", str(port), *arguments.extra]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command + options, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_ready(process, port, log, arguments.timeout)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout: float) -> None:
    """Poll /health until the model is loaded."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if sock.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    sys.exit(f"error: the server did not start (exit code {process.poll()})\n{tail}")


def measure(port: int, arguments: argparse.Namespace, n_clients: int, seed: int) -> Result:
    """Measure one load after one that is not counted."""
    warm = make_requests(min(n_clients, 4), arguments, seed + 500)
    asyncio.run(load(port, warm, len(warm)))
    requests = make_requests(max(arguments.requests, n_clients), arguments, seed)
    before = time.process_time()
    answers, seconds = asyncio.run(load(port, requests, n_clients))
    return summary(answers, seconds, time.process_time() - before)


def run_all(
    programs: dict[str, list[str]], arguments: argparse.Namespace, n_slots: int
) -> dict[tuple[str, int], list[Result]]:
    """Return results of every program and number of clients, one per repetition; each begins with new servers."""
    runs: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for repetition in range(arguments.repetitions):
        names = list(programs) if repetition % 2 else list(reversed(programs))
        for together in [names] if arguments.before else [[name] for name in names]:
            what = " and ".join(together)
            print(f"-np {n_slots}: {what}, run {repetition + 1} of {arguments.repetitions}", file=sys.stderr)
            with contextlib.ExitStack() as running:
                ports = {
                    name: running.enter_context(server(programs[name], arguments.model, arguments, n_slots))
                    for name in together
                }
                for n_clients in arguments.clients:
                    for name, port in ports.items():
                        runs[name, n_clients].append(measure(port, arguments, n_clients, repetition))
    return runs


def medians(results: Sequence[Result]) -> Result:
    """Return the median of every figure."""
    return Result(*(statistics.median(getattr(r, name) for r in results) for name in Result.__dataclass_fields__))


def throughput_ratio(results: Sequence[Result], others: Sequence[Result]) -> float:
    """Return the median over runs that were made beside each other."""
    pairs = zip(results, others, strict=True)
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)


def table_row(name: str, n_slots: int, n_clients: int, r: Result, ratio: float | None) -> str:
    """Return one line of the table."""
    around = f"{r.around:.0f}" if n_clients <= n_slots else ""
    cells = [name, str(n_slots), str(n_clients), f"{r.tokens_per_second:.0f}", "" if ratio is None else f"{ratio:.2f}"]
    cells += [f"{x:.1f}" for x in (r.ttft_p50, r.ttft_p95)] + [f"{x:.2f}" for x in (r.itl_p50, r.itl_p95)]
    return "| " + " | ".join([*cells, around, f"{r.client:.0f}"]) + " |"


def numbers(text: str) -> list[int]:
    """Parse positive integers between commas."""
    found = [int(x) for x in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `extra` holds the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=DEMO, help="GGUF file (default: the demo model)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--reference", type=Path, help=f"folder with {PROGRAM}")
    other.add_argument("--before", help="how to start another ik, as --ik")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("-np", "--parallel", type=numbers, default=[1, 4, 16], help="slots (default: 1,4,16)")
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16, 64], help="at once (default: 1,4,16,64)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-p", "--n-prompt", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--temp", type=float, help="temperature; 0 is greedy (default: the servers' sampling)")
    parser.add_argument("--requests", type=int, default=32, help="at least this many per load (default: %(default)s)")
    parser.add_argument("--n-vocab", type=int, default=2000, help="prompt tokens are below this (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="runs of each server (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to start a server (default: %(default)s)")
    return parse_with_extra(parser, argv)


def main(argv: list[str]) -> int:
    """Run everything and print the table; progress goes to stderr."""
    arguments = parse_arguments(argv)
    programs = {"ik": [*shlex.split(arguments.ik), "serve"]}
    if arguments.before:
        programs["before"] = [*shlex.split(arguments.before), "serve"]
    if arguments.reference:
        programs["reference"] = [str((arguments.reference / PROGRAM).resolve())]
    other = next((name for name in programs if name != "ik"), None)
    options = f"-t {arguments.threads} -p {arguments.n_prompt} -n {arguments.n_gen}"
    options += f" --temp {arguments.temp}" if arguments.temp is not None else ""
    options += " " + shlex.join(arguments.extra) if arguments.extra else ""
    print(f"{arguments.model.name}, `{options}`, medians of {arguments.repetitions}\n")
    print("| server | np | clients | t/s | ratio | TTFT p50 ms | p95 | ITL p50 ms | p95 | around us | client us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for n_slots in arguments.parallel:
        runs = run_all(programs, arguments, n_slots)
        for n_clients in arguments.clients:
            for name in programs:
                found = runs[name, n_clients]
                ratio = throughput_ratio(found, runs[other, n_clients]) if other and name == "ik" else None
                print(table_row(name, n_slots, n_clients, medians(found), ratio), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
