"""Encoders (BERT and its kind): vectors and scores that torch computes of small checkpoints, what runs and what not."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
from attention_cases import whole_texts
from checkpoints import write_checkpoint, write_safetensors
from encoder_models import CLS, SEP, encoder_file, tiny, with_words
from engine_client import Call, request, serving
from factories import MemoryModel
from fake_engine import FakeEngine
from gguf_files import write_model
from server_client import Client

from ikcli import main
from ikcli.backends.cuda.lower import all_rules
from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.plan.devices import GpuFacts, Machine
from ikcli.engine.plan.model_rules import settle_encoder
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.embedder import Embedder, embed, states
from ikcli.engine.run.pooling import Pooling, RankHead
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.self_test import check
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.graph import Graph, Weight
from ikcli.models import GraphConfig, Outputs
from ikcli.models.t5 import bucket
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Embedded, EmbeddingRequest, Failure
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.tokenizer import Tokenizer

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "encoder_answers.json").read_text())
MODELS = {model["name"]: model for model in ANSWERS["models"]}
TOKENS: list[int] = ANSWERS["tokens"]
ARCHITECTURES = ("bert", "jina-bert-v2", "nomic-bert")
LATER = ("eurobert", "gemma-embedding", "jina-bert-v3", "modern-bert", "neo-bert", "nomic-bert-moe", "t5encoder")
SLOW = pytest.mark.slow("compiles attention kernels with windows on both sides, or with biases")
WINDOWS = ("embedding-gemma", "modern-bert")
BIASES = ("t5", "umt5")


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """Values that depend on the name of the tensor alone; weights of norms are around 1."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    if len(shape) > 1:
        return (x * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
    is_norm = any(part in name.lower() for part in ("norm", "emb_ln")) and not name.endswith("bias")
    return (0.1 * x + is_norm).astype(np.float32)


def checkpoint(name: str, directory: Path) -> Path:
    model = MODELS[name]
    write_checkpoint(directory, model["config"], {n: drawn(n, s) for n, s in model["tensors"].items()})
    write_modules(directory, model.get("dense", {}))
    return directory


def write_modules(directory: Path, dense: dict[str, list[int]], act: str = "torch.nn.modules.linear.Identity") -> None:
    """Dense layers after mean pooling, as sentence-transformers stores them."""
    if not dense:
        return
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    configs: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode_mean_tokens": True}}
    for name, shape in dense.items():
        folder, bare = name.split("/")
        modules.append({"path": folder, "type": "sentence_transformers.models.Dense"})
        configs[folder] = {"in_features": shape[1], "out_features": shape[0], "bias": False, "activation_function": act}
        (directory / folder).mkdir()
        write_safetensors(directory / folder / "model.safetensors", {bare: drawn(name, shape)})
    for folder, config in configs.items():
        (directory / folder).mkdir(exist_ok=True)
        (directory / folder / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps(modules))


def converted(name: str, tmp_path: Path, file_type: int = 0) -> Path:
    out = tmp_path / "out.gguf"
    found = open_checkpoint(checkpoint(name, tmp_path / "checkpoint"))
    run(plan_convert(found, out, RecipeOptions(file_type), ToolOptions(n_threads=1)).job)
    return out


def opened(path: Path, **changes: Any) -> Session:
    settings: dict[str, Any] = {"command": "embed", "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "warmup": False}
    return Session.open(RunConfig(model=path, **(settings | changes)), outputs=Outputs.EMBEDDINGS)


def stored(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a file of float32."""
    file = open_gguf(path)
    return {n: np.array(file.data(n)).view(np.float32).reshape(t.shape[::-1]) for n, t in file.tensors.items()}


# --- against torch ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if n.startswith(WINDOWS + BIASES) else n for n in MODELS])
def test_a_converted_checkpoint_gives_the_vectors_of_torch(name: str, tmp_path: Path) -> None:
    pooling = Pooling.RANK if "reranker" in name else Pooling.MEAN
    with opened(converted(name, tmp_path)) as session:
        assert not session.cache_bytes() and session.memory()["CPU"]["KV"] == 0
        found = embed(session, [TOKENS, TOKENS[:3], TOKENS[:5]], pooling)
    columns = [0] if pooling is Pooling.RANK else ANSWERS["columns"]
    for rows, wanted in zip((found[0], found[2]), MODELS[name]["answers"], strict=True):
        np.testing.assert_allclose(rows[0, columns], wanted, atol=3e-6, rtol=1e-6 if pooling is Pooling.MEAN else 1e-5)


@pytest.mark.parametrize(
    "name", ["bert", "nomic-bert-hub", "jina-bert-v2-code", "embedding-gemma", "modern-bert", "t5-encoder"]
)
def test_the_reference_computes_them_too(name: str, tmp_path: Path) -> None:
    session = ReferenceSession(converted(name, tmp_path), GraphConfig(n_ctx=64, outputs=Outputs.EMBEDDINGS))
    mean = session.decode(Batch.single(TOKENS, logits="all")).mean(axis=0)
    for dense, shape in MODELS[name].get("dense", {}).items():
        mean = drawn(dense, shape) @ mean
    got = (mean / np.linalg.norm(mean))[ANSWERS["columns"]]
    np.testing.assert_allclose(got, MODELS[name]["answers"][0], atol=3e-6)


def test_keys_and_names_are_those_of_other_converters(tmp_path: Path) -> None:
    file = open_gguf(converted("bert", tmp_path))
    assert file.metadata["bert.attention.causal"] is False and "bert.pooling_type" not in file.metadata
    assert file.metadata["bert.attention.layer_norm_epsilon"] == pytest.approx(1e-12)
    assert file.metadata["tokenizer.ggml.token_type_count"] == 2
    blocks = "attn_q attn_k attn_v attn_output attn_output_norm ffn_up ffn_down layer_output_norm"
    wanted = {f"blk.{i}.{name}" for i in range(2) for name in blocks.split()}
    wanted |= {"token_embd", "token_embd_norm", "token_types", "position_embd"}
    assert {name.rsplit(".", 1)[0] for name in file.tensors} == wanted
    nomic = open_gguf(converted("nomic-bert", tmp_path / "nomic"))
    assert nomic.metadata["nomic-bert.rope.freq_base"] == 1000
    assert nomic.tensors["blk.1.attn_qkv.weight"].shape == (64, 192) and "blk.1.attn_q.weight" not in nomic.tensors
    ranker = open_gguf(converted("bert-reranker", tmp_path / "ranker"))
    assert ranker.metadata["bert.pooling_type"] == 4 and ranker.tensors["cls.output.weight"].shape == (64, 1)
    hub = open_gguf(converted("nomic-bert-hub", tmp_path / "hub"))
    assert hub.metadata["nomic-bert.context_length"] == 2048  # the checkpoint says 8192


def test_nomic_with_experts(tmp_path: Path) -> None:
    """The matrices of experts come below each other; the reference equals the formula, for one token alone."""
    config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 64, "n_head": 4, "n_inner": 96,
              "n_layer": 2, "n_positions": 128, "vocab_size": 320, "type_vocab_size": 1, "activation_function": "gelu",
              "layer_norm_epsilon": 1e-5, "moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2,
              "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "rotary_emb_base": 10000}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (320, 64)}
    shapes |= {"embeddings.token_type_embeddings.weight": (1, 64), "emb_ln.weight": (64,), "emb_ln.bias": (64,)}
    for il in range(2):
        own = {"attn.Wqkv": (192, 64), "attn.out_proj": (64, 64), "norm1": (64,), "norm2": (64,)}
        own |= {"mlp.fc1": (96, 64), "mlp.fc2": (64, 96)} if il == 0 else {}
        for name, shape in own.items():
            shapes[f"encoder.layers.{il}.{name}.weight"] = shape
            shapes[f"encoder.layers.{il}.{name}.bias"] = shape[:1]
    moe = "encoder.layers.1.mlp"
    shapes |= {
        f"{moe}.experts.mlp.w1": (384, 64),
        f"{moe}.experts.mlp.w2": (384, 64),
        f"{moe}.router.layer.weight": (4, 64),
    }
    values = {n: drawn(n, s) for n, s in shapes.items()} | {f"{moe}.experts.bias": np.zeros(64, np.float32)}
    found = open_checkpoint(write_checkpoint(tmp_path, config, values))
    assert found.file.metadata["general.architecture"] == "nomic-bert-moe" and not found.notes
    assert found.file.tensors["blk.1.ffn_down_exps.weight"].shape == (96, 64, 4)
    seen: dict[str, np.ndarray] = {}
    session = ReferenceSession(
        found.file,
        GraphConfig(n_ctx=64, outputs=Outputs.EMBEDDINGS),
        observe=lambda node, x: seen.update({node.name: x}),
    )
    session.decode(Batch.single([7], logits="all"))
    x = seen["attn_output_norm-1"][0].astype(np.float64)
    scores = np.exp(values[f"{moe}.router.layer.weight"] @ x)
    scores /= scores.sum()
    wanted = np.zeros(64)
    for e in np.argsort(scores)[-2:]:
        up, down = (values[f"{moe}.experts.mlp.{n}"].reshape(4, 96, 64)[e] for n in ("w1", "w2"))
        h = up @ x
        wanted += scores[e] * ((h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))) @ down)
    np.testing.assert_allclose(seen["ffn_moe_out-1"][0], wanted, atol=1e-5)


def test_distances_of_t5_in_buckets() -> None:
    """As in T5: single distances up to 8, then wider ones up to 128; those after a token are in the other half."""
    wanted = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -50: 13, -91: 15, -128: 15, 1: 17, 7: 23, 8: 24, 127: 31}
    assert {distance: bucket(distance, 32) for distance in wanted} == wanted


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    """Linear layers after the pooling are kept; one with an activation has no place, and a note says so."""
    directory = checkpoint("embedding-gemma", tmp_path / "a")
    found = open_checkpoint(directory)
    keys = found.file.metadata
    assert keys["gemma-embedding.pooling_type"] == 1 and keys["gemma-embedding.dense_2_feat_out"] == 128
    assert keys["gemma-embedding.attention.sliding_window"] == 8 and keys["gemma-embedding.rope.freq_base_swa"] == 1e4
    assert found.file.tensors["dense_3.weight"].shape == (128, 64) and not found.notes
    other = checkpoint("bert", tmp_path / "b")
    write_modules(other, {"2_Dense/linear.weight": [8, 64]}, "torch.nn.modules.activation.Tanh")
    found = open_checkpoint(other)
    assert "dense_2.weight" not in found.file.tensors and "Tanh" in found.notes[0]


def test_keys_of_modernbert(tmp_path: Path) -> None:
    """Checkpoints of transformers 4 and 5 name the two rotations differently; heads say what they read."""
    directory = checkpoint("modern-bert", tmp_path / "a")
    old = open_checkpoint(directory).file.metadata
    config = json.loads((directory / "config.json").read_text())
    bases = {"full_attention": config.pop("global_rope_theta"), "sliding_attention": config.pop("local_rope_theta")}
    new = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    (directory / "config.json").write_text(json.dumps(config | {"rope_parameters": new}))
    for keys in (old, open_checkpoint(directory).file.metadata):
        assert keys["modern-bert.rope.freq_base"] == 160000 and keys["modern-bert.rope.freq_base_swa"] == 10000
        assert keys["modern-bert.attention.sliding_window_pattern"] == 3
    silu = open_checkpoint(checkpoint("modern-bert-silu", tmp_path / "b"))
    assert silu.file.metadata["modern-bert.hidden_act"] == "silu"
    ranker = open_checkpoint(checkpoint("modern-bert-reranker", tmp_path / "c"))
    assert ranker.file.metadata["modern-bert.classifier.pooling_type"] == 1 and "cls.norm.weight" in ranker.file.tensors


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embedding-gemma", {"use_bidirectional_attention": False}, "use_bidirectional_attention is"),
        ("modern-bert", {"hidden_activation": "relu"}, "hidden_activation is"),
        ("bert", {"hidden_act": "relu"}, "hidden_act is"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is"),
        ("jina-bert-v2", {"feed_forward_type": "reglu"}, "feed_forward_type is"),
        ("nomic-bert-hub", {"prenorm": True}, "prenorm is"),
        ("nomic-bert-hub", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is"),
    ],
)
def test_checkpoints_of_another_kind_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = checkpoint(name, tmp_path / "checkpoint")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(directory)


def test_matrices_of_gate_and_up_may_be_one(tmp_path: Path) -> None:
    """As newer converters of other programs write them: gate, then up."""
    path = converted("jina-bert-v2", tmp_path)
    file = open_gguf(path)
    model = MemoryModel(dict(file.metadata))
    values = stored(path)
    for il in range(2):
        gate, up = values.pop(f"blk.{il}.ffn_gate.weight"), values.pop(f"blk.{il}.ffn_up.weight")
        values[f"blk.{il}.ffn_up.weight"] = np.concatenate([gate, up])
    for name, x in values.items():
        model.set(name, x)
    with opened(write_model(model, tmp_path / "one.gguf")) as session:
        (found,) = embed(session, [TOKENS], Pooling.MEAN)
    np.testing.assert_allclose(found[0, ANSWERS["columns"]], MODELS["jina-bert-v2"]["answers"][0], atol=3e-6)


# --- texts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *(pytest.param(arch, marks=SLOW) for arch in LATER)])
def test_side_by_side_is_as_alone_and_as_the_reference(arch: str, tmp_path: Path) -> None:
    path = write_model(tiny(arch), tmp_path / "tiny.gguf")
    texts = [np.random.default_rng(n).integers(0, 96, n) for n in (3, 120, 1, 17, 60)]
    reference = ReferenceSession(path, GraphConfig(n_ctx=128, outputs=Outputs.EMBEDDINGS))
    with opened(path, n_ubatch=256) as session:
        together = embed(session, texts, Pooling.NONE, -1)
        alone = [embed(session, [t], Pooling.NONE, -1)[0] for t in texts]
        first = embed(session, texts, Pooling.CLS, -1)
        embedder = Embedder(session, Pooling.CLS)
        for i, text in enumerate(texts):
            embedder.add(i, text)
        assert len(embedder.step()) == len(texts)  # in one micro-batch
    for text, a, b, c in zip(texts, together, alone, first, strict=True):
        wanted = reference.decode(Batch.single(text, logits="all"))
        reference.clear()
        most = (2e-4 if arch == "t5encoder" else 1e-4) * wanted.std()  # scores that are not scaled are sharp
        assert np.abs(a - wanted).max() < most and np.abs(b - wanted).max() < most
        np.testing.assert_allclose(c[0], wanted[0], atol=most)


def test_later_tokens_change_earlier_states(tmp_path: Path) -> None:
    with opened(write_model(tiny("bert"), tmp_path / "tiny.gguf")) as session:
        a, b = embed(session, [[5, 6, 7], [5, 6, 8]], Pooling.NONE, -1)
    assert np.abs(a[0] - b[0]).max() > 0.01


def test_parts_of_texts_matter_to_rerankers_only(tmp_path: Path) -> None:
    path = converted("bert-reranker", tmp_path)
    with opened(path) as session:
        hp = session.model.hp
        assert hp.separator == 3 and hp.n_token_types == 2
        behind = embed(session, [[5, 3, 6], [5, 4, 6]], Pooling.NONE, -1)
    model = MemoryModel(dict(open_gguf(path).metadata) | {"tokenizer.ggml.seperator_token_id": 4})
    for name, x in stored(path).items():
        model.set(name, x)
    with opened(write_model(model, tmp_path / "other.gguf")) as session:
        other = embed(session, [[5, 3, 6], [5, 4, 6]], Pooling.NONE, -1)
    assert np.abs(behind[0] - other[0]).max() > 0.01 and np.abs(behind[1] - other[1]).max() > 0.01
    with opened(converted("bert", tmp_path / "bert")) as session:
        assert session.model.hp.separator == -1


def test_texts_that_are_too_long(tmp_path: Path) -> None:
    """BERT has so many positions; of others -ub is the limit, and no text is computed in pieces."""
    path = write_model(tiny("bert"), tmp_path / "bert.gguf")
    with opened(path) as session:
        assert session.longest_text == 128
        with pytest.raises(
            UsageError, match=r"\(129 tokens\) exceeds the 128 tokens that the model reads at once; shorten it$"
        ):
            embed(session, [[1] * 129], Pooling.MEAN)
    path = write_model(tiny("nomic-bert"), tmp_path / "nomic.gguf")
    with opened(path, n_ubatch=32) as session:
        with pytest.raises(UsageError, match=r"exceeds the 32 tokens .*; shorten it, or raise -c and -ub"):
            embed(session, [[1] * 33], Pooling.MEAN)
        assert np.isfinite(embed(session, [[1] * 32], Pooling.MEAN)[0]).all()


def test_nan_is_traced(tmp_path: Path) -> None:
    model = tiny("bert")
    bad = model.values("blk.1.ffn_up.weight").copy()
    bad[3] = np.nan
    model.set("blk.1.ffn_up.weight", bad)
    with opened(write_model(model, tmp_path / "tiny.gguf")) as session, pytest.raises(NonFiniteError, match="ffn_up"):
        embed(session, [[1, 2, 3]], Pooling.MEAN)


# --- heads --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_output", [True, False])
def test_heads(with_output: bool, tmp_path: Path) -> None:
    """tanh of the dense layer, then labels; some models have no labels. The first token counts."""
    rng, model = np.random.default_rng(1), tiny("bert")
    dense, output = rng.standard_normal((64 if with_output else 1, 64)) / 8, rng.standard_normal((2, 64)) / 8
    model.set("cls.weight", dense)
    model.set("cls.bias", np.full(len(dense), 0.1))
    if with_output:
        model.set("cls.output.weight", output)
    with opened(write_model(model, tmp_path / "tiny.gguf")) as session:
        (states,), (score,) = (embed(session, [[4, 5, 6]], p, -1) for p in (Pooling.NONE, Pooling.RANK))
    wanted = np.tanh(states[0] @ dense.T + 0.1)
    np.testing.assert_allclose(score[0], wanted @ output.T if with_output else wanted, atol=1e-5)


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    model = tiny("bert")
    model.set("cls.weight", np.ones((1, 32)))
    with (
        opened(write_model(model, tmp_path / "tiny.gguf")) as session,
        pytest.raises(FormatError, match=r"cls\.weight has"),
    ):
        RankHead.of(session.model)


# --- runs ---------------------------------------------------------------------------------------------------------
def test_a_gate_that_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny("nomic-bert")
    del model.tensors["blk.1.ffn_gate.weight"]
    with pytest.raises(FormatError, match=r"'blk.1.ffn_gate.weight' is missing"):
        opened(write_model(model, tmp_path / "tiny.gguf"))


def test_a_causal_one_is_refused(tmp_path: Path) -> None:
    model = tiny("bert")
    model.metadata["bert.attention.causal"] = True
    path = write_model(model, tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedError, match=r"bert.attention.causal is true"):
        Planner.of_file(RunConfig(model=path))


@pytest.mark.parametrize(
    "argv", [["perplexity", "-f", "x"], ["chat", "-p", "a"], ["bench"], ["sweep-bench"], ["batched-bench", "-npp", "1"]]
)
def test_commands_that_need_a_next_token_refuse(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tiny("bert"), tmp_path / "tiny.gguf")
    (tmp_path / "x").write_text("text")
    argv = [str(tmp_path / "x") if a == "x" else a for a in argv]
    assert main.main([argv[0], "-m", str(path), *argv[1:]]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("bert models read texts in both directions and have no next token; use ik embed, or ik serve")


def test_a_session_with_logits_is_refused(tmp_path: Path) -> None:
    path = write_model(tiny("bert"), tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedError, match="no next token"):
        Session.open(RunConfig(model=path, n_ctx=64))


def settled(given: tuple[str, ...] = (), gpus: int = 0, **changes: Any) -> tuple[RunConfig, list[str]]:
    hp = Planner.of_file(RunConfig(model=changes.pop("model"))).hp
    machine = Machine(tuple(GpuFacts(f"CUDA{i}", 1 << 30, 1 << 30) for i in range(gpus)))
    notices: list[str] = []
    return settle_encoder(RunConfig(**changes), hp, machine, given, notices), notices


def test_settings(tmp_path: Path) -> None:
    path = write_model(tiny("bert"), tmp_path / "tiny.gguf")
    config, notices = settled(model=path, command="serve", n_parallel=4)
    assert config.server.embeddings and config.n_parallel == 1 and config.n_ubatch == config.n_batch == 2048
    assert "-np 4 has no effect" in notices[0]
    config, _ = settled(("n_ubatch",), model=path, command="serve", n_ubatch=64, server=ServerConfig(reranking=True))
    assert not config.server.embeddings and config.n_ubatch == 64


def test_gpus_are_left_alone(tmp_path: Path) -> None:
    path = write_model(tiny("bert"), tmp_path / "tiny.gguf")
    config, notices = settled(gpus=1, model=path, command="embed", fit=True)
    assert config.n_gpu_layers == 0 and not config.fit and "computed on the CPU" in notices[0]
    with pytest.raises(UnsupportedError, match=r"bert models are computed on the CPU; use -ngl 0"):
        settled(gpus=1, model=path, command="embed", n_gpu_layers=3)
    assert settled(gpus=1, model=path, command="embed", n_gpu_layers=0)[1] == []


def test_the_self_test(tmp_path: Path) -> None:
    for arch in ARCHITECTURES:
        with opened(write_model(tiny(arch), tmp_path / "tiny.gguf")) as session:
            families = {family.op: family for family in check(session)}
            assert families["flash_attn"].nodes == 2 and all(family.ok for family in families.values())
            with pytest.raises(IkError, match="reads a text at once"):
                states(session, 0, [np.array([1], np.int32)], np.arange(1), 1)


def test_an_importance_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows are texts between [CLS] and [SEP]; what it says fits what the products got, and quantize takes it."""
    path, text, out = encoder_file(tmp_path / "bert.gguf"), tmp_path / "text", tmp_path / "imatrix.gguf"
    text.write_text("a castle where dog kings live ? " * 8)
    argv = ["imatrix", "-m", str(path), "-f", str(text), "-o", str(out), "-t", "1", "-c", "16"]
    assert main.main(argv) == 0
    found = read_imatrix(out)
    assert len(found.entries) == 2 * 6 and found.n_chunks == 3
    seen: list[np.ndarray] = []
    with opened(path) as session:
        ids = session.tokenizer.encode(text.read_text())
        windows = [[CLS, *ids[16 * i + 1 : 16 * i + 15], SEP] for i in range(3)]
        session.observer = lambda node, value: seen.append(value.copy()) if node.name == "inp_norm" else None
        embed(session, windows, Pooling.MEAN)
    rows = np.concatenate(seen)[:48].astype(np.float64)
    np.testing.assert_allclose(found.entries["blk.0.attn_q.weight"].sums.ravel(), (rows**2).sum(axis=0), rtol=1e-4)
    quantized = str(tmp_path / "small.gguf")
    assert main.main(["quantize", "--imatrix", str(out), str(path), quantized, "q8_0", "1"]) == 0
    assert main.main([*argv[:-1], "200"]) == 2 and "the model reads 128 tokens at most" in capsys.readouterr().err
    assert main.main([*argv, "--workers", "2"]) == 1 and "leave out --workers" in capsys.readouterr().err


def test_embed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = encoder_file(tmp_path / "bert.gguf")
    argv = ["embed", "-m", str(path), "-t", "1", "--json", "-p"]
    assert main.main([*argv, "a castle\ndog"]) == 0
    found = [one["embedding"] for one in json.loads(capsys.readouterr().out)["data"]]
    with opened(path) as session:
        wanted = embed(session, [session.tokenizer.encode("a castle"), [CLS, 7, SEP]], Pooling.MEAN)
    np.testing.assert_allclose(found, np.concatenate(wanted), atol=1e-6)
    capsys.readouterr()
    assert main.main([*argv, "dog\n" + "dog " * 127]) == 2
    assert "text 2 has 129 tokens, and the model reads 128 at most; shorten it" in capsys.readouterr().err
    path = write_model(with_words(tiny("nomic-bert", context_length=4096)), tmp_path / "nomic.gguf")
    argv[2] = str(path)
    assert main.main([*argv, "dog " * 2100]) == 2
    assert "shorten it, or raise -c and -ub" in capsys.readouterr().err
    assert main.main([*argv, "dog " * 2100, "-ub", "2200"]) == 0


def test_the_cuda_backend_says_what_it_cannot_do() -> None:
    """Where rules or `-ot` send parts of an encoder to a GPU all the same."""
    rules = all_rules()
    with pytest.raises(UnsupportedError, match="cannot compute flash_attn with slopes"):
        rules.check([whole_texts(4, 4, 32, tokens=8, slopes=(1.0,) * 4).node])
    g = Graph()
    with pytest.raises(UnsupportedError, match="no embed_types; use -ngl 0"):
        rules.lower(cast(Any, None), g.embed_types(Weight("token_types.weight", GGMLType.F32, (32, 2)), -1))


@pytest.mark.parametrize("argv", [["plan"], ["warmup"], ["serve", "--dry-run"]])
def test_plans(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tiny("jina-bert-v2"), tmp_path / "tiny.gguf")
    assert main.main([argv[0], "-m", str(path), "-t", "1", *argv[1:]]) == 0
    assert "error" not in capsys.readouterr().err


# --- server -------------------------------------------------------------------------------------------------------
def answers(engine: Engine, texts: Sequence[Sequence[int]]) -> Embedded | Failure:
    found: Queue[Any] = Queue()
    engine.submit(EmbeddingRequest(tuple(map(tuple, texts))), found.put)
    return found.get(timeout=60)


def test_a_server(tmp_path: Path) -> None:
    with serving(1, model=encoder_file(tmp_path / "bert.gguf"), n_ctx=128, server={"embeddings": True}) as engine:
        assert engine.model.pooling == "mean" and not engine.model.generates
        ids = engine.tokenizer.encode("a castle")
        assert ids == [CLS, 5, 6, SEP] and engine.tokenizer.add_eos
        assert isinstance(answers(engine, [ids, ids]), Embedded)
        refused = Call(engine, request([5])).failure
        assert refused.status == 501 and refused.message.endswith("Its model (bert) has no next token; use another one")
        long = answers(engine, [[5] * 129])
        assert isinstance(long, Failure) and long.status == 400 and long.type == "exceed_context_size_error"
        assert long.message.endswith("(128 tokens); shorten it")


def test_query_and_document_in_a_prompt(tmp_path: Path) -> None:
    """[CLS] query [SEP] document [SEP], whatever the file says of what is added."""
    for flags in ({}, {"add_eos_token": False, "add_bos_token": False, "add_sep_token": True}):
        metadata = dict(open_gguf(encoder_file(tmp_path / "rank.gguf", ranks=True)).metadata)
        metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
        engine = FakeEngine(Tokenizer.from_metadata(metadata, "rank.gguf"))
        engine.model = replace(engine.model, pooling="rank", metadata=metadata)
        Client(engine=engine).post("/rerank", {"query": "a castle", "documents": ["dog"]})
        assert engine.embedded[0].texts == ((CLS, 5, 6, SEP, 7, SEP),)
