"""Move weights that are mapped from a file into huge pages, beside the first steps or at once.

Mapping a file costs no time, and its pages are small unless the page cache happens to hold the file in large ones.
Reading weights through small pages can lose a part of the bandwidth. So a run starts with mapped weights, and when it
has generated for a while, a thread of low priority either lets the kernel collapse the mapped pages (MADV_COLLAPSE) or,
where the file system does not support this, copies the weights into anonymous huge pages. Between two steps the
programs are bound to the copies. Results are the same bits.

Copies are made only if RAM is plentiful, that is, if the weights are at most half of what is available, and beside the
steps only if they pay: a sample is copied first and read in turns with its source. On many machines both are read at
the same speed.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.model import Model
from ikcli.engine.run.system_memory import COLLAPSE, HUGE_PAGE, Range, advise, inner_pages, outer_pages
from ikcli.engine.run.weight_memory import TRANSPARENT, reserve
from ikcli.hostinfo import available_memory
from ikcli.log import log

if TYPE_CHECKING:
    from ikcli.engine.run.runner import Runner

Bytes = npt.NDArray[np.uint8]

SHARE = 2  # the weights may take this part of the available memory
PAYS_AFTER = 64  # reads of all weights, after which copying them is worth its time
GAIN = 1.03  # how much faster copies must be read than mapped pages
_SAMPLE, _TURNS = 256 << 20, 12  # bytes that are copied and read to find the gain, and how often
_NICE = 10
_PIECE = 4 << 20
_COLLAPSE_PIECE = 64 << 20
_ENOUGH = 0.9  # of the weights in huge pages: nothing left to gain
_SMAPS = Path("/proc/self/smaps")
_VMA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def plentiful(n_bytes: int) -> bool:
    """Return whether copies of this size leave at least as much memory as they take, in this system and its cgroups."""
    free = available_memory()
    return free is not None and SHARE * n_bytes <= free


def gain(mapped: Sequence[Bytes], copies: Sequence[Bytes], stopped: Callable[[], bool], turns: int = _TURNS) -> float:
    """Return how much faster copies are read than mapped bytes: the shortest times of several turns count.

    It is 0 if it was stopped before.
    """
    shortest = [float("inf"), float("inf")]
    for _ in range(turns):
        if stopped():
            return 0.0
        for i, arrays in enumerate((mapped, copies)):
            start = time.perf_counter()
            for a in arrays:
                np.add.reduce(a[: a.size & -8].view(np.uint64))
            shortest[i] = min(shortest[i], time.perf_counter() - start)
    return shortest[0] / max(shortest[1], 1e-9)


def share_in_huge_pages(ranges: Sequence[Range], smaps: Path = _SMAPS) -> float:
    """Return the part of the present bytes of mapped files around these ranges that are in huge pages."""
    present = huge = 0
    inside = False
    try:
        with smaps.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                found = _VMA.match(line)
                if found:
                    low, high = int(found[1], 16), int(found[2], 16)
                    inside = any(low <= address < high for address, _ in ranges)
                elif inside and line.startswith("Rss:"):
                    present += int(line.split()[1])
                elif inside and line.startswith(("FilePmdMapped:", "ShmemPmdMapped:")):
                    huge += int(line.split()[1])
    except OSError:
        return 0.0
    return huge / present if present else 0.0


class HugeWeights:
    """Weights of a model on their way into huge pages; `step` is called before every step of generation."""

    def __init__(self, model: Model, runner: Runner) -> None:
        """Choose the weights that are read as a whole; tables of embeddings are not, unless one is the output too."""
        addresses = runner.host_weights
        mapped = model.mapped(addresses)
        by_row = {"per_layer_token_embd.weight"} | ({"token_embd.weight"} if "output.weight" in addresses else set())
        whole = [n for n in mapped if n not in by_row]
        self._model, self._runner, self._names = model, runner, whole
        self._ranges = [(addresses[n], model.n_bytes([n])) for n in whole]
        self.n_bytes = sum(n for _, n in self._ranges)
        self._left = self._steps()
        self._thread: threading.Thread | None = None
        self._made: dict[str, Bytes] = {}
        self._stop = False
        self.outcome = ""  # a sentence, when it is done

    def _steps(self) -> int:
        """Return the steps of generation after which copies pay; of experts a step reads only the chosen ones."""
        hp = self._model.hp
        read = sum(
            self._model.n_bytes([n]) * (hp.n_expert_used / hp.n_expert if "_exps." in n and hp.n_expert else 1)
            for n in self._names
        )
        return int(PAYS_AFTER * self.n_bytes / read) if read else 0

    def request(self) -> None:
        """Ask for huge pages when pages of the file are read from now on; this costs nothing."""
        for memory in outer_pages(self._ranges):
            advise(memory, HUGE_PAGE)

    def step(self) -> bool:
        """Count a step; return True once, when all copies are made and programs are to be bound to them."""
        if self._thread is None:
            self._left -= 1
            if self._left <= 0:
                self._thread = threading.Thread(target=self._background, name="ik-huge-pages", daemon=True)
                self._thread.start()
            return False
        return not self._thread.is_alive() and self._adopt()

    def settle(self) -> bool:
        """Do now what would be done beside later steps; return True if programs are to be bound to copies."""
        if self._thread is None:
            self._left = 0
            self.step()
        assert self._thread is not None
        self._thread.join()
        return self._adopt()

    @property
    def done(self) -> bool:
        """Return whether nothing is left to do."""
        return self._thread is not None and not self._thread.is_alive() and not self._made

    def at_once(self, n_threads: int) -> None:
        """Collapse or copy the weights before programs are bound."""
        self._work(n_threads)
        self._adopt()

    def _adopt(self) -> bool:
        made, self._made = self._made, {}
        if made:
            self._runner.move_weights(self._model.adopt(made))
        return bool(made)

    def _background(self) -> None:
        if sys.platform == "linux":  # priorities of threads; elsewhere they are those of processes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._work(1, must_pay=True)

    def _work(self, n_threads: int, *, must_pay: bool = False) -> None:
        size = f"{self.n_bytes / 2**20:.0f} MiB of mapped weights"
        if share_in_huge_pages(self._ranges) >= _ENOUGH:
            self.outcome = f"the page cache holds the {size} in huge pages"
        elif self._collapse_all():
            self.outcome = f"the pages of {size} were collapsed into huge ones"
        elif not plentiful(self.n_bytes):
            self.outcome = (
                f"the {size} keep small pages: the file system cannot change them, and copies would take more than "
                f"1/{SHARE} of the available memory"
            )
        else:
            found = self._copy_all(n_threads, must_pay)
            if found is None:
                self.outcome = f"the {size} were copied into huge pages"
            else:
                self.outcome = f"the {size} stay where the file is mapped: copies are read {found:.2f} times as fast"

    def _collapse_all(self) -> bool:
        """Let the kernel collapse the pages of the files; False if it refuses."""
        any_done = False
        for start, n_bytes in outer_pages(self._ranges):
            for at in range(start, start + n_bytes, _COLLAPSE_PIECE):
                pages = inner_pages((at, min(_COLLAPSE_PIECE, start + n_bytes - at)), 2 << 20)
                if self._stop or (pages is not None and not advise(pages, COLLAPSE)):
                    return False
                any_done = any_done or pages is not None
        return any_done

    def _copy_all(self, n_threads: int, must_pay: bool) -> float | None:
        """Copy the weights; with `must_pay`, return the gain of a sample and copy no more if it is too small."""
        names = list(self._names)
        copies: dict[str, Bytes] = {}
        if must_pay:
            n_bytes = 0
            while names and n_bytes < _SAMPLE:
                name = names.pop(0)
                n_bytes += self._model.n_bytes([name])
                self._copy([name], n_threads, copies)
            mapped = [self._model.file.data(name) for name in copies]
            found = gain(mapped, list(copies.values()), lambda: self._stop)
            if found < GAIN:
                return found
        self._copy(names, n_threads, copies)
        if not self._stop:
            self._made = copies
        return None

    def _copy(self, names: Sequence[str], n_threads: int, copies: dict[str, Bytes]) -> None:
        pieces = []
        for name in names:
            source = self._model.file.data(name)
            copy = copies[name] = reserve(len(source), TRANSPARENT)
            pieces += [(copy[at : at + _PIECE], source[at : at + _PIECE]) for at in range(0, len(source), _PIECE)]

        def copy_one(piece: tuple[Bytes, Bytes]) -> None:
            if not self._stop:
                np.copyto(*piece)

        if n_threads == 1:
            for piece in pieces:
                copy_one(piece)
        else:
            with ThreadPoolExecutor(n_threads) as pool:
                list(pool.map(copy_one, pieces))

    def close(self) -> None:
        """Stop the thread, wait for it, and log what it did."""
        if self.outcome:
            log(f"huge pages: {self.outcome}")
        self._stop = True
        if self._thread is not None:
            self._thread.join()
        self._made = {}
