"""A model in stages against one process: tokens per second, their ratio to the ideal, and what a hop costs.

    python benchmarks/stages.py [-m MODEL] [--stages 2,3] [--delay 0,0.2,1] [--mbit 0] [--share 0.5] [-r 2]

Every process has one thread on a core of its own. Where stages work at the same time they are held to a share of it:
they may run in that part of every 2 ms and are stopped in the rest, so that three stages fit two cores; one process
is held in the same way when it is compared to them. Of several runs the fastest counts, of those that are held the
median. A proxy between two stages, and between the command and the first one, delivers what it gets that many
milliseconds later, at most so many megabits per second (0: no limit). The last stage is with the command.

Ideal of n stages, from times T(g) of one process for a micro-batch of g tokens, f the largest stage's share of the
weights, hops the delays and transfers on the way through all stages:

    one sequence       1 / (T(1) + hops)
    S sequences        S / max(T(S/n) + hops, n f T(S/n)), as n groups of S/n
    prompt             tokens / (T(u) (1 + (m - 1) f) + hops), as m micro-batches of u
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.pipeline.driver import PipelineRunner
from ikcli.engine.pipeline.wire import LostLinkError, MessageKind, StageListener, connect
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.log import hushed
from ikcli.settings.run import RunConfig, default_model

ONE, SEVERAL, PROMPT = "one sequence", "sequences", "prompt"
_PERIOD = 0.002
_CHUNK = 1 << 16
_N_EMBD, _SEQUENCES, _UBATCH = 7168, 8, 512  # of predictions
_NETWORKS = (("10 GbE", 10_000.0, 30e-6), ("1 GbE", 1_000.0, 100e-6))  # megabits, seconds on the way
_SPAWN = multiprocessing.get_context("spawn")


# --- slower cores -----------------------------------------------------------------------------------------------------
class Gate:
    """A context that lets each of some processes run in its part of every period."""

    def __init__(self, pids: Sequence[int], share: float) -> None:
        self._pids, self._share = list(pids), share
        n_cores = len(os.sched_getaffinity(0))  # those that share a core run one after the other
        starts = [i // n_cores * share * _PERIOD for i in range(len(self._pids))]
        events = [(t % _PERIOD, signal.SIGCONT, pid) for t, pid in zip(starts, self._pids, strict=True)]
        ends = [(t + share * _PERIOD) % _PERIOD for t in starts]
        events += [(t, signal.SIGSTOP, pid) for t, pid in zip(ends, self._pids, strict=True)]
        self._events = sorted(events)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Gate:
        if self._share < 1:
            self._thread.start()
        return self

    def _run(self) -> None:
        begin = time.perf_counter()
        while not self._ended.is_set():
            for at, number, pid in self._events:
                wait = begin + at - time.perf_counter()
                if wait > 0:
                    time.sleep(wait)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            begin = max(begin + _PERIOD, time.perf_counter() - _PERIOD)  # lost time is not made up for

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._share < 1:
            self._thread.join()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# --- a slower network -------------------------------------------------------------------------------------------------
class Proxies:
    """A context with a process that stands between others as a proxy."""

    def __init__(self, delay: float, mbit: float) -> None:
        self._pipe, self._theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_be_proxies, args=(self._theirs, delay, mbit), daemon=True)

    def __enter__(self) -> Proxies:
        self._process.start()
        self._theirs.close()
        return self

    def before(self, address: tuple[str, int]) -> tuple[str, int]:
        """Return the address to connect to in place of another."""
        self._pipe.send(address)
        return "127.0.0.1", self._pipe.recv()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _be_proxies(pipe: Connection, delay: float, mbit: float) -> None:
    sys.setswitchinterval(1e-4)
    while True:
        address = pipe.recv()
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_connect, args=(server, address, delay, mbit), daemon=True).start()
        pipe.send(server.getsockname()[1])


def _connect(server: socket.socket, address: tuple[str, int], delay: float, mbit: float) -> None:
    near, _ = server.accept()
    far = socket.create_connection(address)
    for source, goal in ((near, far), (far, near)):
        for sock in (source, goal):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        way: queue.Queue[tuple[float, bytes]] = queue.Queue(64)  # as much as buffers hold on the way
        threading.Thread(target=_take, args=(source, way, delay, mbit), daemon=True).start()
        threading.Thread(target=_give, args=(goal, way), daemon=True).start()


def _take(source: socket.socket, way: queue.Queue[tuple[float, bytes]], delay: float, mbit: float) -> None:
    free = 0.0
    data = b"begin"
    while data:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        free = max(free, time.perf_counter()) + (len(data) / (mbit * 125e3) if mbit else 0)
        way.put((free + delay, data))


def _give(goal: socket.socket, way: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, data = way.get()
        wait = due - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        with suppress(OSError):
            if not data:
                goal.shutdown(socket.SHUT_WR)
                return
            goal.sendall(data)


# --- measurements -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Setting:
    """A run: the number of stages, the delay between them, the workload, and the repetitions."""

    model: Path
    n_stages: int
    delay: float  # seconds
    mbit: float
    share: float
    n_tokens: int  # generated by each sequence
    n_sequences: int
    n_groups: int
    n_prompt: int
    n_ubatch: int
    repeat: int


@dataclass(frozen=True)
class Found:
    """Tokens per second, the largest stage's share of the weights, bytes per token on the way."""

    speeds: dict[str, float]
    largest: float
    crossing: int
    n_stages: int
    mapped: tuple[tuple[float, float], ...]  # of each stage: MiB of the file in its memory, MiB of its weights


