"""Sums over a part of the text, which add up to an importance matrix.

The matrix of a text is the sum over groups of chunks, added in the order of the text no matter where they were
computed. One process and many machines therefore give the same bits.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry

F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class StreamSums:
    """One input that the weights `names` read: `sums` of squares (n_mat, ne0), `counts` of rows (n_mat,)."""

    names: tuple[str, ...]
    sums: F64
    counts: F64
    experts: bool = False


@dataclass(slots=True)
class Sums:
    """The sums of all inputs, in the order of the graph; `similarity` as in `LayerSimilarity.sums`."""

    streams: list[StreamSums] = field(default_factory=list)
    similarity: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        """Add the sums of the next part of the text; `more` must not be used afterwards."""
        if not self.streams:
            self.streams, self.similarity = other.streams, other.similarity
            return
        for mine, more in zip(self.streams, other.streams, strict=True):
            if mine.names != more.names:
                raise FormatError(f"sums of other weights: {more.names[0]} instead of {mine.names[0]}")
            mine.sums += more.sums
            mine.counts += more.counts
        for key, (total, n) in other.similarity.items():
            before = self.similarity.get(key, (0.0, 0))
            self.similarity[key] = before[0] + total, before[1] + n

    def imatrix(self, n_chunks: int, chunk_size: int, datasets: tuple[str, ...] = ()) -> Imatrix:
        """Return the matrix with counts in rows; weights without any data are left out."""
        out = Imatrix(datasets=datasets, n_chunks=n_chunks, chunk_size=chunk_size)
        for s in self.streams:
            if s.counts.any():
                entry = ImatrixEntry(s.sums.astype(np.float32), s.counts.astype(np.float32))
                out.entries.update(dict.fromkeys(s.names, entry))
        out.entries = dict(sorted(out.entries.items(), key=lambda item: _order(item[0])))
        return out

    def unseen_experts(self) -> dict[str, list[int]]:
        """Return, by weight, the experts that no token chose, if there are any."""
        return {
            name: np.flatnonzero(s.counts == 0).tolist()
            for s in self.streams
            if s.experts and not s.counts.all()
            for name in s.names
        }

    def to_bytes(self) -> bytes:
        """Serialize without loss, to send and to store."""
        head = {
            "streams": [[s.names, s.sums.shape, s.experts] for s in self.streams],
            "similarity": [[*key, *value] for key, value in self.similarity.items()],
        }
        text = json.dumps(head).encode()
        arrays = (a for s in self.streams for a in (s.sums, s.counts))
        return b"".join([struct.pack("<Q", len(text)), text, *(a.astype("<f8", copy=False).tobytes() for a in arrays)])

    @staticmethod
    def from_bytes(data: bytes) -> Sums:
        """Restore the result of `to_bytes`."""
        (n_head,) = struct.unpack_from("<Q", data)
        head, at = json.loads(data[8 : 8 + n_head]), 8 + n_head
        out = Sums(similarity={(kind, il): (total, n) for kind, il, total, n in head["similarity"]})
        for names, (n_mat, ne0), experts in head["streams"]:
            sums = np.frombuffer(data, "<f8", n_mat * ne0, at).reshape(n_mat, ne0).astype(np.float64)
            at += sums.nbytes
            counts = np.frombuffer(data, "<f8", n_mat, at).astype(np.float64)
            at += counts.nbytes
            out.streams.append(StreamSums(tuple(names), sums, counts, experts))
        return out


def _order(name: str) -> tuple[int, str]:
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return (int(block) if block.isdigit() else 1 << 30), name
