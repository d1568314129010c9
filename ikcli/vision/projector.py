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
from pathlib import Path

from ikcli.engine.run.media import Media
from ikcli.errors import FormatError
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams, MediaConfig
from ikcli.vision.decode import Picture, Tile
from ikcli.vision.encoder import Encoder
from ikcli.vision.facts import projector_type, read_facts
from ikcli.vision.tensors import Tensors
from ikcli.vision.tower import Grid, Limits
from ikcli.vision.types import tower_of

_LARGE = 16384  # pixels of a side: more than any tower reads


class Projector:
    """An opened projector; see the module. One thread encodes at a time."""

    def __init__(self, path: Path | str, hp: HParams, n_threads: int, limits: Limits) -> None:
        file = open_gguf(path)
        self.path, self.type = str(path), projector_type(file)
        kind, facts = tower_of(self.type, self.path), read_facts(file)
        self.tensors = Tensors(file)
        self.tower = kind(facts, self.tensors, hp, limits)
        if bool(hp.rope.sections) != self.tower.sections:
            have = "has" if hp.rope.sections else "lacks"
            raise FormatError(
                f"{self.path}: a {self.type} projector does not fit {hp.source}, which {have} positions with sections "
                f"({hp.arch}.rope.dimension_sections); use the projector of this model"
            )
        self._check_width(hp)
        self.tower.extra(self.tower.grid(*self.tower.fit(facts.image_size, facts.image_size)))  # has the right shape
        self._encoder = Encoder(self.tower, self.tensors, n_threads)
        self._lock = threading.Lock()
        self._key = f"{self.type}:{facts.n_embd}:{facts.n_layer}:{limits.least}:{limits.most}:{self._fingerprint()}"

    @classmethod
    def open(
        cls, path: Path | str, hp: HParams, *, n_threads: int = 1, min_tokens: int = 0, max_tokens: int = 0
    ) -> Projector:
        """Open a projector for the text model `hp`; nothing is computed.

        `min_tokens`, `max_tokens`: of an image, where the type has a choice (0: as the model's processor). Raise
        FormatError or UnsupportedError for a file that is damaged, of a type that is not supported, or of another
        model.
        """
        return cls(path, hp, n_threads, Limits(min_tokens, max_tokens))

    def _check_width(self, hp: HParams) -> None:
        if not self.tower.checks_width:
            return
        width = self.tower.facts.integer("projection_dim", hp.n_embd)
        if width != hp.n_embd:
            raise FormatError(
                f"{self.path}: the projector makes embeddings of {width} values, {hp.source} has {hp.n_embd}; use the "
                "projector of this model"
            )

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
        return MediaConfig(self.tower.n_deep, self.tower.both())

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an image."""
        return self.tower.most_tokens()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the projector's tensors."""
        return self.tensors.n_bytes

    def plan_bytes(self) -> int:
        """Return the bytes of work memory for the largest image; nothing is allocated."""
        grid = self.tower.grid(*self.tower.fit(_LARGE, _LARGE))
        return self._encoder.plan(grid.rows * grid.cols, grid.n_tokens).arena_bytes

    def pieces(self, picture: Picture) -> list[str | Tile]:
        """Return what a picture becomes in a text: tiles, and texts around them, whose special tokens are to be read.

        Texts are never empty; most types have one tile.
        """
        found = self.tower.pieces(picture.rgb)
        return [one if isinstance(one, str) else Tile.of(one) for one in found if not isinstance(one, str) or one]

    def tile(self, picture: Picture) -> Tile:
        """Return the tile of a picture that has but one; a tile is its own."""
        if isinstance(picture, Tile):
            return picture
        (found,) = (one for one in self.pieces(picture) if isinstance(one, Tile))
        return found

    def _grid(self, picture: Picture) -> Grid:
        tile = self.tile(picture)
        return self.tower.grid(tile.width, tile.height)

    def count(self, picture: Picture) -> int:
        """Return the tokens of a tile, or of a picture of one tile."""
        return self.tower.n_tokens(self._grid(picture))

    def advance(self, picture: Picture) -> int:
        """Return by how much the position of the text behind a tile is larger (`Media.advance`)."""
        grid = self._grid(picture)
        return max(grid.tokens) if self.tower.sections else self.tower.n_tokens(grid)

    def digest(self, picture: Picture) -> str:
        """Return what the encoded tile, or picture of one tile, is known by."""
        return hashlib.sha256(f"{self._key}:{self.tile(picture).digest}".encode()).hexdigest()

    # --- use ----------------------------------------------------------------------------------------------------------
    def encode(self, picture: Picture) -> Media:
        """Return the rows of a tile, or of a picture of one tile."""
        tile = self.tile(picture)
        rgb = tile.rgb
        grid = self.tower.grid(rgb.shape[1], rgb.shape[0])
        with self._lock:
            rows = self.tower.arrange(self._encoder.run(self.tower.inputs(rgb)), grid)
        return Media(rows, self.digest(tile), grid.tokens if self.tower.sections else (0, 0), self.tower.both())

    def close(self) -> None:
        """Stop the threads and free memory."""
        self._encoder.close()