def config_of(setting: Setting) -> RunConfig:
    """Return settings with one thread for each process."""
    n = setting.n_stages
    config = RunConfig(command="bench", model=setting.model, n_ctx=setting.n_prompt, warmup=False, n_threads=n)
    config = replace(config, n_threads_batch=n, n_ubatch=setting.n_ubatch, n_batch=max(setting.n_prompt, 512))
    return replace(config, fleet=replace(config.fleet, stages=n))


def work(setting: Setting, pipe: Connection) -> None:
    """Measure in a separate process; tell the holder of the gate before and after."""
    with hushed(True):
        config = config_of(setting)
        n_ctx = setting.n_sequences * max(setting.n_prompt, 2 * setting.n_tokens)
        session = Session.plan(config, n_ctx=n_ctx, n_seq_max=setting.n_sequences, n_step=setting.n_sequences)
        runner = session.runner
        with Proxies(setting.delay, setting.mbit) as proxies, closing(session):
            if isinstance(runner, PipelineRunner) and (setting.delay or setting.mbit):
                n = setting.n_stages
                runner.route = lambda index, address: address if index == n else proxies.before(address)
            session.load()
            pids = runner.pids if isinstance(runner, PipelineRunner) else [os.getpid()]
            cores = sorted(os.sched_getaffinity(0))
            for i, pid in enumerate(pids):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {cores[i % len(cores)]})
            speeds: dict[str, float] = {}
            for name, measure in ((ONE, _one), (SEVERAL, _several), (PROMPT, _prompt)):
                pipe.send(pids if name != ONE else [])
                pipe.recv()
                measure(session, setting)  # once unmeasured
                found = [measure(session, setting) for _ in range(setting.repeat)]
                held = name != ONE and setting.share < 1  # a gate that is late makes a run too fast
                speeds[name] = statistics.median(found) if held else max(found)
                pipe.send(None)
                pipe.recv()
            parts = [m for name, m in session.memory().items() if isinstance(runner, PipelineRunner) == (name != "CPU")]
            weights = [m["weights"] for m in parts]
            in_memory = [resident(pid, setting.model) for pid in pids]
            crossing = max(runner.crossing_bytes(list(session.programs.values()))) if len(pids) > 1 else 0
        mapped = tuple((have / 2**20, own / 2**20) for have, own in zip(in_memory, weights, strict=True))
        pipe.send(Found(speeds, max(weights) / sum(weights), crossing, setting.n_stages, mapped))


def _ids(session: Session, n: int) -> Any:
    return (np.arange(n) * 7919 + 1).astype(np.int32) % session.n_vocab


def _one(session: Session, setting: Setting) -> float:
    session.clear()
    ids = _ids(session, setting.n_tokens).tolist()
    started = time.perf_counter()
    for i, token in enumerate(ids):
        session.submit_each([token], [i], [0])
        session.collect()
    return setting.n_tokens / (time.perf_counter() - started)


def _several(session: Session, setting: Setting) -> float:
    """Generate as the server does: submit each group's next token when its last one is collected."""
    session.clear()
    seqs = np.array_split(np.arange(setting.n_sequences), setting.n_groups)
    ids = _ids(session, setting.n_tokens).tolist()
    n_each = setting.n_tokens
    started = time.perf_counter()
    in_flight: list[int] = []
    at = [0] * len(seqs)
    todo = len(seqs) * n_each
    depth = session.runner.depth
    while todo:
        for group, own in enumerate(seqs):
            if group not in in_flight and at[group] < n_each and len(in_flight) < depth:
                n = len(own)
                session.submit_each([ids[at[group]]] * n, [at[group]] * n, own.tolist())
                in_flight.append(group)
        session.collect()
        at[in_flight.pop(0)] += 1
        todo -= 1
    return setting.n_sequences * n_each / (time.perf_counter() - started)


