"""Sequences of models with recurrent layers: whatever way leads to a position, logits are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from factories import tiny_model
from gguf_files import write_model
from tiny_architectures import OPTIONAL, TINY

from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Per
from ikcli.models import GraphConfig
from ikcli.settings.run import RunConfig

ARCHS = ("qwen3next", "kimi-linear", "mamba")
CPU_ARCHS = (*ARCHS, "kimi-k3", "mamba2", "minimax-01")
IDS = np.random.default_rng(1).integers(1, 96, 100).astype(np.int32)


@pytest.fixture(params=CPU_ARCHS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    arch: str = request.param
    model = tiny_model(arch, optional=("kv_b.weight", *OPTIONAL.get(arch, ())), **TINY[arch])
    return write_model(model, tmp_path / "model.gguf")


def opened(path: Path, n_seq: int = 2, **changes: Any) -> Session:
    settings: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "type_k": "f32", "type_v": "f32"}
    return Session.open(RunConfig(model=path, n_ctx=512, **settings | changes), n_ctx=512, n_seq_max=n_seq)


def add(session: Session, start: int, stop: int, seq: int = 0) -> np.ndarray:
    """Logits of IDS[start:stop], computed in one go."""
    return np.array(session.decode(Batch.single(IDS[start:stop], start, seq, logits="all")))


def near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() < 1e-3 * wanted.std())


def test_back_to_a_checkpoint_saved_loaded_and_copied(path: Path) -> None:
    with opened(path) as session, opened(path, 4) as other:
        add(session, 0, 20)
        session.checkpoint(0)
        first = add(session, 20, 30)
        assert session.truncate(0, 25) == 20
        assert np.array_equal(add(session, 20, 30), first)
        saved = session.sequences.save(0, 30)
        assert other.sequences.load(2, saved) == 30 and session.sequences.copy(0, 1, 0, 30) == 30
        wanted = add(session, 30, 50)
        assert np.array_equal(add(other, 30, 50, 2), wanted) and np.array_equal(add(session, 30, 50, 1), wanted)
        assert session.truncate(0, 0) == 0
        assert near(add(session, 0, 50)[30:], wanted), "from the beginning, in one go"


def test_sequences_side_by_side_in_a_micro_batch(path: Path) -> None:
    """Pieces of three sequences, of one token to more than a chunk, against the NumPy reference."""
    reference = ReferenceSession(path, GraphConfig(n_ctx=512, type_k=GGMLType.F32, type_v=GGMLType.F32), n_seq_max=3)
    with opened(path, 3) as session:
        past = [0, 0, 0]
        for lengths in ((70, 3, 12), (1, 1, 1), (2, 20, 9)):
            pieces = [(seq, past[seq], past[seq] + n) for seq, n in enumerate(lengths)]
            tokens = np.concatenate([IDS[a:b] for _, a, b in pieces])
            pos = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in pieces])
            seqs = np.concatenate([np.full(b - a, seq, np.int32) for seq, a, b in pieces])
            batch = Batch(tokens, pos, seqs, np.ones(len(tokens), bool))
            assert near(np.array(session.decode(batch)), reference.decode(batch))
            past = [b for _, _, b in pieces]


def test_states_are_counted(path: Path) -> None:
    """Rows of four bytes for convolution and delta rule, per recurrent layer and sequence."""
    with opened(path, 3) as session:
        hp = session.model.hp
        conv = (hp.ssm_d_conv - 1) * (2 * hp.ssm_d_state * hp.ssm_n_group + hp.ssm_d_inner)
        states = {c: n for c, n in session.cache_bytes().items() if c.per is Per.SEQUENCE}
        per_layer = 4 * (conv + hp.ssm_d_state * hp.ssm_d_inner)
        assert sum(states.values()) == 3 * per_layer * len(hp.recurrent_layers)
        assert sum(m["KV"] for m in session.memory().values()) == sum(session.cache_bytes().values())


@needs_emulation
@pytest.mark.parametrize("path", ARCHS, indirect=True)
@pytest.mark.parametrize("n_gpu_layers", [99, 2])
def test_a_gpu_goes_on_where_the_cpu_stopped(path: Path, n_gpu_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all layers, or with some of them."""
    with opened(path) as session:
        add(session, 0, 30)
        saved = session.sequences.save(0, 30)
        wanted = add(session, 30, 50)
    monkeypatch.setattr(gpus, "open_devices", Opener())
    with opened(path, n_gpu_layers=n_gpu_layers, n_threads=1, n_threads_batch=1) as gpu:
        assert gpu.sequences.load(1, saved) == 30
        cuda_sessions.assert_close(add(gpu, 30, 50, 1), wanted, 0.02)
