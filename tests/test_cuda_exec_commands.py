"""Commands and library calls that run models, with an emulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener, config, tokens, written

from ikcli.engine.run import gpus
from ikcli.engine.run.session import Session
from ikcli.imatrix.matrix import ImatrixParams, collect
from ikcli.main import main

pytestmark = needs_emulation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    return opener


class NoBos:
    add_bos = False
    bos = None


def test_bench_names_the_gpu(folder, opener, capsys) -> None:
    args = ["-m", str(written(folder, "qwen3moe")), "-p", "5", "-n", "1", "-r", "1", "-w", "0", "-t", "1"]
    assert main(["bench", *args, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["test"] for row in rows] == ["pp5", "tg1"]
    assert all(row["cuda"] and row["gpu_info"] == opener.devices["CUDA0"].info.name for row in rows)
    assert main(["bench", *args, "-ngl", "0"]) == 0
    assert "| CPU " in capsys.readouterr().out


def test_sweep_bench(folder, opener, capsys) -> None:
    args = ["-m", str(written(folder, "llama")), "-c", "32", "-ub", "8", "-b", "8", "-n", "1", "-t", "1", "--no-warmup"]
    assert main(["sweep-bench", *args, "-ngl", "99"]) == 0
    printed = capsys.readouterr()
    assert "|     8 |      1 |      0 |" in printed.out
    assert "offloaded 3/3 layers to GPU" in printed.err and "CUDA0 KV buffer size" in printed.err


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2"])
def test_importance_matrices_are_those_of_the_cpu(name, folder, opener) -> None:
    path, found = written(folder, name), []
    for ngl in (0, 99):
        settings = {"n_gpu_layers": ngl, "fmoe": False, "mla": 1, "cpu_moe": name == "deepseek2"}
        with Session.open(config(path, **settings)) as session:
            session._tokenizer = NoBos()  # type: ignore[assignment]
            found.append(collect(session, tokens(24), ImatrixParams(n_ctx=12)).imatrix.entries)
    assert opener.devices["CUDA0"].launches
    wanted, entries = found
    assert entries.keys() == wanted.keys()
    for key, entry in wanted.items():
        scale = np.abs(entry.values).max()
        close = np.isclose(entries[key].values, entry.values, rtol=0.05, atol=0.01 * scale)
        assert close.mean() > 0.9, key
