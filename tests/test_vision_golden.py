"""Towers, projectors and images in texts against torch; `../shared/golden/vision` says what each model exercises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Media
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.models import HParams
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.settings.run import RunConfig
from ikcli.vision.decode import decode_image
from ikcli.vision.projector import Projector

MODELS = ("qwen25vl", "qwen3vl", "gemma3", "mistral3", "internvl", "gemma4")
MODES = {"default": {}, "small micro-batches": {"n_ubatch": 7}, "f32 cache": {"type_k": "f32", "type_v": "f32"}}


class Golden:
    """One model of the folder: files, truth, and a projector."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.all = json.loads((folder / "vision.json").read_text(encoding="utf-8"))
        self.facts: dict[str, Any] = self.all["models"][name]
        with np.load(folder / f"{name}.npz") as truth:
            self.truth = dict(truth)
        file = open_gguf(folder / f"{name}.gguf")
        self.hp = HParams.from_gguf(file.metadata, file.tensors, f"{name}.gguf")
        self.projector = Projector.open(folder / f"{name}.mmproj.gguf", self.hp, n_threads=2)

    def media(self, image: str) -> Media:
        data = (self.folder / "images" / f"{image}.png").read_bytes()
        return self.projector.encode(decode_image(data))

    def rows(self, image: str) -> npt.NDArray[np.float32]:
        deep = sorted(k for k in self.truth if k.startswith(f"{image}.deepstack"))
        return np.concatenate([self.truth[k].astype(np.float32) for k in (f"{image}.embd", *deep)], axis=1)

    def retyped(self, path: Path, type_: GGMLType, *, decoded: bool) -> Path:
        """Write the projector with its matrices in another type, or with the numbers of that type as float32."""
        file = open_gguf(self.folder / f"{self.name}.mmproj.gguf")
        found: dict[str, tuple[NewTensor, npt.NDArray[np.uint8]]] = {}
        for name, tensor in file.tensors.items():
            shape, data = tuple(tensor.shape), file.data(name)
            change = len(shape) == 2 and tensor.type is GGMLType.F16
            if change:
                data = np.asarray(quantize_rows(dequantize(data, tensor.type, shape), type_))
            if change and decoded:
                data = dequantize(data.reshape(-1), type_, shape)
            written = (GGMLType.F32 if decoded else type_) if change else tensor.type
            found[name] = NewTensor(name, shape, written), data
        with GGUFWriter(path, file.typed_metadata(), [spec for spec, _ in found.values()]) as writer:
            for name, (_, data) in found.items():
                writer.write_tensor(name, data.reshape(-1).view(np.uint8))
        return path

    def session(self, n_seq: int = 1, **changed: Any) -> Session:
        config = RunConfig(model=str(self.folder / f"{self.name}.gguf"), n_ctx=2048, n_batch=2048, n_threads=2,
                           n_threads_batch=2, **changed)  # fmt: skip
        return Session.open(config, n_seq_max=n_seq, media=self.projector.media_config)


@pytest.fixture(scope="module", params=MODELS)
def golden(request: pytest.FixtureRequest, shared_dir: Path) -> Golden:
    return Golden(shared_dir / "golden" / "vision", request.param)


def test_a_file_that_encodes_audio_too(shared_dir: Path, tmp_path: Path) -> None:
    """Of Qwen2.5-Omni: images are those of Qwen2.5-VL."""
    golden = Golden(shared_dir / "golden" / "vision", "qwen25vl")
    file, path = open_gguf(golden.projector.path), tmp_path / "omni.gguf"
    keys = {"clip.projector_type": "qwen2.5o", "clip.has_audio_encoder": True}
    specs = [NewTensor(name, tuple(t.shape), t.type) for name, t in file.tensors.items()]
    with GGUFWriter(path, file.typed_metadata() | keys, specs) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, file.data(spec.name).reshape(-1).view(np.uint8))
    projector = Projector.open(path, golden.hp)
    assert projector.type == "qwen2.5o" and type(projector.tower) is type(golden.projector.tower)
    picture = decode_image((golden.folder / "images" / "small.png").read_bytes())
    assert projector.count(picture) == golden.projector.count(picture)


@pytest.mark.slow("compiles the kernels of a tower")
def test_embeddings(golden: Golden) -> None:
    for image, facts in golden.facts["images"].items():
        picture = decode_image((golden.folder / "images" / f"{image}.png").read_bytes())
        tile = golden.projector.tile(picture)
        assert [tile.width, tile.height] == facts["processed_size"]
        found, truth = golden.projector.encode(picture), golden.rows(image)
        assert found.rows.shape == truth.shape
        assert golden.projector.count(picture) == facts["image_tokens"] == len(found)
        error = np.sqrt(np.square(found.rows - truth).mean() / np.square(truth).mean())
        assert error < min(1e-3, golden.facts["bounds"]["embd_rel_rms"])


