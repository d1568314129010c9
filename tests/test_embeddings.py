"""Embeddings: states against torch and the NumPy reference, texts side by side, pooling, norms, ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import cuda_sessions
import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from engine_client import serving
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model
from server_client import Client
from tiers import some, some_architectures
from tiny_architectures import tiny

from ikcli import main
from ikcli.convert.sentence import Sentence
from ikcli.convert.tool import open_checkpoint
from ikcli.engine.plan import sizes
from ikcli.engine.plan.programs import HIDDEN
from ikcli.engine.run import gpus, sequences
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.embedder import Embedder, embed, side_by_side, states
from ikcli.engine.run.pooling import Pooling, PoolState, RankHead, normalized, pooling_of, similarities
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import GraphConfig, Outputs
from ikcli.settings.run import RunConfig

Array = npt.NDArray[Any]
F32 = {"type_k": "f32", "type_v": "f32"}
LENGTHS = (3, 40, 1, 17, 9, 23, 2)
# First components of normalized vectors of TOKENS, from LlamaModel of transformers 5 in float32.
TOKENS = np.random.default_rng(3).integers(0, 320, 40)
KNOWN = {
    Pooling.CLS: [0.0761836, 0.0924673, 0.006493, 0.0110283, -0.0031868, -0.0299648],
    Pooling.MEAN: [-0.0004812, 0.0245968, -0.0647905, 0.0496484, 0.014716, -0.0460236],
    Pooling.LAST: [-0.042487, -0.0315684, 0.0620475, 0.0203919, 0.0145839, 0.0067631],
}


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"command": "embed", "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "warmup": False, "n_ubatch": 32}
    return RunConfig(model=path, **(settings | F32 | changes))


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    return [np.random.default_rng(n).integers(0, 96, n).astype(np.int32) for n in lengths]


def opened(path: Path, outputs: Outputs = Outputs.EMBEDDINGS, **changes: Any) -> Session:
    return Session.open(config(path, **changes), outputs=outputs)


def test_known_vectors(tmp_path: Path) -> None:
    directory = checkpoints.write_checkpoint(
        tmp_path / "llama", checkpoints.LLAMA, checkpoints.llama_tensors(checkpoints.LLAMA)
    )
    path = tmp_path / "llama.gguf"
    assert main.main(["convert", str(directory), "--outtype", "f32", "--outfile", str(path)]) == 0
    with opened(path) as session:
        for pooling, wanted in KNOWN.items():
            found = embed(session, [TOKENS[:7], TOKENS], pooling)[1]
            np.testing.assert_allclose(found[0, :6], wanted, atol=2e-6)
            assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def reference(path: Path, tokens: Array) -> Array:
    """States of all tokens by the NumPy meaning of the graph."""
    session = ReferenceSession(path, GraphConfig(n_ctx=256, type_k=GGMLType.F32, type_v=GGMLType.F32))
    session._graphs = [g.until(next(n for n in g.nodes if n.name == HIDDEN)) for g in session._graphs]
    return session.decode(Batch.single(tokens, logits="all"))


@pytest.mark.parametrize("arch", some_architectures())
def test_states_of_every_architecture(arch: str, tmp_path: Path) -> None:
    """Alone, side by side with others, and in pieces."""
    path = write_model(tiny(arch), tmp_path / "tiny.gguf")
    tokens = texts((20,))[0]
    wanted = reference(path, tokens)
    for n_ubatch in (8, 64):
        with opened(path, n_ubatch=n_ubatch) as session:
            found = embed(session, [tokens[:3], tokens, tokens[:7], tokens[:1]], Pooling.NONE, -1)
        assert np.abs(found[1] - wanted).max() < 1e-3 * wanted.std()
        for rows in found:
            assert np.abs(rows - wanted[: len(rows)]).max() < 1e-3 * wanted.std()


@pytest.mark.parametrize("arch", some(["gemma4", "gpt-oss", "mimo2"], ["gemma4"]))
def test_caches_of_windows(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SPARE", 4)
    monkeypatch.setattr(sequences, "SPARE", 2)
    path = write_model(tiny(arch), tmp_path / "tiny.gguf")
    tokens = texts((20,))[0]
    wanted = reference(path, tokens)
    with opened(path, n_ubatch=4) as session:
        assert session.graph_config.n_window == 16
        found = embed(session, [tokens[:1], tokens[:3], tokens, tokens[:2], tokens[:2]], Pooling.NONE, -1)
    for rows in found:
        assert np.abs(rows - wanted[: len(rows)]).max() < 1e-3 * wanted.std()


@needs_emulation
@pytest.mark.parametrize("arch", ["olmo2", "gpt-oss", "qwen35"])
def test_on_an_emulated_gpu(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "open_devices", Opener())
    path = write_model(tiny(arch), tmp_path / "tiny.gguf")
    tokens = texts((20,))[0]
    wanted = reference(path, tokens)
    with Session.open(cuda_sessions.config(path, **F32, n_ubatch=16), outputs=Outputs.EMBEDDINGS) as session:
        assert len(session.gpus) == 1
        for rows in embed(session, [tokens[:3], tokens, tokens[:7]], Pooling.NONE, -1):
            cuda_sessions.assert_close(rows, wanted[: len(rows)], 0.02)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("make", [lambda: tiny_model("qwen3"), tiny_deepseek2])
def test_side_by_side_is_as_alone(make: Any, flash_attn: bool, tmp_path: Path) -> None:
    """With the prompt programs of MLA too."""
    path = write_model(make(), tmp_path / "tiny.gguf")
    many = texts((100, 60, 3, 130, 1))
    with opened(path, n_ubatch=128, flash_attn=flash_attn) as session:
        alone = [embed(session, [t], Pooling.MEAN)[0] for t in many]
        together = embed(session, many, Pooling.MEAN)
    assert max(np.abs(a - b).max() for a, b in zip(alone, together, strict=True)) < 1e-5


def steps(session: Session, many: list[Array], pooling: Pooling = Pooling.LAST) -> int:
    embedder, n = Embedder(session, pooling), 0
    for i, tokens in enumerate(many):
        embedder.add(i, tokens)
    while len(embedder):
        embedder.step()
        n += 1
    return n


def test_short_texts_share_micro_batches(tmp_path: Path) -> None:
    with opened(write_model(tiny_model("qwen3"), tmp_path / "a.gguf"), n_ubatch=256) as session:
        assert steps(session, texts((4,) * 64)) == 1
        assert steps(session, texts((250, 4, 4, 4))) == 2
        assert session.sequences.n_past == [0]
    recurrent = write_model(tiny("qwen35"), tmp_path / "b.gguf")
    with opened(recurrent, n_ubatch=256) as session:
        assert not side_by_side(session) and steps(session, texts((4,) * 3)) == 3
        with pytest.raises(IkError, match="one by one"):
            states(session, 0, texts((2, 2)), np.arange(2))


def test_logits_and_embeddings_in_one_session(tmp_path: Path) -> None:
    """They do not disturb each other; without logits the output matrix is not loaded."""
    path = write_model(tiny_model("llama"), tmp_path / "tiny.gguf")
    (tokens,) = texts((20,))
    with opened(path, Outputs.LOGITS) as session:
        wanted, n_bytes = session.decode(Batch.single(tokens)).copy(), session.memory()["CPU"]
        with pytest.raises(UnsupportedError, match="not opened for embeddings"):
            states(session, 0, [tokens], np.arange(1))
    with opened(path, Outputs.BOTH) as session:
        vector = embed(session, [tokens], Pooling.LAST)[0]
        np.testing.assert_array_equal(session.decode(Batch.single(tokens)), wanted)
        both = session.memory()["CPU"]
        assert both["weights"] == n_bytes["weights"] and both["KV"] == n_bytes["KV"]
    with opened(path) as session:
        np.testing.assert_array_equal(embed(session, [tokens], Pooling.LAST)[0], vector)
        assert "output.weight" not in session.runner.host_weights
        assert session.memory()["CPU"]["weights"] < n_bytes["weights"]
        with pytest.raises(IkError, match="has no logits"):
            session.decode(Batch.single(tokens))


def test_pooling_of_a_model() -> None:
    keys = {"qwen3.pooling_type": 3}
    assert pooling_of("", keys, "qwen3", Pooling.NONE) is Pooling.LAST
    assert pooling_of("mean", keys, "qwen3", Pooling.NONE) is Pooling.MEAN
    assert pooling_of("", keys, "llama", Pooling.NONE) is Pooling.NONE
    assert pooling_of("", {"qwen3.pooling_type": -1}, "qwen3", Pooling.CLS) is Pooling.CLS, "none is said"
    assert pooling_of("", {"qwen3.pooling_type": 0}, "qwen3", Pooling.CLS) is Pooling.NONE
    with pytest.raises(FormatError, match="--pooling"):
        pooling_of("", {"qwen3.pooling_type": 9}, "qwen3", Pooling.NONE)


@pytest.mark.parametrize("pieces", [(7,), (3, 4), (1, 5, 1)])
def test_vectors_of_texts_in_pieces(pieces: tuple[int, ...], rng: np.random.Generator) -> None:
    """What is wanted of each piece, and what becomes of it; the scale of a mean counts where nothing is normalized."""
    rows = rng.normal(0, 1, (7, 4)).astype(np.float32)
    mean = rows.mean(axis=0, keepdims=True)
    for pooling, wanted in (
        (Pooling.NONE, rows), (Pooling.MEAN, mean), (Pooling.CLS, rows[:1]), (Pooling.LAST, rows[6:]),
    ):  # fmt: skip
        pool, at = PoolState(pooling, 7), 0
        for n in pieces:
            assert not pool.done
            chosen = [at + i for i in pool.wanted(n)]
            pool.add(n, rows[chosen])
            at += n
        assert pool.done
        np.testing.assert_allclose(pool.result(), wanted, rtol=1e-6)


def test_norms() -> None:
    rows = np.array([[3, -4, 0], [0, 0, 0]], np.float32)
    assert normalized(rows, -1) is rows
    for kind, wanted in {
        0: [24570, -32760, 0],
        1: [3 / 7, -4 / 7, 0],
        2: [0.6, -0.8, 0],
        3: [3 / 91 ** (1 / 3)],
    }.items():
        found = normalized(rows, kind)
        np.testing.assert_allclose(found[0][: len(wanted)], wanted, rtol=1e-6)
        assert not found[1].any()
    np.testing.assert_allclose(normalized(rows, 400)[0], [0.75, -1, 0], rtol=1e-6)
    np.testing.assert_allclose(similarities(rows), [[1, 0], [0, 1]], atol=1e-7)


def ranking_model(labels: int = 2, arch: str = "qwen3") -> MemoryModel:
    model = tiny_model(arch)
    rng = np.random.default_rng(5)
    n_embd = model.tensors["token_embd.weight"].shape[0]
    model.set("cls.output.weight", rng.normal(0, 1, (labels, n_embd)))
    return model


def test_ranking(tmp_path: Path) -> None:
    path = write_model(ranking_model(), tmp_path / "tiny.gguf")
    (tokens,) = texts((20,))
    with opened(path) as session:
        state = embed(session, [tokens], Pooling.LAST, -1)[0]
        head = RankHead.of(session.model)
        found = embed(session, [tokens, tokens[:3]], Pooling.RANK)
    logits = state[0] @ head.output.T
    np.testing.assert_allclose(found[0][0], np.exp(logits) / np.exp(logits).sum(), rtol=1e-4)
    assert found[1].sum() == pytest.approx(1)
    plain = write_model(tiny_model("qwen3"), tmp_path / "plain.gguf")
    with opened(plain) as session, pytest.raises(UnsupportedError, match="cannot rank"):
        embed(session, [tokens], Pooling.RANK)


def test_what_cannot_be_embedded(tmp_path: Path) -> None:
    with opened(write_model(tiny_model("qwen3"), tmp_path / "tiny.gguf")) as session:
        embedder = Embedder(session, Pooling.LAST)
        with pytest.raises(UsageError, match="without tokens"):
            embedder.add(0, [])
        with pytest.raises(UsageError, match=r"300 tokens.*raise -c"):
            embedder.add(0, [1] * 300)
        embedder.add(0, [1, 2, 96])
        with pytest.raises(IkError, match="outside the vocabulary"):
            embedder.step()
        embedder.drop(lambda key: key == 0)
        assert not len(embedder) and embedder.step() == []


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, 3),
        ({"pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode": "cls"}, 2),
    ],
)
def test_pooling_of_a_checkpoint(config: dict[str, Any], wanted: int, tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]  # fmt: skip
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert Sentence.of(tmp_path).pooling is None
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert Sentence.of(tmp_path).pooling == wanted
    checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA, checkpoints.llama_tensors(checkpoints.LLAMA))
    assert main.main(["convert", str(tmp_path), "--outtype", "f16", "--outfile", str(tmp_path / "a.gguf")]) == 0
    assert open_gguf(tmp_path / "a.gguf").get("llama.pooling_type") == wanted


def test_poolings_of_checkpoints_that_are_not_understood(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    path.write_text("{}")
    assert Sentence.of(tmp_path).pooling is None
    for text in ("[1]", "no", '[{"type": "a.Pooling", "path": "../b"}]', '[{"type": "a.Pooling", "path": "c"}]'):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"modules\.json"):
            Sentence.of(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UnsupportedError, match="pooling_mode_max_tokens"):
        Sentence.of(tmp_path)


RERANKED = {"a castle on the hill": 0.0624459, "the weather there": 0.0725759,
            "dogs, cats\nand other animals": 0.0402353, "a palace": 0.0475442}  # fmt: skip
"""Probabilities of "yes" for "where do kings live?" by the model card's recipe, of transformers in float32."""


