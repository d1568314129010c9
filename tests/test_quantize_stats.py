"""Measured errors of types: samples, sums against plain arithmetic, counts of scales and codes, the command's table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import quant_models

from ikcli.errors import NonFiniteError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.main import main
from ikcli.quant.code_fields import code_space, read_fields
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.measure import measure, sample_tensor
from ikcli.quant.validate import block_scale_offsets
from ikcli.study import quantize_stats
from ikcli.study.code_use import as_json, bars, count_codes, folded
from ikcli.study.quantize_stats import StatsParams, all_types, measure_model, measured_tensors, notes, row_runs

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


def test_pieces_do_not_change_the_sums(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = StatsParams((T.IQ4_K, T.Q4_0), 0, ("up_exps",))
    whole = list(measure_model(open_gguf(model, ()), params))
    monkeypatch.setattr(quantize_stats, "_PIECE_ELEMENTS", 16 * 256)
    parts = list(measure_model(open_gguf(model, ()), params))
    for a, b in zip(whole, parts, strict=True):
        assert a.errors.rmse == pytest.approx(b.errors.rmse, rel=1e-9) and a.n_measured_rows == b.n_measured_rows == 128
        assert a.use is not None and b.use is not None and as_json(a.use) == as_json(b.use)


def test_runs_of_rows() -> None:
    assert row_runs((256, 40, 2), 0) == [(0, 0, 40), (1, 40, 80)]
    sampled = row_runs((4096, 1000, 8), 160)
    assert len(sampled) == 10 and {m for m, _, _ in sampled} == set(range(8))
    assert all((first - m * 1000) % 16 == 0 and stop - first in (8, 16) for m, first, stop in sampled)


SIGNS_APART = (T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ3_KT)
COUNTED = [t for t in (*all_types(), T.Q8_KV) if code_space(t)]


def rows_of_scale_one(type: GGMLType, n: int) -> np.ndarray:
    """Rows of one block with random fields and a float scale (and minimum) of 1, as bytes (n, row size)."""
    fmt, rng = TYPES[type], np.random.default_rng(int(type))
    rows = rng.integers(0, 256, (n, fmt.row_meta_size + fmt.type_size), np.uint8)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if type == T.MXFP4:
        rows[:, 0] = 128
    elif type == T.NVFP4:  # 2, for a table of doubled values
        rows[:, :4] = 64
    elif type == T.IQ1_M:  # the scale is the top nibbles of four words
        rows[:, 49:56:2] = rows[:, 49:56:2] & 15 | np.array([0, 0, 0xC0, 0x30], np.uint8)
    elif fmt.row_meta_size == 2:
        rows[:, :2] = one
    elif fmt.row_meta_size:
        rows[:, :4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    for offset in block_scale_offsets(type):
        rows[:, offset : offset + 2] = one
    return rows


@pytest.mark.parametrize("type", COUNTED, ids=lambda t: TYPES[t].name)
def test_fields_explain_the_values(type: GGMLType) -> None:
    """Value = multiplier * f(shift, code) - minimum, with f the same everywhere: a wrong field would break that."""
    fmt, space = TYPES[type], code_space(type)
    assert space is not None
    rows = rows_of_scale_one(type, 4096 if space.n_codes > 8192 else 256)
    n, size = len(rows), fmt.block_size
    x = dequantize(rows, type, (size, n)).reshape(n, size).astype(np.float64)
    found = read_fields(np.ascontiguousarray(rows[:, fmt.row_meta_size :]), type)

    def per_weight(a: np.ndarray | None, default: int) -> np.ndarray:
        return np.full((n, size), default) if a is None else np.repeat(a.astype(np.int64), size // a.shape[1], axis=1)

    m, shift = per_weight(found.multipliers, 1), per_weight(found.shifts, 0)
    minimum = per_weight(found.minimums, 1 if type in (T.Q4_1, T.Q5_1) else 0)
    if type in (T.Q4_1, T.Q5_1):
        minimum = -minimum
    good = m != 0
    value = np.where(good, (x + minimum) / np.where(good, m, 1), 0)
    if type in SIGNS_APART:
        value = np.abs(value)
    key = (per_weight(found.codes, 0) * 2 + shift) * space.group + np.arange(size) % space.group
    assert found.codes.max() < space.n_codes and found.codes.shape == (n, size // space.group)
    key, value = key[good], value[good]
    least, most = np.full(key.max() + 1, np.inf), np.full(key.max() + 1, -np.inf)
    np.minimum.at(least, key, value)
    np.maximum.at(most, key, value)
    seen = np.isfinite(least)
    assert seen.sum() < key.size and np.allclose(least[seen], most[seen], rtol=1e-5, atol=1e-5)
    if space.group == 1 and type not in (T.MXFP4, T.NVFP4):  # which have two zeros
        assert len(np.unique(least[seen].round(4))) == seen.sum() == space.n_codes * (1 + space.shifts)


def test_every_measured_type_is_counted() -> None:
    assert {t for t in all_types() if code_space(t) is None} == {T.F16, T.BF16}


def test_counts_of_known_codes() -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, :32] = np.arange(-16, 16)
    use = count_codes(quantize_rows(x, T.Q4_K), T.Q4_K, 256)
    assert use is not None and use.codes.sum() == 256 and use.zero == 7 / 8 and use.top in (0, 1 / 8)
    sizes = use.magnitudes()
    assert sizes is not None and sizes.sum() == 8 and sizes[0] >= 7 and use.minimums is not None
    assert use.minimums.sum() == 8 and use.negative is None and use.entropy is not None
    both = as_json(use + use)
    assert sum(both["codes"]["counts"]) == 512 and both["multipliers"]["zero"] == 7 / 8
    tiny = count_codes(quantize_rows(x * np.float32(1e-6), T.Q8_0), T.Q8_0, 256)
    assert tiny is not None and tiny.subnormal_scales == 1 and tiny.zero_scales == 7 and tiny.entropy is None
    assert as_json(tiny)["float_scales"]["exponents"] == {"-23": 1}


def test_trellis_codes_are_reported_in_bins() -> None:
    x = np.random.default_rng(0).standard_normal((2, 256), np.float32)
    use = count_codes(quantize_rows(x, T.IQ2_KT), T.IQ2_KT, 256)
    assert use is not None
    codes = as_json(use)["codes"]
    assert len(codes["counts"]) == 2048 and codes["per_count"] == 32 and sum(codes["counts"]) == 64


def test_bars() -> None:
    assert bars(np.array([0, 1, 40, 80])) == "·▁▄█" and bars(np.zeros(2)) == "··"
    assert folded(np.arange(32), 16).tolist() == [1 + 4 * i for i in range(16)] and len(folded(np.ones(4), 16)) == 4


def test_notes_tell_what_is_left_out(model: Path) -> None:
    file, params = open_gguf(model, ()), StatsParams((T.Q4_K, T.IQ4_NL), 64, (), ("embd",))
    tensors = measured_tensors(file, params)
    assert not any("gate_inp" in t.name for t in tensors)
    sampled, misfit = notes(tensors, params)
    assert sampled.startswith("3 of ") and "about 64 rows" in sampled
    assert (
        misfit.startswith("q4_K does not fit the rows of blk.0.ffn_down_exps.weight [32, 256, 4]") and "q5_0" in misfit
    )
    rows = [r for r in measure_model(file, params) if r.tensor == "blk.0.ffn_down_exps.weight"]
    assert [r.type for r in rows] == ["iq4_nl"] and (rows[0].n_measured_rows, rows[0].n_rows) == (64, 1024)


def test_nan_names_tensor_and_row(tmp_path: Path) -> None:
    bad = quant_models.values(UP, quant_models.SHAPES[UP])
    bad[3, 31, 7] = np.nan
    file = open_gguf(quant_models.write_model(tmp_path / "nan.gguf", **{UP: bad}), ())
    with pytest.raises(NonFiniteError, match=r"nan\.gguf: tensor blk\.0\.ffn_up_exps\.weight .* row 127; .*--exclude"):
        list(measure_model(file, StatsParams((T.Q8_0,), 0)))


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
    assert rows[0]["n_measured_rows"] == 32 and sum(rows[0]["use"]["codes"]["counts"]) == rows[0]["n_measured"]
    assert main([*base[:3], "--include", "exps", "--exclude", "down|gate", "--type", "q4_K", "--summary"]) == 0
    cells = capsys.readouterr().out.splitlines()[2].split(" | ")
    assert cells[1] == "q4_K" and cells[7] == "128" and len(cells[8]) == 8 and len(cells[11]) == 16


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--type", "q4_9"], "unknown tensor type 'q4_9'"),
        (["--include", "nothing"], "leave no matrix to measure"),
        (["--include-layer", "("], "--include"),
        (["--output-format", "xml"], '"xml" is not one of md, jsonl'),
        (["more"], 'unexpected argument "more"'),
    ],
)
def test_refused(model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize-stats", "-m", str(model), *argv]) == 2
    assert message in capsys.readouterr().err
