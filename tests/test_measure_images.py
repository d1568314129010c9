"""Texts with images in measurements: windows, what is scored, and the commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_vision_golden import Golden

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Media
from ikcli.errors import IkError, UsageError
from ikcli.main import main
from ikcli.measure.images import Part, described, score_window, scored, windows_of
from ikcli.quant.imatrix_file import read_imatrix

TEXT = "One picture <__media__> and a second <__media__> " + "and then the text goes on about it, " * 12


def image(n: int, digest: str = "ab") -> Media:
    return Media(np.zeros((n, 2), np.float32), digest * 8)


def test_windows_cut_no_image() -> None:
    parts: list[Part] = [[1, 2, 3, 4], image(4), [5, 6, 7, 8, 9, 10, 11], image(2, "cd"), [12] * 6]
    found = windows_of(parts, 10, bos=99).batches
    assert [len(batch) for batch in found] == [10, 10]
    assert [[p.start for p in batch.media] for batch in found] == [[4], [5]]
    assert found[0].tokens.tolist()[:4] == [99, 2, 3, 4]
    assert found[1].tokens.tolist() == [99, 8, 9, 10, 11, *[image(2, "cd").token] * 2, 12, 12, 12]
    assert found[1].pos.tolist() == list(range(10))
    assert scored(found[0]).tolist() == [7, 8]  # from the last position of the image on
    assert scored(found[1]).tolist() == [6, 7, 8]
    assert [len(batch) for batch in windows_of(parts, 7).batches] == [4, 7, 7, 5]
    assert [len(batch) for batch in windows_of(parts, 6).batches] == [4, 6, 5, 6]  # the last two tokens are left out
    assert [len(batch) for batch in windows_of(parts, 6, 2, first_chunk=1).batches] == [6, 5]
    assert described(parts) == "2 images of 6 tokens, 17 tokens of text"


@pytest.mark.parametrize(
    ("parts", "n_ctx", "says"),
    [
        ([[1], image(20), [2] * 9], 16, "an image of 20 tokens does not fit in -c 16"),
        ([[1, 2], image(12)], 16, "has text behind its images"),
        ([[1, 2], image(12)], 3, "-c 3 is too small"),
    ],
    ids=["large", "no text", "short"],
)
def test_windows_that_cannot_be(parts: list[Part], n_ctx: int, says: str) -> None:
    with pytest.raises((UsageError, IkError), match=says):
        windows_of(parts, n_ctx)


@pytest.mark.slow("runs models and their towers")
@pytest.mark.parametrize("name", ["qwen25vl", "gemma3", "mistral3"])
def test_scores_are_those_of_torch(shared_dir: Path, name: str) -> None:
    golden = Golden(shared_dir / "golden" / "vision", name)
    facts, truth = golden.facts["images"]["small"], golden.truth["small.logprob"].astype(np.float64)
    batch = Batch.mixed([facts["tokens_before"], golden.media("small"), facts["tokens_after"]], logits="none")
    at = scored(batch)
    known = at >= len(batch) - len(truth)
    wanted = -truth[at[known] - (len(batch) - len(truth)), batch.tokens[at[known] + 1]]
    assert len(wanted) > 4
    with golden.session() as session:
        for every in (False, True):
            found = score_window(session, batch, 1, every=every)
            assert np.abs(found[known] - wanted).max() < golden.facts["bounds"]["exact"]["logprob"]


def command(shared_dir: Path, tmp_path: Path, name: str) -> list[str]:
    folder = shared_dir / "golden" / "vision"
    (tmp_path / "text.txt").write_text(TEXT)
    images = ",".join(str(folder / "images" / f"{stem}.png") for stem in ("small", "shapes"))
    return ["-m", str(folder / f"{name}.gguf"), "--mmproj", str(folder / f"{name}.mmproj.gguf"), "--image", images,
            "-t", "1"]  # fmt: skip


@pytest.mark.slow("runs a model and its tower")
def test_perplexity_and_imatrix(shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*command(shared_dir, tmp_path, "qwen25vl"), "-f", str(tmp_path / "text.txt"), "-c", "200"]
    assert main(["perplexity", *line]) == 0
    first = capsys.readouterr()
    assert "Final estimate: PPL over 2 chunks" in first.out
    assert "2 images of 78 tokens" in first.err
    assert main(["imatrix", *line, "-o", str(tmp_path / "im.gguf")]) == 0
    assert first.out.split("[2]")[1].split(",")[0] in capsys.readouterr().out
    counts = read_imatrix(tmp_path / "im.gguf").entries["blk.0.attn_q.weight"].counts
    assert counts.tolist() == [306]  # rows of images among them
    for options, says in (
        (["--ppl-stride", "20"], "cannot be combined with --ppl-stride"),
        (["--image", str(tmp_path / "text.txt")], "the text has 2 markers (<__media__>) and --image names 3 images"),
        (["--workers", "2"], "cannot be combined with --workers"),
    ):
        assert main(["perplexity", *line, *options]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow("runs a model and its tower")
def test_bench_times_an_image(shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command(shared_dir, tmp_path, "gemma3")
    assert main(["bench", *line, "-p", "8", "-n", "0", "-r", "2", "-o", "json"]) == 0
    found = {one["test"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(found) == ["pp8", "image small.png", "image shapes.png"]
    assert found["image small.png"]["n_prompt"] == 16
    assert len(found["image small.png"]["samples_ns"]) == 2
    assert main(["bench", *line[:2], *line[4:], "-p", "0", "-n", "0"]) == 2
    assert "--mmproj FILE" in capsys.readouterr().err


@pytest.mark.slow("runs a model")
def test_sweep_bench_takes_the_command_line_of_a_server(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(shared_dir, tmp_path, "gemma3")
    options = ["--no-mmproj-offload", "--image-max-tokens", "64", "--media-path", str(tmp_path), "-np", "2", "--port",
               "8080", "-c", "128", "-ub", "64"]  # fmt: skip
    assert main(["sweep-bench", *line[:4], *options]) == 0
    assert "|    64 |" in capsys.readouterr().out
