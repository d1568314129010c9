"""Sessions on the CPU backend against the NumPy session, in every mode; errors, observers, golden log-probabilities."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.backends.cpu.tile_modes import makes_integers
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig
from ikcli.settings.run import RunConfig

Array = npt.NDArray[Any]
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
EXACT_CACHE = {"type_k": "f32", "type_v": "f32"}
KV_TYPE = {"f32": GGMLType.F32, "f16": GGMLType.F16, "bf16": GGMLType.BF16, "q8_0": GGMLType.Q8_0}
# Logits differ by at most this times their standard deviation, by a fifth of it in the median row. A cache type rounds
# values whose last bits differ, and the random layers amplify every difference; so do prompts of f16 weights where they
# become 16-bit integers. For shorter types see `compare_short`.
TOLERANCE = {"f32": 5e-4, "f16": 1e-2}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "llama-tied": lambda: tiny_model("llama", tied=True, type_=GGMLType.F16),
    "mixtral": lambda: tiny_model("llama", **EXPERTS),
    "qwen2": lambda: tiny_model("qwen2", type_=GGMLType.F16),
    "qwen3": lambda: tiny_model("qwen3", **{"attention.key_length": 32, "attention.value_length": 32}),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
    "deepseek2-mainline": lambda: tiny_deepseek2("mainline", n_head=3),
    "deepseek2-ik": lambda: tiny_deepseek2("ik"),
    "deepseek2-lite": lambda: tiny_deepseek2(**{"attention.q_lora_rank": None}),
    "deepseek3": lambda: tiny_deepseek2(
        expert_gating_func=2, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2
    ),
}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a model of MODELS, written once."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_model(MODELS[name](), path)

    return get


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"command": "bench", "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "warmup": False}
    return RunConfig(model=path, **(settings | changes))


def graph_config(c: RunConfig) -> GraphConfig:
    """The same settings for the NumPy session."""
    return GraphConfig(
        mla=c.mla, flash_attn=c.flash_attn, amb=c.amb, fmoe=c.fmoe, ser=c.ser, n_ctx=c.n_ctx,
        type_k=KV_TYPE[c.type_k], type_v=KV_TYPE[c.type_v], n_ubatch=c.n_ubatch,
    )  # fmt: skip


def tokens(n: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.int32)


def transcript(session: Any, lengths: tuple[int, ...], steps: int = 3) -> Array:
    """Logits of prompts of these lengths, each followed by single tokens."""
    rows = []
    for n in lengths:
        session.clear()
        ids = tokens(n + steps, seed=n)
        rows.append(np.array(session.decode(Batch.single(ids[:n], logits="all"))))
        rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(n, n + steps)]
    return np.concatenate(rows)


def assert_close(found: Array, wanted: Array, tolerance: float) -> None:
    """Every row within tolerance, but for the rare one where a near tie between experts falls the other way."""
    assert found.shape == wanted.shape and np.isfinite(found).all()
    scale = wanted.std()
    assert scale > 0.1
    error = np.abs(found - wanted).max(axis=1) / scale
    assert np.median(error) <= tolerance / 5
    assert (error > tolerance).mean() <= 0.01, f"largest errors {np.sort(error)[-5:]}"


def compare(path: Path, lengths: tuple[int, ...] = (1, 50, 300), weights: str = "f32", **changes: Any) -> None:
    c = config(path, **changes)
    with Session.open(c) as session:
        found = transcript(session, lengths)
    wanted = transcript(ReferenceSession(path, graph_config(c)), lengths)
    integers = c.flash_attn and makes_integers() and "f16" in (c.type_k, c.type_v)
    if {c.type_k, c.type_v} <= set(TOLERANCE) and not integers:
        assert_close(found, wanted, max(TOLERANCE[t] for t in (c.type_k, c.type_v, weights)))
    else:
        exact = config(path, **(changes | EXACT_CACHE))
        compare_short(found, wanted, transcript(ReferenceSession(path, graph_config(exact)), lengths))


def compare_short(found: Array, wanted: Array, exact: Array) -> None:
    """With a cache that loses what kernels may, or more: as good as NumPy with this cache, and nearer to that than to
    NumPy with an exact one."""

    def distance(a: Array, b: Array) -> float:
        return float(np.sqrt(np.mean((a - b) ** 2)))

    own = distance(wanted, exact)
    assert found.shape == wanted.shape and np.isfinite(found).all() and own > 0
    assert distance(found, exact) < 1.2 * own
    assert distance(found, wanted) < 0.6 * own


# --- every model, every mode ------------------------------------------------------------------------------------------
def modes() -> Iterator[Any]:
    """(model, changes): attention modes of every architecture, cache types, expert modes."""
    for name in MODELS:
        latent = name.startswith("deepseek")
        for mla, fa in itertools.product(range(4) if latent else (3,), (True, False)):
            yield name, {"mla": mla, "flash_attn": fa, **EXACT_CACHE}
    for type_ in KV_TYPE:
        yield "qwen3", {"type_k": type_, "type_v": type_}
        if type_ != "q8_0":
            yield "qwen3", {"type_k": type_, "type_v": type_, "flash_attn": False}
        for mla, fa in itertools.product(range(4), (True, False) if type_ != "q8_0" else (True,)):
            if type_ != "f32":  # those above
                yield "deepseek2", {"mla": mla, "flash_attn": fa, "type_k": type_, "type_v": type_}
    yield "qwen3", {"type_k": "q8_0", "type_v": "f16"}
    yield "llama", {"type_k": "f16", "type_v": "q8_0"}
    for mla, fa in itertools.product(range(4), (True, False)):
        yield "deepseek3", {"mla": mla, "flash_attn": fa, "amb": 1, "n_ctx": 4096, **EXACT_CACHE}
    for name in ("mixtral", "qwen3moe", "deepseek2", "deepseek3"):
        yield name, {"fmoe": False, **EXACT_CACHE}
        yield name, {"ser": (1, 0.6), **EXACT_CACHE}
        yield name, {"ser": (2, 1.0), "fmoe": False, **EXACT_CACHE}


def marks(name: str, changes: dict[str, Any]) -> Any:
    """Slow are caches whose kernels those of other types stand for (bf16, and K and V of different types), and half of
    the modes of MLA, but of one model with an exact cache: the others differ from it in what the tensors hold."""
    types = {changes.get(key, "f16") for key in EXACT_CACHE}
    one_of_all = name == "deepseek2" and types == {"f32"}
    half = name.startswith("deepseek") and changes.get("mla") in (0, 2) and not one_of_all
    return pytest.mark.slow if len(types) > 1 or "bf16" in types or half else ()


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(n, c, id=f"{n}-{'-'.join(f'{k}={v}' for k, v in c.items())}", marks=marks(n, c)) for n, c in modes()],
)
def test_same_as_numpy(model_file: Callable[[str], Path], name: str, changes: dict[str, Any]) -> None:
    rounded = makes_integers() and name in ("llama-tied", "qwen2")
    compare(model_file(name), weights="f16" if rounded else "f32", **changes)


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0])
def test_weight_types(tmp_path: Path, type_: GGMLType) -> None:
    """Kernels that round activations, all but those of float32, can only agree in the bulk of the logits."""
    model = tiny_model("qwen3moe", type_=type_, expert_feed_forward_length=64, **EXPERTS)
    path = write_model(model, tmp_path / "m.gguf")
    c = config(path, type_k="f32", type_v="f32")
    with Session.open(c) as session:
        found = transcript(session, (50,))
    wanted = transcript(ReferenceSession(path, graph_config(c)), (50,))
    error = np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()
    assert error < {GGMLType.F16: 3e-4 if makes_integers() else 1e-4, GGMLType.BF16: 0.03}.get(type_, 0.1)


def test_no_expert_reduction_is_a_no_op(model_file: Callable[[str], Path]) -> None:
    """-ser with as many experts as the model uses drops nothing."""
    results = []
    for ser in (None, (3, 1.0)):
        with Session.open(config(model_file("deepseek2"), ser=ser)) as session:
            results.append(transcript(session, (40,)))
    np.testing.assert_array_equal(results[0], results[1])


# --- batches, sequences, threads --------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_ubatch", [1, 7, 32, 128, 200])
@pytest.mark.parametrize("name", ["qwen3", "deepseek3"])
def test_micro_batches(model_file: Callable[[str], Path], name: str, n_ubatch: int) -> None:
    with Session.open(config(model_file(name), n_ubatch=n_ubatch, **EXACT_CACHE)) as session:
        found = transcript(session, (201,))
    with Session.open(config(model_file(name), **EXACT_CACHE)) as session:
        wanted = transcript(session, (201,))
    assert_close(found, wanted, TOLERANCE["f32"])


@pytest.mark.parametrize("name", ["llama", "deepseek2"])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_sequences_side_by_side(model_file: Callable[[str], Path], name: str, flash_attn: bool) -> None:
    """Three sequences of different lengths in one batch, then one token each, then one of them alone."""
    c = config(model_file(name), n_ctx=768, flash_attn=flash_attn, type_k="f32", type_v="f32")
    session = Session.open(c, n_seq_max=3)
    other = ReferenceSession(model_file(name), graph_config(c), n_seq_max=3)

    def joined(parts: list[Batch]) -> Batch:
        return Batch(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("tokens", "pos", "seq", "logits")))

    lengths = {2: 5, 0: 150, 1: 33}
    batches = [joined([Batch.single(tokens(n, s), 0, s, logits="all") for s, n in lengths.items()])]
    batches.append(joined([Batch.single(tokens(1, 90 + s), n, s) for s, n in lengths.items()]))
    batches.append(Batch.single(tokens(140, 5), 34, 1, logits="all"))
    with session:
        for batch in batches:
            assert_close(np.array(session.decode(batch)), other.decode(batch), TOLERANCE["f32"])


@pytest.mark.parametrize("name", ["qwen3", "deepseek2"])
def test_removal_and_continuation(model_file: Callable[[str], Path], name: str) -> None:
    """What follows a removed end is as if it had never been there."""
    head, wrong, right = tokens(40, 1), tokens(30, 2), tokens(30, 3)
    with Session.open(config(model_file(name), type_k="f32", type_v="f32")) as session:
        session.decode(Batch.single(head, logits="none"))
        session.decode(Batch.single(wrong, 40, logits="none"))
        session.truncate(0, 40)
        found = np.array(session.decode(Batch.single(right, 40, logits="all")))
        session.clear()
        wanted = np.array(session.decode(Batch.single(np.concatenate([head, right]), logits="all")))[40:]
        assert_close(found, wanted, TOLERANCE["f32"])
        session.truncate(0, 500)  # nothing there
        session.decode(Batch.single([1], 70))
        with pytest.raises(IkError, match="sequence 1 does not exist"):
            session.truncate(1, 0)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3"])
def test_number_of_threads_does_not_change_a_bit(model_file: Callable[[str], Path], name: str) -> None:
    results = []
    for n in (1, 2, 3):
        with Session.open(config(model_file(name), n_threads=n, n_threads_batch=n, type_k="q8_0")) as session:
            results.append(transcript(session, (50, 140)))
    for found in results[1:]:
        if name == "qwen3moe":  # MLA, and generation after 64 positions, divide the cache: another order of sums
            np.testing.assert_array_equal(found[:-3], results[0][:-3])
        assert_close(found, results[0], 0.1)


def test_fewer_threads_for_generation(model_file: Callable[[str], Path]) -> None:
    """-t and -tb differ: workers join and leave from call to call."""
    with Session.open(config(model_file("llama"), n_threads=2, n_threads_batch=3)) as session:
        found = [transcript(session, (9,), steps=8) for _ in range(30)]
    with Session.open(config(model_file("llama"))) as session:
        wanted = transcript(session, (9,), steps=8)
    for f in found:
        assert_close(f, wanted, TOLERANCE["f16"])


def test_repeated_runs_are_identical(model_file: Callable[[str], Path]) -> None:
    with Session.open(config(model_file("deepseek2"), n_threads=2, n_threads_batch=2)) as session:
        first = transcript(session, (3, 130))
        for _ in range(3):
            np.testing.assert_array_equal(transcript(session, (3, 130)), first)


def test_more_outputs_than_planned(model_file: Callable[[str], Path]) -> None:
    """Buffers for logits grow with the need: 1, 5, all of 60; the cache survives."""
    with Session.open(config(model_file("deepseek2"), type_k="f32")) as session:
        wanted = np.array(session.decode(Batch.single(tokens(60), logits="all")))
        assert session.output_bytes == 64 * 96 * 4
    with Session.open(config(model_file("deepseek2"), type_k="f32")) as session:
        assert session.output_bytes == 96 * 4
        found = [np.array(session.decode(Batch.single(tokens(60)[:20])))]
        part = Batch.single(tokens(60)[20:40], 20)
        part.logits[3:8] = True
        found.append(np.array(session.decode(part)))
        found.append(np.array(session.decode(Batch.single(tokens(60)[40:], 40, logits="all"))))
    assert_close(np.concatenate(found), wanted[[19, *range(23, 28), 39, *range(40, 60)]], TOLERANCE["f32"])


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.Q4_0])
def test_more_outputs_need_no_other_kernels(tmp_path: Path, type_: GGMLType) -> None:
    """The last block has as many rows as outputs, and no kernel is loaded when their number grows."""
    model = tiny_model("qwen3moe", type_=type_, expert_feed_forward_length=64, **EXPERTS)
    with Session.open(config(write_model(model, tmp_path / "m.gguf"))) as session:
        kernels = {name: set(p.parts["CPU"].program.kernels) for name, p in session.programs.items()}
        last = np.array(session.decode(Batch.single(tokens(30))))
        session.clear()
        every = np.array(session.decode(Batch.single(tokens(30), logits="all")))
        assert {name: set(p.parts["CPU"].program.kernels) for name, p in session.programs.items()} == kernels
    assert_close(last, every[-1:], 1e-2)


def test_nothing_wanted(model_file: Callable[[str], Path]) -> None:
    with Session.open(config(model_file("deepseek2"))) as session:
        assert session.decode(Batch.single([])).shape == (0, 96)
        assert session.decode(Batch.single([1, 2], logits="none")).shape == (0, 96)
        assert session.decode(Batch.single([1], 2, logits="none")).shape == (0, 96)
        assert session.decode(Batch.single([1], 3)).shape == (1, 96)


def test_loading_without_mmap(model_file: Callable[[str], Path]) -> None:
    results = []
    for mmap in (True, False):
        with Session.open(config(model_file("deepseek2-ik"), mmap=mmap, warmup=True)) as session:
            results.append(transcript(session, (20,)))
    np.testing.assert_array_equal(results[0], results[1])


def test_step_of_one_token_each(model_file: Callable[[str], Path]) -> None:
    """`step_each` is `step`, which is described by a batch."""
    with Session.open(config(model_file("deepseek2"), n_ctx=256), n_seq_max=3, n_step=3) as session:
        found = []
        for by_batch in (False, True):
            session.clear()
            for seq in range(3):
                session.decode(Batch.single(tokens(5 + 9 * seq), 0, seq))
            seqs, ids = (2, 0), (7, 90)
            pos = [5 + 9 * seq for seq in seqs]
            batch = Batch(*(np.array(x, np.int32) for x in (ids, pos, seqs)), np.ones(2, np.bool_))
            found.append(np.array(session.step(batch) if by_batch else session.step_each(ids, pos, seqs)))
            assert [session.sequences.n_past[s] for s in range(3)] == [6, 14, 24]
        np.testing.assert_array_equal(found[0], found[1])
        with pytest.raises(IkError, match="sequence 1: position 13 does not follow the 14 cached"):
            session.step_each([1], [13], [1])
        for pos, seqs, message in [
            ([6, 13], [0, 1], "sequence 1: position 13 does not follow the 14 cached"),
            ([6, 0], [0, 3], "sequence 3 does not exist"),
            ([6, 24], [0, -1], "sequence -1 does not exist"),
        ]:
            with pytest.raises(IkError, match=message):
                session.step_each([1, 2], pos, seqs)
        with pytest.raises(IkError, match="outside the vocabulary"):
            session.step_each([1, 96], [6, 14], [0, 1])
        assert session.sequences.n_past[0] == 6


# --- wrong calls ------------------------------------------------------------------------------------------------------
def test_wrong_batches(model_file: Callable[[str], Path]) -> None:
    with Session.open(config(model_file("llama"), n_ctx=256), n_seq_max=2) as session:
        session.decode(Batch.single(tokens(10)))
        gap = Batch.single(tokens(4), 10)
        gap.pos[:] = 10, 12, 11, 13
        for batch, message in [
            (Batch.single([96], 10), "outside the vocabulary of 96"),
            (Batch.single([-1], 10), "outside the vocabulary of 96"),
            (Batch.single([1], 9), "sequence 0: position 9 does not follow the 10 cached"),
            (Batch.single([1], 11), "sequence 0: position 11 does not follow"),
            (Batch.single([1], 1, 1), "sequence 1: position 1 does not follow the 0 cached"),
            (gap, "sequence 0: position 10 does not follow"),
            (Batch.single([1], 0, 2), "sequence 2 does not exist; the session was made for 2"),
            (Batch.single([1], 0, -1), "sequence -1 does not exist"),
            (Batch.single(tokens(119), 10), "129 tokens do not fit its context of 128; raise -c"),
        ]:
            with pytest.raises(IkError, match=message):
                session.decode(batch)
        session.decode(Batch.single(tokens(118), 10))  # a refused batch leaves no trace; the last cell is usable
        with pytest.raises(IkError, match="129 tokens do not fit"):
            session.decode(Batch.single([1], 128))


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("llama", {"type_k": "q4_K"}, UnsupportedError, "-ctk q4_K cannot be the type of a cache; use one of f32, f16"),
        ("llama", {"type_v": "iq4_xs"}, UnsupportedError, "-ctv iq4_xs cannot be"),
        ("llama", {"type_v": "q8_0", "flash_attn": False}, UsageError, "-ctv q8_0 needs flash attention"),
        ("deepseek2", {"type_v": "q8_0", "flash_attn": False, "mla": 1}, UsageError, "use -ctv f16"),
        ("deepseek2", {"type_v": "q5_K", "mla": 0}, UnsupportedError, "-ctv q5_K"),
    ],
)
def test_refused_cache_types(
    model_file: Callable[[str], Path], name: str, changes: dict[str, Any], error: type[IkError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Session.plan(config(model_file(name), **changes))


def test_v_type_is_ignored_by_one_latent_row(model_file: Callable[[str], Path]) -> None:
    with Session.open(config(model_file("deepseek2"), type_v="q4_0", mla=3)) as session:
        assert session.decode(Batch.single([1, 2])).shape == (1, 96)


def test_row_lengths_that_do_not_suit_a_cache_type(tmp_path: Path) -> None:
    """Heads of 20 columns have no whole blocks of 32."""
    keys = {"attention.key_length": 20, "attention.value_length": 20, "attention.head_count_kv": 1}
    path = write_model(tiny_model("llama", **{"rope.dimension_count": 20}, **keys), tmp_path / "m.gguf")
    compare(path, (1, 20))
    with pytest.raises(IkError, match="q8_0"):
        Session.plan(config(path, type_k="q8_0", type_v="q8_0"))


def test_shape_mismatch_names_tensor_and_shapes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.set("blk.1.ffn_down.weight", np.zeros((64, 128)))
    path = write_model(model, tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_down\.weight' has wrong shape; expected 96, 64, got 128, 64"):
        Session.plan(config(path))


# --- numbers that are not ---------------------------------------------------------------------------------------------
NAN_TENSORS = [
    ("llama", "blk.1.attn_norm.weight", "attn_norm-1"),
    ("llama", "blk.0.attn_q.weight", "Qcur"),
    ("llama", "blk.0.attn_k.weight", "Kcur"),
    ("llama", "blk.1.attn_v.weight", "Vcur"),
    ("llama", "blk.1.attn_output.weight", "kqv_out-1"),
    ("llama", "blk.1.ffn_up.weight", "ffn_up-1"),
    ("llama", "blk.1.ffn_down.weight", "ffn_out-1"),
    ("llama", "token_embd.weight", "inp_embd"),
    ("llama", "output_norm.weight", "result_norm"),
    ("llama", "output.weight", "result_output"),
    ("mixtral", "blk.1.ffn_gate_inp.weight", "ffn_moe_logits-1"),
    ("mixtral", "blk.1.ffn_up_exps.weight", "ffn_moe_gate_par-1"),
    ("mixtral", "blk.0.ffn_down_exps.weight", "ffn_moe_down-0"),
    ("deepseek2", "blk.2.attn_kv_a_norm.weight", "kv_compressed-2"),
    ("deepseek2", "blk.1.ffn_down_shexp.weight", "ffn_shexp-1"),
]


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q8_0])
@pytest.mark.parametrize(("name", "tensor", "node"), NAN_TENSORS)
def test_nan_weights_are_named(tmp_path: Path, name: str, tensor: str, node: str, type_: GGMLType) -> None:
    """One NaN in one tensor: an error that names node, layer and tensor, never finite logits; with either path."""
    model = tiny_model("llama", type_=type_, **(EXPERTS if name == "mixtral" else {}))
    if name == "deepseek2":
        model = tiny_deepseek2()
    values = model.values(tensor).copy()
    if values.ndim > 1:
        values[..., 3, 11] = np.nan  # in every expert
    else:
        values[11] = np.nan
    model.set(tensor, values, model.tensors[tensor].type)
    path = write_model(model, tmp_path / "m.gguf")
    if not np.isnan(model.values(tensor)).any():
        pytest.skip("the type cannot store it")
    with Session.open(config(path)) as session:
        for ids in (np.arange(40), np.array([3])):
            session.clear()
            with pytest.raises(NonFiniteError) as caught:
                session.decode(Batch.single(ids, logits="all"))
            assert node in str(caught.value) and tensor in str(caught.value)
    with pytest.raises(NonFiniteError, match=tensor):
        Session.open(config(path, check_tensors=True))


def test_check_tensors_passes_good_files(model_file: Callable[[str], Path]) -> None:
    Session.open(config(model_file("deepseek2"), check_tensors=True)).close()


def test_session_goes_on_after_non_finite_logits(tmp_path: Path) -> None:
    model = tiny_model("llama")
    values = model.values("token_embd.weight").copy()
    values[5] = np.inf
    model.set("token_embd.weight", values)
    with Session.open(config(write_model(model, tmp_path / "m.gguf"))) as session:
        wanted = np.array(session.decode(Batch.single([1, 2, 3], logits="all")))
        session.clear()
        with pytest.raises(NonFiniteError):
            session.decode(Batch.single([1, 5, 3], logits="all"))
        session.clear()
        np.testing.assert_array_equal(session.decode(Batch.single([1, 2, 3], logits="all")), wanted)


# --- observers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "n"), [("qwen3moe", 6), ("deepseek2", 6), ("deepseek2", 150)])
def test_observer_sees_every_node(model_file: Callable[[str], Path], name: str, n: int) -> None:
    """Names with layer numbers, shapes, values of the NumPy session."""
    c = config(model_file(name), type_k="f32", type_v="f32")
    seen: dict[str, list[Array]] = {}
    wanted: dict[str, list[Array]] = {}
    with Session.open(c) as session:
        plain = np.array(session.decode(Batch.single(tokens(n), logits="all")))
        session.clear()
        session.observer = lambda node, value: seen.setdefault(node.name, []).append(np.array(value))
        observed = np.array(session.decode(Batch.single(tokens(n), logits="all")))
        graph, _ = session.graphs["prefill" if n > 128 else "decode"]
        assert set(seen) == {node.name for node in graph.nodes if node.cols > 0}
    np.testing.assert_array_equal(plain, observed)
    other = ReferenceSession(
        model_file(name), graph_config(c),
        observe=lambda node, value: wanted.setdefault(node.name, []).append(np.array(value)),
    )  # fmt: skip
    other.decode(Batch.single(tokens(n), logits="all"))
    assert "ffn_moe_logits-1" in seen and "result_output" in seen
    for node_name, values in wanted.items():
        if "ffn_moe_plan" in node_name or "ffn_moe_topk" in node_name or values[0].shape[1] == 0:
            continue
        for a, b in zip(seen[node_name], values, strict=True):
            assert_rows_near(a, b, node_name)


def assert_rows_near(a: Array, b: Array, what: str) -> None:
    assert a.shape == b.shape, what
    error = np.abs(a - b).max(axis=1) / (np.abs(b).max() + 1e-30)
    assert (error > 1e-4).mean() <= 0.05, what


# --- life of a session ------------------------------------------------------------------------------------------------
def test_close_ends_the_threads(model_file: Callable[[str], Path]) -> None:
    before = threading.active_count()
    for _ in range(3):
        with Session.open(config(model_file("llama"), n_threads=3, n_threads_batch=3)) as session:
            session.decode(Batch.single([1, 2, 3]))
            assert threading.active_count() == before + 2
        assert threading.active_count() == before
    session.close()  # again


def test_plan_allocates_no_threads_and_can_be_closed(model_file: Callable[[str], Path]) -> None:
    before = threading.active_count()
    with closing(Session.plan(config(model_file("llama"), n_threads=3))) as session:
        assert session.compute_bytes > 0 and session.output_bytes == 96 * 4
    assert threading.active_count() == before


def test_two_sessions_at_once(model_file: Callable[[str], Path]) -> None:
    """Interleaved and from two threads: nothing is shared."""
    names = ("qwen3", "deepseek2")
    wanted = {}
    for name in names:
        with Session.open(config(model_file(name))) as session:
            wanted[name] = transcript(session, (20,), steps=20)
    sessions = {name: Session.open(config(model_file(name), n_threads=2)) for name in names}
    found: dict[str, Array] = {}

    def work(name: str) -> None:
        found[name] = transcript(sessions[name], (20,), steps=20)

    workers = [threading.Thread(target=work, args=(name,)) for name in names]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    for name, session in sessions.items():
        assert_close(found[name], wanted[name], TOLERANCE["f16"])
        session.close()
