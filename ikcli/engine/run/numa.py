"""`--numa` and `--cpu-range`: choose the CPUs of each thread, and touch memory first on the node that uses it.

Linux places a page on the node of the thread that first touches it. Nodes are read from /sys/devices/system/node. With
a single node, or without that folder, nothing is pinned and nothing is touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.errors import UsageError
from ikcli.hostinfo import parse_cpulist, visible_cpus
from ikcli.settings.run import RunConfig

_NODE_ROOT = Path("/sys/devices/system/node")
_BALANCING = Path("/proc/sys/kernel/numa_balancing")
_STAT = Path("/proc/self/stat")
_PROCESSOR_FIELD = 36  # of /proc/self/stat, counted after the name in parentheses
STRIPE = 2**21  # bytes that one thread touches at a time

Bytes = npt.NDArray[np.uint8]
Cpus = frozenset[int]


def read_nodes(root: Path = _NODE_ROOT) -> dict[int, Cpus]:
    """Return the CPUs of each node.

    Nodes without CPUs (memory only) are left out. The result is empty where the system does not report nodes.
    """
    nodes: dict[int, Cpus] = {}
    for path in root.glob("node[0-9]*") if root.is_dir() else ():
        if re.fullmatch(r"node\d+", path.name):
            try:
                cpus = parse_cpulist((path / "cpulist").read_text())
            except (OSError, ValueError):
                continue
            if cpus:
                nodes[int(path.name[4:])] = cpus
    return dict(sorted(nodes.items()))


def current_cpu(stat: Path = _STAT) -> int | None:
    """Return the CPU this process last ran on."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[_PROCESSOR_FIELD])
    except (OSError, ValueError, IndexError):
        return None


def thread_cpus(
    mode: str, n_threads: int, nodes: Mapping[int, Cpus], allowed: Iterable[int], here: int | None
) -> list[Cpus] | None:
    """Return the CPUs of each thread, or None to pin nothing.

    distribute, mirror: threads alternate between the nodes; isolate: all on the node of CPU `here`; numactl: as set for
    the process. Only CPUs in `allowed` are used, and nodes without any do not count.
    """
    visible = frozenset(allowed)
    usable = [cpus & visible for cpus in nodes.values() if cpus & visible]
    if mode == "numactl" or len(usable) < 2:
        return None
    if mode in ("distribute", "mirror"):
        return [usable[i % len(usable)] for i in range(n_threads)]
    home = next((cpus for cpus in usable if here in cpus), usable[0])
    return [home] * n_threads


def plan_threads(config: RunConfig, n_threads: int) -> tuple[list[Cpus] | None, list[str]]:
    """Return the CPUs of each thread on this machine (None to pin nothing), and notices for the user."""
    mode, asked, strict = config.numa, config.cpus, config.cpu_strict
    if mode is None and not asked and not strict:
        return None, []
    if not hasattr(os, "sched_setaffinity"):
        name = "--cpu-range" if mode is None else f"--numa {mode}"
        return None, [f"{name} has no effect: this system does not let programs choose CPUs"]
    allowed = frozenset(visible_cpus())
    if asked and not asked & allowed:
        few = ", ".join(map(str, sorted(asked)[:8]))
        raise UsageError(f"--cpu-mask and --cpu-range: none of the CPUs {few} may be used by this process")
    allowed = asked & allowed or allowed
    cpus, warnings = (None, []) if mode is None else _by_node(mode, n_threads, allowed)
    if cpus is None and (asked or strict):
        cpus = [allowed] * n_threads
    return (_one_each(cpus) if strict and cpus else cpus), warnings


def copy_of_threads(cpus: Sequence[Cpus]) -> list[int]:
    """Return which copy of mirrored weights each thread reads: that of its node, counted in the order of threads."""
    nodes = list(read_nodes().values())
    numbers: dict[int, int] = {}
    return [numbers.setdefault(next(i for i, n in enumerate(nodes) if own <= n), len(numbers)) for own in cpus]


def home_of_weights(config: RunConfig, cpus: Sequence[Cpus] | None) -> Sequence[Cpus] | None:
    """Return the CPUs of the threads over whose nodes weights are spread when they are read.

    The first copy of mirrored weights is for the node of the first thread.
    """
    if config.numa != "mirror" or cpus is None:
        return cpus
    return [own for own, copy in zip(cpus, copy_of_threads(cpus), strict=True) if copy == 0]


def _one_each(cpus: Sequence[Cpus]) -> list[Cpus]:
    """Choose one CPU for every thread from its set; each is used once before any is used twice."""
    used: Counter[int] = Counter()
    chosen = []
    for own in cpus:
        best = min(sorted(own), key=lambda cpu: used[cpu])
        used[best] += 1
        chosen.append(frozenset((best,)))
    return chosen


