"""A projector file in use: from pictures to the rows that take the place of tokens.

projector = Projector.open("mmproj.gguf", hp, n_threads=8)
session = Session.open(config, media=projector.media_config)
picture = decode_image(data, "messages[0].content[1]")
pieces = projector.pieces(picture)         # texts and tiles: ["<|vision_start|>", tile, "<|vision_end|>"]
media = projector.encode(tile)             # once per tile; `projector.digest(tile)` is known before
session.decode(Batch.mixed([ids_before, [*ids of the first text], media, [*ids of the last text], ids_after]))
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from ikcli.engine.run.media import Media, advance_of
from ikcli.engine.run.run_device import CPU
from ikcli.engine.run.runner import Runner
from ikcli.errors import FormatError, NonFiniteError
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams, MediaConfig
from ikcli.vision.decode import Picture, Tile
from ikcli.vision.encoder import Encoder, tower_runner
from ikcli.vision.facts import projector_type, read_facts
from ikcli.vision.tensors import Tensors
from ikcli.vision.tower import Grid, Limits
from ikcli.vision.types import tower_of

_LARGE = 16384  # pixels of a side: more than any tower reads
_MOST_PATCHES = 1 << 17


class Projector:
    """An opened projector; see the module. One thread encodes at a time."""

    @np.errstate(all="ignore")  # values that are not finite are found when they reach an embedding
    def __init__(self, path: Path | str, hp: HParams, runner: Runner, limits: Limits) -> None:
        file = open_gguf(path)
        self.path, self.type = str(path), projector_type(file)
        kind, facts = tower_of(self.type, self.path), read_facts(file)
        self.tensors = Tensors(file)
        self.tower = kind(facts, self.tensors, hp, limits)
        if self.tower.sections not in (None, bool(hp.rope.sections)):
            have = "has" if hp.rope.sections else "lacks"
            raise FormatError(
                f"{self.path}: a {self.type} projector does not fit {hp.source}, which {have} positions with sections "
                f"({hp.arch}.rope.dimension_sections); use the projector of this model"
            )
        self._check_width(hp)
        self.tensors.check_layers(facts.n_layer)
        self._check_size()
        side = facts.image_size or facts.patch
        self.tower.extra(self.tower.grid(*self.tower.fit(side, side)))  # has the right shape
        self._encoder = Encoder(self.tower, self.tensors, runner)
        self._lock = threading.Lock()
        self._key = f"{self.type}:{facts.n_embd}:{facts.n_layer}:{limits.least}:{limits.most}:{self._fingerprint()}"

    @classmethod
    def open(
        cls,
        path: Path | str,
        hp: HParams,
        *,
        n_threads: int = 1,
        min_tokens: int = 0,
        max_tokens: int = 0,
        runner: Runner | None = None,
    ) -> Projector:
        """Open a projector for the text model `hp`; nothing is computed.

        `min_tokens`, `max_tokens`: of an image, where the type has a choice (0: as the model's processor). `runner`:
        of `tower_runner`, otherwise `n_threads` of the CPU compute it. Raise FormatError or UnsupportedError for a file
        that is damaged, of a type that is not supported, or of another model.
        """
        return cls(path, hp, runner or tower_runner(n_threads), Limits(min_tokens, max_tokens))

    def _check_width(self, hp: HParams) -> None:
        if not self.tower.checks_width:
            return
        width = self.tower.facts.integer("projection_dim", hp.n_embd)
        if width != hp.n_embd:
            raise FormatError(
                f"{self.path}: the projector makes embeddings of {width} values, {hp.source} has {hp.n_embd}; use the "
                "projector of this model"
            )

    def _check_size(self) -> None:
        """Raise FormatError if the largest image has more patches than any model reads."""
        grid = self._largest()
        if grid.rows * grid.cols > _MOST_PATCHES:
            raise FormatError(
                f"{self.path}: an image has up to {grid.rows} x {grid.cols} patches; at most {_MOST_PATCHES} are "
                "computed: give --image-max-tokens, or check clip.vision.image_size"
            )

    def _largest(self) -> Grid:
        return self.tower.grid(*self.tower.fit(_LARGE, _LARGE))

    def _fingerprint(self) -> str:
        """Return a digest of a few weights, which tells projectors of the same shape apart."""
        found = hashlib.sha256()
        for name in sorted(self.tensors.names)[:8]:
            found.update(self.tensors.sample(name))
        return found.hexdigest()[:16]

    # --- about --------------------------------------------------------------------------------------------------------
    @property
    def media_config(self) -> MediaConfig:
        """Return what a session must be opened with to take images of this projector."""
        return MediaConfig(self.tower.n_deep, self.tower.both(), self.tower.framed)

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an image."""
        return self.tower.most_tokens()

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes by device of the projector and of work memory for its largest image; allocate nothing."""
        grid = self._largest()
        found = self._encoder.memory(grid.rows * grid.cols, grid.n_tokens)
        used = {d: {"projector": parts["weights"], "images": parts["compute"]} for d, parts in found.items()}
        if len(used) == 1:
            used[CPU]["projector"] = self.tensors.file_bytes
        return used

    def load(self) -> None:
        """Copy the weights to the GPU, if there is one."""
        self._encoder.load()

    def pieces(self, picture: Picture) -> list[str | Tile]:
        """Return what a picture becomes in a text: tiles, and texts around them, whose special tokens are to be read.

        Texts are never empty; most types have one tile.
        """
        found = self.tower.pieces(picture.rgb)
        made = (Tile.of(one) if isinstance(one, np.ndarray) else one for one in found)
        return [one for one in made if not isinstance(one, str) or one]

    def tile(self, picture: Picture) -> Tile:
        """Return the tile of a picture that has but one; a tile is its own."""
        if isinstance(picture, Tile):
            return picture
        (found,) = (one for one in self.pieces(picture) if isinstance(one, Tile))
        return found

    def _grid(self, picture: Picture) -> Grid:
        tile = self.tile(picture)
        return replace(self.tower.grid(tile.width, tile.height), shown=tile.shown)

    def count(self, picture: Picture) -> int:
        """Return the tokens of a tile, or of a picture of one tile."""
        return self.tower.n_tokens(self._grid(picture))

    def advance(self, picture: Picture) -> int:
        """Return by how much the position of the text behind a tile is larger (`Media.advance`)."""
        grid = self._grid(picture)
        return advance_of(self.tower.n_tokens(grid), self._places(grid), self.tower.framed)

    def _places(self, grid: Grid) -> tuple[int, int]:
        """Return rows and columns of tokens where positions have sections."""
        return grid.tokens if self.tower.sections else (0, 0)

    def digest(self, picture: Picture) -> str:
        """Return what the encoded tile, or picture of one tile, is known by."""
        tile = self.tile(picture)
        shown = "" if tile.shown is None else f":{tile.shown}"
        return hashlib.sha256(f"{self._key}:{tile.digest}{shown}".encode()).hexdigest()

    # --- use ----------------------------------------------------------------------------------------------------------
    @np.errstate(all="ignore")
    def encode(self, picture: Picture) -> Media:
        """Return the rows of a tile, or of a picture of one tile; raise NonFiniteError if they are not finite."""
        tile = self.tile(picture)
        grid = self._grid(tile)
        with self._lock:
            parts = [self._encoder.run(self.tower.inputs(part)) for part in self.tower.parts(tile.rgb)]
            rows = self.tower.arrange(np.concatenate(parts) if len(parts) > 1 else parts[0], grid)
        if not np.isfinite(rows).all():
            raise NonFiniteError(f"{self.path}: the embedding of the image is NaN or Inf: {self._why_not_finite()}")
        return Media(rows, self.digest(tile), self._places(grid), self.tower.both(), self.tower.framed)

    def _why_not_finite(self) -> str:
        name = self.tensors.not_finite()
        return f"tensor '{name}' holds such values" if name else "its values overflow in the vision tower"

    def close(self) -> None:
        """Stop the threads and free memory."""
        self._encoder.close()
