"""From the images of a micro-batch to the places of its tokens in the step block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import FloatRows, Media, Span
from ikcli.engine.run.sequences import Sequences
from ikcli.errors import IkError
from ikcli.graph.micro_batch import AXES, MEDIA_AT, PLACE_WORDS, SEEN, VISUAL
from ikcli.models import MediaConfig

Places = npt.NDArray[np.int32]


def places_of_text(cells: Sequence[int] | Places, shift: Sequence[int] | Places) -> Places:
    """Return the places of tokens in these cells, whose positions are `shift` larger."""
    cell = np.asarray(cells, np.int32)
    found = np.zeros((len(cell), PLACE_WORDS), np.int32)
    found[:, MEDIA_AT] = -1
    found[:, AXES : AXES + 3] = (cell + np.asarray(shift, np.int32))[:, None]
    found[:, SEEN], found[:, SEEN + 1] = cell, cell + 1
    return found


class MediaPlaces:
    """The places of a micro-batch, the rows of its images, and the batch with ids that embeddings have.

    Raise IkError for rows of another width, and for images that see both ways and are not whole in the micro-batch.
    """

    def __init__(self, batch: Batch, sequences: Sequences, config: MediaConfig, cols: int) -> None:
        self._spans: list[tuple[int, Span]] = []
        shift = np.zeros(len(batch), np.int32)
        for seq in set(batch.seq.tolist()):
            for s in sequences.spans(seq):
                shift[(batch.seq == seq) & (batch.pos >= s.first + s.n)] += s.advance - s.n
        self.rows: list[FloatRows] = []
        pieces: list[tuple[int, int, int, Media, int]] = []  # first token, end, index in the image, image, its shift
        for start, media in batch.media:
            at, stop = max(start, 0), min(start + len(media), len(batch))
            seq, first = int(batch.seq[at]), int(batch.pos[at]) - (at - start)
            self._check(media, config, cols, start, len(batch))
            span = Span(first, len(media), media.advance)
            if span not in sequences.spans(seq):
                self._spans.append((seq, span))
                shift[(batch.seq == seq) & (batch.pos >= first + span.n)] += span.advance - span.n
            pieces.append((at, stop, at - start, media, first))
        self.places = places_of_text(batch.pos, shift)
        tokens, n_rows = batch.tokens.copy(), 0
        for at, stop, index, media, first in pieces:
            n, part = stop - at, self.places[at:stop]
            part[:, MEDIA_AT] = cols * np.arange(n_rows, n_rows + n)
            part[:, AXES : AXES + 3] = media.positions(first + int(shift[at]), index, index + n)
            if media.framed:
                part[:, VISUAL] = np.arange(index, index + n) < len(media) - 1
            if media.both:
                part[:, SEEN], part[:, SEEN + 1] = first, first + len(media)
            tokens[at:stop] = 0  # the token whose embeddings of layers an image has
            self.rows.append(media.rows[index : index + n])
            n_rows += n
        self.batch = replace(batch, tokens=tokens)

    @staticmethod
    def _check(media: Media, config: MediaConfig, cols: int, start: int, n_batch: int) -> None:
        if media.rows.shape[1] != cols:
            raise IkError(f"an image has rows of {media.rows.shape[1]} values, the session was opened for {cols}")
        if media.both and config.both and (start < 0 or start + len(media) > n_batch):
            raise IkError(
                f"an image of {len(media)} tokens that see each other in both directions must be in one micro-batch; "
                f"use -ub {max(len(media), n_batch)} or more (and -b)"
            )

    def note(self, sequences: Sequences) -> None:
        """Add the images to their sequences."""
        for seq, span in self._spans:
            sequences.add_span(seq, span)
