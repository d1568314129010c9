"""The file of --kl-divergence-base: log-probabilities of a model over chunks of a text, 16 bits each.

Little endian: `_logits_`, int32 n_ctx, n_vocab, n_chunk; int32 tokens (n_chunk, n_ctx); then per chunk n_ctx-1-n_ctx/2
rows of uint16 (4 + n_vocab rounded up to even): float32 scale, float32 minimum, then q with log p = scale*q + minimum.
Layout and rounding are those of llama.cpp's perplexity tool, so files can be exchanged.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, IkError
from ikcli.measure.protocol import FloatRows, TokenIds
from ikcli.measure.stats import for_row_blocks, log_sum_exp

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
ROW_HEAD = 4
"""uint16 values before the log-probabilities of a row: two float32."""

LOG_RANGE = np.float32(24.0)
"""Log-probabilities more than this below the best one are stored as the minimum."""

U16 = npt.NDArray[np.uint16]


def row_width(n_vocab: int) -> int:
    """Return the uint16 values per row."""
    return ROW_HEAD + 2 * ((n_vocab + 1) // 2)


def rows_per_chunk(n_ctx: int) -> int:
    """Return the number of scored positions per chunk: n_ctx/2 .. n_ctx-2."""
    return n_ctx - 1 - n_ctx // 2


def encode_rows(logits: FloatRows, n_threads: int = 1) -> U16:
    """Encode logits (n, n_vocab) as rows of the file (n, row_width)."""
    n_rows, n_vocab = logits.shape
    out = np.zeros((n_rows, row_width(n_vocab)), dtype=np.uint16)

    def work(rows: slice) -> None:
        _encode_block(logits[rows], out[rows])

    for_row_blocks(work, n_rows, n_vocab, n_threads)
    return out


def _encode_block(logits: FloatRows, out: U16) -> None:
    top, lse = log_sum_exp(logits)
    low = np.maximum(logits.min(axis=1), top - LOG_RANGE)
    scale = (top - low) / np.float32(65535.0)
    head = np.stack([scale, low - top - lse.astype(np.float32)], axis=1).astype("<f4")
    out[:, :ROW_HEAD] = head.view("<u2")
    inverse = np.divide(np.float32(1.0), scale, out=np.zeros_like(scale), where=scale > 0)
    steps = logits - low[:, None]
    np.maximum(steps, np.float32(0.0), out=steps)
    steps *= inverse[:, None]
    np.rint(steps, out=steps)
    out[:, ROW_HEAD : ROW_HEAD + logits.shape[1]] = steps


def split_rows(rows: U16, n_vocab: int) -> tuple[FloatRows, FloatRows, U16]:
    """Return the scale (n,), minimum (n,) and quantized log-probabilities (n, n_vocab) of encoded rows, as views."""
    head = np.ascontiguousarray(rows[:, :ROW_HEAD]).view("<f4")
    return head[:, 0], head[:, 1], rows[:, ROW_HEAD : ROW_HEAD + n_vocab]


class BaseWriter:
    """Writes a base file chunk by chunk under a temporary name and renames it when it is complete."""

    def __init__(self, path: Path, tokens: TokenIds, n_vocab: int, n_threads: int = 1) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._n_vocab = n_vocab
        self._n_threads = n_threads
        n_chunk, n_ctx = tokens.shape
        self._missing = n_chunk * rows_per_chunk(n_ctx)
        try:
            self._file = self._temporary.open("wb")
            self._file.write(HEADER.pack(MAGIC, n_ctx, n_vocab, n_chunk))
            self._file.write(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> IkError:
        return IkError(
            f"cannot write {self._path}: {error.strerror or error}; name a file in a writable folder with room"
        )

    def add(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        """Append the scored rows of a chunk; they must come in file order."""
        encoded = encode_rows(logits[: len(targets)], self._n_threads)
        try:
            self._file.write(encoded.astype("<u2", copy=False).data)
        except OSError as error:
            raise self._failure(error) from error
        self._missing -= len(targets)

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if kind is None:
                if self._missing:
                    raise IkError(f"{self._path} was not written: {self._missing} rows are missing")
                os.replace(self._temporary, self._path)
        except OSError as failure:
            raise self._failure(failure) from failure
        finally:
            self._temporary.unlink(missing_ok=True)


class BaseReader:
    """A base file: sizes and tokens are checked on opening, rows are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(HEADER.size)
                self.n_ctx, self.n_vocab, self.n_chunk = self._header(head)
                self._check_size(file.seek(0, os.SEEK_END))
                self.tokens = self._read_tokens()
        except OSError as error:
            raise IkError(
                f"cannot read {path}: {error.strerror or error}; name a file with --kl-divergence-base"
            ) from error

    def _bad(self, what: str) -> FormatError:
        return FormatError(f"{self.path} {what}; write it again with `perplexity --kl-divergence-base`")

    def _header(self, head: bytes) -> tuple[int, int, int]:
        if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
            raise self._bad("is not a file of log-probabilities")
        _, n_ctx, n_vocab, n_chunk = HEADER.unpack(head)
        if n_ctx < 4 or n_vocab < 1 or n_chunk < 1:
            raise self._bad(f"has impossible sizes (n_ctx {n_ctx}, n_vocab {n_vocab}, {n_chunk} chunks)")
        return n_ctx, n_vocab, n_chunk

    def _check_size(self, size: int) -> None:
        chunk_bytes = rows_per_chunk(self.n_ctx) * row_width(self.n_vocab) * 2
        self._rows_at = HEADER.size + self.n_chunk * self.n_ctx * 4
        expected = self._rows_at + self.n_chunk * chunk_bytes
        if size < expected:
            raise self._bad(f"is truncated: {size} of {expected} bytes for {self.n_chunk} chunks")
        if size > expected:
            raise self._bad(f"has {size} bytes where its header promises {expected}")

    def _read_tokens(self) -> TokenIds:
        count = self.n_chunk * self.n_ctx
        tokens = np.fromfile(self.path, dtype="<i4", count=count, offset=HEADER.size).astype(np.int32, copy=False)
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise self._bad(f"holds token ids outside its vocabulary of {self.n_vocab}")
        return tokens.reshape(self.n_chunk, self.n_ctx)

    def rows(self, chunk: int, row: int = 0, count: int | None = None) -> U16:
        """Return encoded rows row..row+count-1 of a chunk (without count: all); FormatError for NaN or infinity."""
        per_chunk, width = rows_per_chunk(self.n_ctx), row_width(self.n_vocab)
        count = per_chunk - row if count is None else count
        offset = self._rows_at + (chunk * per_chunk + row) * width * 2
        data = np.fromfile(self.path, dtype="<u2", count=count * width, offset=offset)
        if len(data) != count * width:
            raise self._bad(f"ended inside chunk {chunk + 1}")
        rows: U16 = data.astype(np.uint16, copy=False).reshape(count, width)
        scale, minimum, _ = split_rows(rows, self.n_vocab)
        if not (np.isfinite(scale).all() and np.isfinite(minimum).all() and (scale >= 0).all()):
            raise self._bad(f"has log-probabilities that are not numbers in chunk {chunk + 1}")
        return rows
