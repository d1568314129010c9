"""Heads in a file of their own (`ik convert --mtp`): joined with the model's file, they are those of a whole file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, add_heads
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.drafting.draft_model import DraftModel
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UsageError
from ikcli.settings.drafts import stages
from ikcli.settings.records import SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

RUN: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "n_ctx": 256}
MTP = ServerConfig(spec_type=(SpecStage("mtp"),))


def halves(whole: MemoryModel, folder: Path) -> tuple[Path, Path]:
    """The file of the model and that of its heads, which also has embeddings, as converters write it."""
    arch = whole.metadata["general.architecture"]
    blocks, further = f"{arch}.block_count", f"{arch}.nextn_predict_layers"
    n_layer = whole.metadata[blocks] - whole.metadata[further]
    mine = [name for name in whole.tensors if name.startswith("blk.") and int(name.split(".")[1]) >= n_layer]
    model = MemoryModel(
        {k: v for k, v in whole.metadata.items() if k != further} | {blocks: n_layer},
        {name: t for name, t in whole.tensors.items() if name not in mine},
    )
    heads = MemoryModel(whole.metadata, {name: whole.tensors[name] for name in ("token_embd.weight", *mine)})
    return write_model(model, folder / "model.gguf"), write_model(heads, folder / "heads.gguf")


def drafted(config: RunConfig) -> np.ndarray:
    with Session.open(config) as session:
        assert session.heads is not None
        session.decode(Batch.single(np.arange(9, dtype=np.int32), logits="none"))
        return session.heads.logits(0, 9)


def test_a_file_of_heads(tmp_path: Path) -> None:
    whole = add_heads(tiny("qwen35"), 1)
    path = write_model(whole, tmp_path / "whole.gguf")
    wanted = drafted(RunConfig(model=path, server=MTP, **RUN))
    model, heads = halves(whole, tmp_path)
    named = RunConfig(model=model, server=replace(MTP, model_draft=heads), **RUN)
    np.testing.assert_array_equal(drafted(named), wanted)
    # in place of the model's own heads
    other = write_model(add_heads(tiny("qwen35"), 1, seed=6), tmp_path / "other.gguf")
    assert not np.array_equal(drafted(RunConfig(model=other, server=MTP, **RUN)), wanted)
    np.testing.assert_array_equal(drafted(replace(named, model=other)), wanted)
    # beside the model, under the name that a converter gives it
    heads.rename(tmp_path / "mtp-model.gguf")
    np.testing.assert_array_equal(drafted(RunConfig(model=model, server=MTP, **RUN)), wanted)
    # only where drafts are wanted
    assert not any("nextn" in name for name in Planner.of_file(RunConfig(model=model, **RUN)).file.tensors)


def test_a_plan_counts_them(tmp_path: Path) -> None:
    model, heads = halves(add_heads(tiny("qwen35")), tmp_path)
    config = RunConfig(model=model, server=replace(MTP, model_draft=heads), command="serve", n_parallel=1, **RUN)
    plain = replace(config, server=ServerConfig())
    with_heads, without = (Planner.of_file(c).plan(c).memory.parts["CPU"] for c in (config, plain))
    assert with_heads["weights"] > without["weights"] and with_heads["KV"] > without["KV"]


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    model, heads = halves(add_heads(tiny("qwen35")), tmp_path)
    wrong = write_model(add_heads(tiny("qwen35", embedding_length=128)), tmp_path / "wrong.gguf")
    (tmp_path / "w").mkdir()
    _, wide = halves(add_heads(tiny("qwen35", embedding_length=128)), tmp_path / "w")
    for file, error, text in (
        (
            wide,
            FormatError,
            r"heads.gguf: these heads are of another model: embedding_length 128, but .*model.gguf has",
        ),
        (wrong, UsageError, r"-md .*wrong.gguf: a whole model, but --spec-type mtp wants a file of heads alone"),
        (tmp_path / "none.gguf", FormatError, r"none.gguf: no such file"),
    ):
        with pytest.raises(error, match=text):
            Planner.of_file(RunConfig(model=model, server=replace(MTP, model_draft=file), **RUN))
    draft = ServerConfig(model_draft=heads, spec_type=(SpecStage("draft"),))
    with (
        Session.open(RunConfig(model=model, server=draft, **RUN)) as session,
        pytest.raises(IkError, match=r"heads.gguf: holds heads .* add --spec-type mtp"),
    ):
        DraftModel.open(session.config, session)


def test_whose_file_md_names(tmp_path: Path) -> None:
    """Heads with `mtp`; with `draft` too, or without a type, a draft model."""
    model, heads = halves(add_heads(tiny("qwen35")), tmp_path)
    for types, wanted in (((), ["draft"]), (("mtp",), ["mtp"]), (("ngram-simple", "mtp"), ["ngram-simple", "mtp"])):
        server = ServerConfig(spec_type=tuple(SpecStage(t) for t in types), model_draft=heads)
        with Session.open(RunConfig(model=model, server=server, **RUN)) as session:
            assert [s.type for s in stages(session.config)] == wanted
