"""Measured errors of types: samples, sums against plain arithmetic, the table of the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import quant_models

from ikcli.eval.quantize_stats import StatsParams, all_types, measure_model
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.measure import measure, sample_tensor

T = GGMLType
UP = "blk.0.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quant_models.write_model(tmp_path_factory.mktemp("m") / "m.gguf")


def weights(n_mat: int = 4) -> np.ndarray:
    return np.linspace(0.5, 3, n_mat * 256, dtype=np.float32).reshape(n_mat, 256)


def test_all_rows_against_plain_arithmetic(model: Path) -> None:
    file, w = open_gguf(model, ()), weights()
    sample = sample_tensor(file, file.tensors[UP], w)
    assert sample.n_sampled == sample.n_rows == 4 * 32 and [p.matrix for p in sample.pieces] == [0, 1, 2, 3]
    found = measure(sample, T.Q4_0)
    x = dequantize(file.data(UP), T.F16, (256, 32, 4)).reshape(4, 32, 256)
    error2 = np.zeros_like(x, np.float64)
    for e in range(4):
        back = dequantize(quantize_rows(x[e], T.Q4_0, w[e]), T.Q4_0, (256, 32)).reshape(32, 256)
        error2[e] = (back.astype(np.float64) - x[e]) ** 2
    x2 = x.astype(np.float64) ** 2
    assert found.rmse == pytest.approx(np.sqrt(error2.mean()), rel=1e-5)
    assert found.relative == pytest.approx(np.sqrt(error2.sum() / x2.sum()), rel=1e-5)
    wanted = (error2 * w[:, None]).sum() / (x2 * w[:, None]).sum()
    assert found.weighted == pytest.approx(np.sqrt(wanted), rel=1e-5)
    assert found.largest == pytest.approx(np.sqrt(error2.max()), rel=1e-5)


def test_samples_meet_every_expert(model: Path) -> None:
    file = open_gguf(model, ())
    sample = sample_tensor(file, file.tensors[UP], weights(), 64)
    assert sample.n_sampled == 64 and {p.matrix for p in sample.pieces} == {0, 1, 2, 3}
    assert all((p.weights == weights()[p.matrix]).all() for p in sample.pieces)
    everything = measure(sample_tensor(file, file.tensors[UP], None), T.Q4_0).relative
    assert measure(sample, T.Q4_0).relative == pytest.approx(everything, rel=0.1)


def test_interleaved_types_are_their_plain_types(model: Path) -> None:
    file = open_gguf(model, ())
    sample = sample_tensor(file, file.tensors["output.weight"], None)
    assert measure(sample, T.Q8_0_R8) == measure(sample, T.Q8_0)
    assert measure(sample, T.F32).sum2 == 0


def test_rows_of_the_table(model: Path) -> None:
    entry = ImatrixEntry(weights(), np.ones(4, np.float32))
    imatrix = Imatrix({UP: entry}, path="i.dat")
    params = StatsParams((T.Q8_0, T.Q4_0, T.Q6_0), 0, ("exps", "attn_q"), ("gate",), 2)
    rows = list(measure_model(open_gguf(model, ()), params, imatrix))
    assert [(r.tensor, r.type) for r in rows[:3]] == [("blk.0.attn_q.weight", t) for t in ("q8_0", "q4_0", "q6_0")]
    assert [r.tensor for r in rows[-3:]] == [""] * 3
    by_type = {r.type: r.errors for r in rows if not r.tensor}
    assert by_type["q8_0"].rmse < by_type["q6_0"].rmse < by_type["q4_0"].rmse
    assert by_type["q8_0"].n == sum(r.errors.n for r in rows if r.tensor and r.type == "q8_0")
    assert {r.tensor for r in rows if r.has_weights} == {UP, ""}


def test_types_by_size() -> None:
    types = all_types()
    assert {T.Q4_K, T.IQ4_K, T.F16} <= set(types) and not {T.F32, T.Q4_K_R4, T.IQ2_BN} & set(types)


def test_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["quantize-stats", "-m", str(model), "--type", "q8_0,Q4_0", "--include-layer", "attn_[qk]"]
    assert main(base) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| tensor | type | bpw |") and len(lines) == 2 + 4 + 2
    assert lines[2].startswith("| blk.0.attn_q.weight | q8_0 | 8.500 | ") and lines[-1].startswith("| all | q4_0 | ")
    assert main([*base, "--summary", "--output-format", "jsonl", "--rows", "16"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["type"] for r in rows] == ["q8_0", "q4_0"] and rows[0]["tensor"] is None
    assert rows[0]["n_measured"] == 2 * 16 * 256 and rows[0]["weighted"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--type", "q4_9"], "unknown tensor type 'q4_9'"),
        (["--include-layer", "nothing"], "leave no matrix to measure"),
        (["--include-layer", "("], "--include-layer"),
        (["--output-format", "xml"], "use md or jsonl"),
        (["more"], 'unexpected argument "more"'),
    ],
)
def test_refused(model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize-stats", "-m", str(model), *argv]) == 2
    assert message in capsys.readouterr().err
