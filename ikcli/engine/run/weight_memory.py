"""Memory for weights that are read instead of mapped: one region in huge pages, filled by several threads.

Transparent huge pages are requested by default, since weights are read from end to end for every token and walks
through page tables cost bandwidth. `--hugetlb` takes pages that the administrator reserved. The bytes
come from the file by read calls: mapped pages would count a second time while they are copied.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.backends.memory import aligned_zeros
from ikcli.engine.run import numa
from ikcli.errors import IkError
from ikcli.gguf.reader import GGUFFile

Bytes = npt.NDArray[np.uint8]

HUGE = 2 << 20  # bytes of a transparent huge page on x86 and most ARM64 kernels
SIZES = {"2M": 2 << 20, "1G": 1 << 30}
_RESERVED = Path("/sys/kernel/mm/hugepages")
_MAP_HUGETLB, _SIZE_SHIFT = 0x40000, 26  # of Linux
_ALIGN = 64
_PIECE = 8 << 20  # bytes that a thread reads at a time


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of weights in RAM: transparent huge pages, or reserved ones of `hugetlb` bytes (0: none)."""

    huge: bool = True
    hugetlb: int = 0


TRANSPARENT = Pages()


def reserve(n_bytes: int, pages: Pages) -> Bytes:
    """Return zeroed memory that starts on a page of the wanted kind; MemoryError, or IkError without reserved pages."""
    if pages.hugetlb:
        return _reserved(n_bytes, pages.hugetlb)
    if sys.platform != "linux" or n_bytes < HUGE:
        return aligned_zeros(n_bytes)
    try:
        memory = mmap.mmap(-1, n_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    advice = getattr(mmap, "MADV_HUGEPAGE" if pages.huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(advice)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + n_bytes]


def _reserved(n_bytes: int, size: int) -> Bytes:
    name = next(text for text, n in SIZES.items() if n == size)
    if sys.platform != "linux":
        raise IkError(f"--hugetlb {name}: only Linux reserves huge pages")
    wanted = -(-n_bytes // size)
    folder = _RESERVED / f"hugepages-{size >> 10}kB"
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | (size.bit_length() - 1) << _SIZE_SHIFT
    try:
        return np.frombuffer(mmap.mmap(-1, max(wanted, 1) * size, flags=flags), np.uint8)[:n_bytes]
    except OSError:
        free = _free_pages(folder)
        has = f"{free} are free" if free is not None else "this system has none of this size"
        raise IkError(
            f"--hugetlb {name}: the weights need {wanted} pages, {has}; reserve them with "
            f"echo {wanted} > {folder}/nr_hugepages, or run without --hugetlb"
        ) from None


def _free_pages(folder: Path) -> int | None:
    try:
        return int((folder / "free_hugepages").read_text())
    except (OSError, ValueError):
        return None


def divided(
    sizes: Mapping[str, int], pages: Pages, cpus: Sequence[frozenset[int]] | None = None,
    experts: Mapping[str, int] | None = None,
) -> dict[str, Bytes]:  # fmt: skip
    """Reserve one region and divide it between tensors of these sizes; `cpus` of threads spread it over their nodes.

    Threads take rows as they get free, so no row has a node of its own: stripes load all nodes alike. `experts`: the
    number of experts of tensors whose experts have nodes.
    """
    places, end = {}, 0
    for name, n_bytes in sizes.items():
        places[name] = end
        end += -(-n_bytes // _ALIGN) * _ALIGN
    memory = reserve(end, pages)
    if cpus is not None:
        stripe = max(numa.STRIPE, pages.hugetlb)
        by_node = [(places[name], sizes[name] // n, n) for name, n in (experts or {}).items() if name in sizes]
        if by_node:
            owners = numa.stripe_owners(end, numa.copy_of_threads(cpus), by_node, stripe)
            numa.spread(memory, cpus, stripe, owners)
        else:
            numa.spread(memory, cpus, stripe)
    return {name: memory[at : at + sizes[name]] for name, at in places.items()}


def read_tensors(
    file: GGUFFile, names: Sequence[str], pages: Pages, n_threads: int, advance: Callable[[float], None],
    cpus: Sequence[frozenset[int]] | None = None, experts: Mapping[str, int] | None = None,
) -> dict[str, Bytes]:  # fmt: skip
    """Read tensors into one region; raise MemoryError or IkError if memory is short."""
    made = divided({name: file.tensors[name].n_bytes for name in names}, pages, cpus, experts)
    pieces = [(name, at) for name in names for at in range(0, file.tensors[name].n_bytes, _PIECE)]

    def read(piece: tuple[str, int]) -> int:
        name, at = piece
        out = made[name][at : at + _PIECE]
        file.read_into(name, at, out)
        return out.nbytes

    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        for n_bytes in pool.map(read, pieces):
            advance(n_bytes)
    return made
