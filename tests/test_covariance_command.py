"""Second moments end to end: `ik imatrix --covariance`, then `ik quantize --covariance`, on the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ikcli.gguf.constants import GGMLType as T
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.quant.covariance_file import Covariance, open_covariance
from ikcli.quant.decode import dequantize
from ikcli.quant.encoding import Encoding
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.quant.measure import measure_piece, sample_tensor
from ikcli.settings.run import default_model, default_text
from ikcli.study.calibrate import Calibrator
from ikcli.study.resident import ResidentOptions

NAME = "blk.1.attn_output.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Importance matrix and second moments of the first part of the bundled text."""
    folder = tmp_path_factory.mktemp("covariance")
    text, imatrix, moments = (folder / name for name in ("seen.txt", "imatrix.gguf", "moments.gguf"))
    text.write_text(default_text().read_text("utf-8")[:40000], "utf-8")
    options = ["-c", "128", "-o", str(imatrix), "--covariance", str(moments)]
    assert main(["imatrix", "-m", str(default_model()), "-f", str(text), *options]) == 0
    return imatrix, moments


@pytest.fixture(scope="module")
def covariance(files: tuple[Path, Path]) -> Covariance:
    return open_covariance(files[1])


@pytest.mark.slow  # runs the bundled model many times
def test_mean_squares_are_those_of_the_importance_matrix(files: tuple[Path, Path], covariance: Covariance) -> None:
    matrix, moments = read_imatrix(files[0]), covariance.imatrix()
    names = [n for n in matrix.entries if n in moments.entries]
    assert {NAME, "blk.1.ffn_down_exps.weight", "blk.0.attn_kv_b.weight"} <= set(names)
    for name in names:
        ours, theirs = moments.entries[name], matrix.entries[name]
        np.testing.assert_allclose(ours.sums.reshape(-1), theirs.sums.reshape(-1), rtol=1e-3, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(ours.counts, theirs.counts, err_msg=name)


@pytest.mark.slow  # runs the bundled model many times
def test_the_model_changes_less(files: tuple[Path, Path], covariance: Covariance, tmp_path: Path) -> None:
    """On text that was not seen, with every matrix in one type; experts, latent attention and all."""
    unseen = tmp_path / "unseen.txt"
    unseen.write_text(default_text().read_text("utf-8")[60000:66000], "utf-8")
    calibrator = Calibrator(ResidentOptions(default_model(), unseen, chunks=8, n_ctx=128))
    file, imatrix = open_gguf(default_model()), read_imatrix(files[0])
    trial = {n: T.IQ3_S for n, t in file.tensors.items() if covariance.find(n) and t.shape[0] % 256 == 0}
    (plain,), (better,) = (calibrator.measure([trial], e) for e in (Encoding(imatrix), Encoding(imatrix, covariance)))
    assert better < 0.7 * plain


def test_the_command_writes_what_the_library_encodes(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", "--covariance", str(files[1]), "--pure", str(default_model()), str(out), "IQ4_XS"]) == 0
    made, source = open_gguf(out), open_gguf(default_model())
    t = made.tensors[NAME]
    assert t.type == T.IQ4_XS
    values = dequantize(source.data(NAME), source.tensors[NAME].type, t.shape).reshape(t.shape[1], t.shape[0])
    ours = Encoding(None, open_covariance(files[1])).of(NAME, t.shape).encode(np.ascontiguousarray(values), t.type, 0)
    np.testing.assert_array_equal(made.data(NAME).reshape(-1), ours)


@pytest.mark.slow  # runs the bundled model many times
def test_a_matrix_of_quants_feeds_back_as_separate_runs_do(files: tuple[Path, Path], tmp_path: Path) -> None:
    listing, model = tmp_path / "list.txt", str(default_model())
    lines = [f"IQ3_K --covariance {files[1]}", "IQ3_K plain", f"Q4_K mixed --imatrix {files[0]}"]
    listing.write_text("\n".join(lines))
    assert main(["quantize", "--matrix", str(listing), "-t", "2", model, str(tmp_path / "m-{name}.gguf")]) == 0
    made = []
    for line in lines:
        type, *rest = line.split()
        name = rest.pop(0) if not rest[0].startswith("-") else type
        assert main(["quantize", *rest, model, str(tmp_path / "alone.gguf"), type]) == 0
        made.append((tmp_path / f"m-{name}.gguf").read_bytes())
        assert made[-1] == (tmp_path / "alone.gguf").read_bytes(), line
    assert made[0] != made[1]


def test_a_target_is_met_with_the_errors_of_products(covariance: Covariance, files: tuple[Path, Path]) -> None:
    """What --target-size tries is what is written, and is judged by products: less of them is lost than without."""
    file = open_gguf(default_model())
    t = file.tensors[NAME]
    plain, better = Encoding(covariance.imatrix()), Encoding(covariance.imatrix(), covariance)
    sample = sample_tensor(file, t, plain.of(NAME, t.shape).weights)
    mine, by = better.of(NAME, t.shape), plain.of(NAME, t.shape)
    (piece,) = sample.pieces
    h = covariance.moments(NAME, t.shape, 0)
    assert h is not None
    found = measure_piece(piece, T.IQ3_K, mine)
    y = dequantize(mine.encode(piece.values, T.IQ3_K, 0), T.IQ3_K, t.shape).reshape(piece.values.shape)
    e, x, h64 = (y - piece.values).astype(np.float64), piece.values.astype(np.float64), h[0].astype(np.float64)
    assert found.weighted**2 == pytest.approx(((e @ h64) * e).sum() / ((x @ h64) * x).sum(), rel=1e-3)
    without = dequantize(by.encode(piece.values, T.IQ3_K, 0), T.IQ3_K, t.shape).reshape(piece.values.shape) - x
    assert found.weighted2 < 0.6 * ((without @ h64) * without).sum()


@pytest.mark.slow  # runs the bundled model many times
def test_target_and_second_moments_on_one_command_line(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--covariance", str(files[1]), "--target-bpw", "5", "--target-rows", "16", "--candidates", "iq3_s,q6_K"]
    assert main(["quantize", *options, "--dry-run", str(default_model()), str(tmp_path / "x.gguf")]) == 0
    with_moments = capsys.readouterr().err
    options[:2] = ["--imatrix", str(files[0])]
    assert main(["quantize", *options, "--dry-run", str(default_model()), str(tmp_path / "x.gguf")]) == 0
    assert predicted(with_moments) < predicted(capsys.readouterr().err)


def predicted(text: str) -> float:
    """The predicted KL divergence in the report of --target-bpw."""
    found = re.search(r"predicted KL divergence from the input ([\d.]+)", text)
    assert found is not None
    return float(found[1])