@pytest.mark.slow("runs a model and its tower")
@pytest.mark.parametrize("mode", list(MODES))
def test_log_probabilities(golden: Golden, mode: str) -> None:
    """The text after an image, in one batch, in micro-batches smaller than the image, and token by token."""
    if golden.projector.media_config.both and "n_ubatch" in MODES[mode]:
        pytest.skip("the image must be in one micro-batch")
    bounds = golden.facts["bounds"]["exact"]
    with golden.session(**MODES[mode]) as session:
        for image, facts in golden.facts["images"].items():
            session.clear()
            truth = golden.truth[f"{image}.logprob"].astype(np.float64)
            batch = Batch.mixed([facts["tokens_before"], golden.media(image), facts["tokens_after"]], logits="none")
            batch.logits[-len(truth) :] = True
            logits = session.decode(batch)
            found = log_softmax(logits)
            assert (np.exp(truth) * (truth - found)).sum(axis=1).max() < bounds["kld"]
            assert np.abs(found - truth)[truth > -6].max() < bounds["logprob"]
            sequences = session.sequences
            expected = facts.get("next_position", len(batch))
            assert sequences.n_past[0] + sequences.shift(0) == expected
            check_greedy(golden, session, facts, logits[-1])


def check_greedy(golden: Golden, session: Session, facts: dict[str, Any], logits: npt.NDArray[np.float32]) -> None:
    for token, margin in zip(facts["greedy"], facts["greedy_margin"], strict=True):
        if margin < golden.all["bounds"]["greedy_margin"]:
            return
        logits = logits.copy()
        logits[golden.facts["greedy_without"]] = -np.inf
        assert int(logits.argmax()) == token
        logits = session.decode(Batch.single([token], session.sequences.n_past[0]))[0]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return found


@pytest.mark.slow("runs a model and its tower")
def test_sequences_with_images_are_truncated_saved_and_copied(golden: Golden) -> None:
    """What follows an image is at the same positions after a rollback, in a loaded sequence and in a copy."""
    image, facts = next(iter(golden.facts["images"].items()))
    media = golden.media(image)
    parts: list[Sequence[int] | Media] = [facts["tokens_before"], media, facts["tokens_after"]]
    more = facts["tokens_after"][1:5]
    with golden.session(2) as session:
        session.decode(Batch.mixed(parts))
        n = session.sequences.n_past[0]
        truth = session.decode(Batch.mixed([more, media], n)).copy()
        shift = session.sequences.shift(0)
        kept = session.truncate(0, n)
        assert kept == n
        assert np.array_equal(session.decode(Batch.mixed([more, media], n)), truth)
        session.truncate(0, n)
        saved = session.sequences.save(0, n)
        assert session.sequences.load(1, saved) == n
        assert np.array_equal(session.decode(Batch.mixed([more, media], n, 1)), truth)
        assert session.sequences.shift(1) == shift
        session.truncate(1, 0)
        assert session.sequences.shift(1) == 0
        assert session.sequences.copy(0, 1, 0, n) == n
        assert np.array_equal(session.decode(Batch.mixed([more, media], n, 1)), truth)


@pytest.mark.slow("runs a model and its tower")
def test_an_image_that_must_be_whole_says_so(shared_dir: Path) -> None:
    golden = Golden(shared_dir / "golden" / "vision", "gemma3")
    with golden.session(n_ubatch=8) as session, pytest.raises(IkError, match=r"16 tokens.*one micro-batch; use -ub 16"):
        session.decode(Batch.mixed([[1, 5], golden.media("small"), [6]]))


@pytest.mark.slow("compiles the kernels of quantized towers")
@pytest.mark.parametrize(("name", "limit"), [("f32", 1e-4), ("bf16", 2e-2), ("q8_0", 4e-2), ("q4_0", 4e-2)])
def test_projectors_of_other_types(shared_dir: Path, tmp_path: Path, name: str, limit: float) -> None:
    """Matrices in another type give what the same numbers in float32 give, up to the rounding of activations."""
    for model in ("qwen25vl", "gemma3", "mistral3", "gemma4"):
        golden = Golden(shared_dir / "golden" / "vision", model)
        picture = decode_image((golden.folder / "images" / "small.png").read_bytes())
        rows = []
        for decoded in (False, True):
            path = golden.retyped(tmp_path / f"{model}-{decoded}.gguf", GGMLType[name.upper()], decoded=decoded)
            projector = Projector.open(path, golden.hp, n_threads=2)
            rows.append(projector.encode(picture).rows)
            projector.close()
        assert np.sqrt(np.square(rows[0] - rows[1]).mean() / np.square(rows[1]).mean()) < limit
