"""The sequences of an encoder-decoder: their first tokens are a text for the encoder, the others are the decoder's.

The encoder's text ends with the first token whose logits are wanted. These are the logits of the decoder's first token,
which is the same for all texts (`decoder_start_token_id`), takes the place of the encoder's last one in the caches, and
is in no sequence of tokens. So prompts, windows of a perplexity and choices are given as those of any other model are:
what comes before the first question is encoded at once, and the rest is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.sequences import Sequences
from ikcli.errors import IkError, UsageError
from ikcli.graph.micro_batch import Segment

Ids = npt.NDArray[np.int32]
Encode = Callable[[Ids, list[Segment]], None]


class EncoderTexts:
    """The encoded part of every sequence, and texts of which more is to come.

    `encode` computes texts side by side, of at most `n_most` tokens together.
    """

    def __init__(self, sequences: Sequences, start: int, n_most: int, encode: Encode) -> None:
        self._sequences, self._start, self._n_most, self._encode = sequences, start, n_most, encode
        self._waiting: dict[int, list[int]] = {}
        sequences.encoded = {}

    def read(self, batch: Batch) -> Batch:
        """Encode the texts that end in a batch; return the tokens of the decoder, which may be none."""
        encoded, n_past = self._sequences.encoded, self._sequences.n_past
        assert encoded is not None
        seqs = batch.seq.tolist()
        starts = [0, *(i for i in range(1, len(seqs)) if seqs[i] != seqs[i - 1]), len(seqs)]
        due: list[tuple[int, list[int]]] = []
        parts: list[tuple[int, int, list[int], list[bool]]] = []  # sequence, position, tokens, wanted
        for first, end in pairwise(starts):
            seq, pos = seqs[first], int(batch.pos[first])
            tokens, wanted = batch.tokens[first:end].tolist(), batch.logits[first:end].tolist()
            if pos and seq in encoded:
                parts.append((seq, pos, tokens, wanted))
                continue
            self._sequences.check_next(seq, pos, end - first, follow=bool((np.diff(batch.pos[first:end]) == 1).all()))
            text = self._waiting.setdefault(seq, [])
            del text[pos:]
            encoded.pop(seq, None)
            n = wanted.index(True) + 1 if True in wanted else len(wanted)
            self._check(pos + n)
            text += tokens[:n]
            n_past[seq] = pos + n
            if True in wanted:
                due.append((seq, self._waiting.pop(seq)))
                parts.append((seq, pos + n - 1, [self._start, *tokens[n:]], wanted[n - 1 :]))
        self._encode_all(due)
        for seq, text in due:
            encoded[seq] = len(text)
            n_past[seq] = len(text) - 1  # the decoder's first token takes the last place
        return Batch(
            np.array([t for part in parts for t in part[2]], np.int32),
            np.array([part[1] + i for part in parts for i in range(len(part[2]))], np.int32),
            np.array([part[0] for part in parts for _ in part[2]], np.int32),
            np.array([w for part in parts for w in part[3]], np.bool_),
        )

    def placed(self, segments: Sequence[Segment]) -> tuple[Ids, list[Segment]]:
        """Return positions and segments of the decoder for those of whole sequences."""
        found = [self.segment(s) for s in segments]
        return np.concatenate([np.arange(s.pos, s.n_kv, dtype=np.int32) for s in found]), found

    def step(
        self, pos: Sequence[int], seqs: Sequence[int], n_outputs: int
    ) -> tuple[Ids, npt.NDArray[np.int64], list[Segment]]:
        """Return positions, outputs and segments of one token of each of these sequences."""
        n_ctx = self._sequences.n_ctx
        whole = [Segment(i, 1, seq * n_ctx, p, seq) for i, (seq, p) in enumerate(zip(seqs, pos, strict=True))]
        found, segments = self.placed(whole)
        return found, np.arange(n_outputs), segments

    def segment(self, s: Segment) -> Segment:
        """Return the segment of a decoder as its kernels read it; see `Segment`."""
        encoded = self._sequences.encoded
        if encoded is None or s.seq not in encoded:
            raise IkError(f"sequence {s.seq} has no encoded text; compute its first tokens with `decode` or `submit`")
        before = encoded[s.seq] - 1
        return Segment(s.start, s.n_tokens, s.cell + before, s.pos - before, s.seq, s.cell)

    def _check(self, n: int) -> None:
        if n > self._n_most:
            raise UsageError(
                f"the text ({n} tokens or more) exceeds the {self._n_most} tokens that the encoder reads at once; "
                "shorten it, or raise -c and -ub"
            )

    def _encode_all(self, due: list[tuple[int, list[int]]]) -> None:
        """Encode texts, as many at once as fit."""
        n_ctx = self._sequences.n_ctx
        while due:
            n, tokens = 0, list[int]()
            segments: list[Segment] = []
            for seq, text in due:
                if tokens and n + len(text) > self._n_most:
                    break
                segments.append(Segment(n, len(text), seq * n_ctx, 0, seq, seq * n_ctx))
                tokens += text
                n += len(text)
            self._encode(np.array(tokens, np.int32), segments)
            due = due[len(segments) :]
