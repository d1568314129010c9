"""Hy 4: sessions against NumPy, shared choices through roll-backs and copies, its streams, keys, names of checkpoints.

Kernels are compared with logits of torch in `test_convert_answers.py`, the definition of operations here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import build, drawn, write_checkpoint
from gguf_files import write_model
from test_convert_answers import ANSWERS
from tiny_architectures import tiny

from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.plan.model_rules import check_indexer
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import GraphConfig, HParams, check_tensors, find
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig

TOP_K = 24
# All experts are in use: which are chosen among near ties differs between forms of attention.
INDEXER: dict[str, Any] = {
    "block_count": 4, "attention.indexer.head_count": 16, "attention.indexer.key_length": 32,
    "attention.indexer.top_k": TOP_K, "attention.indexer.types": np.array([True, True, False, False]),
    "swiglu_clamp_exp": np.float32([0.5] * 4), "expert_used_count": 8,
}  # fmt: skip
TOKENS, OTHER = (np.random.default_rng(seed).integers(0, 96, 150) for seed in (3, 5))
slow = pytest.mark.slow("compiles the kernels of streams and of chosen positions with sinks")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny("hy_v4", **INDEXER), tmp_path_factory.mktemp("models") / "tiny.gguf")


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=256, warmup=False, **(settings | changes))


def reference(path: Path, tokens: np.ndarray = TOKENS, **changes: Any) -> np.ndarray:
    f32 = GGMLType.F32
    cfg = GraphConfig(n_ctx=256, type_k=f32, type_v=f32, type_index=f32, **changes)
    return ReferenceSession(path, cfg, dtype=np.float64).decode(Batch.single(tokens, logits="all"))


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Positions whose scores are equal up to rounding may be chosen differently."""
    error = np.abs(found - wanted).max(axis=1)
    assert (error < 1e-3 * wanted.std()).mean() >= 0.97, np.sort(error)


def test_graph_is_that_of_torch(tmp_path: Path) -> None:
    """The definition of every operation, without kernels: chosen positions, sinks, streams, capped gates."""
    model = next(m for m in ANSWERS["models"] if m["name"] == "hy4")
    tensors = {name: drawn(name, shape) for name, shape in model["tensors"].items()}
    found, out = open_checkpoint(write_checkpoint(tmp_path / "model", model["config"], tensors)), tmp_path / "m.gguf"
    run(plan_convert(found, out, RecipeOptions(0), ToolOptions(n_threads=1)).job)
    logits = reference(out, np.array(ANSWERS["tokens"]))[np.ix_(ANSWERS["rows"], ANSWERS["columns"])]
    np.testing.assert_allclose(logits, model["logits"], atol=1e-4)


@slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_ubatch": 64, "n_batch": 64}, {"mla": 1}, {"mla": 0}, {"flash_attn": False}, {"k_hadamard": True}],
    ids=str,
)
def test_prompts_and_single_tokens(path: Path, changes: dict[str, Any]) -> None:
    wanted = reference(path)
    with Session.open(config(path, **changes)) as session:
        found = [np.array(session.decode(Batch.single(TOKENS[:20], logits="all")))]
        found.append(np.array(session.decode(Batch.single(TOKENS[20:133], 20, logits="all"))))
        found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(133, 150)]
    assert_close(np.concatenate(found), wanted)


@slow
@pytest.mark.parametrize("changes", [{}, {"mla": 1}, {"mla": 2}, {"mla": 1, "flash_attn": False}, {"amb": 1}], ids=str)
def test_all_positions(path: Path, changes: dict[str, Any]) -> None:
    """The choice makes a difference beyond as many positions as may be chosen."""
    sparse, dense = reference(path), reference(path, index_top_k=0)
    assert np.abs(sparse - dense)[TOP_K:].max() > 0.1 > 1e-9 > np.abs(sparse - dense)[:TOP_K].max()
    with Session.open(config(path, dsa=False, **changes)) as session:
        found = np.array(session.decode(Batch.single(TOKENS, logits="all")))
    assert np.abs(found - dense).max() < 1e-3 * dense.std()


