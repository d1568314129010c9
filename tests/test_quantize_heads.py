"""`ik quantize --no-mtp` and `--mtp`: a model without the heads that predict further tokens, and the heads alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, add_heads
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli import log, main
from ikcli.commands.inspect import describe, summary
from ikcli.engine.plan.head_file import holds_heads_alone, join_heads
from ikcli.engine.plan.planner import Planner
from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.heads import Heads, head_blocks, select_heads
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.quant.recipes import RecipeOptions, choose_types
from ikcli.quant.target import SizeBudget, TargetOptions
from ikcli.quant.tool import ToolOptions, plan_quantize
from ikcli.settings.run import RunConfig

MODELS = ["glm4moe", "qwen35", "step35", "mimo2"]  # the last two have keys with a value per block


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


def whole(arch: str, n: int = 2) -> MemoryModel:
    """A model with n heads, and where keys have a value per block, with values for the heads too."""
    model = add_heads(tiny(arch), n)
    n_layer = model.metadata[f"{arch}.block_count"] - n
    for key, value in model.metadata.items():
        if isinstance(value, list) and len(value) == n_layer:
            model.metadata[key] = [*value, *[value[-1]] * n]
    return model


def quantize(*argv: object) -> int:
    return main.main(["quantize", *map(str, argv)])


@pytest.mark.parametrize("arch", MODELS)
def test_both_halves(arch: str, tmp_path: Path) -> None:
    model = whole(arch)
    path = write_model(model, tmp_path / "whole.gguf")
    assert quantize(path, tmp_path / "all.gguf", "Q8_0") == 0
    assert quantize("--no-mtp", path, tmp_path / "model.gguf", "Q8_0") == 0
    assert quantize("--mtp", path, tmp_path / "mtp-model.gguf", "Q8_0") == 0
    everything, main_half, heads = (open_gguf(tmp_path / f"{n}.gguf") for n in ("all", "model", "mtp-model"))
    mine = head_blocks(everything.tensors, everything.metadata)
    n_layer = everything.metadata[f"{arch}.block_count"] - 2
    assert mine == {n_layer, n_layer + 1} and not head_blocks(main_half.tensors, main_half.metadata)
    # the model is the one without heads
    a, b = (HParams.from_gguf(f.metadata, f.tensors, "") for f in (everything, main_half))
    assert replace(a, n_further=0) == b
    assert main_half.metadata[f"{arch}.block_count"] == n_layer
    assert main_half.metadata[f"{arch}.nextn_predict_layers"] == 0
    Planner.of_file(RunConfig(model=tmp_path / "model.gguf"))
    # both say so
    assert f"2 (blk.{n_layer}, blk.{n_layer + 1}), " in summary(everything)["heads (MTP)"]
    assert summary(heads)["heads (MTP)"].endswith(", without the model")
    assert describe(heads, tensors=False)["head_blocks"] == [n_layer, n_layer + 1]
    assert "heads (MTP)" not in summary(main_half) and "head_blocks" not in describe(main_half, tensors=False)
    # the heads are found beside it, and both together are the whole
    assert holds_heads_alone(heads) and not any(n.startswith("blk.0.") for n in heads.tensors)
    assert {"token_embd.weight", "output_norm.weight"} <= set(heads.tensors)
    join_heads(main_half, tmp_path / "mtp-model.gguf", RunConfig())
    assert set(main_half.tensors) == set(everything.tensors)
    for name in everything.tensors:
        np.testing.assert_array_equal(main_half.data(name), everything.data(name), name)


def test_names_repacking_and_several_quants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(whole("qwen35", 1), tmp_path / "in.gguf")
    assert quantize("--mtp", path, "Q4_0") == 0
    assert (tmp_path / "mtp-ggml-model-Q4_0.gguf").is_file()
    (tmp_path / "list").write_text("Q8_0\nQ4_0\n")
    assert quantize("--matrix", tmp_path / "list", "--mtp", path, tmp_path / "out") == 0
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["mtp-in-Q4_0.gguf", "mtp-in-Q8_0.gguf"]
    assert main.main(["repack", "--no-mtp", str(path), str(tmp_path / "repacked.gguf")]) == 0
    assert not any("nextn" in name for name in open_gguf(tmp_path / "repacked.gguf").tensors)
    capsys.readouterr()
    for option in ("--dry-run", "--preflight"):
        assert quantize(option, "--no-mtp", path, "Q8_0") == 0
        assert "nextn" not in capsys.readouterr().out
    assert quantize("--dry-run", "--mtp", path, "Q8_0") == 0
    assert "blk.0." not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "half", "text"),
    [
        ("--no-mtp", "model", "--no-mtp: the file has no layers that predict further tokens"),
        ("--mtp", "model", "--mtp: the file has no layers that predict further tokens"),
        ("--no-mtp", "heads", "--no-mtp: the file has nothing but layers that predict further tokens"),
    ],
)
def test_nothing_to_drop(option: str, half: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(whole("qwen35"), tmp_path / "in.gguf")
    assert quantize("--mtp" if half == "heads" else "--no-mtp", path, tmp_path / "half.gguf", "COPY") == 0
    for more in ((), ("--dry-run",), ("--preflight",)):
        code = quantize(option, *more, tmp_path / "half.gguf", tmp_path / "out.gguf", "Q8_0")
        out, err = capsys.readouterr()
        assert code in (1, 2) and text in out + err and "half.gguf" in out + err
    assert not (tmp_path / "out.gguf").exists()
    assert quantize("--mtp", "--no-mtp", path, "Q8_0") == 2
    assert "--mtp and --no-mtp exclude each other" in capsys.readouterr().err


def test_selecting_leaves_the_opened_file_alone(tmp_path: Path) -> None:
    file = open_gguf(write_model(whole("qwen35"), tmp_path / "in.gguf"))
    before = dict(file.metadata), dict(file.tensors)
    for heads in Heads:
        select_heads(file, heads)
    assert (dict(file.metadata), dict(file.tensors)) == before
    with pytest.raises(UsageError, match="no layers that predict"):
        select_heads(select_heads(file, Heads.DROPPED), Heads.DROPPED)


def test_embeddings_of_a_head_are_not_interleaved() -> None:
    """Single rows of them are read; in an interleaved type the head could not run."""
    model = add_heads(tiny("glm4moe", embedding_length=256), own=True)
    tensors: list[Any] = list(open_tensors(model))
    chosen = {c.name: c for c in choose_types(tensors, model.metadata, RecipeOptions(340))}
    name = "blk.3.nextn.{}.weight".format
    assert chosen[name("embed_tokens")].new.name == "IQ4_K" and "not interleaved" in chosen[name("embed_tokens")].reason
    assert chosen[name("shared_head_head")].new.name == "IQ4_K_R4"


def open_tensors(model: MemoryModel) -> list[Any]:
    from recipe_models import info

    return [info(name, *t.shape, type=t.type) for name, t in model.tensors.items()]


def test_a_text_says_nothing_about_heads(tmp_path: Path) -> None:
    """They do not run with the model: a measured divergence of zero must not give them the fewest bits."""
    model = add_heads(tiny("qwen35", embedding_length=256, feed_forward_length=256), 1)
    path = write_model(model, tmp_path / "in.gguf")
    block = f"blk.{min(head_blocks(model.tensors, model.metadata))}."
    trials: list[set[str]] = []

    def measure(given: Any, encoding: Any) -> list[float]:
        trials.extend(set(trial) for trial in given)
        return [0.1 for _ in given]

    target = TargetOptions(SizeBudget(bpw=7.0), candidates=(GGMLType.Q4_0, GGMLType.Q8_0), rows=8, calibrate=measure)
    plan = plan_quantize(str(path), str(tmp_path / "o.gguf"), RecipeOptions(7), ToolOptions(), target)
    *groups, result = trials  # the last one is the whole choice
    tried = set().union(*groups)
    assert tried == {name for name in result if not name.startswith(block)} < result
    assert plan.target is not None and all(c.damage > 0 for c in plan.target.chosen.values())
