"""The acceptance test of encoders: its command line, the arithmetic of its ratios, and what it repeats and what not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


class Scripts(NamedTuple):
    """The modules of the script; they are beside the package."""

    main: ModuleType
    bench: ModuleType
    report: ModuleType


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    before = list(sys.path)
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
    try:
        import divergence
        import divergence_bench
        import divergence_report

        yield Scripts(divergence, divergence_bench, divergence_report)
    finally:
        sys.path[:] = before


def record(scripts: Scripts, type_: str, ratio: float | None, model: str = "a", mode: str = "imatrix") -> Any:
    """A record with this ratio of divergences."""
    side = scripts.report.Side(0.1, 0.01, 7.5, 0.9, 0.002, 1.0)
    theirs = replace(side, kld=0.1 / ratio) if ratio else None
    error = ratio / 10 if ratio else None
    size = scripts.bench.bpw(type_)
    return scripts.report.Record(model, type_, size, mode, 7.0, 512, -1, "", side, theirs, ratio, error)


def test_ratio_of_means_has_the_error_of_paired_values(scripts: Scripts) -> None:
    rng = np.random.default_rng(0)
    common = rng.exponential(1.0, 20_000)
    ours, theirs = 1.1 * common + 0.1 * rng.exponential(1.0, 20_000), 1.0 * common
    ratio, error = scripts.report.ratio_of_means(ours.tolist(), theirs.tolist())
    assert ratio == pytest.approx(ours.mean() / theirs.mean())
    blocks = [a.mean() / b.mean() for a, b in zip(ours.reshape(200, -1), theirs.reshape(200, -1), strict=True)]
    assert error == pytest.approx(np.std(blocks) / math.sqrt(200), rel=0.2)
    assert scripts.report.ratio_of_means([1.0, 2.0], [1.0, 2.0]) == (1.0, 0.0)
    assert scripts.report.ratio_of_means([1.0, 2.0], [0.0, 0.0]) == (None, None)


def test_summary_takes_types_by_size(scripts: Scripts) -> None:
    a = [record(scripts, "IQ2_K", 0.5), record(scripts, "Q4_0", 2.0), record(scripts, "Q6_K", 8.0)]
    mean, error, n = scripts.report.geometric_mean(a)
    assert (mean, n) == (pytest.approx(2.0), 3) and error == pytest.approx(2.0 * 0.1 / math.sqrt(3))
    assert scripts.report.summary([*a, record(scripts, "IQ1_S", None)]) == [
        "| a | imatrix | 1.0000 ± 0.0707 (2) | 0.5000 ± 0.0500 (1) | 2.0000 ± 0.1155 (3) | Q6_K 8.0000 |"
    ]
    rows = scripts.report.summary(
        [*a, record(scripts, "IQ2_K", 2.0, "b"), record(scripts, "Q2_K", 4.0, "b", "covariance")]
    )
    assert [row.split("|")[1:3] for row in rows] == [
        [" a ", " imatrix "],
        [" b ", " imatrix "], [" b ", " covariance "],
        [" all ", " imatrix "], [" all ", " covariance "],
    ]  # fmt: skip
    assert "1.0000 ± 0.0707 (2) |" in rows[0] and "4.0000 ± 0.4000 (1) |" in rows[-1]
    assert scripts.report.summary([]) == []


def test_records_survive_their_file(scripts: Scripts, tmp_path: Path) -> None:
    found = [
        record(scripts, "IQ2_K", 0.5),
        replace(record(scripts, "IQ1_S", None), note="llama-quantize: exit code -6"),
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(map(scripts.report.line, found)), encoding="utf-8")
    assert scripts.report.read(path) == found and scripts.report.read(tmp_path / "none") == []
    assert json.loads(path.read_text().splitlines()[0])["ours"]["kld"] == 0.1
    assert scripts.report.row(found[0]) == (
        "| a | IQ2_K | 2.38 | imatrix | 0.100000 ± 0.010000 | 0.200000 ± 0.010000 | 0.5000 ± 0.0500 | 7.5000 | 7.5000 "
        "| 90.00 ± 0.20 | 90.00 ± 0.20 |  |"
    )
    widths = {scripts.report.row(r).count("|") for r in found}
    assert widths == {line.count("|") for line in scripts.report.HEADER.splitlines()}


def test_types_are_tensor_types(scripts: Scripts) -> None:
    assert scripts.bench.file_type("IQ2_S") == "IQ2_M" and scripts.bench.file_type("Q3_K") == "Q3_K_S"
    assert scripts.bench.file_type("IQ9_X") is None
    sizes = [scripts.bench.bpw(t) for t in scripts.main.TYPES]
    assert len(set(scripts.main.TYPES)) == len(sizes) and max(sizes) <= 8
    assert scripts.bench.bpw("IQ2_XXS") == 2.0625 and 2 <= scripts.bench.bpw("IQ2_KL") < 2.75


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "a.gguf", "--eval", "e.txt"], "needs one --eval and one --calib"),
        (["--resume"], "--resume needs --json"),
        (["Q4_0", "Q4_9"], "no file type makes tensors of Q4_9"),
        (["--modes", "some"], "invalid choice"),
    ],
)
def test_wrong_command_lines(
    scripts: Scripts, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scripts.main.parse_arguments(argv)
    assert message in capsys.readouterr().err


def test_modes(scripts: Scripts) -> None:
    assert scripts.main.parse_arguments([]).modes == ["imatrix", "nothing", "covariance", "self"]
    assert scripts.main.parse_arguments(["--modes", "nothing"]).modes == ["nothing"]


def test_resuming_measures_what_is_missing(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    class Bench:
        judge = scripts.bench.Judge("a", Path("a.gguf"), "", "")

        def key(self, type_: str, mode: str) -> Any:
            return record(scripts, type_, 1.0, mode=mode).key

        def measure(self, type_: str, mode: str) -> Any:
            measured.append((type_, mode))
            if type_ == "IQ1_S":
                raise scripts.bench.Failed("not without")
            return record(scripts, type_, 0.5, mode=mode)

    monkeypatch.setattr(scripts.main, "open_bench", lambda *_: Bench())
    path = tmp_path / "r.jsonl"
    path.write_text(scripts.report.line(record(scripts, "Q4_0", 2.0)), encoding="utf-8")
    argv = ["q4_0", "IQ1_S", "--json", str(path), "--modes", "imatrix", "nothing"]
    assert scripts.main.main([*argv, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert measured == [("Q4_0", "nothing"), ("IQ1_S", "imatrix"), ("IQ1_S", "nothing")]
    assert "| a | imatrix | 2.0000 " in out and err.count("a, IQ1_S: not without") == 2
    assert [r.ratio for r in scripts.report.read(path)] == [2.0, 0.5]
    assert scripts.main.main(argv) == 0 and measured[3:] == [("Q4_0", "imatrix"), *measured[:3]]


def test_files_are_compared_by_types_and_data(scripts: Scripts) -> None:
    from ikcli.gguf.constants import GGMLType
    from ikcli.gguf.reader import open_gguf
    from ikcli.settings.run import default_model

    a, b = open_gguf(default_model(), ()), open_gguf(default_model(), ())
    assert scripts.bench.different_types(a, b) == [] and scripts.bench.same_data(a, b)
    b.tensors["output.weight"] = replace(b.tensors["output.weight"], type=GGMLType.F16)
    del b.tensors["output_norm.weight"]
    assert scripts.bench.different_types(a, b) == ["output.weight BF16/F16", "output_norm.weight F32/none"]
    assert not scripts.bench.same_data(a, b)


def test_judges_are_not_trained_on_what_they_are_asked(scripts: Scripts, tmp_path: Path) -> None:
    import judge_text

    for i in range(20):
        (tmp_path / f"m{i}.py").write_text(f"# module {i}\n" + f"x = {i}\n" * 800, encoding="utf-8")
    (tmp_path / "twin.py").write_text((tmp_path / "m3.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("no", encoding="utf-8")
    found = judge_text.split(judge_text.read_sources(tmp_path), n_bytes=20_000)
    kept = "\n".join(found.training.values())
    parts = [found.judge, found.calibration, kept]
    assert [sum(f"# module {i}\n" in part for part in parts) for i in range(20)] == [1] * 20
    assert kept.count("# module 3\n") <= 1 and all(parts) and "no" not in found.training.values()