def reranker(directory: Path) -> Path:
    """A small Qwen3 with the tokens that a Qwen3-Reranker needs; nothing says yet that it is one."""
    n_vocab = 326
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": n_vocab, "hidden_size": 64,
              "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
              "rope_theta": 10000.0, "hidden_act": "silu"}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, 64), "model.norm.weight": (64,)}
    for il in range(2):
        own = {"input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_proj": (64, 64)}
        own |= {"self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64)}
        own |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,), "mlp.gate_proj": (96, 64)}
        own |= {"mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
        shapes |= {f"model.layers.{il}.{name}.weight": shape for name, shape in own.items()}
    checkpoints.write_checkpoint(directory, config, {name: checkpoints.drawn(name, s) for name, s in shapes.items()})
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"~{i}": i for i in range(len(vocabulary), 320)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, text in enumerate(("no", "yes", "<|im_start|>", "<|im_end|>", "<think>", "</think>")):
        tokenizer["added_tokens"].append({"id": 320 + i, "content": text, "special": "im_" in text} | flags)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_a_qwen3_reranker_is_converted_to_a_model_that_ranks(tmp_path: Path) -> None:
    """Its score is the probability of "yes" against "no" as the next token; README.md says that it is one."""
    directory = reranker(tmp_path / "a")
    assert "cls.output.weight" not in open_checkpoint(directory).file.tensors
    (directory / "README.md").write_text("# Qwen3-Reranker-0.6B\n")
    file = open_checkpoint(directory).file
    assert file.metadata["qwen3.pooling_type"] == 4 and file.metadata["qwen3.classifier.output_labels"] == ["yes", "no"]
    assert "<Query>: {query}" in file.metadata["tokenizer.chat_template.rerank"]
    tokens = [5, 70, 300, 12]
    logits = ReferenceSession(file, GraphConfig(n_ctx=64)).decode(Batch.single(tokens, logits="last"))[0]
    head = file.data("cls.output.weight").view(np.float32).reshape(2, 64)
    embedding = file.data("token_embd.weight").view(np.float32).reshape(326, 64)
    np.testing.assert_array_equal(head, embedding[[321, 320]])
    wanted = 1 / (1 + np.exp(logits[320] - logits[321]))
    path = tmp_path / "ranks.gguf"
    assert main.main(["convert", str(directory), "--outtype", "f32", "--outfile", str(path)]) == 0
    settings = RunConfig(model=path, n_ctx=64, n_threads=1, n_threads_batch=1, warmup=False)
    with Session.open(settings, outputs=Outputs.EMBEDDINGS) as session:
        scores = embed(session, [tokens], Pooling.RANK)[0]
    np.testing.assert_allclose(scores[0], [wanted, 1 - wanted], atol=3e-6)


def test_scores_of_a_qwen3_reranker_through_the_server(tmp_path: Path) -> None:
    """The published scores: with its prompt around query and document, through /v1/rerank."""
    path = tmp_path / "ranks.gguf"
    directory = reranker(tmp_path / "Qwen3-Reranker-0.6B")
    assert main.main(["convert", str(directory), "--outtype", "f32", "--outfile", str(path)]) == 0
    with serving(1, model=path, server={"reranking": True}, **F32) as engine:
        body = {"query": "where do kings live?", "documents": list(RERANKED)}
        answer = Client(engine=engine).post("/v1/rerank", body).json()
    assert [item["index"] for item in answer["results"]] == [1, 0, 3, 2] and answer["usage"]["prompt_tokens"] == 1141
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    np.testing.assert_allclose([scores[i] for i in range(4)], list(RERANKED.values()), atol=1e-6)
