"""Prompts with images in the engine of a server: caches, slots, slot files, a full context; on the CPU and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from engine_client import Call, ask, request, serving

from ikcli.engine.run import gpus
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import GenerationRequest
from ikcli.server.slots.pictures import PlacedPicture, keys_of
from ikcli.settings.vision import VisionConfig

pytestmark = pytest.mark.slow("runs models and their towers")
MODELS = ("gemma3", "qwen25vl")  # an image in both directions; positions with sections
BEFORE, AFTER = (1, 20, 21, 22, 23), (30, 31, 32)


@contextmanager
def seeing(shared_dir: Path, name: str, n_slots: int = 1, **changes: Any) -> Iterator[Engine]:
    """The engine of a golden model with its projector."""
    folder = shared_dir / "golden" / "vision"
    vision = VisionConfig(mmproj=folder / f"{name}.mmproj.gguf")
    with serving(n_slots, model=folder / f"{name}.gguf", vision=vision, **{"n_gpu_layers": 0, **changes}) as engine:
        yield engine


class Prompts:
    """Makes prompts: numbers are tokens, names are images."""

    def __init__(self, shared_dir: Path, engine: Engine) -> None:
        self.folder, self.engine = shared_dir / "golden" / "vision" / "images", engine
        self.pictures: dict[str, Any] = {}

    def __call__(self, *parts: int | str, n_predict: int = 6, **fields: Any) -> GenerationRequest:
        prompt: list[int] = []
        placed = []
        for part in parts:
            if isinstance(part, int):
                prompt.append(part)
                continue
            picture = self.picture(part)
            placed.append(PlacedPicture(len(prompt), picture))
            prompt += keys_of(picture)
        return request(prompt, n_predict, pictures=tuple(placed), **fields)

    def picture(self, name: str) -> Any:
        reader = self.engine.pictures
        assert reader is not None
        if name not in self.pictures:
            found = reader.read((self.folder / f"{name}.png").read_bytes())
            (self.pictures[name],) = (piece for piece in found if not isinstance(piece, str))
        return self.pictures[name]

    def ask(self, *parts: int | str, **fields: Any) -> Any:
        return Call(self.engine, self(*parts, **fields)).final

    @property
    def n_encoded(self) -> int:
        assert self.engine._worker is not None and self.engine._worker.projector is not None
        return int(self.engine._worker.projector.n_encoded)


def ids(final: Any) -> list[int]:
    return [token.id for token in final.tokens]


@pytest.mark.parametrize("name", MODELS)
def test_the_next_turn_computes_only_what_is_new(shared_dir: Path, name: str) -> None:
    """The key of an image is its digest: the same one is cached, another of the same size is not."""
    with seeing(shared_dir, name) as engine:
        prompts = Prompts(shared_dir, engine)
        first = prompts.ask(*BEFORE, "small", *AFTER)
        n = len(BEFORE) + prompts.picture("small").n_tokens + len(AFTER)
        assert first.timings.prompt_n == n and prompts.n_encoded == 1
        again = prompts.ask(*BEFORE, "small", *AFTER, *ids(first), 40, 41)
        assert again.timings.cache_n >= n and prompts.n_encoded == 1
        other = prompts.ask(*BEFORE, "gradient", *AFTER)
        assert other.timings.cache_n <= len(BEFORE) and prompts.n_encoded == 2
        assert ids(prompts.ask(*BEFORE, "small", *AFTER)) == ids(first) and prompts.n_encoded == 2


@pytest.mark.parametrize("name", MODELS)
def test_slots_side_by_side_answer_as_alone(shared_dir: Path, name: str) -> None:
    lines: list[tuple[int | str, ...]] = [
        (*BEFORE, "small", *AFTER), (1, 50, "shapes", 51), (1, "gradient", 60, "small", 61), (1, 70, 71, 72)
    ]  # fmt: skip
    with seeing(shared_dir, name, 4, n_ctx=4096) as engine:
        prompts = Prompts(shared_dir, engine)
        calls = [Call(engine, prompts(*line, n_predict=12)) for line in lines]
        together = [ids(call.final) for call in calls]
        assert {call.final.id_slot for call in calls} == {0, 1, 2, 3}
    for line, found in zip(lines, together, strict=True):
        with seeing(shared_dir, name) as engine:
            assert ids(Prompts(shared_dir, engine).ask(*line, n_predict=12)) == found


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_file_holds_the_image(shared_dir: Path, tmp_path: Path, name: str) -> None:
    with seeing(shared_dir, name) as engine:
        prompts = Prompts(shared_dir, engine)
        first = prompts.ask(*BEFORE, "small", *AFTER)
        engine.slot_action(0, "save", tmp_path / "slot").result(60)
        wanted = ids(prompts.ask(*BEFORE, "small", *AFTER, *ids(first), 40))
    with seeing(shared_dir, name) as engine:
        prompts = Prompts(shared_dir, engine)
        assert engine.slot_action(0, "restore", tmp_path / "slot").result(60).n_tokens > 0
        found = prompts.ask(*BEFORE, "small", *AFTER, *ids(first), 40)
        assert ids(found) == wanted and prompts.n_encoded == 0
        assert found.timings.cache_n >= len(BEFORE) + prompts.picture("small").n_tokens + len(AFTER)


def test_a_full_slot_ends_instead_of_being_shifted(shared_dir: Path) -> None:
    with seeing(shared_dir, "qwen25vl", n_ctx=256) as engine:
        prompts = Prompts(shared_dir, engine)
        found = prompts.ask(
            *BEFORE, "small", *AFTER, n_predict=400, sampling=SamplerParams(temperature=0, ignore_eos=True)
        )
        n = found.timings.prompt_n
        assert found.truncated and found.stop_type == "limit" and n + len(found.tokens) in (256, 257)


def test_micro_batches_smaller_than_an_image(shared_dir: Path) -> None:
    """The same answer where tokens see the past only; one sentence where they see each other."""
    answers = []
    for n_ubatch in (512, 16):
        with seeing(shared_dir, "qwen25vl", n_ubatch=n_ubatch) as engine:
            answers.append(ids(Prompts(shared_dir, engine).ask(*BEFORE, "shapes", *AFTER)))
    assert answers[0] == answers[1]
    with seeing(shared_dir, "gemma3", n_ubatch=8) as engine:
        failure = Call(engine, Prompts(shared_dir, engine)(*BEFORE, "small", *AFTER)).failure
        assert failure.status == 400 and "start again with -ub 16 or more" in failure.message
        assert len(ask(engine, BEFORE, 3).tokens) == 3


@needs_emulation
@pytest.mark.parametrize("name", MODELS)
def test_tower_and_model_on_a_gpu(shared_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two slots with images, and a next turn, all on an emulated GPU: the answers of the CPU."""
    lines: list[tuple[int | str, ...]] = [(*BEFORE, "small", *AFTER), (1, 50, "small", 51)]
    with seeing(shared_dir, name) as engine:
        prompts = Prompts(shared_dir, engine)
        wanted = [ids(prompts.ask(*line, n_predict=3)) for line in lines]
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    with seeing(shared_dir, name, 2, n_gpu_layers=99, n_ctx=1024) as engine:
        prompts = Prompts(shared_dir, engine)
        calls = [Call(engine, prompts(*line, n_predict=3)) for line in lines]
        assert [ids(call.final) for call in calls] == wanted and prompts.n_encoded == 1
        again = prompts.ask(*lines[0], *wanted[0], 40, n_predict=1)
        assert again.timings.cache_n >= len(lines[0]) + prompts.picture("small").n_tokens - 1 and prompts.n_encoded == 1
        assert opener.devices["CUDA0"].launches