def _by_node(mode: str, n_threads: int, allowed: Cpus) -> tuple[list[Cpus] | None, list[str]]:
    nodes = read_nodes()
    warnings = []
    if mode == "mirror" and (n_threads < 2 or sum(bool(cpus & allowed) for cpus in nodes.values()) < 2):
        why = "one thread" if n_threads < 2 else "CPUs of one NUMA node"
        raise UsageError(f"--numa mirror copies the weights to several nodes, and this run has {why}; leave it out")
    if len(nodes) < 2 and mode != "numactl":
        warnings.append(f"--numa {mode} has no effect: this machine has one node")
    elif _balancing():
        warnings.append("the kernel moves memory between nodes by itself, which may be slow; "
                        "off: echo 0 > /proc/sys/kernel/numa_balancing")  # fmt: skip
    return thread_cpus(mode, n_threads, nodes, allowed, current_cpu()), warnings


def _balancing(path: Path = _BALANCING) -> bool:
    try:
        return path.read_text().strip() not in ("", "0")
    except OSError:
        return False


def placement_line(cpus: Sequence[Cpus], n_bytes: int) -> str:
    """Return a log line on the nodes of threads and memory; `n_bytes` of weights are in stripes of our own memory."""
    counts = Counter(node for own in cpus for node, all_of_it in read_nodes().items() if own <= all_of_it)
    threads = ", ".join(f"{n} on node {node}" for node, n in sorted(counts.items()))
    weights = f", {n_bytes / 2**20:.0f} MiB of weights" if n_bytes else ""
    return f"numa: threads: {threads}; cache, buffers{weights}: in stripes of {STRIPE >> 20} MiB on their nodes"


def stripes(n_bytes: int, n_threads: int, stripe: int = STRIPE) -> list[range]:
    """Return the first bytes of the stripes of memory that each thread touches first: they alternate."""
    return [range(ith * stripe, n_bytes, n_threads * stripe) for ith in range(n_threads)]


def touch(buffers: Sequence[Bytes], cpus: Sequence[Cpus]) -> None:
    """Write zeros to every buffer: stripes of 2 MiB, in turn by a thread per entry of `cpus`, each on its CPUs."""

    def work(ith: int) -> None:
        for buffer in buffers:
            address = buffer.ctypes.data
            for start in stripes(buffer.nbytes, len(cpus))[ith]:
                ctypes.memset(address + start, 0, min(STRIPE, buffer.nbytes - start))

    on_each(cpus, work)


def expert_parts(n_expert: int, n_nodes: int) -> list[range]:
    """Return the experts in the memory of each node; kernels divide them alike (`_by_expert` in kernels/matmul.py)."""
    return [range(n_expert * i // n_nodes, n_expert * (i + 1) // n_nodes) for i in range(n_nodes)]


def stripe_owners(
    n_bytes: int, nodes: Sequence[int], experts: Iterable[tuple[int, int, int]], stripe: int = STRIPE
) -> npt.NDArray[np.int64]:
    """Return the thread that touches each stripe first; `nodes`: of each thread.

    Threads alternate, except where experts are, each tensor as (first byte, bytes of an expert, experts): there, those
    of the node to which most of the stripe's experts belong.
    """
    owner = np.arange(-(-n_bytes // stripe)) % len(nodes)
    threads = [np.flatnonzero(np.array(nodes) == node) for node in range(max(nodes) + 1)]
    for at, size, n_expert in experts:
        for own, part in zip(threads, expert_parts(n_expert, len(threads)), strict=True):
            first, stop = ((at + size * e + stripe // 2) // stripe for e in (part.start, part.stop))
            owner[first:stop] = own[np.arange(stop - first) % len(own)]
    return owner


def spread(
    memory: Bytes, cpus: Sequence[Cpus], stripe: int = STRIPE, owners: npt.NDArray[np.int64] | None = None
) -> None:
    """Place fresh memory, which is zero: stripes in turn by a thread per entry of `cpus`, which touches every page.

    `stripe` must be at least the size of a page. `owners`: the thread of each stripe. Memory that was used before stays
    where it is.
    """

    def work(ith: int) -> None:
        own = (int(i) * stripe for i in np.flatnonzero(owners == ith)) if owners is not None else None
        for start in own or stripes(len(memory), len(cpus), stripe)[ith]:
            memory[start : start + stripe : mmap.PAGESIZE] = 0

    on_each(cpus, work)


def on_each(cpus: Sequence[Cpus], work: Callable[[int], None]) -> None:
    """Call work(i) in a thread on the i-th CPUs, for all of them at once."""

    def run(ith: int) -> None:
        os.sched_setaffinity(0, cpus[ith])
        work(ith)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(cpus))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
