"""The random projectors of `benchmarks/vision.py` are whole, and its reader of the reference's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_scripts import load

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.vision.projector import Projector

vision = load("vision")


@pytest.mark.parametrize("name", list(vision.SHAPES))
def test_projectors_open(name: str, tmp_path: Path) -> None:
    shape = replace(vision.SHAPES[name], width=64, n_ff=96, n_head=2, layers=1, image_size=112)
    vision.write_text_model(tmp_path / "text.gguf", shape.text)
    vision.write_projector(tmp_path / "p.gguf", shape, GGMLType.Q8_0)
    file = open_gguf(tmp_path / "text.gguf")
    projector = Projector.open(tmp_path / "p.gguf", HParams.from_gguf(file.metadata, file.tensors, "text"))
    assert projector.count(vision.noise(112)) == {"qwen2.5vl": 16, "gemma3": 4, "pixtral": 19}[name]
    assert open_gguf(tmp_path / "p.gguf").tensors["v.blk.0.attn_q.weight"].type is GGMLType.Q8_0


def test_times_of_the_reference() -> None:
    log = "encoding image slice...\nimage slice encoded in 812 ms\nimage/slice decoded\nimage encoded in 7 ms\n"
    assert [int(x) for x in vision._ENCODED.findall(log)] == [812, 7]


def test_turns_of_a_conversation(tmp_path: Path) -> None:
    images = [vision.noise_file(tmp_path, 16, i) for i in range(2)]
    assert images[0].read_bytes() != images[1].read_bytes()
    (first,) = vision.turns(images, None)
    kinds = [part["type"] for part in first["content"]]
    assert kinds == ["image_url", "image_url", "text"]
    second = vision.turns(images, "red")
    assert second[0] == first and second[1] == {"role": "assistant", "content": "red"} and len(second) == 3
