"""Vision towers, and texts with images, on an emulated GPU: against torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, needs_emulation
from cuda_sessions import Opener
from projector_models import Model
from test_vision_golden import MODELS, Golden, log_softmax
from test_vision_types import after_images, spread, values
from vision_models import answers

from ikcli.backends.cuda.device import OutOfMemory
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.main import main
from ikcli.settings.run import RunConfig
from ikcli.settings.vision import VisionConfig
from ikcli.vision.decode import Tile, decode_image
from ikcli.vision.encoder import tower_runner
from ikcli.vision.opening import open_projector
from ikcli.vision.projector import Projector

pytestmark = [needs_emulation, pytest.mark.slow("emulates GPU programs")]


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    yield opener


def on_gpu(shared_dir: Path, name: str) -> tuple[Golden, EmulatedDevice]:
    """A golden model whose projector is on an emulated GPU."""
    golden, device = Golden(shared_dir / "golden" / "vision", name), EmulatedDevice()
    runner = tower_runner(2, ("CUDA0", gpus.run_device(device)))
    golden.projector = Projector.open(golden.projector.path, golden.hp, runner=runner)
    return golden, device


@pytest.mark.parametrize("name", MODELS)
def test_embeddings(shared_dir: Path, name: str) -> None:
    """Within the bounds of the CPU; a larger image after a small one gets more memory."""
    golden, device = on_gpu(shared_dir, name)
    with closing(golden.projector) as projector:
        for image in ("small", "shapes"):
            picture = decode_image((golden.folder / "images" / f"{image}.png").read_bytes())
            found, truth = projector.encode(picture), golden.rows(image)
            error = np.sqrt(np.square(found.rows - truth).mean() / np.square(truth).mean())
            # queries and activations are rounded to float16, which Gemma 4's unscaled scores feel
            assert error < min(2e-3 if name == "gemma4" else 1e-3, golden.facts["bounds"]["embd_rel_rms"])
        assert any(name.endswith("_seen") for name in device.launches)
        assert projector.memory().keys() == {"CPU", "CUDA0"}


TYPES = sorted(answers())


@pytest.mark.parametrize("name", TYPES)
def test_embeddings_of_other_types(tmp_path: Path, name: str) -> None:
    model, device = Model(name, tmp_path), EmulatedDevice()
    runner = tower_runner(2, ("CUDA0", gpus.run_device(device)))
    with closing(Projector.open(model.projector.path, model.hp, runner=runner)) as projector:
        for size, truth in model.images.items():
            rows = [projector.encode(one).rows for one in model.pieces(size) if isinstance(one, Tile)]
            found, wanted = spread(rows, 96), values(truth["embeddings"])
            assert found.shape == wanted.shape
            error = np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean())
            assert error < 4e-3, error  # activations in float16, weights that enlarge what is rounded
    assert device.launches


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(shared_dir: Path, opener: Opener, name: str) -> None:
    """Tower and model on GPUs; images of Gemma, whose tokens see each other in both directions, too.

    For Gemma 4, the rounding in both together is a little more than the bounds allow, so its tower is on the CPU.
    """
    golden = Golden(shared_dir / "golden" / "vision", name) if name == "gemma4" else on_gpu(shared_dir, name)[0]
    bounds = golden.facts["bounds"]["exact"]
    facts, truth = golden.facts["images"]["small"], golden.truth["small.logprob"].astype(np.float64)
    with golden.session(n_gpu_layers=99, warmup=False) as session:
        batch = Batch.mixed([facts["tokens_before"], golden.media("small"), facts["tokens_after"]], logits="none")
        batch.logits[-len(truth) :] = True
        found = log_softmax(np.array(session.decode(batch)))
        assert session.programs["decode"].parts.keys() == {"CPU", "CUDA0"}
        assert (np.exp(truth) * (truth - found)).sum(axis=1).max() < bounds["kld"]
        assert np.abs(found - truth)[truth > -6].max() < bounds["logprob"]
        session.truncate(0, len(batch) - 1)
        after = Batch.single(facts["tokens_after"][-1:], len(batch) - 1)
        again = log_softmax(np.array(session.decode(after)))
        assert np.abs(again - truth[-1:])[truth[-1:] > -6].max() < bounds["logprob"]


def test_visual_experts(tmp_path: Path, opener: Opener) -> None:
    assert after_images("cogvlm", tmp_path, n_gpu_layers=99) < 1e-4
    assert opener.devices["CUDA0"].launches


def run_config(shared_dir: Path, offload: bool, **changed: Any) -> RunConfig:
    folder = shared_dir / "golden" / "vision"
    vision = VisionConfig(mmproj=folder / "gemma3.mmproj.gguf", mmproj_offload=offload)
    return RunConfig(model=folder / "gemma3.gguf", n_ctx=512, n_threads=1, n_threads_batch=1, warmup=False,
                     vision=vision, **changed)  # fmt: skip


@pytest.mark.parametrize(
    ("offload", "n_gpu_layers", "main_gpu"), [(True, 99, 0), (True, 1, 1), (False, 99, 0), (True, 0, 0)]
)
def test_which_device_a_projector_uses(
    shared_dir: Path, opener: Opener, offload: bool, n_gpu_layers: int, main_gpu: int
) -> None:
    config = run_config(shared_dir, offload, n_gpu_layers=n_gpu_layers, main_gpu=main_gpu, tensor_split=(1.0, 1.0))
    golden = Golden(shared_dir / "golden" / "vision", "gemma3")
    projector = open_projector(config, golden.hp)
    assert projector is not None
    with closing(projector):
        assert len(projector.encode(decode_image((golden.folder / "images" / "small.png").read_bytes()))) == 16
        used = {name for name, device in opener.devices.items() if device.launches}
    assert used == ({f"CUDA{main_gpu}"} if offload and n_gpu_layers else set())
    assert not any(device.owners() for device in opener.devices.values())


def test_a_session_leaves_memory_for_the_projector(shared_dir: Path, opener: Opener) -> None:
    config = run_config(shared_dir, True, n_gpu_layers=99)
    planner = Planner.of_file(config)
    beside = {"CUDA0": {"projector": 7 << 30, "images": 1 << 30}}
    with pytest.raises(OutOfMemory, match="projector"):
        Session.open(config, planner=planner.on(planner.machine, beside=beside))


def test_plan_counts_the_projector(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, totals = shared_dir / "golden" / "vision", []
    line = ["plan", "-m", str(folder / "gemma3.gguf"), "-c", "512", "-ngl", "99", "--device-spec", "cuda:8GiB,cpu:8GiB"]
    for more, where in (((), "CUDA0"), (("--no-mmproj-offload",), "CPU")):
        assert main([*line, "--mmproj", str(folder / "gemma3.mmproj.gguf"), *more]) == 0
        out = capsys.readouterr().out
        used = re.search(rf"projector: gemma3 on {where}, ([\d.]+) MiB, and ([\d.]+) MiB", out)
        needs = re.search(r"CUDA0 needs ([\d.]+) MiB", out)
        assert used is not None and needs is not None
        totals.append((float(needs[1]), float(used[1]) + float(used[2])))
    assert abs(totals[0][0] - totals[1][0] - totals[0][1]) < 0.05
