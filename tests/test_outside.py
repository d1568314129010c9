"""Recipes of CONTRIBUTING.md, followed by a package outside of ik (`outside/`): an op, its kernel, an architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from factories import tiny_model
from gguf_files import write_model

from ikcli import models
from ikcli.config import RunConfig
from ikcli.engine.batch import Batch
from ikcli.engine.reference_session import ReferenceSession
from ikcli.engine.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.main import main
from ikcli.models import GraphConfig
from ikcli.native import kernel_cache


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
    assert np.abs(found - wanted).max() < 0.01 * wanted.std()


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


def test_kernels_of_other_packages_are_known_by_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for text in ("A = 1\n", "A = 2\n"):
        (package / "kernels.py").write_text(text)
        kernel_cache.source_digest.cache_clear()
        digests.append(kernel_cache.source_digest("elsewhere.kernels"))
    assert digests[0] != digests[1]
