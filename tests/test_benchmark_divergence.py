"""The acceptance test of encoders: its command line, the arithmetic of its ratios, and what it repeats and what not."""

from __future__ import annotations

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
