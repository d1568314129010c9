"""Opened projectors of the small random models of `vision_models`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from vision_models import answers, image, write_checkpoint, write_projector

from ikcli.convert.projector import open_projector
from ikcli.models import HParams
from ikcli.vision.decode import Picture, Tile
from ikcli.vision.projector import Projector

SECTIONS = {"glm4v", "glm_ocr", "paddleocr"}


class Model:
    """A model of the answers: its projector in a file, opened."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.answers = name, answers()[name]
        path = folder / f"{name}.gguf"
        if "metadata" in self.answers:
            write_projector(path, self.answers)
        else:
            write_checkpoint(folder, self.answers)
            open_projector(folder, "f16").write(path)
        text = self.answers["config"].get("text_config", self.answers["config"])
        sections = (2, 1, 1, 0) if name in SECTIONS else ()
        hp = SimpleNamespace(n_embd=text["hidden_size"], rope=SimpleNamespace(sections=sections), source="text.gguf",
                             arch="text", n_embd_per_layer=0)  # fmt: skip
        self.hp = cast(HParams, hp)
        self.projector = Projector.open(path, self.hp, n_threads=2)

    @property
    def images(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.answers["images"]
        return found

    def pieces(self, size: str) -> list[str | Tile]:
        width, height = map(int, size.split("x"))
        return self.projector.pieces(Picture.of(image(width, height)))
