"""openPangu: graphs against a forward pass in plain NumPy, sessions through roll-backs and copies, keys, taps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_control_vector
from checkpoints import build, values
from factories import MemoryModel
from gguf_files import write_model
from openpangu_model import (
    EPS,
    HEADS,
    N_SINK,
    N_STREAM,
    NOPE,
    Q_RANK,
    RANK,
    ROT,
    TOP_K,
    VALUE,
    forward,
    tiny_openpangu,
)

from ikcli.engine.plan.model_rules import check_indexer
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig, HParams, find
from ikcli.models.heads import mtp
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.run import RunConfig

TOKENS = np.random.default_rng(3).integers(0, 96, 150)
slow = pytest.mark.slow("compiles the kernels of streams and of rows before all positions")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_openpangu(), tmp_path_factory.mktemp("models") / "tiny.gguf")


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=256, warmup=False, **(settings | changes))


@pytest.mark.parametrize("changes", [{}, {"index_top_k": 0}, {"k_hadamard": True, "n_ubatch": 7}], ids=str)
def test_graph_is_that_of_the_definition(changes: dict[str, Any]) -> None:
    """Streams, convolutions, learned rows, windows and chosen positions, in one micro-batch and in several."""
    model, f32 = tiny_openpangu(), GGMLType.F32
    cfg = GraphConfig(n_ctx=128, type_k=f32, type_v=f32, type_index=f32, **changes)
    found = ReferenceSession(model, cfg, dtype=np.float64).decode(Batch.single(TOKENS[:50], logits="all"))
    np.testing.assert_allclose(found, forward(model, TOKENS[:50], changes.get("index_top_k", TOP_K)), atol=1e-4)


def test_taps_of_any_type() -> None:
    """Files have taps as f16, in two dimensions or three."""
    model, wanted = tiny_openpangu(), tiny_openpangu()
    for name in [name for name in model.tensors if name.endswith("_conv.weight")]:
        taps = model.values(name)
        model.set(name, taps.reshape(-1, 1, 3), GGMLType.F16)
        wanted.set(name, taps.astype(np.float16))
    cfg = GraphConfig(n_ctx=16, type_k=GGMLType.F32, type_v=GGMLType.F32)
    found = ReferenceSession(model, cfg, dtype=np.float64).decode(Batch.single(TOKENS[:9], logits="all"))
    np.testing.assert_allclose(found, forward(wanted, TOKENS[:9]), atol=1e-4)


@slow
def test_prompts_and_single_tokens(path: Path) -> None:
    """Prompts of one and of several micro-batches, then single tokens, with and without the choice of positions."""
    model = tiny_openpangu()
    sparse, dense = forward(model, TOKENS), forward(model, TOKENS, 0)
    assert np.abs(sparse - dense)[TOP_K:].max() > 0.1 > 1e-9 > np.abs(sparse - dense)[:TOP_K].max()
    for changes, wanted in (
        ({}, sparse), ({"n_ubatch": 32, "n_batch": 32}, sparse), ({"k_hadamard": True}, sparse),
        ({"dsa": False}, dense),
    ):  # fmt: skip
        with Session.open(config(path, **changes)) as session:
            found = [np.array(session.decode(Batch.single(TOKENS[:20], logits="all")))]
            found.append(np.array(session.decode(Batch.single(TOKENS[20:120], 20, logits="all"))))
            found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(120, 150)]
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=2e-3)


@slow
def test_directions_are_added_to_every_stream(path: Path, tmp_path: Path) -> None:
    model, rng = tiny_openpangu(), np.random.default_rng(2)
    steered = {il: rng.normal(0, 1, model.metadata["openpangu.embedding_length"]).astype(np.float32) for il in (1, 2)}
    vector = write_control_vector(tmp_path / "v.gguf", {f"direction.{il}": v for il, v in steered.items()})
    with Session.open(config(path, adapters=AdapterConfig(control_vector=(vector,)))) as session:
        found = np.array(session.decode(Batch.single(TOKENS[:40], logits="all")))
    np.testing.assert_allclose(found, forward(model, TOKENS[:40], steered=steered), atol=2e-3)
    assert np.abs(found - forward(model, TOKENS[:40])).max() > 0.1


@slow
def test_roll_backs_and_copies(path: Path) -> None:
    """A sequence goes on as if nothing had happened: after a roll-back, or after its states were saved and loaded."""
    model, other = tiny_openpangu(), np.random.default_rng(5).integers(0, 96, 150)
    wanted = forward(model, TOKENS)
    with Session.open(config(path, n_ubatch=32, n_batch=32)) as session:

        def check(tokens: np.ndarray, first: int, end: int, wanted: np.ndarray) -> None:
            found = np.array(session.decode(Batch.single(tokens[first:end], first, logits="all")))
            np.testing.assert_allclose(found, wanted[first:end], atol=2e-3)

        check(TOKENS, 0, 90, wanted)
        session.decode(Batch.single(other[:5], 90, logits="all"))
        check(TOKENS, session.truncate(0, 90), 110, wanted)
        saved = session.sequences.save(0, 110)
        assert session.truncate(0, 0) == 0
        check(other, 0, 60, forward(model, other[:60]))
        session.sequences.load(0, saved)
        check(TOKENS, 110, 130, wanted)
        check(TOKENS, session.truncate(0, 40), 60, wanted)


@slow
def test_sequences_of_one_batch(path: Path) -> None:
    """Two texts share micro-batches, and each computes what it does alone."""
    model, other = tiny_openpangu(), np.random.default_rng(5).integers(0, 96, 150)
    texts = {0: TOKENS, 1: other}
    wanted = {i: forward(model, text[:110]) for i, text in texts.items()}
    with Session.open(config(path, n_ubatch=64, n_batch=64), n_ctx=512, n_seq_max=2) as session:
        for a0, a1, b0, b1 in ((0, 50, 0, 71), (50, 81, 71, 103)):
            parts = ((0, a0, a1), (1, b0, b1))
            tokens = np.concatenate([texts[i][first:end] for i, first, end in parts]).astype(np.int32)
            pos = np.concatenate([np.arange(first, end) for _, first, end in parts]).astype(np.int32)
            seq = np.repeat([0, 1], [a1 - a0, b1 - b0]).astype(np.int32)
            found = np.array(session.decode(Batch(tokens, pos, seq, np.ones(len(pos), bool))))
            np.testing.assert_allclose(found[: a1 - a0], wanted[0][a0:a1], atol=2e-3)
            np.testing.assert_allclose(found[a1 - a0 :], wanted[1][b0:b1], atol=2e-3)


@slow
def test_pages_of_a_shorter_text(path: Path) -> None:
    """Cells of a prefix, saved while the sequence was no longer, serve one that goes on (as prompt caches do)."""
    wanted = forward(tiny_openpangu(), TOKENS)
    with Session.open(config(path)) as session:
        session.decode(Batch.single(TOKENS[:50]))
        first = session.sequences.read(0, 0, 50)
        session.decode(Batch.single(TOKENS[50:100], 50))
        second, known = session.sequences.read(0, 50, 50), session.sequences.save(0, 100)
        session.clear()
        session.decode(Batch.single(TOKENS[::-1][:100]))
        session.sequences.load(0, known)
        session.sequences.write(0, 0, first)
        session.sequences.write(0, 50, second)
        found = np.array(session.decode(Batch.single(TOKENS[100:130], 100, logits="all")))
    np.testing.assert_allclose(found, wanted[100:130], atol=2e-3)


def test_numbers_of_the_file() -> None:
    """Layers with windows are listed; those without one choose positions if they have an indexer."""
    model = tiny_openpangu()
    hp = HParams.from_gguf(model.metadata, model.tensors, "m")
    assert [hp.at(il).window for il in range(4)] == [16, 0, 16, 0] and hp.index_owners == {1, 3}
    assert (hp.n_stream, hp.stream_iterations, hp.n_sink, hp.index_top_k) == (4, 5, 5, TOP_K)

    def read(**changes: Any) -> HParams:
        metadata = model.metadata | {f"openpangu.{key}": value for key, value in changes.items()}
        return HParams.from_gguf({k: v for k, v in metadata.items() if v is not None}, model.tensors, "m")

    dense = read(swa_layers=None, sliding_window_list=None)
    assert dense.window == 0 and dense.index_top_k == 0
    assert read(sliding_window_list=None).at(2).window == 16
    for key, value, why in (
        ("sliding_window_list", np.array([16, 16]), "has 2 values for 3 layers"),
        ("swa_layers", np.array([0, -1, 2]), "should be a list of whole numbers"),
        ("swa_layers", 3, "should be a list of whole numbers"),
        ("mhc_num_stream", 0, "mhc_num_stream"),
        ("param_sink_number", 0, "param_sink_number"),
    ):
        with pytest.raises(FormatError, match=why):
            read(**{key: value})


def test_files_without_an_indexer(path: Path) -> None:
    """Layers of files without windows see all positions, which a notice says."""
    model, notices = tiny_openpangu(), list[str]()
    changes = {"openpangu.swa_layers": [], "openpangu.sliding_window_list": []}
    hp = HParams.from_gguf(model.metadata | changes, model.tensors, "m.gguf")
    check_indexer(config(path), hp, (), notices)
    assert len(notices) == 1 and "has no indexer" in notices[0]


_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm", "block_post_norm": "block_post_layernorm", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj", "attn_output": "self_attn.o_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_param_sink_kv": "self_attn.param_sink_compressed_kv", "attn_param_sink_k_pe": "self_attn.param_sink_k_pe",
    "attn_indexer_q_b": "self_attn.indexer.wq_b", "attn_indexer_k": "self_attn.indexer.wk",
    "attn_indexer_k_norm": "self_attn.indexer.k_norm", "attn_indexer_weights_proj": "self_attn.indexer.weights_proj",
    "ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.e_score_correction_bias", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
    **{f"attn_{x}_conv": f"self_attn.{x}_conv" for x in ("qa", "compresskv", "o")},
    **{f"{p}_mhc_{new}": f"{p}_mhc_module.{old}" for p in ("attn", "mlp")
       for new, old in (("phi", "phi"), ("alpha", "branch_alpha"), ("beta", "branch_beta"), ("gamma", "norm_gamma"))},
    "merge_mhc_phi": "model.merge_mhc_module.phi", "merge_mhc_alpha": "model.merge_mhc_module.branch_alpha_pre",
    "merge_mhc_beta": "model.merge_mhc_module.branch_beta_pre", "merge_mhc_gamma": "model.merge_mhc_module.norm_gamma",
}  # fmt: skip
"""Names of the file -> those of the checkpoint."""


def checkpoint(model: MemoryModel) -> dict[str, np.ndarray]:
    """Return the tensors of a model as its publisher has them."""
    found: dict[str, np.ndarray] = {}
    for name in model.tensors:
        x = model.values(name)
        block, _, part = name.removeprefix("blk.").partition(".") if name.startswith("blk.") else ("", "", name)
        stem = f"model.layers.{block}." if block else ""
        suffix = ".weight" if part.endswith(".weight") else ""
        part = part.removesuffix(".weight")
        if part in ("attn_k_b", "attn_v_b"):
            continue
        if part.endswith("_exps"):
            kind = part.removeprefix("ffn_").removesuffix("_exps")
            found |= {f"{stem}mlp.experts.{i}.{kind}_proj.weight": w for i, w in enumerate(x)}
        else:
            found[stem + _NAMES[part] + suffix] = x[:, None] if part.endswith("_conv") else x
    for il in range(4):
        k_b = model.values(f"blk.{il}.attn_k_b.weight").reshape(HEADS, RANK, NOPE).transpose(0, 2, 1)
        v_b = model.values(f"blk.{il}.attn_v_b.weight").reshape(HEADS, VALUE, RANK)
        rows = np.concatenate([k_b, v_b], axis=1).reshape(-1, RANK)
        found[f"model.layers.{il}.self_attn.kv_b_proj.weight"] = np.ascontiguousarray(rows)
    return found


CONFIG: dict[str, Any] = {
    "architectures": ["OpenPanguV2ForCausalLM"], "model_type": "openpangu_v2", "hidden_size": 64, "vocab_size": 96,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "max_position_embeddings": 512, "q_lora_rank": Q_RANK, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROT, "v_head_dim": VALUE, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "router_enable_expert_bias": True, "rms_norm_eps": EPS, "rope_theta": 10000.0,
    "rope_interleave": False, "tie_word_embeddings": False, "hidden_act": "silu", "sandwich_norm": True,
    "use_mhc": True, "mhc_num_stream": N_STREAM, "mhc_recur_norm": 5, "mhc_use_gamma": True, "use_mome": True,
    "router_sliding_window": 3, "param_sink_number": N_SINK, "dsa_layers": [1, 3], "swa_layers": [0, 2, 4],
    "sliding_window_list": [16, 16, 64], "sliding_window": 16, "block_post_layernorm_idx": [1],
    "index_topk": TOP_K, "index_n_heads": 4, "index_head_dim": 32, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_conversion(tmp_path: Path) -> None:
    """A checkpoint becomes the tensors, of the same shapes, and the numbers of the model that it was made of."""
    model = tiny_openpangu()
    m = build(tmp_path, CONFIG, checkpoint(model))
    assert {name: t.shape for name, t in m.tensors.items()} == {n: t.shape for n, t in model.tensors.items()}
    for name in model.tensors:
        np.testing.assert_array_equal(values(m, name).reshape(-1), model.values(name).reshape(-1), err_msg=name)
    wanted = model.metadata | {"openpangu.swa_layers": [0, 2], "openpangu.sliding_window_list": [16, 16]}
    for key in wanted.keys() - {"general.architecture"}:  # the last window is that of a layer which is not there
        assert np.array_equal(m.metadata[key], wanted[key]), key


def test_layers_for_further_tokens(tmp_path: Path) -> None:
    """They are kept with their windows, and left out of a run, which says so where they are wanted."""
    model = tiny_openpangu()
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}
    further = {f"model.layers.4.{name}.weight": np.ones((64, 128) if name == "eh_proj" else 64, np.float32)
               for name in names}  # fmt: skip
    m = build(tmp_path, CONFIG, checkpoint(model) | further)
    assert m.tensors.keys() - model.tensors.keys() == {f"blk.4.nextn.{name}.weight" for name in names.values()}
    assert m.metadata["openpangu.block_count"] == 5 and m.metadata["openpangu.swa_layers"] == [0, 2, 4]
    metadata = model.metadata | m.metadata | {"general.architecture": "openpangu"}
    hp = HParams.from_gguf(metadata, m.tensors, "m")
    assert (hp.n_layer, hp.n_further) == (4, 1) and [hp.at(il).window for il in range(4)] == [16, 0, 16, 0]
    reason = mtp.why_not(find("openpangu"), hp, m.tensors)
    assert reason is not None and "MTP layers of openpangu models is not supported" in reason
