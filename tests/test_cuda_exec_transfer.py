"""Weight rows on the way to the device: rearranged there as on the CPU, in chunks, for every type."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, as_array, emulation_only, needs_emulation

from ikcli.backends.cuda import transfer, upload
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight
from ikcli.quant.formats import get_format, row_size

pytestmark = needs_emulation
STORED = [t.type for t in TYPES.values() if t.cuda or (t.base is not None and TYPES[t.base].cuda)]


def sent(w: Weight, data: np.ndarray, largest: int, pin: bool = False) -> np.ndarray:
    """What lies on the device afterwards."""
    device = EmulatedDevice()
    memory = device.alloc(upload.device_bytes(w), "weights")
    way = transfer.Transfer(device, [w], largest)
    if pin:
        way.pin([data[:100], data])
        ((start, stop),) = device.registered.items()
        assert data.ctypes.data <= start < stop <= data.ctypes.data + data.nbytes, "no page that others have a part of"
    way.send(w, data, memory.address)
    way.close()
    assert not device.registered
    found = as_array(memory.address, memory.n_bytes).copy()
    device.close()
    return found


@pytest.mark.parametrize("type_", STORED, ids=lambda t: get_format(t).name)
def test_rows_are_rearranged_as_on_the_cpu(type_, rng) -> None:
    """Plain and interleaved; of two experts, whose groups follow each other."""
    n = 3 * get_format(type_).rows
    w = Weight("w", type_, (512, n, 2))
    data = rng.integers(0, 256, 2 * n * row_size(type_, 512), dtype=np.uint8)
    if TYPES[type_].row_meta_size == 4:  # scales that are finite
        heads = data.reshape(-1, get_format(type_).rows * row_size(type_, 512))[:, : 4 * get_format(type_).rows]
        heads[:] = np.arange(1, heads.size // 4 + 1, dtype=np.float32).view(np.uint8).reshape(heads.shape)
    wanted = np.zeros(upload.device_bytes(w), np.uint8)
    upload.convert(data, w, wanted)
    np.testing.assert_array_equal(sent(w, data, len(wanted)), wanted)


@pytest.mark.parametrize("name", ["Q4_K", "Q4_K_R4", "F32", "IQ4_KS"])
def test_chunks(name, rng) -> None:
    """Buffers for few rows at a time; a group of interleaved rows is never cut."""
    type_ = GGMLType[name]
    w = Weight("w", type_, (256, 16))
    data = rng.integers(0, 256, 16 * row_size(type_, 256), dtype=np.uint8)
    wanted = np.zeros(upload.device_bytes(w), np.uint8)
    upload.convert(data, w, wanted)
    rows = 4 if name.endswith("_R4") else 3
    largest = rows * max(row_size(type_, 256), upload.device_row_bytes(type_, 256)) + 5
    np.testing.assert_array_equal(sent(w, data, largest), wanted)


@emulation_only
@pytest.mark.parametrize("name", ["Q4_K", "Q4_K_R4"])
def test_pinned_memory_is_read_where_it_is(name, rng, monkeypatch) -> None:
    """No buffer is used; the ends of an array beside whole pages are copied on their own."""
    type_ = GGMLType[name]
    w = Weight("w", type_, (256, 96))
    data = rng.integers(0, 256, 96 * row_size(type_, 256), dtype=np.uint8)
    wanted = np.zeros(upload.device_bytes(w), np.uint8)
    upload.convert(data, w, wanted)
    used: list[int] = []
    buffer = transfer.Transfer._buffer
    monkeypatch.setattr(transfer.Transfer, "_buffer", lambda self, n: [used.append(n), buffer(self, n)][1])
    np.testing.assert_array_equal(sent(w, data, 4000, pin=True), wanted)
    assert not used


@emulation_only
@pytest.mark.parametrize(("pages", "allowed"), [(3, False), (7, False), (8, True), (9, True)])
def test_no_more_than_half_of_the_memory_is_pinned(pages, allowed, monkeypatch) -> None:
    """Of two arrays together."""
    device, page = EmulatedDevice(), transfer.mmap.PAGESIZE
    way, memory = transfer.Transfer(device, [Weight("w", GGMLType.F32, (250,))]), np.zeros(7 * page, np.uint8)
    start = -memory.ctypes.data % page  # of the first whole page
    monkeypatch.setattr(transfer.os, "sysconf", lambda name: pages)
    way.pin([memory[start : start + 2 * page], memory[start + 3 * page : start + 5 * page]])
    assert sum(end - at for at, end in device.registered.items()) == (4 * page if allowed else 0)
    way.close()
    assert not device.registered
