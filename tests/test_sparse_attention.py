"""Models with an indexer: sessions against NumPy, programs for prompts that see no more than may be chosen, notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_model
from gguf_files import write_model
from tiny_architectures import MISTRAL4, SHARED

from ikcli.engine.plan import startup
from ikcli.engine.plan.model_rules import check_indexer
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import GraphConfig, HParams
from ikcli.settings.run import RunConfig

TOP_K = 140
TOKENS = np.random.default_rng(3).integers(0, 96, 300)


def keys(top_k: int = TOP_K, types: Any = (True, False, True)) -> dict[str, Any]:
    found = {"attention.indexer.head_count": 16, "attention.indexer.key_length": 32, "attention.indexer.top_k": top_k}
    # without experts, whose choice among near ties differs between forms of attention
    return (
        MISTRAL4
        | {"block_count": 3, "leading_dense_block_count": 3}
        | found
        | ({"attention.indexer.types": np.array(types)} if types else {})
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tiny_model("glm-dsa", optional=("kv_b.weight", "exp_probs_b.bias"), **keys()),
        tmp_path_factory.mktemp("models") / "tiny.gguf",
    )


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=512, warmup=False, **(settings | changes))


def reference(path: Path, **changes: Any) -> np.ndarray:
    f32 = GGMLType.F32
    cfg = GraphConfig(n_ctx=512, type_k=f32, type_v=f32, type_index=f32, **changes)
    return ReferenceSession(path, cfg).decode(Batch.single(TOKENS, logits="all"))


@pytest.mark.parametrize("changes", [{}, {"mla": 1}, {"mla": 0}, {"flash_attn": False}, {"n_ubatch": 128}], ids=str)
def test_prompts_and_single_tokens(path: Path, changes: dict[str, Any]) -> None:
    """A short prompt, one that goes on beyond the number of chosen positions, then single tokens."""
    wanted = reference(path)
    with Session.open(config(path, **changes)) as session:
        found = [np.array(session.decode(Batch.single(TOKENS[:130], logits="all")))]
        found.append(np.array(session.decode(Batch.single(TOKENS[130:292], 130, logits="all"))))
        found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(292, 300)]
        assert ("short" in session.programs) == (not changes or "n_ubatch" in changes)
    error = np.abs(np.concatenate(found) - wanted).max(axis=1)
    # Equal scores up to rounding may be chosen differently.
    assert (error < 1e-3 * wanted.std()).mean() > 0.97 and (error[:140] < 1e-3 * wanted.std()).all()


def test_all_positions(path: Path) -> None:
    """With --no-dsa, with -dsatk 0 and in contexts that are no longer than the choice; it makes a difference."""
    dense, sparse = reference(path, index_top_k=0), reference(path)
    for changes in ({"dsa": False}, {"dsa_top_k": 0}, {"dsa_top_k": 512}):
        with Session.open(config(path, **changes)) as session:
            found = np.array(session.decode(Batch.single(TOKENS, logits="all")))
            assert not any(c.kind == "index" for c in session.run_plan.caches)
        assert np.abs(found - dense).max() < 1e-3 * dense.std()
    assert np.abs(sparse[-1] - dense[-1]).max() > 0.01 * dense.std()


def test_layers_that_choose(tmp_path: Path) -> None:
    """The file says which, or has tensors of some."""

    def owners(**changes: Any) -> tuple[int, ...]:
        model = tiny_model("glm-dsa", optional=("kv_b.weight", "exp_probs_b.bias"), **keys(**changes))
        file = open_gguf(write_model(model, tmp_path / "m.gguf"))
        return tuple(sorted(HParams.from_gguf(file.metadata, file.tensors, "m").index_owners))

    assert owners() == (0, 2) and owners(types=(True, True, True)) == (0, 1, 2)
    with pytest.raises(FormatError, match="gives the first layer no indexer"):
        owners(types=(False, True, True))


def test_where_it_does_not_run(path: Path) -> None:
    """Stages cannot share chosen positions."""
    file = open_gguf(path)
    hp, notices = HParams.from_gguf(file.metadata, file.tensors, str(path)), list[str]()
    check_indexer(config(path), hp, (), notices)
    assert not notices
    staged = config(path)
    staged = staged.__class__(**{f: getattr(staged, f) for f in staged.__slots__} | {
        "fleet": staged.fleet.__class__(stages=2)})  # fmt: skip
    with pytest.raises(UnsupportedError, match="use --no-dsa"):
        check_indexer(staged, hp, (), notices)
    check_indexer(staged, replace(hp, index_block=16), (), notices)  # whose layers choose for themselves


def test_options_of_models_without_an_indexer(tmp_path: Path) -> None:
    model = write_model(tiny_model("llama"), tmp_path / "m.gguf")
    found = startup.prepare(RunConfig(model=model, command="bench", dsa_top_k=4), ("dsa_top_k",))
    assert "-dsatk has no effect: llama models have no indexer" in found.notices


def m3_keys(**changes: Any) -> dict[str, Any]:
    """Metadata of a tiny MiniMax-M3: 4 of up to 32 blocks of 16 positions."""
    numbers = {"head_count": 2, "key_length": 16, "top_k": 4, "block_size": 16, "local_blocks": 1} | changes
    lead = {"block_count": 3, "leading_dense_block_count": 1, "rope.dimension_count": 8}
    return SHARED | lead | {f"attention.indexer.{name}": value for name, value in numbers.items() if value}


@pytest.mark.slow("compiles the kernels of an indexer of blocks")
def test_blocks_of_positions(tmp_path: Path) -> None:
    """Prompts and single tokens of MiniMax-M3, with and without the choice, which -dsatk rounds up to blocks."""
    path = write_model(tiny_model("minimax-m3", **m3_keys()), tmp_path / "m3.gguf")
    dense = reference(path, index_top_k=0)
    for changes, wanted in (
        ({}, reference(path)), ({"n_ubatch": 128}, reference(path)), ({"dsa": False}, dense),
        ({"dsa_top_k": 90}, reference(path, index_top_k=96)),
    ):  # fmt: skip
        with Session.open(config(path, **changes)) as session:
            found = [np.array(session.decode(Batch.single(TOKENS[:60], logits="all")))]
            found.append(np.array(session.decode(Batch.single(TOKENS[60:292], 60, logits="all"))))
            found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(292, 300)]
        error = np.abs(np.concatenate(found) - wanted).max(axis=1)
        # Equal scores and experts that tie up to rounding may be chosen differently.
        assert (error < 1e-3 * wanted.std()).mean() > 0.97 and (error[:64] < 1e-3 * wanted.std()).all()
    assert np.abs(reference(path)[-1] - dense[-1]).max() > 0.01 * dense.std()


def test_numbers_of_a_block_indexer(tmp_path: Path) -> None:
    """The layers with its tensors have it; without them, or with other heads, the run says so."""

    def opened(optional: tuple[str, ...] = (), **changes: Any) -> HParams:
        model = tiny_model("minimax-m3", optional=optional, **m3_keys(**changes))
        file = open_gguf(write_model(model, tmp_path / "m3.gguf"))
        return HParams.from_gguf(file.metadata, file.tensors, "m3.gguf")

    hp = opened()
    assert (hp.index_top_k, hp.index_block, hp.index_local) == (64, 16, 1) and hp.index_owners == {1, 2}
    with pytest.raises(FormatError, match=r"head_count'? is 1; supported is one index head per KV head"):
        opened(head_count=1)
    for changes in ({"block_size": 0}, {"local_blocks": 5}):
        with pytest.raises(FormatError, match=next(iter(changes))):
            opened(**changes)
    notices = list[str]()
    check_indexer(config(tmp_path / "m3.gguf"), opened(top_k=0), (), notices)
    assert notices == [
        "attention covers all positions: m3.gguf has no indexer, with which minimax-m3 models are trained; convert the "
        "checkpoint again to keep it"
    ]
