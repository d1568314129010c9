"""Headers read piece by piece: enough and not much more, vocabularies shared, hostile counts bounded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hub_models import N_TOKENS, model_bytes

from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.hub import headers
from ikcli.hub.headers import fetch_header, shared_arrays


class Remote:
    """A file behind a network; counts what is read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, list[tuple[int, int]]()

    def read(self, start: int, stop: int) -> bytes:
        self.reads.append((start, stop))
        return self.data[start:stop]

    @property
    def n_read(self) -> int:
        return sum(min(stop, len(self.data)) - start for start, stop in self.reads)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / "first.gguf"
    fetch_header(Remote(model_bytes()).read, len(model_bytes()), path)
    return path


def test_a_header_is_read_in_growing_pieces(tmp_path: Path) -> None:
    remote = Remote(model_bytes())
    file = fetch_header(remote.read, len(remote.data), tmp_path / "h.gguf")
    (tmp_path / "whole.gguf").write_bytes(remote.data)
    whole = open_gguf(tmp_path / "whole.gguf")
    assert file.tensors == whole.tensors
    assert list(file.metadata["tokenizer.ggml.tokens"]) == list(whole.metadata["tokenizer.ggml.tokens"])
    sizes = [stop - start for start, stop in remote.reads]
    assert sizes[0] == headers._FIRST and len(sizes) > 1
    assert [start for start, _ in remote.reads] == [sum(sizes[:i]) for i in range(len(sizes))]  # nothing twice


def test_shared_arrays_are_not_read_again(header: Path, tmp_path: Path) -> None:
    shared = shared_arrays(header)
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"} == set(shared)
    other = model_bytes(GGMLType.Q8_0, "another name")
    remote = Remote(other)
    file = fetch_header(remote.read, len(other), tmp_path / "h.gguf", shared)
    (tmp_path / "whole.gguf").write_bytes(other)
    whole = open_gguf(tmp_path / "whole.gguf")
    assert file.tensors == whole.tensors and file.metadata["general.name"] == "another name"
    assert file.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == whole.metadata["tokenizer.ggml.scores"].tolist()
    assert remote.n_read < len(shared["tokenizer.ggml.tokens"]), "the vocabulary was read again"


def test_another_vocabulary_is_read_as_a_whole(header: Path, tmp_path: Path) -> None:
    """Because it begins otherwise, or because the sizes do not come out."""
    shared = shared_arrays(header)
    other = model_bytes(GGMLType.Q8_0).replace(b"token number 0", b"TOKEN number 0", 1)
    remote = Remote(other)
    file = fetch_header(remote.read, len(other), tmp_path / "h.gguf", shared)
    assert file.metadata["tokenizer.ggml.tokens"][0] == "TOKEN number 0"
    longer = model_bytes(GGMLType.Q8_0)
    at = longer.index(b"token number 39999")
    longer = longer[: at - 8] + struct.pack("<Q", 20) + b"token number 39999XY" + longer[at + 18 :]
    file = fetch_header(Remote(longer).read, len(longer), tmp_path / "h2.gguf", shared)
    assert file.metadata["tokenizer.ggml.tokens"][-1] == "token number 39999XY"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == N_TOKENS


def test_what_is_no_gguf_is_refused_at_once(tmp_path: Path) -> None:
    remote = Remote(b"<!doctype html>" + bytes(1 << 20))
    with pytest.raises(FormatError, match="not a GGUF file"):
        fetch_header(remote.read, 1 << 40, tmp_path / "h.gguf")
    assert len(remote.reads) == 1


def test_a_hostile_count_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER", 4 << 20)
    remote = Remote(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(64 << 20))
    with pytest.raises(FormatError, match="more than fit"):
        fetch_header(remote.read, len(remote.data), tmp_path / "h.gguf")
    assert remote.n_read == 4 << 20


def test_a_header_that_never_ends(tmp_path: Path) -> None:
    data = model_bytes()[:300_000]  # the file itself is cut off
    with pytest.raises(FormatError, match=r"truncated|more than fit"):
        fetch_header(Remote(data).read, len(data), tmp_path / "h.gguf")
    with pytest.raises(FormatError, match=r"truncated|more than fit"):
        fetch_header(Remote(data).read, len(data) * 100, tmp_path / "h.gguf")  # the server gives less than it said
