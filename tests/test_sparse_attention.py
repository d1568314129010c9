"""Models with an indexer: sessions against NumPy, programs for prompts that see no more than may be chosen, notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_model
from gguf_files import write_model
from tiny_architectures import MISTRAL4

from ikcli.engine.plan import startup
from ikcli.engine.plan.model_rules import settle_indexer
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
    assert settle_indexer(config(path), hp, (), notices).dsa and not notices
    staged = config(path)
    staged = staged.__class__(**{f: getattr(staged, f) for f in staged.__slots__} | {
        "fleet": staged.fleet.__class__(stages=2)})  # fmt: skip
    with pytest.raises(UnsupportedError, match="use --no-dsa"):
        settle_indexer(staged, hp, (), notices)


def test_options_of_models_without_an_indexer(tmp_path: Path) -> None:
    model = write_model(tiny_model("llama"), tmp_path / "m.gguf")
    found = startup.prepare(RunConfig(model=model, command="bench", dsa_top_k=4), ("dsa_top_k",))
    assert "-dsatk has no effect: llama models have no indexer" in found.notices
