"""`ik imatrix --compare`: numbers against hand-made vectors, order, what only one file has, command line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikcli.imatrix.compare import compare, comparison_lines
from ikcli.imatrix.matrix import save
from ikcli.main import main
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry

UP = "blk.0.ffn_up_exps.weight"


def entry(means: list[list[float]], counts: list[float] | None = None) -> ImatrixEntry:
    n = np.array(counts or [8.0] * len(means), np.float32)
    return ImatrixEntry(np.array(means, np.float32) * n[:, None], n)


def test_numbers_and_order() -> None:
    a = Imatrix({"same": entry([[1, 2]]), "turned": entry([[3, 4]]), "zero": entry([[1, 0]]), "a": entry([[1]])})
    b = Imatrix({"same": entry([[2, 4]]), "turned": entry([[4, 3]]), "zero": entry([[1, 1]]), "b": entry([[1]])})
    found = compare(a, b)
    assert [c.name for c in found.tensors] == ["zero", "turned", "same"]
    zero, turned, same = found.tensors
    assert (same.cosine, same.ratio, same.difference) == pytest.approx((1.0, 2.0, 0.5))
    assert (turned.cosine, turned.ratio, turned.difference) == pytest.approx((24 / 25, 4 / 3, math.sqrt(2) / 5))
    assert zero.ratio == math.inf and zero.cosine == pytest.approx(math.sqrt(0.5))
    assert (found.only, found.sizes) == ((["a"], ["b"]), [])


def test_experts_without_data_are_left_out_and_the_worst_is_seen() -> None:
    a = Imatrix({UP: entry([[1, 2], [3, 3], [0, 0], [1, 0.1]], [8, 8, 0, 8])})
    b = Imatrix({UP: entry([[1, 2, 1, 1, 5, 7, 0.1, 1]], [2])})  # .dat: the second expert was filled with 1
    (c,) = compare(a, b).tensors
    assert (c.n, c.n_matrices, c.n_left_out) == (4, 4, 2)
    assert c.least_cosine == pytest.approx(0.2 / 1.01) and c.cosine == pytest.approx(5.2 / 6.01)
    assert c.ratio == pytest.approx(10)
    alone = compare(Imatrix({UP: entry([[0, 0], [1, 2]], [0, 3])}), Imatrix({UP: entry([[1, 2], [0, 0]], [3, 0])}))
    assert alone.tensors[0].n == 0 and math.isnan(alone.tensors[0].cosine)
    lines = comparison_lines(Imatrix({UP: entry([[0, 0], [1, 2]], [0, 3])}), Imatrix({UP: entry([[1, 2, 0, 0]])}))
    assert lines[-1] == f"| {UP} | 0 |  |  |  |  | 2 of 2 |"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.dat", tmp_path / "two.gguf"
    save(Imatrix({"x": entry([[1, 2]]), "s": entry([[1, 2]]), "o": entry([[1]])}, ("t",), 3), one, as_gguf=False)
    save(Imatrix({"x": entry([[2, 1]]), "s": entry([[1, 2, 3]])}, ("u",), 4), two, as_gguf=True)
    assert main(["imatrix", "--in-file", str(one), "--in-file", str(two), "--compare"]) == 0
    out = capsys.readouterr().out
    assert f"a: {one}, 3 entries, 3 chunks, data: t" in out and f"b: {two}, 2 entries, 4 chunks, data: u" in out
    assert "| x | 2 | 0.8000 |  | 2 | 63.25% |  |" in out
    assert "1 tensors in both; cosine 0.8000 in the mean, 0.8000 at worst" in out
    assert "s: 2 values in a, 3 in b" in out and "only in a:\n  o" in out and "only in b:" not in out.split("\n\n")[-1]
    for files in ([], [one], [one, two, one]):
        argv = [word for path in files for word in ("--in-file", str(path))]
        assert main(["imatrix", *argv, "--compare"]) == 2
        assert f"--compare needs two importance matrices and no --show-statistics, {len(files)}" in (
            capsys.readouterr().err
        )
    assert not list(tmp_path.glob("*.tmp")) and len(list(tmp_path.iterdir())) == 2
