"""Images in slots: what is reused, saved, cut and drafted, with the small models that have images."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import GREEDY, Call, serving
from PIL import Image

from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.server.http.pictures import Pictures
from ikcli.server.http.prompts import Prompt
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Final, GenerationRequest
from ikcli.settings.records import SpecStage
from ikcli.settings.vision import VisionConfig

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vision"
MARK = "<__media__>"


def picture(seed: int, size: tuple[int, int] = (96, 64)) -> str:
    """A PNG file of smooth noise, in base64."""
    values = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    out = BytesIO()
    Image.fromarray(values).resize(size).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


RED, BLUE = picture(1), picture(2)


def vision(name: str, **changes: Any) -> VisionConfig:
    if not (GOLDEN / f"{name}.gguf").is_file():
        pytest.skip("the models with images are not here")
    return VisionConfig(mmproj=GOLDEN / f"{name}.mmproj.gguf", **changes)


SLOW = pytest.mark.slow("compiles kernels of towers and of queries that see later positions")


@pytest.fixture(
    scope="module", params=["internvl", *(pytest.param(name, marks=SLOW) for name in ("qwen25vl", "gemma3"))]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = {"model": GOLDEN / f"{request.param}.gguf", "vision": vision(request.param)}
    with serving(2, n_ctx=1024, **config) as found:
        yield found


def prompt(engine: Engine, text: str, *images: str) -> Prompt:
    assert engine.pictures is not None
    pictures = Pictures(engine.config.vision, engine.pictures, engine.tokenizer, engine.model.n_ctx_slot)
    return asyncio.run(pictures.raw_prompt(text, list(images), "prompt"))


def ask(engine: Engine, made: Prompt, n_predict: int = 8, **more: Any) -> Final:
    request = GenerationRequest(made.tokens, GREEDY, n_predict, pictures=made.pictures, **more)
    end = Call(engine, request).end
    assert isinstance(end, Final), end
    return end


def n_encoded(engine: Engine) -> int:
    found: Any = engine.pictures
    return int(found.n_encoded)


LONG = (
    f"Once upon a time there was a little girl who liked to play in the park with her dog. {MARK} She said to her mom"
)
FIRST = f"Once upon a time {MARK} and she was very happy."


def test_the_next_turn_encodes_nothing(engine: Engine) -> None:
    made = prompt(engine, FIRST, RED)
    first = ask(engine, made, cache_prompt=False, id_slot=0)
    before = n_encoded(engine)
    again = ask(engine, made, id_slot=0)
    assert (again.timings.cache_n, again.timings.prompt_n) == (len(made.tokens) - 1, 1)
    assert again.text == first.text
    longer = prompt(engine, f"{FIRST}{first.text} Her mom said {MARK}", RED, BLUE)
    turn = ask(engine, longer, id_slot=0)
    assert turn.timings.cache_n >= len(made.tokens) and n_encoded(engine) == before + 1
    whole = ask(engine, longer, id_slot=1, cache_prompt=False)
    assert whole.timings.cache_n == 0 and whole.text == turn.text and n_encoded(engine) == before + 1
    donated = ask(engine, longer, id_slot=0)
    assert donated.text == turn.text


def test_another_image_is_another_prompt(engine: Engine) -> None:
    one, two = prompt(engine, FIRST, RED), prompt(engine, FIRST, BLUE)
    start = one.pictures[0].start
    assert one.tokens[:start] == two.tokens[:start] and one.tokens[start] != two.tokens[start]
    ask(engine, one, id_slot=0)
    found = ask(engine, two, id_slot=0)
    assert found.timings.cache_n <= start
    assert found.text == ask(engine, two, id_slot=1, cache_prompt=False).text


def test_a_prompt_that_ends_with_an_image_computes_it_again(engine: Engine) -> None:
    made = prompt(engine, f"One day {MARK}", RED)
    stop = made.pictures[0].stop
    cut = Prompt(made.tokens[:stop], made.text, 0, made.pictures)  # without the end token
    first = ask(engine, cut, id_slot=0, cache_prompt=False)
    again = ask(engine, cut, id_slot=0)
    assert again.timings.cache_n == made.pictures[0].start and again.text == first.text


def test_slot_files_hold_images(engine: Engine, tmp_path: Path) -> None:
    made = prompt(engine, FIRST, RED)
    first = ask(engine, made, id_slot=0, cache_prompt=False)
    path = tmp_path / "slot"
    saved = engine.slot_action(0, "save", path).result()
    engine.slot_action(1, "erase").result()
    assert engine.slot_action(1, "restore", path).result().n_tokens == saved.n_tokens
    again = ask(engine, made, id_slot=1)
    assert again.timings.cache_n == len(made.tokens) - 1 and again.text == first.text


def test_a_full_slot_with_an_image_is_not_shifted(engine: Engine) -> None:
    made = prompt(engine, FIRST, RED)
    eos = engine.tokenizer.eos_id
    assert eos is not None
    endless = replace(GREEDY, logit_bias=((eos, -math.inf),))
    end = Call(engine, GenerationRequest(made.tokens, endless, pictures=made.pictures)).end
    assert isinstance(end, Final) and end.truncated and end.stop_type == "limit"
    assert end.timings.n_past == engine.model.n_ctx_slot - 1


def test_a_token_outside_the_vocabulary_is_still_refused(engine: Engine) -> None:
    made = prompt(engine, FIRST, RED)
    refused = Call(engine, GenerationRequest((*made.tokens, 1 << 20), GREEDY, 1, pictures=made.pictures)).end
    assert not isinstance(refused, Final) and "outside the vocabulary" in refused.message
    refused = Call(engine, GenerationRequest((5, -7), GREEDY, 1)).end
    assert not isinstance(refused, Final) and "outside the vocabulary" in refused.message


@pytest.mark.parametrize("name", ["qwen25vl", "gemma3"])
@pytest.mark.slow("engines of several kinds")
def test_micro_batches_smaller_than_an_image_and_other_ways(name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model": GOLDEN / f"{name}.gguf", "vision": vision(name)}
    with serving(1, n_ctx=1024, **config) as plain:
        made = prompt(plain, LONG, RED)
        wanted = ask(plain, made, 16).text
        other = prompt(plain, "Tom and Sue went to the park to play with the ball and the dog.")
        ask(plain, other)  # takes the only slot
        back = ask(plain, made, 16)
        assert back.timings.cache_n >= len(made.tokens) - 1 and back.text == wanted and n_encoded(plain) == 1
    n_ubatch = 7 if name == "qwen25vl" else made.pictures[0].picture.n_tokens
    with serving(1, n_ctx=1024, n_ubatch=n_ubatch, **config) as small:
        assert ask(small, made, 16).text == wanted
    stages = (SpecStage("ngram-map-k"),)
    with serving(1, n_ctx=1024, server={"spec_type": stages, "spec_autotune": False}, **config) as drafting:
        assert ask(drafting, made, 16).text == wanted
    with serving(1, n_ctx=1024, server={"cache_disk": tmp_path / "s"}, **config) as keeping:
        ask(keeping, made, 16)
    with serving(1, n_ctx=1024, server={"cache_disk": tmp_path / "s"}, **config) as kept:
        found = ask(kept, made, 16)
        assert found.timings.cache_n == len(made.tokens) - 1 and found.text == wanted and not n_encoded(kept)


def test_an_image_that_must_be_whole_needs_a_micro_batch_for_it() -> None:
    with serving(1, n_ctx=512, model=GOLDEN / "gemma3.gguf", vision=vision("gemma3"), n_ubatch=8) as small:
        made = prompt(small, FIRST, RED)
        refused = Call(small, GenerationRequest(made.tokens, GREEDY, 1, pictures=made.pictures)).end
        assert not isinstance(refused, Final) and refused.status == 400 and "-ub 16" in refused.message


@pytest.mark.slow("runs a model and its tower")
def test_tiles_of_an_image(tmp_path: Path) -> None:
    """Tiles stand side by side in a prompt, and the next request finds all of them in the cache."""
    file = open_gguf(vision("internvl").mmproj or "")
    specs = [NewTensor(name, tuple(t.shape), t.type) for name, t in file.tensors.items()]
    path = tmp_path / "tiles.gguf"
    with GGUFWriter(path, {**file.typed_metadata(), "clip.vision.preproc_max_tiles": 3}, specs) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, file.data(spec.name).reshape(-1).view(np.uint8))
    config = {"model": GOLDEN / "internvl.gguf", "vision": VisionConfig(mmproj=path)}
    with serving(1, n_ctx=512, **config) as engine:
        made = prompt(engine, f"Look: {MARK} What is it?", picture(3, (300, 180)))
        starts = [one.start for one in made.pictures]
        assert starts == [starts[0], starts[0] + 64, starts[0] + 128]  # two tiles and a view of it all
        first, second = ask(engine, made), ask(engine, made)
        assert first.timings.cache_n == 0
        assert second.timings.cache_n == len(made.tokens) - 1
        assert second.text == first.text
