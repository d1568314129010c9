"""Projectors of all types against torch: pixels of tiles, texts around them, embeddings; see `vision_models`."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vision_models import Floats, answers, image, write_checkpoint

from ikcli.convert.projector import open_projector
from ikcli.models import HParams
from ikcli.vision.decode import Picture, Tile
from ikcli.vision.projector import Projector

NAMES = sorted(answers())
SECTIONS = {"glm4v"}


class Model:
    """A model of the answers: its projector in a file, opened."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.answers = name, answers()[name]
        write_checkpoint(folder, self.answers)
        path = folder / f"{name}.gguf"
        open_projector(folder, "f16").write(path)
        text = self.answers["config"].get("text_config", self.answers["config"])
        sections = (2, 1, 1, 0) if name in SECTIONS else ()
        hp = SimpleNamespace(n_embd=text["hidden_size"], rope=SimpleNamespace(sections=sections), source="text.gguf",
                             arch="text", n_embd_per_layer=0)  # fmt: skip
        self.projector = Projector.open(path, cast(HParams, hp), n_threads=2)

    @property
    def images(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.answers["images"]
        return found

    def pieces(self, size: str) -> list[str | Tile]:
        width, height = map(int, size.split("x"))
        return self.projector.pieces(Picture.of(image(width, height)))


def values(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), np.float32)


def spread(parts: list[Floats], n: int) -> Floats:
    """The values of which the answers have a part."""
    flat = np.concatenate([x.reshape(-1) for x in parts])
    return flat[:: max(len(flat) // n, 1)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def test_tiles_have_the_pixels_of_the_processor(model: Model) -> None:
    for size, truth in model.images.items():
        tiles = [one for one in model.pieces(size) if isinstance(one, Tile)]
        shapes = [[one.rgb.shape[2], *one.rgb.shape[:2]] for one in tiles]
        assert shapes == truth["tiles"]
        assert sum(model.projector.count(one) for one in tiles) == sum(truth["rows"])
        pixels = [model.projector.tower.normalized(one.rgb).transpose(2, 0, 1) for one in tiles]
        assert np.abs(spread(pixels, 64) - values(truth["pixels"])).max() < 1e-5


TEXTS = {
    "idefics3": "<fake_token_around_image><row_1_col_1>|<fake_token_around_image><row_1_col_2>|"
    "<fake_token_around_image><row_1_col_3>|\n<fake_token_around_image><row_2_col_1>|"
    "<fake_token_around_image><row_2_col_2>|<fake_token_around_image><row_2_col_3>|"
    "\n\n<fake_token_around_image><global-img>|<fake_token_around_image>",
    "llama4": "<|image_start|>|<|tile_x_separator|>|<|tile_x_separator|>|<|tile_y_separator|>|<|tile_x_separator|>|"
    "<|tile_x_separator|>|<|tile_y_separator|><|image|>|<|image_end|>",
    "internvl": "<img>|||||||</img>",
    "minicpmv": "<image>|</image><slice>|</slice><slice>|</slice>",
    "glm4v": "<|begin_of_image|>|<|end_of_image|>",
    "kimivl": "<|media_start|>|<|media_end|>",
    "kimik25": "<|media_begin|>|<|media_end|>",
    "lfm2": "<|image_start|><|img_row_1_col_1|>|<|img_row_1_col_2|>|<|img_row_1_col_3|>|<|img_row_2_col_1|>|"
    "<|img_row_2_col_2|>|<|img_row_2_col_3|>|<|img_thumbnail|>|<|image_end|>",
}
"""What stands around the tiles of an image, with | for a tile."""


def test_texts_around_tiles(model: Model) -> None:
    size = "1024x600" if model.name == "lfm2" else "150x90"
    found = "".join(one if isinstance(one, str) else "|" for one in model.pieces(size))
    assert found == TEXTS[model.name]


@pytest.mark.slow("compiles the kernels of towers")
def test_embeddings(model: Model) -> None:
    for size, truth in model.images.items():
        rows = [model.projector.encode(one).rows for one in model.pieces(size) if isinstance(one, Tile)]
        found, wanted = spread(rows, 96), values(truth["embeddings"])
        assert found.shape == wanted.shape
        assert np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()) < 1e-3
