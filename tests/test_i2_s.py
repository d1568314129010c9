"""I2_S, one scale for a whole tensor: models compute with it as rows of IQ2_BN, on CPUs and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
from cuda_emulation import needs_emulation
from factories import MemoryModel, MemoryTensor, tiny_model
from gguf_files import write_model

from ikcli.engine.run import gpus
from ikcli.engine.run.model import Model
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import tensor_n_bytes
from ikcli.models import GraphConfig
from ikcli.quant.decode import dequantize
from ikcli.quant.repack import iq2_bn_of_i2_s

T = GGMLType


def i2_s(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random ternary values with a scale below 0.1."""
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, 3, (4, tensor_n_bytes(T.I2_S, shape) - 32), dtype=np.uint8)
    codes = np.bitwise_or.reduce(parts << np.array([0, 2, 4, 6], np.uint8)[:, None])
    tail = np.zeros(32, np.uint8)
    tail[:4] = np.array([0.03 + 0.05 * rng.random()], "<f4").view(np.uint8)
    return np.concatenate([codes, tail])


def bitnet() -> MemoryModel:
    """A tiny model whose matrices have this type."""
    model = tiny_model("bitnet-b1.58", embedding_length=128, feed_forward_length=256, type_=T.F16)
    for i, (name, t) in enumerate(list(model.tensors.items())):
        if name.startswith("blk.") and len(t.shape) == 2:
            model.tensors[name] = MemoryTensor(T.I2_S, t.shape, i2_s(t.shape, i))
    return model


@pytest.mark.parametrize("shape", [(128, 1), (384, 7), (256, 5, 3)], ids=str)
def test_values_stay(shape: tuple[int, ...]) -> None:
    data = i2_s(shape, 1)
    rows = iq2_bn_of_i2_s(data, shape[0])
    assert rows.size == tensor_n_bytes(T.IQ2_BN, shape)
    found = dequantize(np.ascontiguousarray(rows).reshape(-1), T.IQ2_BN, shape)
    np.testing.assert_array_equal(found, dequantize(data, T.I2_S, shape))


def test_a_model_holds_rows(tmp_path: Path) -> None:
    made = bitnet()
    model = Model.from_file(open_gguf(write_model(made, tmp_path / "m.gguf")), GraphConfig())
    name = "blk.1.ffn_down.weight"
    spec = model.specs[name]
    assert spec.type == T.IQ2_BN and model.n_bytes([name]) == model.bytes_of(name).size
    values = dequantize(model.bytes_of(name), T.IQ2_BN, tuple(spec.shape))
    np.testing.assert_array_equal(values, made.values(name))
    np.testing.assert_array_equal(values, model.values(name))
    assert not model.as_in_file(name)


@needs_emulation
@pytest.mark.slow("compiles kernels of ternary types for both devices")
@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_sessions(n_gpu_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute as those of a file with IQ2_BN, to the last bit."""
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    made, found = bitnet(), []
    reference: Any = ReferenceSession(made, GraphConfig(n_ctx=256))
    wanted = cuda_sessions.transcript(reference)
    for type_ in (T.I2_S, T.IQ2_BN):
        for name, t in list(made.tensors.items()):
            if t.type == T.I2_S and type_ == T.IQ2_BN:
                rows = iq2_bn_of_i2_s(t.bytes, t.shape[0])
                made.tensors[name] = MemoryTensor(T.IQ2_BN, t.shape, np.ascontiguousarray(rows).reshape(-1))
        path = write_model(made, tmp_path / f"{type_.name}.gguf")
        with Session.open(cuda_sessions.config(path, n_gpu_layers=n_gpu_layers)) as session:
            found.append(cuda_sessions.transcript(session))
    np.testing.assert_array_equal(*found)
    cuda_sessions.assert_close(found[0], wanted, 0.3)  # of 8-bit activations in rows of 128
