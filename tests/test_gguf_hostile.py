"""Damaged and hostile GGUF files end in a FormatError that names the file, quickly and without big allocations."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import FormatError
from ikcli.gguf.reader import open_gguf

U64_TRAPS = (0, 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
U32_TRAPS = (0, 1, 3, 5, 8, 9, 13, 36, 142, 255, 2**31, 2**32 - 1)


def s(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str, type: int, value: bytes) -> bytes:
    return s(key) + struct.pack("<I", type) + value


def array(type: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", type, count) + items


def tensor(name: str, shape: tuple[int, ...], type: int, offset: int) -> bytes:
    return s(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type, offset)


def header(kvs: list[bytes], tensors: list[bytes], version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, len(tensors), len(kvs)) + b"".join(kvs) + b"".join(tensors)


def padded(head: bytes, data: int = 4096, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment) + bytes(data)


ARCH = kv("general.architecture", 8, s("llama"))
GOOD = padded(
    header(
        [
            ARCH,
            kv("n", 4, struct.pack("<I", 7)),
            kv("tokens", 9, array(8, 3, s("a") + s("bb") + s(b"\xff"))),
            kv("scores", 9, array(6, 3, bytes(12))),
            kv("nested", 9, array(9, 2, array(4, 1, bytes(4)) + array(8, 1, s("x")))),
        ],
        [
            tensor("a.weight", (32, 4), 8, 0),
            tensor("b.weight", (256, 2), 144, 160),
            tensor("c.weight", (8,), 0, 448),
        ],
    ),
    data=480,
)


def attempt(path: Path, raw: bytes) -> str:
    """Open `raw` as a file: "" if it loads, else the message. Whatever has been opened can be read."""
    path.unlink(missing_ok=True)  # a new inode: earlier maps stay valid
    path.write_bytes(raw)
    try:
        file = open_gguf(path)
    except FormatError as e:
        assert str(path.name) in str(e)
        assert str(e).isprintable()
        return str(e)
    for name in file.tensors:
        assert file.data(name).size == file.tensors[name].n_bytes
    return ""


def test_the_unharmed_file_loads(tmp_path: Path) -> None:
    assert attempt(tmp_path / "m.gguf", GOOD) == ""


def test_a_single_number_needs_no_dimensions(tmp_path: Path) -> None:
    """As converters write biases of one number."""
    file = tmp_path / "scalar.gguf"
    file.write_bytes(padded(header([ARCH], [tensor("t", (), 0, 0)])))
    assert open_gguf(file).tensors["t"].shape == (1,)


CASES: dict[str, tuple[bytes, str]] = {
    "magic": (padded(header([ARCH], [], magic=b"GGML")), "not a GGUF file"),
    "version 1": (padded(header([ARCH], [], version=1)), "version 1 is not supported"),
    "version 4": (padded(header([ARCH], [], version=4)), "version 4 is not supported"),
    "big endian": (padded(header([ARCH], [], version=3 << 24)), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(99), "announces 1152921504606846976 tensors"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(99), "key-value pairs, more than fit"),
    "key length": (padded(header([struct.pack("<Q", 2**50) + bytes(99)], [])), "the name of key 0 has a length"),
    "empty key": (padded(header([kv("", 4, bytes(4))], [])), "the name of key 0 has a length of 0"),
    "duplicate key": (padded(header([ARCH, ARCH], [])), r"key general\.architecture occurs twice"),
    "value type": (padded(header([kv("k", 13, bytes(8))], [])), "key k has the unknown value type 13"),
    "string length": (padded(header([kv("k", 8, struct.pack("<Q", 2**63))], [])), "in the middle of key k"),
    "array type": (padded(header([kv("k", 9, array(99, 1, bytes(8)))], [])), "key k has the unknown value type 99"),
    "array count": (padded(header([kv("k", 9, array(6, 2**61, b""))], [])), "elements of key k, more than fit"),
    "string count": (padded(header([kv("k", 9, array(8, 2**61, b""))], [])), "elements of key k, more than fit"),
    "string in array": (
        padded(header([kv("k", 9, array(8, 2, s("ok") + struct.pack("<Q", 2**64 - 1)))], [])),
        "in string 1 of key k",
    ),
    "nested count": (padded(header([kv("k", 9, array(9, 2**61, b""))], [])), "elements of key k, more than fit"),
    "nesting": (padded(header([kv("k", 9, array(9, 1, array(9, 1, b"") * 50))], [])), "nests arrays more than 4"),
    "alignment 0": (padded(header([kv("general.alignment", 4, bytes(4))], [])), r"general\.alignment is 0"),
    "alignment 24": (padded(header([kv("general.alignment", 4, b"\x18\0\0\0")], [])), r"general\.alignment is 24"),
    "alignment -32": (padded(header([kv("general.alignment", 5, b"\xe0\xff\xff\xff")], [])), r"alignment is -32"),
    "alignment text": (padded(header([kv("general.alignment", 8, s("32"))], [])), r"general\.alignment is '32'"),
    "5 dimensions": (padded(header([], [tensor("t", (1,) * 5, 0, 0)])), "tensor t has 5 dimensions"),
    "2^31 dimensions": (
        padded(header([], [s("t") + struct.pack("<I", 2**31) + bytes(64)])),
        "tensor t has 2147483648 dimensions",
    ),
    "zero dimension": (
        padded(header([], [tensor("t", (32, 0), 0, 0)])),
        r"tensor t has the impossible shape \[32, 0\]",
    ),
    "overflow": (padded(header([], [tensor("t", (2**32, 2**32), 0, 0)])), "impossible shape"),
    "wraps to small": (padded(header([], [tensor("t", (2**63, 2, 4), 0, 0)])), "impossible shape"),
    "unknown type": (padded(header([], [tensor("t", (32,), 142, 0)])), "tensor t has the unknown type id 142"),
    "row length": (padded(header([], [tensor("t", (100,), 144, 0)])), "rows of 100 elements, not a multiple of 256"),
    "offset": (padded(header([], [tensor("t", (32,), 0, 16)])), "at offset 16, which is not aligned to 32"),
    "past the end": (padded(header([], [tensor("t", (32,), 0, 4096)])), "but the file ends at"),
    "huge offset": (padded(header([], [tensor("t", (32,), 0, 2**64 - 32)])), "but the file ends at"),
    "huge tensor": (padded(header([], [tensor("t", (2**40,), 0, 0)])), "but the file ends at"),
    "overlap": (
        padded(header([], [tensor("x", (32,), 0, 0), tensor("y", (32,), 0, 96)])),
        "the data of tensor y overlaps that of tensor x",
    ),
    "same place": (
        padded(header([], [tensor("x", (8,), 0, 64), tensor("y", (8,), 0, 64)])),
        "the data of tensor y overlaps that of tensor x",
    ),
    "duplicate tensor": (
        padded(header([], [tensor("x", (8,), 0, 0), tensor("x", (8,), 0, 32)])),
        "tensor x occurs twice",
    ),
    "long name": (padded(header([], [tensor("t" * 70000, (8,), 0, 0)])), "the name of tensor 0 has a length of 70000"),
    "split count type": (padded(header([kv("split.count", 8, s("2"))], [])), r"key split\.count must be"),
    "split count size": (padded(header([kv("split.count", 4, b"\xff\xff\xff\x7f")], [])), "not believable"),
}


@pytest.mark.parametrize("case", CASES)
def test_specific_damage(tmp_path: Path, case: str) -> None:
    raw, problem = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=problem) as e:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(e.value)
    assert peak < 1 << 20


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    raw = padded(header([], [s(b"\x1b[31m\xff\n") + struct.pack("<I", 9) + bytes(40)]))
    assert r"\x1b[31m\udcff\n" in attempt(tmp_path / "m.gguf", raw)


def test_every_truncation_of_the_header(tmp_path: Path) -> None:
    for n in range(1, len(GOOD)):
        assert attempt(tmp_path / "m.gguf", GOOD[:n]), n


def flip_bits(raw: bytearray, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(1, 4))):
        raw[int(rng.integers(4, len(raw) - 480))] ^= 1 << int(rng.integers(8))


def plant_u64(raw: bytearray, rng: np.random.Generator) -> None:
    struct.pack_into("<Q", raw, int(rng.integers(4, len(raw) - 488)), U64_TRAPS[int(rng.integers(len(U64_TRAPS)))])


def plant_u32(raw: bytearray, rng: np.random.Generator) -> None:
    struct.pack_into("<I", raw, int(rng.integers(4, len(raw) - 484)), U32_TRAPS[int(rng.integers(len(U32_TRAPS)))])


def cut_out(raw: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(8, len(raw) - 480))
    del raw[start : start + int(rng.integers(1, 40))]


def repeat_part(raw: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(24, len(raw) - 480))
    raw[start:start] = raw[start : start + int(rng.integers(1, 60))]


def noise(raw: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(8, len(raw) - 480))
    raw[start : start + 16] = rng.bytes(16)


MUTATIONS: tuple[Callable[[bytearray, np.random.Generator], None], ...] = (
    flip_bits,
    plant_u64,
    plant_u32,
    cut_out,
    repeat_part,
    noise,
)


def mutate_and_open(tmp_path: Path, seeds: range) -> tuple[int, int]:
    """Number of mutated files that load and that are refused; anything but a FormatError propagates."""
    outcome = [0, 0]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        raw = bytearray(GOOD)
        for _ in range(int(rng.integers(1, 3))):
            MUTATIONS[int(rng.integers(len(MUTATIONS)))](raw, rng)
        outcome[bool(attempt(tmp_path / "m.gguf", bytes(raw)))] += 1
    return outcome[0], outcome[1]


def test_mutated_files(tmp_path: Path) -> None:
    loaded, refused = mutate_and_open(tmp_path, range(400))
    assert refused > 200  # most mutations hit something that matters
    assert loaded > 5  # and the mutations are not all fatal, so the checks behind them were reached


@pytest.mark.slow
def test_many_mutated_files(tmp_path: Path) -> None:
    loaded, refused = mutate_and_open(tmp_path, range(1000, 21000))
    assert loaded + refused == 20000
