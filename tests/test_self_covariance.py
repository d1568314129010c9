"""`--covariance self` and `ik imatrix --random-tokens`: second moments of random tokens, on the bundled model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikcli.gguf.constants import GGMLType as T
from ikcli.gguf.reader import open_gguf
from ikcli.imatrix.random_tokens import random_tokens
from ikcli.main import main
from ikcli.quant.covariance_file import open_covariance, with_squares
from ikcli.quant.encoding import Encoding
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.settings.run import default_model, default_text
from ikcli.study.calibrate import Calibrator
from ikcli.study.resident import ResidentOptions
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.vocab import Attr

MODEL, NAME = str(default_model()), "blk.1.attn_output.weight"


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    out = folder / "moments.gguf"
    words = ["--random-tokens", "4096", "-o", str(folder / "imatrix.dat"), "--covariance", str(out), "--no-ppl"]
    assert main(["imatrix", "-m", MODEL, *words]) == 0
    return out


def test_tokens_are_normal_and_the_same_every_time() -> None:
    tokenizer = Tokenizer.from_metadata(open_gguf(MODEL).metadata, MODEL)
    tokens = random_tokens(tokenizer, 3000)
    assert tokens.dtype == np.int32 and np.array_equal(tokens, random_tokens(tokenizer, 3000))
    assert all(tokenizer.vocab.attrs[t] & Attr.NORMAL for t in set(tokens.tolist()))
    assert len(set(tokens.tolist())) > 1000


def test_squares_are_replaced_and_correlations_kept() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 2, 8)).astype(np.float32)
    x[:, 1, 3] = 0  # a column the tokens never moved
    moments = np.einsum("tbi,tbj->bij", x, x)
    squares = rng.uniform(0.1, 9, 16).astype(np.float32)
    squares[5] = 0  # and one the text never moved
    found = with_squares(moments, squares)
    np.testing.assert_allclose(np.diagonal(found, axis1=1, axis2=2).reshape(-1), squares, rtol=1e-6)
    expected = moments[0, 1, 2] / np.sqrt(moments[0, 1, 1] * moments[0, 2, 2])
    np.testing.assert_allclose(found[0, 1, 2] / np.sqrt(found[0, 1, 1] * found[0, 2, 2]), expected, rtol=1e-5)
    assert not found[1, 3, :3].any() and not found[0, 5, :5].any() and np.isfinite(found).all()


@pytest.mark.slow  # encodes the bundled model several times
def test_the_model_changes_less_on_a_text_it_did_not_need(moments: Path, tmp_path: Path) -> None:
    seen, unseen, matrix = (tmp_path / name for name in ("seen.txt", "unseen.txt", "imatrix.dat"))
    text = default_text().read_text("utf-8")
    seen.write_text(text[:40000], "utf-8")
    unseen.write_text(text[60000:66000], "utf-8")
    assert main(["imatrix", "-m", MODEL, "-f", str(seen), "-c", "128", "-o", str(matrix), "--no-ppl"]) == 0
    covariance, imatrix = open_covariance(moments), read_imatrix(matrix)
    assert covariance.of_random_tokens
    calibrator = Calibrator(ResidentOptions(default_model(), unseen, chunks=8, n_ctx=128))
    file = open_gguf(MODEL)
    trial = {n: T.IQ3_S for n, t in file.tensors.items() if covariance.find(n) and t.shape[0] % 256 == 0}
    encodings = Encoding(imatrix), Encoding(imatrix, covariance), Encoding(covariance.imatrix(), covariance)
    (plain,), (better,), (without,) = (calibrator.measure([trial], e) for e in encodings)
    assert better < 0.75 * plain
    assert without < 0.85 * plain  # with no text at all


@pytest.mark.slow  # runs two commands with the bundled model
def test_self_is_what_both_commands_do_in_turn(tmp_path: Path) -> None:
    one, two, moments = (tmp_path / name for name in ("one.gguf", "two.gguf", "moments.gguf"))
    assert main(["quantize", "--covariance", "self", "--covariance-tokens", "1024", MODEL, str(one), "IQ2_XXS"]) == 0
    words = ["--random-tokens", "1024", "-o", str(tmp_path / "i.dat"), "--covariance", str(moments), "--no-ppl"]
    assert main(["imatrix", "-m", MODEL, "--process-output", *words]) == 0
    assert main(["quantize", "--covariance", str(moments), MODEL, str(two), "IQ2_XXS"]) == 0
    a, b = open_gguf(one), open_gguf(two)
    for name in a.tensors:
        np.testing.assert_array_equal(a.data(name), b.data(name), err_msg=name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.dat", "moments.gguf", "one.gguf", "two.gguf"]


@pytest.mark.parametrize("words", [["--dry-run"], ["--preflight"]])
def test_nothing_is_run_before_it_is_needed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", *words, "--covariance", "self", MODEL, str(out), "IQ2_XXS"]) == 0
    assert "iq2_xxs" in capsys.readouterr().out or words == ["--preflight"]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_matrix_takes_the_data_for_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("IQ2_XXS --covariance self\nQ4_K_M\n")
    assert main(["quantize", "--dry-run", "--matrix", str(listing), MODEL, str(tmp_path / "out")]) == 0
    assert "IQ2_XXS" in capsys.readouterr().out


def test_a_model_that_does_not_run_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--override-kv", "general.architecture=str:nothing", MODEL, str(tmp_path / "out.gguf"), "IQ3_K"]
    assert main(["quantize", "--covariance", "self", *words]) == 1
    assert "--covariance self: the model must run for it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_text_and_random_tokens_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["imatrix", "-m", MODEL, "--random-tokens", "1024", "-p", "a text"]) == 2
    assert "--random-tokens takes the place of a text" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [(["IQ3_K"], True), (["Q8_0"], False), (["--covariance", "self"], False)])
def test_users_hear_of_it(words: list[str], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*words, "--covariance-tokens", "512"] if words[0].startswith("-") else []
    type = "IQ3_K" if options else words[0]
    assert main(["quantize", "--pure", *options, MODEL, str(tmp_path / "out.gguf"), type]) == 0
    assert ("hint: --covariance self" in capsys.readouterr().err) == told


def test_repacking_runs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = tmp_path / "plain.gguf", tmp_path / "out.gguf"
    assert main(["quantize", MODEL, str(plain), "Q4_K_S"]) == 0
    capsys.readouterr()
    assert main(["repack", "--covariance", "self", str(plain), str(out)]) == 0
    found = capsys.readouterr().err
    assert "random tokens" not in found and "hint" not in found