@slow
def test_roll_backs_and_copies(path: Path) -> None:
    """A sequence goes on as if nothing had happened: after a roll-back, or after it was saved and loaded."""
    wanted = reference(path)
    with Session.open(config(path, n_ubatch=32, n_batch=32)) as session:

        def check(tokens: np.ndarray, first: int, end: int, wanted: np.ndarray) -> None:
            found = np.array(session.decode(Batch.single(tokens[first:end], first, logits="all")))
            assert_close(found, wanted[first:end])

        check(TOKENS, 0, 90, wanted)
        session.decode(Batch.single(OTHER[:5], 90, logits="all"))
        check(TOKENS, session.truncate(0, 90), 110, wanted)
        saved = session.sequences.save(0, 110)
        assert session.truncate(0, 0) == 0
        check(OTHER, 0, 60, reference(path, OTHER))
        session.sequences.load(0, saved)
        check(TOKENS, 110, 130, wanted)
        check(TOKENS, session.truncate(0, 40), 60, wanted)


@slow
def test_sequences_of_one_batch(path: Path) -> None:
    """Two texts share micro-batches, and each computes what it does alone."""
    wanted = {0: reference(path), 1: reference(path, OTHER)}
    with Session.open(config(path, n_ubatch=64, n_batch=64), n_ctx=512, n_seq_max=2) as session:
        for a0, a1, b0, b1 in ((0, 50, 0, 71), (50, 81, 71, 103)):
            tokens = np.concatenate([TOKENS[a0:a1], OTHER[b0:b1]]).astype(np.int32)
            pos = np.concatenate([np.arange(a0, a1), np.arange(b0, b1)]).astype(np.int32)
            seq = np.repeat([0, 1], [a1 - a0, b1 - b0]).astype(np.int32)
            found = np.array(session.decode(Batch(tokens, pos, seq, np.ones(len(pos), bool))))
            assert_close(found[: a1 - a0], wanted[0][a0:a1])
            assert_close(found[a1 - a0 :], wanted[1][b0:b1])


def test_numbers_of_the_file(path: Path) -> None:
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m")
    assert (hp.index_owners, hp.index_top_k, hp.n_stream, hp.stream_most) == ({0, 1}, TOP_K, 4, pytest.approx(1.7))
    for key in ("count", "epsilon", "magnitude"):
        name = f"hy_v4.hyper_connection.{key}"
        with pytest.raises(FormatError, match=name):
            HParams.from_gguf({k: v for k, v in file.metadata.items() if k != name}, file.tensors, "m")
    with pytest.raises(FormatError, match="gives the first layer no indexer"):
        changes = {"hy_v4.attention.indexer.types": np.array([False, True, True, True])}
        HParams.from_gguf(file.metadata | changes, file.tensors, "m")


def test_file_without_an_indexer(tmp_path: Path) -> None:
    file, notices = open_gguf(write_model(tiny("hy_v4"), tmp_path / "m.gguf")), list[str]()
    check_indexer(config(tmp_path), HParams.from_gguf(file.metadata, file.tensors, "m"), (), notices)
    assert len(notices) == 1 and "m has no indexer, with which hy_v4 models are trained" in notices[0]


