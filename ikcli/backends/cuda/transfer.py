"""Send weight rows from host memory to the device.

Rows go chunk by chunk through two pinned buffers on the host and two raw buffers on the device, which rearranges them
into their place (`kernels/upload_rows.cu`). Copies and rearranging have a stream each, so that the bus never waits for
kernels, nor for the place of the rows to become free. The stream that rearranges is urgent: its short kernels begin
before the waiting blocks of a product on another stream, instead of after all of them. `send` returns when the host's
memory has been read or is pinned: data that is sent in every step can be pinned (`pin`), and the device then reads it
in place.
"""

from __future__ import annotations

import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda import upload
from ikcli.backends.cuda.device import Device, Event, Launch, Stream
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight
from ikcli.quant.formats import get_format, row_size

Bytes = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 25
_THREADS = 4  # that fill a pinned buffer: one core copies slower than the bus
_SLICE = 1 << 22  # bytes worth a thread
_ROWS = 256  # threads of upload_rows


def rows_launch(w: Weight, source: int, target: int, n_rows: int, terms: int) -> Launch:
    """Return the launch that rearranges rows. `terms`: address of the moves of an interleaved type, else 0."""
    fmt, stored = upload.device_format(w.type, w.name), row_size(w.type, w.ne0)
    out = fmt.row_bytes(w.ne0)
    offsets = sum(offset << 12 * i for i, (offset, _) in enumerate(fmt.planes))
    sizes = sum(size << 12 * i for i, (_, size) in enumerate(fmt.planes))
    factor = TYPES[upload.device_type(w.type)].matmul_scale if fmt.scale else 1.0
    header = TYPES[w.type].row_meta_size if terms else fmt.header
    args = (source, target, n_rows, stored, out, np.int32(header), np.int32(fmt.n_bytes),
            np.int32(w.ne0 // fmt.columns), offsets, sizes, np.int32(fmt.scale), np.float32(factor))  # fmt: skip
    grid = (-(-n_rows * (out // 4) // _ROWS), 1, 1)
    if not terms:
        return Launch("upload_rows", grid, _ROWS, 0, args)
    moves = upload.group_moves(w.type)
    group = (terms, np.int32(len(moves.terms)), np.int32(moves.rows), np.int32(moves.unit))
    return Launch("upload_groups", grid, _ROWS, 0, (*args, *group))


def chunk_rows(w: Weight, chunk: int) -> int:
    """Return the rows of one chunk: whole groups, at least one."""
    group = get_format(w.type).rows
    largest = max(row_size(w.type, w.ne0), upload.device_row_bytes(w.type, w.ne0))
    return max(chunk // largest // group, 1) * group


def _interleaved(weights: Iterable[Weight]) -> list[GGMLType]:
    return sorted({w.type for w in weights if get_format(w.type).rows > 1})


def _chunk_bytes(weights: Iterable[Weight], most: int) -> int:
    return max(min(most, max(map(upload.device_bytes, weights), default=0)), 1)  # rows are not shorter on the device


class Transfer:
    """Buffers for these tensors, each no larger than the largest of them; close it when all is sent."""

    def __init__(self, device: Device, weights: Collection[Weight], chunk: int = CHUNK_BYTES) -> None:
        self._device = device
        self.stream: Stream = device.stream(urgent=True)  # rearranges rows
        self._copies: Stream = device.stream()
        self._chunk = _chunk_bytes(weights, chunk)
        self._pinned = [device.pinned(self._chunk, "upload") for _ in range(2)]
        self._copied: list[Event] = [device.event() for _ in range(2)]
        self._emptied: list[Event] = [device.event() for _ in range(2)]
        self._used = [False, False]
        self._registered: list[tuple[int, int]] = []  # addresses
        self._next = 0
        self._memory = [device.alloc(self._chunk, "compute") for _ in range(2)]
        self._raw = [memory.address for memory in self._memory]
        self._terms: dict[GGMLType, int] = {}  # addresses
        for type_ in _interleaved(weights):
            terms = upload.group_moves(type_).terms
            self._memory.append(device.alloc(terms.nbytes, "compute"))
            self._terms[type_] = self._memory[-1].address
            device.upload(self.stream, self._terms[type_], terms)
        device.synchronize(self.stream)  # the arrays may be collected now
        self._pool = ThreadPoolExecutor(_THREADS) if self._chunk > _SLICE else None
        device.prepare({"upload_rows": 0, "upload_groups": 0})

    def pin(self, arrays: Iterable[Bytes]) -> None:
        """Pin memory that stays in place until `close`, as far as allowed and at most half of the machine's.

        Only pages that lie inside an array are pinned. Drivers refuse to copy memory that is pinned in part, so the
        owner of the rest of a page could not copy data that crosses its end.
        """
        page, ends = mmap.PAGESIZE, list[tuple[int, int]]()
        for start, stop in sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays):
            if ends and start <= ends[-1][1]:
                ends[-1] = ends[-1][0], max(stop, ends[-1][1])
            else:
                ends.append((start, stop))
        pages_of_memory = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0  # nothing is pinned then
        ranges = [(-(-start // page), stop // page) for start, stop in ends]
        if 2 * sum(max(stop - start, 0) for start, stop in ranges) > pages_of_memory:
            return
        for start, stop in ranges:
            if start < stop and self._device.register(start * page, (stop - start) * page):
                self._registered.append((start * page, stop * page))

    def _pinned_ends(self, data: Bytes) -> list[int]:
        """Return where pinned memory begins and ends in an array; empty if none of it is pinned."""
        i = bisect_right(self._registered, data.ctypes.data, key=lambda r: r[1])
        if i == len(self._registered) or self._registered[i][0] >= data.ctypes.data + data.nbytes:
            return []
        return [min(max(end - data.ctypes.data, 0), data.nbytes) for end in self._registered[i]]

    def _upload_in_place(self, data: Bytes, raw: int) -> None:
        """Queue the copy of an array to a raw buffer, separately for each part that is pinned."""
        for a, b in pairwise([0, *self._pinned_ends(data), len(data)]):
            if a < b:
                self._device.upload(self._copies, raw + a, data[a:b])

    @staticmethod
    def device_bytes(weights: Collection[Weight]) -> int:
        """Return the device memory of a `Transfer` of these tensors."""
        tables = (upload.group_moves(type_).terms.nbytes for type_ in _interleaved(weights))
        return 2 * _chunk_bytes(weights, CHUNK_BYTES) + sum(tables)

    def send(self, w: Weight, data: Bytes, address: int) -> None:
        """Queue copies of a tensor's rows to `address`."""
        device, terms = self._device, self._terms.get(w.type, 0)
        stored, row = row_size(w.type, w.ne0), upload.device_row_bytes(w.type, w.ne0)
        rows = data.reshape(-1, stored)
        step = chunk_rows(w, self._chunk)
        direct = bool(self._pinned_ends(data))
        for i in range(0, len(rows), step):
            part, at = rows[i : i + step].reshape(-1), self._next
            if self._used[at]:
                device.wait(self._copies, self._emptied[at])
            if direct:
                self._upload_in_place(part, self._raw[at])
            else:
                target = self._buffer(at, len(part))
                self._copy(target, part)
                device.upload(self._copies, self._raw[at], target)
            device.record(self._copies, self._copied[at])
            device.wait(self.stream, self._copied[at])
            device.launch(self.stream, rows_launch(w, self._raw[at], address + i * row, len(part) // stored, terms))
            device.record(self.stream, self._emptied[at])
            self._used[at], self._next = True, 1 - at

    def _copy(self, target: Bytes, source: Bytes) -> None:
        n = len(source)
        if self._pool is None or n < 2 * _SLICE:
            target[:] = source
            return
        step = max(-(-n // _THREADS), _SLICE)
        parts = [(target[i : i + step], source[i : i + step]) for i in range(0, n, step)]
        list(self._pool.map(lambda pair: np.copyto(*pair), parts))

    def _buffer(self, at: int, n_bytes: int) -> Bytes:
        """Return a pinned buffer, once its last copy is over."""
        while self._used[at] and not self._device.done(self._copied[at]):
            time.sleep(0)
        return self._pinned[at].array[:n_bytes]

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        self._device.synchronize(self._copies)
        self._device.synchronize(self.stream)
        for start, _ in self._registered:
            self._device.unregister(start)
        for pinned in self._pinned:
            self._device.free_pinned(pinned)
        for event in (*self._copied, *self._emptied):
            self._device.free_event(event)
        self._device.free_stream(self._copies)
        self._device.free_stream(self.stream)
        for memory in self._memory:
            self._device.free(memory)
        if self._pool is not None:
            self._pool.shutdown()
