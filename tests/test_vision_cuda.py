"""Images in texts with the text model on an emulated GPU, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from test_vision_golden import Golden, log_softmax

from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch

pytestmark = [needs_emulation, pytest.mark.slow("emulates GPU programs")]


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    yield opener


@pytest.mark.parametrize("name", ["qwen25vl", "qwen3vl", "mistral3", "internvl", "gemma3", "gemma4"])
def test_log_probabilities(shared_dir: Path, opener: Opener, name: str) -> None:
    """Images of Gemma, whose tokens see each other in both directions, too."""
    golden = Golden(shared_dir / "golden" / "vision", name)
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