# --- checkpoints ------------------------------------------------------------------------------------------------------
CONFIG: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "hidden_size": 64, "vocab_size": 320,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "q_lora_rank": 48, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "qk_head_dim": 48, "v_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "routed_scaling_factor": 2.827,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"], "index_topk": 8, "index_head_dim": 32, "index_n_heads": 4,
    "indexer_types": ["full", "shared"], "layer_types": ["deepseek_sparse_attention"] * 2, "hc_mult": 4, "hc_eps": 1e-6,
    "hc_magnitude": 2.0, "swiglu_limit": 10.0, "enable_ihc": True, "learnable_sink": True, "gated_mla": True,
    "gating_type": "elementwise", "enable_lm_head_fp32": True, "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "tie_word_embeddings": False,
}  # fmt: skip
_ATTENTION = {
    "q_a_proj.weight": (48, 64), "q_a_layernorm.weight": (48,), "q_b_proj.weight": (192, 48),
    "kv_a_proj_with_mqa.weight": (80, 64), "kv_a_layernorm.weight": (64,), "kv_b_proj.weight": (256, 64),
    "o_proj.weight": (64, 128),
}  # fmt: skip
_INDEXER = {
    "wq_b.weight": (128, 48), "wk.weight": (32, 64), "k_norm.weight": (32,), "k_norm.bias": (32,),
    "weights_proj.weight": (4, 64),
}  # fmt: skip


def checkpoint(attn: str, ffn: str, head: str, gate: str, sinks: str) -> dict[str, np.ndarray]:
    """Tensors under the names of a program."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64),
        f"model.{head}fn": (4, 256), f"model.{head}base": (4,), f"model.{head}scale": (1,),
    }  # fmt: skip
    for il in range(2):
        p = f"model.layers.{il}."
        shapes |= {p + "input_layernorm.weight": (64,), p + "post_attention_layernorm.weight": (64,)}
        shapes |= {f"{p}self_attn.{name}": shape for name, shape in _ATTENTION.items()}
        shapes |= {f"{p}self_attn.{gate}.weight": (128, 64), f"{p}self_attn.{sinks}": (4,)}
        for part in (attn, ffn):
            shapes |= {f"{p}{part}fn": (8, 256), f"{p}{part}base": (8,), f"{p}{part}scale": (2,)}
    shapes |= {f"model.layers.0.self_attn.indexer.{name}": shape for name, shape in _INDEXER.items()}
    for part, width, p in (("mlp.", 96, "model.layers.0."), ("mlp.shared_experts.", 32, "model.layers.1.")):
        shapes |= {f"{p}{part}{x}_proj.weight": (width, 64) for x in ("gate", "up")}
        shapes[f"{p}{part}down_proj.weight"] = (64, width)
    p = "model.layers.1.mlp."
    shapes |= {p + "gate.weight": (4, 64), p + "gate.e_score_correction_bias": (4,)}
    shapes |= {p + "experts.gate_up_proj": (4, 64, 64), p + "experts.down_proj": (4, 64, 32)}
    shapes["model.mtp_layers.0.eh_proj.weight"] = (64, 128)
    return {name: drawn(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "names",
    [
        ("hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_", "hc_head.hc_head_", "linear_gate",
         "learnable_sink_param"),
        ("attn_hc.", "ffn_hc.", "hc_head.hc_", "gate_proj", "sinks"),
    ],
    ids=["released", "transformers"],
)  # fmt: skip
def test_names_of_checkpoints(tmp_path: Path, names: tuple[str, str, str, str, str]) -> None:
    """Both become the tensors that a graph expects; heads for further tokens are left out."""
    m = build(tmp_path, CONFIG, checkpoint(*names))
    metadata = m.metadata | {"general.architecture": "hy_v4"}
    hp = HParams.from_gguf(metadata, m.tensors, "m")
    check_tensors(find("hy_v4").tensor_shapes(hp), m.tensors, "m")  # type: ignore[arg-type]
    assert m.dropped == ["model.mtp_layers.0.eh_proj.weight"] and m.tensors["blk.1.exp_probs_b.bias"].shape == (4,)
    assert m.metadata["hy_v4.attention.indexer.types"] == [True, False]
    assert m.metadata["hy_v4.swiglu_clamp_exp"] == [10.0, 10.0] and m.metadata["hy_v4.attention.head_count_kv"] == 1
