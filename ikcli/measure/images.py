"""Texts with images for measurements: `<__media__>` in the text stands for the next image of `--image`.

Windows are as long as those of plain texts (`-c`), but no image is cut: a window ends before an image for which it has
no room. Without a marker, all images stand before the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ikcli.chat.images import PUBLIC_MARKER
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Media
from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.measure.chunks import WindowValues
from ikcli.measure.protocol import SessionLike, TokenizerLike
from ikcli.measure.stats import F64, token_nll
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.vision.projector import Projector

Part = list[int] | Media
"""Token ids, or the rows of an image."""


@dataclass(frozen=True, slots=True)
class MixedWindows:
    """Windows of a text with images, decoded one by one. Position p of a window is scored if it is in the second half
    and the position behind it is text.
    """

    batches: tuple[Batch, ...]
    n_seq: int = 1

    @property
    def n_chunk(self) -> int:
        return len(self.batches)

    @property
    def n_scored(self) -> int:
        """Return the most scored positions of a window."""
        return max((len(scored(batch)) for batch in self.batches), default=0)


def check_options(config: RunConfig) -> None:
    """Raise UsageError for options that images exclude."""
    p = config.perplexity
    names = {"--workers, --ray and --stages": config.fleet.wanted or config.fleet.stages > 1,
             "--ppl-stride": p.stride, "--kl-divergence": p.kl_divergence, "--kl-divergence-base": p.logits_file,
             "choice tasks": p.scores_choices, "--random-tokens": config.imatrix.random_tokens,
             "--moe-trace": p.moe_trace, "an embedding model": config.server.only_embeds}  # fmt: skip
    found = next((name for name, given in names.items() if given), None)
    if found is not None:
        raise UsageError(f"--image: texts with images cannot be combined with {found}")


def parts_of(config: RunConfig, text: str, tokenizer: TokenizerLike, projector: Projector) -> list[Part]:
    """Return a text as token ids and encoded images; every image is encoded once."""
    from ikcli.vision.opening import read_picture

    paths = config.vision.images
    texts = text.split(PUBLIC_MARKER)
    if len(texts) == 1:
        texts = [*[""] * len(paths), text]
    if len(texts) != len(paths) + 1:
        raise UsageError(
            f"the text has {len(texts) - 1} markers ({PUBLIC_MARKER}) and --image names {len(paths)} images; give one "
            "for each"
        )
    parts: list[Part] = []
    known: dict[str, Media] = {}

    def add(text: str, parse_special: bool) -> None:
        if text or not parts:
            ids = tokenizer.encode(text, add_special=not parts, parse_special=parse_special)
            parts.append(ids)

    add(texts[0], config.prompt.parse_special)
    for path, after in zip(paths, texts[1:], strict=True):
        for piece in projector.pieces(read_picture(path)):
            if isinstance(piece, str):
                add(piece, True)
                continue
            digest = projector.digest(piece)
            if digest not in known:
                known[digest] = projector.encode(piece)
            parts.append(known[digest])
        add(after, config.prompt.parse_special)
    return parts


def windows_of(
    parts: Sequence[Part], n_ctx: int, max_chunks: int = -1, bos: int | None = None, first_chunk: int = 0
) -> MixedWindows:
    """Return the windows of a text from `first_chunk` on; a last one of less than half of the length is left out,
    unless it is the only one.

    `bos` replaces the first token of every window that begins with text, as in plain texts. Raise UsageError for an
    image larger than a window.
    """
    if n_ctx < 4:
        raise UsageError(f"-c {n_ctx} is too small; give at least 4 tokens, for example -c 512")
    if max_chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to evaluate; give a number above 0, or -1 for all")
    whole = Batch.mixed(list(parts), logits="none")
    bounds, start = [], 0
    while start < len(whole):
        stop = min(start + n_ctx, len(whole))
        cut = next((p for p in whole.media if p.start < stop < p.start + len(p.media)), None)
        if cut is not None and cut.start <= start:
            raise UsageError(f"an image of {len(cut.media)} tokens does not fit in -c {n_ctx}; use a larger -c")
        if cut is not None:
            stop = cut.start
        bounds.append((start, stop))
        start = stop
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] < n_ctx // 2:
        bounds.pop()
    bounds = bounds[first_chunk:]
    if max_chunks >= 0:
        bounds = bounds[:max_chunks]
    found = [_window(whole, a, b, bos) for a, b in bounds]
    if not any(len(scored(batch)) for batch in found):
        raise IkError("the second half of no window has text behind its images; use a longer text")
    return MixedWindows(tuple(found))


def _window(whole: Batch, start: int, stop: int, bos: int | None) -> Batch:
    piece = whole.slice(start, stop)
    tokens = piece.tokens.copy()
    if bos is not None and tokens[0] >= 0:
        tokens[0] = bos
    return Batch(tokens, np.arange(len(tokens), dtype=np.int32), np.zeros(len(tokens), np.int32),
                 np.zeros(len(tokens), np.bool_), piece.media)  # fmt: skip


def scored(batch: Batch) -> np.typing.NDArray[np.int64]:
    """Return the positions of a window whose next token is scored."""
    n = len(batch)
    at = np.arange(n // 2, n - 1)
    return at[batch.tokens[at + 1] >= 0]


def score_window(session: SessionLike, batch: Batch, n_threads: int, *, every: bool = False) -> F64:
    """Decode a window and return its negative log-likelihoods; `every`: compute the logits of all positions."""
    session.clear()
    wanted = scored(batch)
    logits_of = np.zeros(len(batch), np.bool_)
    logits_of[wanted] = True
    found: list[F64] = [np.empty(0)]
    for start, stop in batch.cuts(max(session.n_batch, 1)):
        piece = batch.slice(start, stop)
        asked = np.ones(len(piece), np.bool_) if every else logits_of[start:stop]
        rows = session.decode(Batch(piece.tokens, piece.pos, piece.seq, asked, piece.media))
        here = wanted[(wanted >= start) & (wanted < stop)]
        if len(here):
            found.append(token_nll(rows[here - start] if every else rows, batch.tokens[here + 1], n_threads))
    return np.concatenate(found)


def values_of(session: SessionLike, windows: MixedWindows, n_threads: int) -> Iterator[WindowValues]:
    """Yield the values of all windows in order."""
    for i, batch in enumerate(windows.batches):
        started = time.perf_counter()
        try:
            values = score_window(session, batch, n_threads)
        except NonFiniteError as error:
            yield WindowValues(i, 0.0, None, str(error))
            continue
        yield WindowValues(i, time.perf_counter() - started, values[None])


def described(parts: Sequence[Part]) -> str:
    """Return what a text holds, for the log: `2 images of 128 tokens, 300 tokens of text`."""
    media = [part for part in parts if isinstance(part, Media)]
    n_text = sum(len(part) for part in parts if not isinstance(part, Media))
    return f"{len(media)} images of {sum(map(len, media))} tokens, {n_text} tokens of text"
