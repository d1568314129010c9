"""Model graphs on the NumPy reference backend: golden log-probabilities, and properties that hold for every model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import N_VOCAB, MemoryModel, tiny_deepseek2, tiny_model
from leaves import leaf, route_leaf
from tiers import some
from tiny_architectures import WINDOWED

from ikcli.backends.reference import CacheStore, ReferenceExecutor, through_type
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.graph import Graph, Weight
from ikcli.graph.micro_batch import MicroBatch, Segment
from ikcli.graph.ops_experts import route_parts
from ikcli.models import ARCHITECTURES, GraphConfig, HParams, RopeParams, Weights, deepseek2, find
from ikcli.models.blocks import heads_per_step
from ikcli.models.mla import derive, derived_specs
from ikcli.models.rope import correction_dims, inverse_frequencies, magnitude
from ikcli.models.unsupported import REASONS

Array = Any
EXACT = GraphConfig(type_k=GGMLType.F32, type_v=GGMLType.F32, n_ctx=256)


def decode_all(model: MemoryModel, cfg: GraphConfig = EXACT, n: int = 40, seed: int = 5) -> Array:
    """Logits of n random tokens of one sequence."""
    return decode_tokens(model, cfg, np.random.default_rng(seed).integers(0, N_VOCAB, n))


def decode_tokens(model: MemoryModel, cfg: GraphConfig, tokens: Array) -> Array:
    """Logits of all tokens, in float64 so that equal models agree closely."""
    return ReferenceSession(model, cfg, dtype=np.float64).decode(Batch.single(tokens, logits="all"))


def assert_same(a: Array, b: Array, tolerance: float = 2e-4) -> None:
    assert a.shape == b.shape
    assert np.abs(a).max() > 0.1
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


# --- golden -----------------------------------------------------------------------------------------------------------
PLAIN = ["stories260K-d256.f32", "tiny-llama.f16", "tiny-qwen3.f16", "tiny-qwen3moe.f16"]
MLA = ["tiny-deepseek2.f16", "tiny-deepseek2-mainline.f16", "tiny-deepseek3.f16"]
GOLDEN = [(n, 3, fa) for n in PLAIN for fa in (True, False)] + [
    (n, mla, fa) for n in MLA for mla in range(4) for fa in (True, False)
]


def read_log_probs(path: Path) -> tuple[Array, Array]:
    """Tokens (n_chunk, n_ctx) and log-probs (n_chunk, n_ctx - 1 - n_ctx//2, n_vocab) of a --kl-divergence-base file."""
    raw = np.fromfile(path, np.uint8)
    assert bytes(raw[:8]) == b"_logits_"
    n_ctx, n_vocab, n_chunk = raw[8:20].view(np.int32)
    end = 20 + 4 * n_chunk * n_ctx
    rows = raw[end:].view(np.uint16).reshape(n_chunk, n_ctx - 1 - n_ctx // 2, 2 * ((n_vocab + 1) // 2) + 4)
    scale = np.ascontiguousarray(rows[..., :4]).view(np.float32)
    return raw[20:end].view(np.int32).reshape(n_chunk, n_ctx), scale[..., :1] * rows[..., 4 : 4 + n_vocab] + scale[
        ..., 1:
    ]


def divergence(log_p: Array, logits: Array) -> Array:
    """KL divergence per row, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    log_q = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def check_golden(folder: Path, name: str, mla: int, flash: bool, n_chunks: int | None) -> None:
    tokens, log_probs = read_log_probs(folder / f"{name}.kld")
    file = open_gguf(folder / f"{name}.gguf")
    session = ReferenceSession(file, GraphConfig(mla=mla, flash_attn=flash))
    found = []
    for chunk, expected in list(zip(tokens.copy(), log_probs, strict=True))[:n_chunks]:
        chunk[0] = file.metadata["tokenizer.ggml.bos_token_id"]
        session.clear()
        n = len(chunk)
        found.append(
            divergence(expected.astype(np.float64), session.decode(Batch.single(chunk, logits="all"))[n // 2 : -1])
        )
    kld = np.concatenate(found)
    assert np.median(kld) <= 5e-6
    assert np.percentile(kld, 99) <= (1e-4 if name.startswith("stories") else 5e-5)


# Every mode of one model with latent attention; the graphs of the others have the same attention.
USUAL = [g for g in GOLDEN if g[0] not in MLA[1:] or g[1:] == (3, True)]


@pytest.mark.parametrize(("name", "mla", "flash"), some(GOLDEN, USUAL, unpack=True))
def test_golden_first_chunk(shared_dir: Path, name: str, mla: int, flash: bool) -> None:
    check_golden(shared_dir / "golden" / "models", name, mla, flash, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mla", "flash"), GOLDEN)
def test_golden_all_chunks(shared_dir: Path, name: str, mla: int, flash: bool) -> None:
    check_golden(shared_dir / "golden" / "models", name, mla, flash, None)


# --- every model ------------------------------------------------------------------------------------------------------
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
MODELS = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "mixtral": lambda: tiny_model("llama", **EXPERTS),
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: tiny_model("qwen3", **{"attention.key_length": 32, "attention.value_length": 32}),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
    "deepseek2-lite": lambda: tiny_deepseek2(**{"attention.q_lora_rank": None}),
    "deepseek3": lambda: tiny_deepseek2(
        expert_gating_func=2, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2
    ),
}


@pytest.mark.parametrize("name", some(MODELS, ["qwen3moe", "deepseek2"]))
def test_micro_batch_size_does_not_matter(name: str) -> None:
    model = MODELS[name]()
    whole = decode_all(model, n=150)
    for n_ubatch in (1, 7, 32):
        assert_same(decode_all(model, replace(EXACT, n_ubatch=n_ubatch), n=150), whole)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_are_independent(name: str) -> None:
    model = MODELS[name]()
    session = ReferenceSession(model, EXACT, n_seq_max=2)
    a, b = Batch.single([3, 4, 5, 6], seq=0, logits="all"), Batch.single([9, 8, 7], seq=1, logits="all")
    both = Batch(*(np.concatenate([getattr(b, f), getattr(a, f)]) for f in ("tokens", "pos", "seq", "logits")))
    logits = session.decode(both)
    assert_same(logits[:3], ReferenceSession(model, EXACT).decode(replace(b, seq=b.seq * 0)))
    assert_same(logits[3:], ReferenceSession(model, EXACT).decode(a))


@pytest.mark.parametrize("mla", range(4))
def test_long_sequences_in_one_batch(mla: int) -> None:
    """140 tokens take the prompt path; the second sequence also has a past."""
    model, cfg = MODELS["deepseek2"](), replace(EXACT, mla=mla)
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, (2, 80))
    expected = [decode_tokens(model, cfg, t) for t in tokens]
    session = ReferenceSession(model, cfg, n_seq_max=2, dtype=np.float64)
    session.decode(Batch.single(tokens[1, :10], seq=1))
    a, b = Batch.single(tokens[0], seq=0, logits="all"), Batch.single(tokens[1, 10:], 10, seq=1, logits="all")
    both = Batch(*(np.concatenate([getattr(a, f), getattr(b, f)]) for f in ("tokens", "pos", "seq", "logits")))
    assert_same(session.decode(both), np.concatenate([expected[0], expected[1][10:]]))


def test_removed_positions_are_forgotten() -> None:
    session = ReferenceSession(MODELS["llama"](), EXACT)
    first = session.decode(Batch.single([5, 6, 7, 8], logits="all"))
    session.truncate(0, 2)
    np.testing.assert_allclose(session.decode(Batch.single([7, 8], 2, logits="all")), first[2:], atol=1e-5)


def test_only_wanted_rows_are_computed() -> None:
    seen: dict[str, int] = {}
    session = ReferenceSession(
        MODELS["deepseek2"](), EXACT, observe=lambda node, value: seen.__setitem__(node.name, len(value))
    )
    assert session.decode(Batch.single([1, 2, 3])).shape == (1, N_VOCAB)
    assert seen["attn_norm-2"] == seen["ffn_inp-1"] == 3
    assert seen["ffn_inp-2"] == seen["l_out-2"] == seen["result_output"] == 1
    names = {"ffn_moe_logits-1", "ffn_moe_down-1", "ffn_shexp-1", "ffn_out-0", "kqv_out-0", "result_norm"}
    assert names <= seen.keys()


def test_bad_batches_are_refused() -> None:
    session = ReferenceSession(MODELS["llama"](), replace(EXACT, n_ctx=32), n_seq_max=2)
    with pytest.raises(IkError, match="vocabulary"):
        session.decode(Batch.single([N_VOCAB]))
    with pytest.raises(IkError, match="does not follow"):
        session.decode(Batch.single([1], 3))
    with pytest.raises(IkError, match="do not fit"):
        session.decode(Batch.single([1] * 17))
    with pytest.raises(IkError, match="does not exist"):
        session.decode(Batch.single([1], seq=2))


# --- llama variants ---------------------------------------------------------------------------------------------------
def test_tied_output_is_the_embedding() -> None:
    tied, untied = tiny_model(tied=True), tiny_model(tied=True)
    untied.set("output.weight", untied.values("token_embd.weight"))
    assert_same(decode_all(tied), decode_all(untied), 0)


def test_optional_tensors_are_used() -> None:
    plain = decode_all(tiny_model())
    for ending in ("attn_q.bias", "attn_k.bias", "attn_output.bias", "ffn_down.bias", "rope_freqs.weight"):
        neutral = tiny_model(optional=(ending,))
        for name in [n for n in neutral.tensors if n.endswith(ending)]:
            neutral.set(name, np.full(neutral.tensors[name].shape, float(ending == "rope_freqs.weight")))
        for name, tensor in tiny_model().tensors.items():
            neutral.tensors[name] = tensor
        assert_same(decode_all(neutral), plain, 1e-5)
        for name in [n for n in neutral.tensors if n.endswith(ending)]:
            neutral.set(name, neutral.values(name) + 1)
        assert np.abs(decode_all(neutral) - plain).max() > 1e-2


def test_quantized_cache_stays_close() -> None:
    exact = decode_all(tiny_deepseek2(), n=60)
    for type_, limit in ((GGMLType.F16, 1e-4), (GGMLType.BF16, 1e-2), (GGMLType.Q8_0, 1e-2)):
        cfg = replace(EXACT, type_k=type_, type_v=type_)
        log_p = exact - np.log(np.exp(exact.astype(np.float64)).sum(-1, keepdims=True))
        kld = np.median(divergence(log_p, decode_all(tiny_deepseek2(), cfg, n=60)))
        assert 0 < kld < limit


def test_q8_0_cache_rounds_ties_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 127.0, 0.5, 1.5, 2.5
    assert through_type(x, GGMLType.Q8_0)[0, :4].tolist() == [127.0, 0.0, 2.0, 2.0]


# --- deepseek2 --------------------------------------------------------------------------------------------------------
MODES = [(mla, flash) for mla in range(4) for flash in (True, False)]


@pytest.mark.parametrize("layout", ["legacy", "mainline", "ik"])
def test_layouts_and_modes_agree(layout: str) -> None:
    expected = decode_all(tiny_deepseek2(), replace(EXACT, mla=0), n=140)
    for mla, flash in MODES:
        cfg = replace(EXACT, mla=mla, flash_attn=flash)
        assert_same(decode_all(tiny_deepseek2(layout), cfg, n=140), expected)


def test_head_sizes_without_mla_keys_are_those_of_the_known_models() -> None:
    metadata = dict(tiny_deepseek2("mainline").metadata)
    for part in ("key", "value"):
        del metadata[f"deepseek2.attention.{part}_length_mla"]
    with pytest.raises(FormatError, match="key_length_mla"):
        HParams.from_gguf(metadata, {}, "x.gguf")
    metadata |= {"deepseek2.attention.kv_lora_rank": 512, "deepseek2.rope.dimension_count": 64}
    metadata |= {"deepseek2.attention.key_length": 576, "deepseek2.attention.value_length": 512}
    hp = HParams.from_gguf(metadata, {}, "x.gguf")
    assert (hp.head_dim_k, hp.head_dim_v, hp.n_head_kv) == (192, 128, 4)


@pytest.mark.parametrize("n_head", some([4, 20], [4]))
def test_amb_does_not_change_results(n_head: int) -> None:
    model = tiny_deepseek2(n_head=n_head)
    base = replace(EXACT, n_ctx=16384, amb=0)
    modes = [(3, True), (2, True), (1, False)] + [(0, False)] * (n_head == 4)
    for mla, flash in modes:
        cfg = replace(base, mla=mla, flash_attn=flash)
        assert_same(decode_all(model, replace(cfg, amb=10), n=130), decode_all(model, cfg, n=130), 1e-5)


def test_amb_divides_the_heads() -> None:
    hp = HParams.from_gguf(tiny_deepseek2(n_head=20).metadata, {}, "x.gguf")
    cfg = GraphConfig(n_ctx=16384, amb=10)  # 80 MiB for all heads
    assert deepseek2.heads_per_expansion(hp, cfg) == 2
    assert deepseek2.heads_per_expansion(hp, replace(cfg, amb=16)) == 4
    assert deepseek2.heads_per_expansion(hp, replace(cfg, amb=80)) == 20
    assert deepseek2.heads_per_expansion(hp, replace(cfg, amb=3)) == 1
    assert deepseek2.heads_per_expansion(hp, replace(cfg, amb=0)) == 20
    # 16384 * 20 * 512 * 4 bytes = 640 MiB of K*Q
    off = replace(cfg, flash_attn=False)
    assert heads_per_step(replace(off, amb=100), 20) == 3
    assert heads_per_step(replace(off, amb=1), 20) == 1
    assert heads_per_step(replace(off, amb=640), 20) == 0
    assert heads_per_step(replace(cfg, amb=100), 20) == 0


def test_expanded_graph_has_one_attention_per_step() -> None:
    model = tiny_deepseek2("ik", n_head=20)
    hp = HParams.from_gguf(model.metadata, model.tensors, "x.gguf")
    for amb, steps in ((0, 1), (10, 10), (16, 5)):
        g = Graph()
        cfg = GraphConfig(n_ctx=16384, amb=amb, expand=True)
        deepseek2.build(g, hp, Weights(model.tensors, "x.gguf"), cfg)
        assert sum(n.op.name == "flash_attn" for n in g.nodes) == steps * hp.n_layer


def test_derived_tensor_types() -> None:
    model = tiny_deepseek2()
    hp = HParams.from_gguf(model.metadata, model.tensors, "x.gguf")
    name = "blk.1.attn_kv_b.weight"
    model.set(name, model.values(name), GGMLType.Q4_0)
    made = derive(model, hp, GraphConfig(mla=3))
    k_b, v_b = made["blk.1.attn_k_b.weight"], made["blk.1.attn_v_b.weight"]
    assert (k_b[0], k_b[1]) == (GGMLType.Q8_0, (32, 64, 4))
    assert (v_b[0], v_b[1]) == (GGMLType.Q4_0, (64, 32, 4))
    rows = model.data(name).reshape(4, 64, -1)
    assert np.array_equal(v_b[2].reshape(4, 32, -1), rows[:, 32:])
    assert made["blk.0.attn_k_b.weight"][0] == GGMLType.F32
    assert not derived_specs(model.tensors, hp, GraphConfig(mla=0))
    mainline = tiny_deepseek2("mainline")
    for part in ("k_b", "v_b"):
        n = f"blk.0.attn_{part}.weight"
        mainline.set(n, mainline.values(n), GGMLType.Q8_0)
    specs = derived_specs(mainline.tensors, hp, GraphConfig(mla=3))
    assert specs["blk.0.attn_kv_b.weight"].type == GGMLType.Q8_0
    assert specs["blk.1.attn_kv_b.weight"].type == GGMLType.F32
    assert not derived_specs(mainline.tensors, hp, GraphConfig(mla=1))


def test_layer_without_any_projection_is_an_error() -> None:
    model = tiny_deepseek2("mainline")
    del model.tensors["blk.2.attn_v_b.weight"]
    with pytest.raises(FormatError, match="block 2 has neither"):
        ReferenceSession(model)


# --- experts ----------------------------------------------------------------------------------------------------------
def route(probs: Array, **options: Any) -> tuple[Array, Array]:
    """Weights and ids that `moe_route` chooses for sigmoid probabilities."""
    p = np.asarray(probs, np.float64)
    g = Graph()
    bias = options.pop("bias", None)
    logits = leaf(g, "logits", p.shape[1])
    w = Weight("b", GGMLType.F32, (p.shape[1],)) if bias is not None else None
    node = g.moe_route(logits, w, "route", gating="sigmoid", **({"norm": False, "scale": 1.0} | options))
    ex = ReferenceExecutor(lambda name: np.asarray(bias, np.float32), CacheStore(1), np.float64)
    ex.state = MicroBatch(*(np.zeros(len(p), np.int32),) * 3, np.zeros(0, np.int64), ())
    ex._values[0] = np.log(p / (1 - p))
    return route_parts(node.op.compute(ex), options["n_used"])


P = [[0.1, 0.8, 0.4, 0.5, 0.2, 0.3]]


def test_route_takes_the_best() -> None:
    weights, ids = route(P, n_used=3)
    assert ids.tolist() == [[1, 3, 2]]
    np.testing.assert_allclose(weights, [[0.8, 0.5, 0.4]], rtol=1e-6)
    weights, _ = route(P, n_used=3, norm=True, scale=2.0)
    np.testing.assert_allclose(weights, np.array([[0.8, 0.5, 0.4]]) * 2 / 1.7, rtol=1e-6)


def test_bias_selects_but_does_not_weigh() -> None:
    weights, ids = route(P, n_used=2, bias=[1, 0, 0, 0, 0, 0])
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.1, 0.8]], rtol=1e-6)


def test_groups_limit_the_choice() -> None:
    # Sums of the two best: 0.9, 0.9 + tie broken by order for (0,1) and (2,3); 0.5 for (4,5).
    _, ids = route([[0.1, 0.8, 0.45, 0.5, 0.7, 0.3]], n_used=3, n_group=3, n_group_used=2)
    assert ids.tolist() == [[4, 3, 2]]
    _, ids = route([[0.1, 0.8, 0.4, 0.5, 0.2, 0.3]], n_used=2, n_group=2, n_group_used=1)
    assert ids.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("ser", "kept"),
    [
        ((1, 1.0), 1),
        ((2, 1.0), 2),
        ((1, 0.0), 4),
        ((1, 0.49), 3),
        ((1, 0.6), 2),
        ((4, 1.0), 4),
        ((3, 0.9), 3),
        (None, 4),
    ],
)
def test_ser_drops_weak_experts(ser: tuple[int, float] | None, kept: int) -> None:
    weights, ids = route(P, n_used=4, ser=ser, norm=True)
    assert (ids >= 0).sum() == kept
    assert (ids[0, kept:] == -1).all() and (weights[0, kept:] == 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-6)


def test_ser_keeps_ties() -> None:
    _, ids = route([[0.5, 0.5, 0.2]], n_used=2, ser=(1, 1.0))
    assert ids.tolist() == [[0, 1]]


def test_dropped_slots_add_exactly_nothing() -> None:
    """Rows of dropped slots may hold anything, NaN included."""
    g = Graph()
    y, route = leaf(g, "y", 1), route_leaf(g, "route", 2)
    node = g.moe_sum(y, route, g.moe_sort(route, 2, "plan"), "sum")
    ex = ReferenceExecutor(lambda name: np.zeros(0, np.float32), CacheStore(1))
    ids = np.array([[1, -1], [0, 1]], np.int32)
    ex._values[0] = np.array([[10], [20], [30], [np.nan]], np.float32)  # sorted: (1,0) (0,0) (1,1), then the dropped
    ex._values[1] = np.concatenate([np.array([[1, 0], [0.5, 0.25]], np.float32), ids.view(np.float32)], axis=1)
    ex._values[2] = np.array([[2, 0], [0, 1], [3, 1], [1, -1]], np.int32)
    assert node.op.compute(ex).tolist() == [[20], [12.5]]


@pytest.mark.parametrize("fmoe", [True, False])
def test_ser_in_a_model(fmoe: bool) -> None:
    model = MODELS["deepseek3"]()
    cfg = replace(EXACT, fmoe=fmoe)
    plain = decode_all(model, cfg)
    assert_same(decode_all(model, replace(cfg, ser=(3, 1.0))), plain, 0)
    one = tiny_deepseek2(
        expert_gating_func=2,
        expert_weights_norm=True,
        expert_group_count=4,
        expert_group_used_count=2,
        expert_used_count=1,
    )
    assert_same(decode_all(model, replace(cfg, ser=(1, 1.0))), decode_all(one, cfg), 1e-5)
    assert np.abs(decode_all(one, cfg) - plain).max() > 1e-2


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "deepseek2"])
def test_fused_experts_change_nothing(name: str) -> None:
    model = MODELS[name]()
    assert_same(decode_all(model, replace(EXACT, fmoe=False)), decode_all(model), 1e-5)


# --- rope -------------------------------------------------------------------------------------------------------------
V3 = RopeParams(scaling="yarn", factor=40.0, n_ctx_orig=4096, log_mul=0.1)


def test_yarn_of_deepseek_v3() -> None:
    assert correction_dims(V3, 64) == (10, 23)
    plain = inverse_frequencies(RopeParams(), 64)
    yarn = inverse_frequencies(V3, 64)
    np.testing.assert_allclose(yarn[:11], plain[:11])
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40)
    assert (np.diff(yarn) < 0).all()
    assert magnitude(V3, 1.0) == pytest.approx(1.3688879)
    metadata = tiny_deepseek2().metadata | {
        "deepseek2.attention.key_length": 192,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.1,
    }
    hp = HParams.from_gguf(metadata, {}, "x.gguf")
    assert deepseek2.attention_scale(hp) == pytest.approx(0.1352337788608801)


def test_linear_scaling_and_factors() -> None:
    plain = inverse_frequencies(RopeParams(), 8)
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(inverse_frequencies(RopeParams(scaling="linear", factor=4), 8), plain / 4)
    factors = np.array([1, 2, 4, 8], np.float32)
    np.testing.assert_allclose(inverse_frequencies(RopeParams(), 8, factors), plain / factors)


def test_segment_describes_compact_rows() -> None:
    """Rows.KV of two sequences lie one after the other."""
    g = Graph()
    g.il = 0
    cache = g.cache("kv", 4, GGMLType.F32)
    g.kv_rows(cache, 1, 2, "rows")
    ex = ReferenceExecutor(lambda name: np.zeros(0, np.float32), CacheStore(6))
    ex.caches.rows(cache)[:] = np.arange(24).reshape(6, 4)
    state = MicroBatch(*(np.zeros(2, np.int32),) * 3, np.zeros(0, np.int64), (Segment(0, 1, 3, 1), Segment(1, 1, 0, 0)))
    assert ex.run(g, state).tolist() == [[13, 14], [17, 18], [1, 2]]


def test_shared_experts_of_granite_swa_with_gate_and_up_in_one_tensor() -> None:
    keys = WINDOWED["granite_swa"] | {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": 40,
    }
    model = tiny_model("granite_swa", optional=("ffn_gate_shexp.weight",), **keys)
    apart = decode_all(model, n=9)
    for il in range(4):
        gate, up = (f"blk.{il}.ffn_{part}_shexp.weight" for part in ("gate", "up"))
        model.set(up, np.concatenate([model.values(gate), model.values(up)]))
        del model.tensors[gate]
    np.testing.assert_allclose(decode_all(model, n=9), apart, 1e-5)
    model.set(up, model.values(up)[:40])
    with pytest.raises(FormatError, match=r"blk\.3\.ffn_gate_shexp\.weight' is missing"):
        decode_all(model, n=9)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'nobody' is not supported; known: .*deepseek2, .*dots1"):
        find("nobody")


def test_every_architecture_of_gguf_runs_or_says_why_not() -> None:
    from gguf.constants import MODEL_ARCH_NAMES

    later = (Path(__file__).parent / "data" / "later_architectures.txt").read_text().split()
    for arch in (*MODEL_ARCH_NAMES.values(), *later, *REASONS):
        assert (arch in ARCHITECTURES) + (arch in REASONS) + (arch == "clip") == 1, arch
    with pytest.raises(UnsupportedError, match=r"x\.gguf: .*'rwkv7' do not run: it has the recurrences .*; inspect"):
        find("rwkv7", "x.gguf")
