"""A session with known logits for tests: the next token depends on the present one only, through a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch
from ikcli.errors import NonFiniteError


@dataclass(frozen=True)
class FakeTokenizer:
    bos_id: int | None = 1
    add_bos: bool = True

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = [2 + ord(c) % 6 for c in text]
        return [self.bos_id or 0, *ids] if add_special and self.add_bos else ids


@dataclass
class FakeSession:
    """Bigram logits from `table` (n_vocab, n_vocab); keeps the cache as {seq: tokens} and checks every position."""

    table: npt.NDArray[np.float32]
    n_ctx: int = 256
    n_seq_max: int = 1
    n_batch: int = 64
    n_ubatch: int = 16
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    fail_on: int | None = None
    cache: dict[int, list[int]] = field(default_factory=dict)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    closed: bool = False

    @property
    def n_vocab(self) -> int:
        return self.table.shape[0]

    @property
    def n_ctx_seq(self) -> int:
        return self.n_ctx // self.n_seq_max

    def decode(self, batch: Batch) -> npt.NDArray[np.float32]:
        assert len(batch) <= self.n_batch
        self.log.append(("decode", len(batch), int(batch.pos[0])))
        for token, pos, seq in zip(batch.tokens.tolist(), batch.pos.tolist(), batch.seq.tolist(), strict=True):
            cells = self.cache.setdefault(seq, [])
            assert seq < self.n_seq_max and pos == len(cells) < self.n_ctx_seq
            cells.append(token)
        if self.fail_on is not None and self.fail_on in batch.tokens:
            raise NonFiniteError("tensor result_output is not finite")
        return self.table[batch.tokens[batch.logits]]

    def step_each(self, tokens: Sequence[int], pos: Sequence[int], seqs: Sequence[int]) -> npt.NDArray[np.float32]:
        ((token,), (at,), (seq,)) = tokens, pos, seqs
        return self.decode(Batch.single([token], at, seq))

    def clear(self) -> None:
        self.log.append(("rm", -1, 0))
        self.cache.clear()

    def truncate(self, seq: int, n: int) -> int:
        self.log.append(("rm", seq, n))
        del self.cache.setdefault(seq, [])[n:]
        return len(self.cache[seq])

    def checkpoint(self, seq: int) -> None: ...

    def settle_weights(self) -> None: ...

    def close(self) -> None:
        self.closed = True