def _prompt(session: Session, setting: Setting) -> float:
    session.clear()
    batch = Batch.single(_ids(session, setting.n_prompt), logits="last")
    started = time.perf_counter()
    session.decode(batch)
    return setting.n_prompt / (time.perf_counter() - started)


def resident(pid: int, path: Path) -> int:
    """Return the bytes of a mapped file that are in the memory of a process."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path.resolve()))
        elif inside and first == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


def measure(setting: Setting) -> Found:
    """Run a setting in a separate process, with its stages at their gate."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(setting, theirs))
    process.start()
    theirs.close()
    try:
        while not isinstance(said := ours.recv(), Found):
            with Gate(said, setting.share if said else 1):
                ours.send(None)
                ours.recv()
            ours.send(None)
        return said
    except EOFError:
        raise SystemExit("a measurement failed; its error is above") from None
    finally:
        process.join()


# --- the ideal --------------------------------------------------------------------------------------------------------
def ideals(setting: Setting, found: Found, alone: dict[str, float], wire: dict[int, float]) -> dict[str, float]:
    """Return tokens per second of stages without losses; `wire`: seconds of a hop by its rows. See the module."""
    n, largest = setting.n_stages, found.largest

    def hops(rows: int) -> float:
        transfer = rows * found.crossing / (setting.mbit * 125e3) if setting.mbit else 0.0
        return n * setting.delay + (n - 1) * transfer + (n + 1) * wire[rows]

    group = -(-setting.n_sequences // n)
    t_group, t_ubatch = group / alone[SEVERAL], setting.n_ubatch / alone[PROMPT]
    n_ubatches = setting.n_prompt / setting.n_ubatch
    return {
        ONE: 1 / (1 / alone[ONE] + hops(1)),
        SEVERAL: setting.n_sequences / max(t_group + hops(group), n * largest * t_group),
        PROMPT: setting.n_prompt / (t_ubatch * (1 + (n_ubatches - 1) * largest) + hops(setting.n_ubatch)),
    }


def predict(generation: float, prompts: float, wire: dict[int, float]) -> list[list[str]]:
    """Return table rows for DeepSeek 671B on machines for which one with memory for all of it would have these speeds.

    Eight sequences count as if a machine gained nothing from several at once, which is nearly so for experts.
    """
    out = []
    for n in (2, 4):
        for network, mbit, delay in _NETWORKS:
            setting = Setting(Path(), n, delay, mbit, 1, 0, _SEQUENCES, n, 4096, _UBATCH, 1)
            found = Found({}, 1 / n, 4 * _N_EMBD, n, ())
            alone = {ONE: generation, SEVERAL: generation, PROMPT: prompts}
            best = ideals(setting, found, alone, wire)
            cells = [f"{best[name]:.1f} ({best[name] / alone[name]:.2f})" for name in (ONE, SEVERAL, PROMPT)]
            out.append([str(n), network, *cells])
    return out


def _echo(pipe: Connection) -> None:
    listener = StageListener("127.0.0.1", "hop")
    pipe.send(listener.address)
    found = listener.accept(60)
    assert found is not None
    with suppress(LostLinkError):
        while True:
            kind, words, data = found[0].receive()
            found[0].send(kind, words, [data])


@contextmanager
def _echoing() -> Any:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_echo, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    link = connect(ours.recv(), {"secret": "hop"})
    try:
        yield link
    finally:
        link.close()
        process.join()


def hop_seconds(n_bytes: Sequence[int], n: int = 300) -> list[float]:
    """Return median seconds of a message of these bytes from one process to another: half of a round trip."""
    out = []
    with _echoing() as link:
        for size in n_bytes:
            data, times = np.zeros(size, np.uint8), []
            for _ in range(n):
                started = time.perf_counter()
                link.send(MessageKind.RUN, {}, [data])
                link.receive()
                times.append((time.perf_counter() - started) / 2)
            out.append(statistics.median(times))
    return out


# --- output -----------------------------------------------------------------------------------------------------------
def random_model(room: Path) -> Path:
    """Make a llama of width 2048 with six layers, so that two and three stages are alike."""
    path = room / "model.gguf"
    tool = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
    words = ["--preset", "llama", "--type", "Q8_0", "--layers", "6", "--vocab", "4096", "-o", str(path)]
    subprocess.run([sys.executable, str(tool), *words], check=True, stdout=subprocess.DEVNULL)
    return path


def numbers(text: str) -> list[float]:
    """Parse `0,0.2,1`."""
    return [float(word) for word in text.split(",")]


def report(args: argparse.Namespace, model: Path) -> None:
    """Measure all settings; print Markdown tables, and a line of JSON for each row."""
    n_embd = Planner.of_file(RunConfig(model=model)).hp.n_embd
    most = max(int(n) for n in numbers(args.stages))
    base = Setting(
        model, 1, 0, 0, args.share, args.n_gen, args.sequences, 1, args.n_prompt, args.ubatch, args.repeat,
    )  # fmt: skip
    sizes = sorted({1, args.ubatch, args.sequences, *(-(-args.sequences // n) for n in range(1, most + 1))})
    wire = dict(zip(sizes, hop_seconds([4 * n_embd * n for n in sizes]), strict=True))
    print(f"| rows of {n_embd} floats | {' | '.join(map(str, sizes))} |\n|:---|{'---:|' * len(sizes)}")
    print(f"| a hop, us | {' | '.join(f'{1e6 * wire[n]:.0f}' for n in sizes)} |\n", flush=True)
    print("| stages | delay ms | mbit | what | one process | stages | gain | ideal | of the ideal |")
    print("|---:|---:|---:|:---|---:|---:|---:|---:|---:|", flush=True)
    whole = measure(base)
    mapped: list[str] = []
    for n in (int(n) for n in numbers(args.stages)):
        alone = measure(replace(base, n_groups=n)).speeds
        for delay in numbers(args.delay):
            for mbit in numbers(args.mbit):
                setting = replace(base, n_stages=n, delay=delay / 1000, mbit=mbit, n_groups=n)
                found = measure(setting)
                best = ideals(setting, found, alone, wire)
                for name, speed in found.speeds.items():
                    one, ideal = whole.speeds[name], best[name]
                    what = f"{args.sequences} {name}" if name == SEVERAL else name
                    row = [n, f"{delay:g}", f"{mbit:g}", what, f"{one:.1f}", f"{speed:.1f}", f"{speed / one:.2f}"]
                    row += [f"{ideal:.1f}", f"{speed / ideal:.2f}"]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
                if args.json:
                    words = {"setting": asdict(setting) | {"model": model.name}, "found": asdict(found), "ideal": best}
                    with args.json.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(words | {"alone": alone, "whole": whole.speeds, "wire": wire}) + "\n")
        mapped += [f"| {n} | {i + 1} | {a:.1f} | {b:.1f} |" for i, (a, b) in enumerate(found.mapped)]
    print("\n| stages | stage | MiB of the file in its memory | MiB of its weights |\n|---:|---:|---:|---:|")
    print("\n".join(mapped))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF file; default: random weights, 6 layers; demo: the bundled one")
    add("--stages", default="2,3", help="how many")
    add("--delay", default="0,0.2,1", help="milliseconds between stages")
    add("--mbit", default="0", help="megabits per second between stages; 0: no limit")
    add("--share", type=float, default=0.5, help="of a core for each process where several work at once")
    add("--sequences", type=int, default=6, help="that are generated side by side")
    add("-n", "--n-gen", type=int, default=24, help="tokens generated by each")
    add("-p", "--n-prompt", type=int, default=1024, help="tokens of a prompt")
    add("-ub", "--ubatch", type=int, default=128, help="tokens of a micro-batch of it")
    add("-r", "--repeat", type=int, default=2, help="runs of each")
    add("--json", type=Path, help="append the results to this file")
    add(
        "--predict",
        metavar="TG,PP",
        help="only predict 671B from speeds of a machine with room for it",
    )
    args = parser.parse_args(argv)
    if args.predict:
        generation, prompts = numbers(args.predict)
        rows = sorted({1, _UBATCH, *(_SEQUENCES // n for n in (2, 4))})
        wire = dict(zip(rows, hop_seconds([4 * _N_EMBD * n for n in rows], 50), strict=True))
        print("| stages | network | one sequence | 8 sequences | prompt of 4096 |\n|---:|:---|---:|---:|---:|")
        for row in predict(generation, prompts, wire):
            print(f"| {' | '.join(row)} |")
        return
    with tempfile.TemporaryDirectory() as name:
        model = args.model or random_model(Path(name))
        report(args, default_model() if str(model) == "demo" else model)


if __name__ == "__main__":
    main()
