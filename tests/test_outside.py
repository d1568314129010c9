"""Recipes of CONTRIBUTING.md, followed by a package outside of ik (`outside/`): ops, architectures, tensor types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from factories import MemoryTensor, tiny_model
from gguf_files import write_model

from ikcli import models
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES, TensorType, add_type, new_type_id
from ikcli.main import main
from ikcli.models import GraphConfig
from ikcli.native import code_digest, kernel_cache
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.decode import dequantize
from ikcli.settings.run import RunConfig


@pytest.fixture
def toy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where workers that compile find the package
    monkeypatch.setitem(models.ARCHITECTURES, "toy", "outside.model")
    yield write_model(tiny_model("toy", type_=GGMLType.F16), tmp_path / "toy.gguf")


def config(path: Path, **changes: int) -> RunConfig:
    return RunConfig(model=path, n_ctx=256, n_threads=2, n_threads_batch=2, warmup=False, **changes)  # type: ignore[arg-type]


def test_a_model_of_another_package_runs(toy_file: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 96, 20)
    reference = ReferenceSession(toy_file, GraphConfig(n_ctx=256))
    wanted = reference.decode(Batch.single(tokens, logits="all"))
    with Session.open(config(toy_file)) as session:
        found = np.array(session.decode(Batch.single(tokens, logits="all")))
        assert any(node.op.name == "relu_squared_glu" for node in session.graphs["decode"][0].nodes)
    assert np.abs(found - wanted).max() < 0.02 * wanted.std()


def test_commands_take_it(toy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", str(toy_file), "-p", "32", "-n", "4", "-r", "1", "-t", "2"]) == 0
    assert "pp32" in capsys.readouterr().out


def test_what_its_rules_do_not_know_is_refused_before_anything_is_loaded(
    toy_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outside import model

    monkeypatch.setattr(model, "SHIFT", 1.0)
    with pytest.raises(UnsupportedError, match=r"ffn_par-0: the CPU backend cannot compute relu_sq.* with shift 1.0"):
        Session.plan(config(toy_file))
    monkeypatch.setattr(model, "SHIFT", 0.0)
    code = main(["plan", "-m", str(toy_file), "-ngl", "99", "--device-spec", "cuda:8GiB"])
    assert code == 1 and "the CUDA backend has no relu_squared_glu" in capsys.readouterr().err


@pytest.fixture
def q8_toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorType]:
    from outside import tensor_type

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield tensor_type.register()
    del TYPES[tensor_type.Q8_TOY]


def test_a_tensor_type_of_another_package(
    q8_toy: TensorType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written by `ik quantize`, read, decoded, multiplied with on the CPU, and refused on a GPU."""
    source, made = write_model(tiny_model(type_=GGMLType.F16), tmp_path / "f16.gguf"), tmp_path / "toy.gguf"
    arguments = ["--token-embedding-type", "Q8_TOY", "--custom-q", ".*=q8_toy"]
    assert main(["quantize", *arguments, str(source), str(made), "Q8_0"]) == 0
    before, after = open_gguf(source), open_gguf(made)
    changed = [t for t in after.tensors.values() if t.type == q8_toy.type]
    assert {"token_embd.weight", "output.weight", "blk.1.ffn_up.weight"} <= {t.name for t in changed}
    for t in changed:
        x = dequantize(before.data(t.name), before.tensors[t.name].type, t.shape)
        y = dequantize(after.data(t.name), t.type, t.shape)
        assert 0 < np.abs(x - y).max() <= np.abs(x).max() / 200
    model = tiny_model(type_=GGMLType.F16)
    for t in changed:  # the same codes and scales in the order of q8_0
        blocks = np.asarray(after.data(t.name)).reshape(-1, 34)
        same = np.concatenate((blocks[:, 32:], blocks[:, :32]), axis=1).reshape(-1)
        model.tensors[t.name] = MemoryTensor(GGMLType.Q8_0, t.shape, same)
    tokens, logits = np.random.default_rng(1).integers(0, 96, 20), []
    for path in (made, write_model(model, tmp_path / "q8_0.gguf")):
        with Session.open(config(path)) as session:
            many = np.array(session.decode(Batch.single(tokens, logits="all")))
            one = np.array(session.decode(Batch.single(tokens[:1], pos0=len(tokens))))
            logits.append(np.concatenate((many, one)))
    np.testing.assert_array_equal(*logits)
    capsys.readouterr()
    code = main(["plan", "-m", str(made), "-ngl", "99", "--device-spec", "cuda:8GiB"])
    assert code == 1 and "is q8_toy, which has no CUDA kernel" in capsys.readouterr().err


def test_numbers_and_names_of_tensor_types_are_taken_once(q8_toy: TensorType) -> None:
    assert GGMLType(int(q8_toy.type)) is q8_toy.type is new_type_id(1001, "Q8_TOY")
    with pytest.raises(ValueError, match=r"tensor type id 12 is that of Q4_K"):
        new_type_id(12, "MINE")
    with pytest.raises(ValueError, match=r"tensor type Q4_k \(1002\): q4_K is 12"):
        add_type(TensorType(new_type_id(1002, "MINE"), "Q4_k", 32, 18))
    with pytest.raises(ValueError, match="1003 is not a valid GGMLType"):
        GGMLType(1003)


def test_kernels_of_other_packages_are_known_by_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []
    keys = KernelKey("elsewhere.kernels", "A"), KernelKey("matmul", "make_mul_mat", ("toy,elsewhere.kernels:A,s32",))
    for text in ("A = 1\n", "A = 2\n"):
        (package / "kernels.py").write_text(text)
        kernel_cache.source_digest.cache_clear()
        kernel_cache._source.cache_clear()
        code_digest._module.cache_clear()
        code_digest._source.cache_clear()
        names.append([(key.file_name, key.code_name) for key in keys])
    for before, after in zip(*names, strict=True):
        assert before[0] != after[0] and before[1] != after[1]
    assert keys[1].text == "matmul.make_mul_mat(toy)"
