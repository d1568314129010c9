#!/usr/bin/env python3
"""Prompt and generation speed of a model with experts under memory limits, as a Markdown table.

Every run gets a cgroup (v1 or v2) with the limit, and starts without the file in the page cache. `ik` runs with a
mapped file, with `--expert-ram` and with `--prefetch-experts`, and the sweep-bench in --reference with a mapped file
and with `--prefetch-experts --defer-experts`, all in turns. Medians of all rows behind the first are shown: at N_KV 0
a mapped file is cold, while slots were filled before. Ratios are to the first line of a limit. A program
that --timeout stops before it has such a row is shown as stopped.

With --minutes, no run begins after that time except for the first of each program. --resident names a smaller model,
which fits RAM twice: mapped and in slots, which take turns in one process. Models that do not exist are made
(`tools/make_random_model.py`): Qwen3-MoE's layout in Q4_K with 128 experts per layer, routers of skew 1, --layers of
them, 0.33 GiB each; the smaller one has 4. All of it, in about 12 minutes:

    python benchmarks/experts_on_disk.py /tmp/moe.gguf --layers 30 --resident /tmp/moe-4.gguf --reference BIN \\
        --shares 0.5,0.25 --only 0,2,3,4 -r 3 -c 512 -n 4 --timeout 75 --minutes 9

MB/s is what a program read from disk between its first row and its last, prompts and generation together. Above the
table is the bandwidth of the disk: direct reads of 1 MiB at random places of the file, by 4 threads, before and after.

Needs write access to a folder of cgroups (root, usually). Options after `--` are given to all programs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare_reference import PROGRAM, parse_table
from extra_options import parse_with_extra

MIB = 1 << 20
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # v1, v2


@dataclass(frozen=True, slots=True)
class Variant:
    """A program with options; `{ram}` in them is the RAM for experts in MiB."""

    name: str
    command: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """What runs of a variant measured behind their first row, and the rate at which they read."""

    pp: list[float] = field(default_factory=list)
    tg: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # bytes per second
    runs: int = 0
    notes: list[str] = field(default_factory=list)
    stopped: str = ""  # why there are no rows

    def cells(self, base: Result) -> list[str]:
        """Return table cells: speeds, their ratios to another result, and MB/s."""
        if not self.pp:
            return [self.stopped or "failed", "-", "-", "-", "-"]
        out: list[str] = []
        for own, other in ((self.pp, base.pp), (self.tg, base.tg)):
            value = statistics.median(own)
            out += [f"{value:.1f}", f"{value / statistics.median(other):.2f}" if other else "-"]
        return [*out, f"{statistics.median(self.rates) / 1e6:.0f}" if self.rates else "-"]


def drop_from_cache(path: Path) -> None:
    """Write the file out and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def memory_group(root: Path, limit: int) -> Iterator[Path | None]:
    """Make a cgroup with a limit of bytes; None without a limit."""
    if not limit:
        yield None
        return
    group = root / f"ik-experts-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / name).write_text(str(limit))
        yield group
    finally:
        for _ in range(50):  # the group is busy until its processes are gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def bandwidth(path: Path, n_threads: int = 4, block: int = MIB, seconds: float = 3.0) -> float:
    """Return bytes per second of direct reads at random places."""
    fd, n_blocks = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // block
    totals = [0] * n_threads
    started = time.perf_counter()

    def work(i: int) -> None:
        rng, into = random.Random(i), memoryview(mmap.mmap(-1, block))
        while time.perf_counter() - started < seconds:
            totals[i] += os.preadv(fd, [into], rng.randrange(n_blocks) * block)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return sum(totals) / (time.perf_counter() - started)


