"""Models with windows, sinks and soft caps on an emulated GPU: the logits of the CPU."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener, assert_close, config, tokens
from factories import tiny_model
from gguf_files import write_model

from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.graph import Per
from ikcli.measure.kl_divergence import KlParams, run
from ikcli.measure.kld_file import BaseReader

pytestmark = needs_emulation
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": 20},
    "gpt-oss": {"attention.sliding_window": 24, "expert_feed_forward_length": 64, **EXPERTS},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def written(folder: Path, arch: str) -> Path:
    path = folder / f"{arch}.gguf"
    return path if path.exists() else write_model(tiny_model(arch, context_length=4096, **MODELS[arch]), path)


def logits(path: Path, **changes: Any) -> tuple[Any, set[Per]]:
    """Of a prompt in two pieces, which moves the windows, and of single tokens; what the caches have rows of."""
    with Session.open(config(path, n_ctx=4096, n_ubatch=64, **changes)) as session:
        ids = tokens(430)
        pieces = (0, 100, 427, 428, 429, 430)
        rows = [np.array(session.decode(Batch.single(ids[a:b], a))) for a, b in pairwise(pieces)]
        return np.concatenate(rows), {c.per for c in session.cache_bytes()}


F32 = {"type_k": "f32", "type_v": "f32"}


@pytest.mark.parametrize(
    ("arch", "changes", "tolerance"),
    [
        ("gemma2", F32, 0.02),
        ("gpt-oss", F32, 0.02),
        # for each of these the CPU compiles attention of its own
        pytest.param("gemma2", {"swa_full": True}, 0.05, marks=pytest.mark.slow),
        pytest.param("gemma2", {"type_k": "q8_0", "type_v": "q8_0", "n_gpu_layers": 1}, 0.1, marks=pytest.mark.slow),
        pytest.param("gpt-oss", F32 | {"flash_attn": False}, 0.02, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_cpu(arch, changes, tolerance, folder, monkeypatch) -> None:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    path = written(folder, arch)
    wanted, _ = logits(path, **(changes | {"n_gpu_layers": 0}))
    found, per = logits(path, **changes)
    assert_close(found, wanted, tolerance)
    assert (Per.WINDOW in per) == ("swa_full" not in changes)
    device = opener.devices["CUDA0"]
    attention = {k for k in device.launches if k.startswith("attn")}
    assert attention and not {k for k in attention if k.startswith("attn_mla")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "gemma2", "gemma3", "gemma4", "cohere2", "llama4", "laguna", "mimo2"])
def test_golden_log_probabilities(name, shared_dir, monkeypatch) -> None:
    """Those of the reference program, within the bounds of the CPU."""
    monkeypatch.setattr(gpus, "open_devices", Opener())
    folder = shared_dir / "golden" / "arch"
    bounds = json.loads((folder / "expected.json").read_text())[name]["bounds"]["f16"]
    base = BaseReader(folder / f"{name}.kld")
    settings = {"command": "perplexity", "n_ctx": base.n_ctx, "n_batch": base.n_ctx}
    with Session.open(config(folder / f"{name}.gguf", **settings)) as session:
        kld = run(session, base, KlParams(n_batch=base.n_ctx, chunks=1)).positions.kld
    assert np.median(kld) <= bounds["median"] and np.quantile(kld, 0.99) <= bounds["p99"]
