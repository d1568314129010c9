"""Error feedback: value tables, the search against a plain loop, errors of products, files of second moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGMLType as T
from ikcli.gguf.types import TYPES
from ikcli.imatrix.covariance import Products, block_size, check_memory
from ikcli.main import main
from ikcli.quant import feedback_search
from ikcli.quant.code_fields import is_replaceable, read_fields, replace_codes
from ikcli.quant.covariance_file import Moments, open_covariance, write_covariance
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import available_types, quantize_rows
from ikcli.quant.feedback import encode_with_feedback, supports
from ikcli.quant.feedback_codes import value_tables
from ikcli.quant.feedback_metric import Metric
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_legacy

NE0 = 512
FED_BACK = sorted((t for t in available_types() if supports(t) and TYPES[t].base is None), key=lambda t: t.name)


def inputs(rng: np.random.Generator, n: int = NE0, rank: int = 48) -> np.ndarray:
    """Rows of activations (4096, n) that vary mostly in `rank` directions, columns of different size."""
    mixed = rng.standard_normal((4096, rank)) @ rng.standard_normal((rank, n))
    x = (mixed + 0.5 * rank**0.5 * rng.standard_normal((4096, n))) * np.exp(0.5 * rng.standard_normal(n))
    return x.astype(np.float32)


@pytest.fixture(scope="module")
def moments() -> np.ndarray:
    return moments_of(inputs(np.random.default_rng(1234)))


def moments_of(x: np.ndarray) -> np.ndarray:
    return (x.T.astype(np.float64) @ x / len(x)).astype(np.float32)


def product_error(w: np.ndarray, y: np.ndarray, h: np.ndarray) -> float:
    """Mean squared error of the products over their mean square."""
    e = (w - y).astype(np.float64)
    return float(((e @ h) * e).sum() / ((w @ h.astype(np.float64)) * w).sum())


@pytest.mark.parametrize("type", FED_BACK, ids=lambda t: t.name)
def test_products_are_better_than_without(rng: np.random.Generator, moments: np.ndarray, type: T) -> None:
    h = moments
    w = (rng.standard_normal((24, NE0)) * 0.02).astype(np.float32)
    plain = dequantize(quantize_rows(w, type, np.diagonal(h).copy()), type, (NE0, 24))
    ours = dequantize(encode_with_feedback(w, type, Metric(h)), type, (NE0, 24))
    factor = np.float32(TYPES[type].matmul_scale)
    ours, plain = ours * factor, plain * factor  # as products see them
    limit = 0.85 if type == T.MXFP4 else 0.75
    assert product_error(w, ours, h) < limit * product_error(w, plain, h)
    gain = ((w @ h) * ours).sum(axis=1) / ((w @ h) * w).sum(axis=1)
    if type != T.MXFP4:  # (its scales are powers of two; those of NVFP4 have four significant bits)
        assert np.abs(gain - 1).max() < (2e-2 if type == T.NVFP4 else 4e-3)


@pytest.mark.parametrize("type", [T.Q4_K, T.IQ3_S, T.IQ2_KS], ids=lambda t: t.name)
def test_independent_inputs_give_what_is_there_without(rng: np.random.Generator, type: T) -> None:
    """With nothing to learn from, errors are those of the plain search, or next to it."""
    h = np.diag(rng.random(NE0) + 0.5).astype(np.float32)
    w = (rng.standard_normal((16, NE0)) * 0.02).astype(np.float32)
    plain = dequantize(quantize_rows(w, type, np.diagonal(h).copy()), type, (NE0, 16))
    ours = dequantize(encode_with_feedback(w, type, Metric(h)), type, (NE0, 16))
    assert product_error(w, ours, h) < 1.02 * product_error(w, plain, h)


@pytest.mark.parametrize("type", [T.Q2_K, T.IQ3_XXS, T.IQ2_KT, T.IQ4_KSS, T.IQ1_M], ids=lambda t: t.name)
def test_chosen_again_given_all_others(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, type: T) -> None:
    h, w = moments_of(inputs(rng)), (rng.standard_normal((16, NE0)) * 0.02).astype(np.float32)
    found = []
    for passes in (0, 1, 2):
        monkeypatch.setattr(feedback_search, "_PASSES", passes)
        found.append(product_error(w, dequantize(encode_with_feedback(w, type, Metric(h)), type, (NE0, 16)), h))
    assert found[1] < 0.95 * found[0]
    assert found[2] < found[1]


def test_codes_are_those_of_a_plain_loop(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback_search, "_PASSES", 0)
    h, w = moments_of(inputs(rng, 64)), (rng.standard_normal((4, 64)) * 0.1).astype(np.float32)
    metric = Metric(h)
    squares = np.diagonal(h).astype(np.float64)
    h64 = h.astype(np.float64) + np.diag(0.03 * squares + 0.003 * np.median(squares))
    np.testing.assert_allclose(metric.roots[0] @ metric.roots[0].T, h64, rtol=1e-9)
    data = encode_with_feedback(w, T.Q4_0, metric)
    scales = value_tables(data.reshape(4, -1), T.Q4_0, 64)[:, :, 0, :16]
    codes = read_fields(data.reshape(-1, 18), T.Q4_0).codes.reshape(4, 64)
    r = metric.roots[0]
    for row in range(4):
        e = np.zeros(64)
        for j in range(64):
            target = w[row, j] + e @ r[:, j] / r[j, j]
            values = scales[row, j // 16]
            # scales were changed a little when the row was made unbiased: the code is nearest but for that
            assert abs(values[codes[row, j]] - target) < 0.6 * abs(values[1] - values[0]) or codes[row, j] in (0, 15)
            e[j] = w[row, j] - values[codes[row, j]]


@pytest.mark.parametrize("type", [t for t in TYPES if is_replaceable(t)], ids=lambda t: t.name)
def test_codes_are_replaced_and_nothing_else(rng: np.random.Generator, type: T) -> None:
    rows = quantize_rows(rng.standard_normal((4, 256)).astype(np.float32), type).reshape(4, -1)
    blocks = np.ascontiguousarray(rows[:, TYPES[type].row_meta_size :]).reshape(-1, TYPES[type].type_size)
    before = read_fields(blocks, type)
    new = np.roll(before.codes, 1, axis=1)
    after = read_fields(replace_codes(blocks, type, new), type)
    np.testing.assert_array_equal(after.codes, new)
    for name in ("multipliers", "minimums", "shifts"):
        if getattr(before, name) is not None:
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    np.testing.assert_array_equal(replace_codes(blocks, type, before.codes), blocks)
    tables = value_tables(rows, type, 256)
    decoded = dequantize(rows.reshape(-1), type, (256, 4)).reshape(4, 16, -1, tables.shape[2])
    picked = np.take_along_axis(
        tables.transpose(0, 1, 3, 2), before.codes.reshape(4, 16, -1, 1).astype(np.int64), axis=2
    )
    np.testing.assert_array_equal(picked, decoded)


def test_interleaved_types_hold_the_same_rows(rng: np.random.Generator) -> None:
    from ikcli.quant.repack import unrepack_rows

    metric, w = Metric(moments_of(inputs(rng))), (rng.standard_normal((8, NE0)) * 0.02).astype(np.float32)
    rows = unrepack_rows(encode_with_feedback(w, T.IQ4_K_R4, metric), T.IQ4_K_R4, NE0)
    np.testing.assert_array_equal(rows.reshape(-1), encode_with_feedback(w, T.IQ4_K, metric))


def test_a_channel_of_great_energy_hides_nothing(rng: np.random.Generator) -> None:
    x = inputs(rng)
    x[:, 7] *= 1000
    h, w = moments_of(x), (rng.standard_normal((16, NE0)) * 0.02).astype(np.float32)
    plain = dequantize(quantize_rows(w, T.IQ3_S, np.diagonal(h).copy()), T.IQ3_S, (NE0, 16))
    ours = dequantize(encode_with_feedback(w, T.IQ3_S, Metric(h)), T.IQ3_S, (NE0, 16))
    others = np.delete(np.arange(NE0), 7)
    rest = h[np.ix_(others, others)]
    assert product_error(w[:, others], ours[:, others], rest) < 0.75 * product_error(
        w[:, others], plain[:, others], rest
    )
    assert product_error(w, ours, h) < product_error(w, plain, h)


def test_columns_without_input(rng: np.random.Generator) -> None:
    x = inputs(rng)
    x[:, 100:140] = 0
    w = (rng.standard_normal((8, NE0)) * 0.02).astype(np.float32)
    y = dequantize(encode_with_feedback(w, T.Q4_K, Metric(moments_of(x))), T.Q4_K, (NE0, 8))
    assert np.abs(y[:, 100:140] - w[:, 100:140]).max() < 0.02
    nothing = dequantize(encode_with_feedback(w, T.Q4_K, Metric(np.zeros((NE0, NE0)))), T.Q4_K, (NE0, 8))
    assert product_error(w, nothing, np.eye(NE0)) < 0.01


# --- files ------------------------------------------------------------------------------------------------------------
def products(x: np.ndarray, block: int, n_mat: int = 1) -> Moments:
    found = Products.empty(n_mat, x.shape[1], block)
    for m, part in enumerate(np.array_split(x, n_mat)):
        found.add(m, part)
    return found.moments()


def shrunk(h: np.ndarray, n_rows: int, block: int) -> np.ndarray:
    """Moments as they are handed out: what is off the diagonal is scaled."""
    out = h * n_rows / (n_rows + 4 * block)
    out[np.diag_indices_from(h)] = np.diagonal(h)
    return out


def test_file_of_full_and_block_moments(rng: np.random.Generator, tmp_path: Path) -> None:
    x = inputs(rng, 96, 8)
    path = tmp_path / "c.gguf"
    names = ["blk.0.attn_q.weight", "blk.0.attn_k.weight"]
    write_covariance(path, [(names, products(x, 96)), (["blk.0.ffn_down.weight"], products(x, 32))], n_chunks=3)
    found = open_covariance(path)
    full = found.moments("blk.0.attn_k.weight", (96, 10), 0)
    assert full is not None
    full = full[0]
    np.testing.assert_allclose(full, shrunk(moments_of(x), 4096, 96), rtol=2e-5, atol=1e-3)
    np.testing.assert_array_equal(full, full.T)
    blocks = found.moments("blk.0.ffn_down.weight", (96, 10), 0)
    assert blocks is not None and blocks.shape == (3, 32, 32)
    inside = np.kron(np.eye(3), np.ones((32, 32))) > 0
    expected = shrunk(moments_of(x), 4096, 32)[inside]
    np.testing.assert_allclose(blocks.reshape(-1), expected, rtol=2e-5, atol=1e-3)
    np.testing.assert_allclose(found.imatrix().weights(names[1], (96, 10)), np.diagonal(moments_of(x))[None], rtol=1e-5)
    assert found.moments("blk.7.attn_q.weight", (96, 10), 0) is None
    with pytest.raises(FormatError, match=r"attn_q\.weight has 96 columns .* rows of 128"):
        found.moments(names[0], (128, 10), 0)


def test_experts_with_few_rows_follow_the_layer(rng: np.random.Generator, tmp_path: Path) -> None:
    x, name = inputs(rng, 32, 4), "blk.1.ffn_up_exps.weight"
    found = Products.empty(3, 32, 32)
    found.add(0, x)
    found.add(1, x[:8] * 3)
    write_covariance(tmp_path / "c.gguf", [([name], found.moments())])
    shape, layer = (32, 5, 3), moments_of(np.concatenate((x, x[:8] * 3)))
    many, few, none = (open_covariance(tmp_path / "c.gguf").moments(name, shape, e) for e in range(3))
    many, few, none = many[0], few[0], none[0]
    np.testing.assert_allclose(none, shrunk(layer, 32, 32), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(many, shrunk(moments_of(x), 4128, 32), rtol=0.05, atol=0.05 * np.abs(layer).max())
    mixed = 0.2 * moments_of(x[:8] * 3) + 0.8 * layer
    np.testing.assert_allclose(few, shrunk(mixed, 40, 32), rtol=1e-3, atol=1e-2)


def test_other_files_are_refused(tmp_path: Path) -> None:
    write_legacy(Imatrix({"a": ImatrixEntry(np.ones((1, 4), np.float32), np.ones(1, np.float32))}), tmp_path / "i.dat")
    with pytest.raises(FormatError, match=r"i\.dat"):
        open_covariance(tmp_path / "i.dat")
    demo = Path(__file__).resolve().parents[1] / "ikcli" / "data" / "demo.gguf"
    with pytest.raises(FormatError, match=r"no second moments \(general.type is model\); make them with"):
        open_covariance(demo)


def test_blocks_follow_the_limit() -> None:
    assert block_size(1, 4096, 1 << 29) == 4096
    assert block_size(64, 1408, 1 << 26) == 128
    assert block_size(256, 7168, 1 << 29) == 64
    assert block_size(256, 7168, 1) == 32
    assert block_size(4, 100, 1) == 100  # nothing to cut evenly
    assert check_memory([3, 4], None) == 7
    with pytest.raises(UsageError, match="--covariance-limit"):
        check_memory([1 << 40], 1 << 30)


@pytest.mark.parametrize("type", [T.Q4_K, T.IQ2_KS, T.IQ4_KSS, T.IQ4_NL], ids=lambda t: t.name)
def test_blocks_do_what_a_full_matrix_of_zeros_around_them_does(rng: np.random.Generator, type: T) -> None:
    h = moments_of(inputs(rng))
    blocks = np.stack([h[:256, :256], h[256:, 256:]])
    dense = np.zeros_like(h)
    dense[:256, :256], dense[256:, 256:] = blocks
    w = (rng.standard_normal((16, NE0)) * 0.02).astype(np.float32)
    ours, full = (encode_with_feedback(w, type, Metric(m)).reshape(16, -1) for m in (blocks, dense))
    assert (ours != full).mean() < 0.02  # sums are rounded differently
    errors = [product_error(w, dequantize(rows.reshape(-1), type, (NE0, 16)), dense) for rows in (ours, full)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_files_are_merged(rng: np.random.Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, names = inputs(rng, 64, 8), ["blk.0.attn_q.weight", "blk.0.attn_k.weight"]
    a, b, c, other = (tmp_path / f"{n}.gguf" for n in ("a", "b", "all", "other"))
    up = "blk.0.ffn_up_exps.weight"
    write_covariance(a, [(names, products(x[:1000], 64)), ([up], products(x[:99], 32, 3))], n_chunks=3, datasets=["t"])
    write_covariance(b, [(names, products(x[1000:], 64))], n_chunks=4, datasets=["u", "t"])
    write_covariance(other, [(names, products(x, 32))])
    assert main(["imatrix", "--in-file", str(a), "--in-file", str(b), "-o", str(c)]) == 0
    found = open_covariance(c)
    assert (found.n_chunks, found.datasets) == (7, ("t", "u")) and found.entries == open_covariance(a).entries
    whole, parts = products(x, 64), found.sums(names[0])
    np.testing.assert_allclose(parts.products, whole.products, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    np.testing.assert_array_equal(found.sums(up).products, open_covariance(a).sums(up).products)
    assert main(["imatrix", "--in-file", str(a), "--in-file", str(b), "-o", str(a)]) == 0  # in place of one of them
    assert a.read_bytes() == c.read_bytes()
    before = c.read_bytes()
    assert main(["imatrix", "--in-file", str(b), "--in-file", str(other), "-o", str(c)]) == 1
    assert "in blocks of 32, elsewhere 1, 64, 64" in capsys.readouterr().err and c.read_bytes() == before
    assert main(["imatrix", "--in-file", str(b), "--show-statistics"]) == 2
    assert "can only be merged with others" in capsys.readouterr().err