def run_once(command: list[str], group: Path | None, timeout: float, result: Result) -> None:
    """Run a program in a cgroup and add its rows; what it printed last is a note if it has none."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=enter,
        )  # fmt: skip
        started = time.perf_counter()
        alarm = threading.Timer(timeout, process.kill)
        alarm.start()
        lines: list[str] = []
        marks: list[tuple[float, int]] = []  # after each row: time, bytes read
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("|") and line.split("|")[1].strip().isdigit():
                with contextlib.suppress(OSError, StopIteration):
                    text = Path(f"/proc/{process.pid}/io").read_text().split("read_bytes: ")[1]
                    marks.append((time.perf_counter(), int(text.split()[0])))
        process.wait()
        alarm.cancel()
    result.runs += 1
    if process.returncode == -signal.SIGKILL:
        result.stopped = f"stopped after {timeout:.0f} s" if time.perf_counter() - started >= timeout else "killed"
    rows = [speeds for depth, speeds in sorted(parse_table("".join(lines)).items()) if depth]
    result.notes += [line.strip() for line in lines if line.startswith("experts:") or " uses were in RAM" in line]
    if not rows:
        result.notes += [line.strip() for line in lines[-4:]]
        return
    result.pp += [pp for pp, _ in rows]
    result.tg += [tg for _, tg in rows]
    if len(marks) > 1:
        result.rates.append((marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]))


def variants(ik: str, reference: Path | None, only: str) -> list[Variant]:
    """Return what runs in turns."""
    own = (*shlex.split(ik), "sweep-bench")
    found = [
        Variant("mapped", own),
        Variant("--expert-ram", (*own, "--expert-ram", "{ram}MiB")),
        Variant("--prefetch-experts", (*own, "--prefetch-experts")),
    ]
    if reference is not None:
        other = str((reference / PROGRAM).resolve())
        found += [
            Variant("ik_llama.cpp, mapped", (other,)),
            Variant("ik_llama.cpp, both options", (other, "--prefetch-experts", "--defer-experts")),
        ]
    return [v for i, v in enumerate(found) if not only or str(i) in only.split(",")]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--reference", type=Path, help=f"folder with {PROGRAM}")
    parser.add_argument("--ik", default=f"{sys.executable} -m ikcli", help="how to start ik (default: this tree's)")
    parser.add_argument("--shares", default="0.5,0.25,0", help="limits as shares of the file, 0: none (%(default)s)")
    parser.add_argument("--own", type=int, default=500, help="MiB of the limit that are not for experts (%(default)s)")
    parser.add_argument("--only", default="", metavar="N,...", help="variants by number, from 0")
    parser.add_argument("--cgroup", type=Path, help="folder in which cgroups are made")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-c", "--ctx-size", type=int, default=768, help="depths are 0, ub, ... (default: %(default)s)")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=256)
    parser.add_argument("-n", type=int, default=16, help="generated tokens of a row (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=1, help="runs of each variant (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="after which no run begins, except for the first of a variant")
    parser.add_argument("--layers", type=int, default=30, help="of a model that is made (default: %(default)s)")
    parser.add_argument("--resident", type=Path, metavar="MODEL", help="compare ways to have all of it in RAM, too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per run (default: %(default)s)")
    return parse_with_extra(parser, argv)


def make_model(path: Path, n_layers: int) -> None:
    """Write the random model."""
    tool = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
    options = ["--preset", "qwen3moe", "--type", "Q4_K", "--experts", "128", "--router-skew", "1"]
    subprocess.run([sys.executable, tool, *options, "--layers", str(n_layers), "-o", str(path)], check=True)


def resident(model: Path, a: argparse.Namespace, n_turns: int = 9, n_tokens: int = 32) -> str:
    """Return a sentence with the median ratios of --expert-ram to a mapped file, all in RAM, in turns."""
    import numpy as np

    from ikcli.engine.run.batch import Batch
    from ikcli.engine.run.session import Session
    from ikcli.settings.run import RunConfig

    base = RunConfig(command="sweep-bench", model=model, n_ctx=a.ctx_size, n_ubatch=a.ubatch_size,
                     n_threads=a.threads, n_threads_batch=a.threads)  # fmt: skip
    ids = np.random.default_rng(1).integers(0, 1000, a.ubatch_size + n_tokens).astype(np.int32)
    times: dict[str, list[tuple[float, float]]] = {"mapped": [], "slots": []}
    with Session.open(base) as mapped, Session.open(replace(base, expert_ram=2 * model.stat().st_size)) as slots:
        for turn in range(n_turns + 1):
            pairs = [("mapped", mapped), ("slots", slots)]
            for name, session in pairs[:: 1 if turn % 2 else -1]:
                session.clear()
                started = time.perf_counter()
                session.decode(Batch.single(ids[: a.ubatch_size]))
                middle = time.perf_counter()
                for i in range(a.ubatch_size, len(ids)):
                    session.decode(Batch.single(ids[i : i + 1], i))
                if turn:
                    times[name].append((middle - started, time.perf_counter() - middle))
    prompts, tokens = (
        statistics.median(m[i] / s[i] for m, s in zip(times["mapped"], times["slots"], strict=True)) for i in (0, 1)
    )
    return f"All in RAM, {n_turns} turns: --expert-ram is {prompts:.3f} of mapped for prompts, {tokens:.3f} for tokens."


def main(argv: list[str]) -> int:
    """Run everything and print the tables; progress and notes go to stderr."""
    a = parse_arguments(argv)
    if not a.model.exists():
        make_model(a.model, a.layers)
    size = a.model.stat().st_size
    root = a.cgroup or next((g for g in GROUPS if (g / "cgroup.procs").exists()), GROUPS[-1])
    options = ["-m", str(a.model.resolve()), "-c", str(a.ctx_size), "-ub", str(a.ubatch_size), "-t", str(a.threads)]
    options += ["-n", str(a.n), "-fa", "on", *a.extra]
    before = bandwidth(a.model)
    chosen, shares = variants(a.ik, a.reference, a.only), [float(s) for s in a.shares.split(",")]
    results: dict[tuple[float, str], Result] = defaultdict(Result)
    end = time.perf_counter() + 60 * a.minutes if a.minutes else float("inf")
    for turn, share, v in itertools.product(range(a.repetitions), shares, chosen):
        result, first = results[share, v.name], results[share, chosen[0].name]
        if result.runs and (time.perf_counter() > end or (result.stopped and not result.pp)):
            continue
        print(f"{share:g} of {a.model.name}: {v.name}, turn {turn + 1}", file=sys.stderr, flush=True)
        drop_from_cache(a.model)
        limit = int(share * size)
        ram = max((limit or 2 * size) // MIB - a.own, 1)
        with memory_group(root, limit) as group:
            run_once([w.format(ram=ram) for w in v.command] + options, group, a.timeout, result)
        print(result.cells(first), *result.notes, sep="\n  ", file=sys.stderr)
    after = bandwidth(a.model)
    print(f"\n{a.model.name}, {size / MIB:.0f} MiB; disk {before / 1e6:.0f} MB/s before, {after / 1e6:.0f} after\n")
    print(
        "| limit | variant | runs | PP t/s | ratio | TG t/s | ratio | MB/s |\n|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for share, v in itertools.product(shares, chosen):
        result, limit = results[share, v.name], f"{share * size / MIB:.0f} MiB" if share else "none"
        cells = [limit, v.name, str(result.runs), *result.cells(results[share, chosen[0].name])]
        print("| " + " | ".join(cells) + " |")
    if a.resident is not None:
        if not a.resident.exists():
            make_model(a.resident, 4)
        print("\n" + resident(a.resident, a))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
