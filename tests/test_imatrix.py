"""Importance matrices from a running model: streams against loops, models against each other and the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model
from leaves import leaf
from tiny_architectures import tiny

from ikcli.cli.parser import ModelRun
from ikcli.commands import imatrix as imatrix_command
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import GGMLType as T
from ikcli.graph import Graph, HeadSlice, Node, Weight
from ikcli.imatrix.collect import InputStream, watch
from ikcli.imatrix.matrix import ImatrixParams, ImatrixResult, collect, in_calls, load, save, windows
from ikcli.imatrix.statistics import LayerSimilarity, statistics
from ikcli.main import main
from ikcli.measure.perplexity import bos_of
from ikcli.measure.text import load_text, tokenize
from ikcli.models import EXPAND_MIN_TOKENS, GraphConfig
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, read_imatrix
from ikcli.settings.run import ImatrixConfig, PerplexityConfig, PromptConfig, RunConfig, default_model, default_text

N_CTX = 64
EXPERTS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 3}


def config(path: Path, **changes: Any) -> RunConfig:
    base = RunConfig(command="imatrix", model=path, n_ctx=N_CTX, n_threads=1, n_threads_batch=1, warmup=False, mla=1)
    return replace(base, type_k="f32", type_v="f32", **changes)


def collected(path: Path, params: ImatrixParams | None = None, n_tokens: int = 150, **changes: Any) -> ImatrixResult:
    params = params or ImatrixParams(n_ctx=N_CTX, ppl=False)
    ids = np.random.default_rng(5).integers(0, 96, n_tokens).astype(np.int32)
    with Session.open(config(path, **changes), n_ctx=N_CTX) as session:
        session._tokenizer = NoBos()  # type: ignore[assignment]
        return collect(session, ids, params)


class NoBos:
    add_bos = False
    bos_id = None


@pytest.fixture(scope="module")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS)
    return write_model(model, tmp_path_factory.mktemp("m") / "moe.gguf")


@pytest.fixture(scope="module")
def mla_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_deepseek2(), tmp_path_factory.mktemp("m") / "mla.gguf")


def shape_of(values: np.ndarray | None) -> tuple[int, ...]:
    assert values is not None
    return values.shape


# --- streams ----------------------------------------------------------------------------------------------------------
def node(name: str = "x") -> Node:
    return leaf(Graph(), name, 4)


@pytest.mark.parametrize("by_expert", [False, True])
def test_expert_rows(by_expert: bool, rng: np.random.Generator) -> None:
    ids = np.array([[2, 0], [1, 2], [-1, 2], [0, -1]], np.int32)
    per_slot = rng.normal(size=(4, 2, 3)).astype(np.float32)
    if not by_expert:
        per_slot[:, 1] = per_slot[:, 0]
    sums, counts = np.zeros((4, 3)), np.zeros(4)
    rows: list[list[np.ndarray]] = [[] for _ in range(4)]
    for t in range(4):
        for slot in range(2):
            e = ids[t, slot]
            if e >= 0:
                sums[e] += per_slot[t, slot].astype(np.float64) ** 2
                counts[e] += 1
                rows[e].append(per_slot[t, slot])
    x = np.array([r for e in rows for r in e]) if by_expert else per_slot[:, 0].copy()
    s = InputStream(["w"], np.zeros((4, 3)), np.zeros(4), node(), by_expert)
    s.add(x, ids)
    np.testing.assert_allclose(s.sums, sums, rtol=1e-6)
    assert s.counts.tolist() == counts.tolist() == [2, 1, 3, 0]


def test_head_columns(rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 12)).astype(np.float32)
    s = InputStream(["w"], np.zeros((3, 2)), np.zeros(3), heads=HeadSlice(node(), 1, 2, 4))
    s.add(x, None)
    wanted = [[(x[:, 4 * h + 1 + i].astype(np.float64) ** 2).sum() for i in range(2)] for h in range(3)]
    np.testing.assert_allclose(s.sums, wanted, rtol=1e-6)
    assert s.counts.tolist() == [5, 5, 5]


# --- models -----------------------------------------------------------------------------------------------------------
def test_experts_of_a_model(moe_file: Path) -> None:
    entries = collected(moe_file).imatrix.entries
    for il in range(2):
        router, up, gate, down = (
            entries[f"blk.{il}.ffn_{part}.weight"] for part in ("gate_inp", "up_exps", "gate_exps", "down_exps")
        )
        assert router.counts.tolist() == [2 * N_CTX]  # every row, in the last layer too
        assert up.counts.sum() == 2 * N_CTX * 3
        np.testing.assert_allclose(up.sums.sum(axis=0), 3 * router.sums[0], rtol=1e-5)
        assert (up.sums == gate.sums).all() and (up.counts == down.counts).all()
        assert (down.sums[down.counts > 0].min(axis=1) > 0).all()


def test_small_batches_and_unfused_experts_give_the_same(moe_file: Path) -> None:
    wanted = collected(moe_file).imatrix.entries
    found = collected(moe_file, fmoe=False, n_ubatch=24).imatrix.entries
    assert list(found) == list(wanted)
    for name, entry in wanted.items():
        np.testing.assert_allclose(found[name].sums, entry.sums, rtol=2e-3, atol=1e-6 * entry.sums.max(), err_msg=name)
        assert found[name].counts.tolist() == entry.counts.tolist()


def test_expert_reduction_drops_slots(moe_file: Path) -> None:
    entries = collected(moe_file, ser=(1, 1.0)).imatrix.entries
    assert entries["blk.0.ffn_down_exps.weight"].counts.sum() == 2 * N_CTX


def test_further_experts_of_groups(tmp_path: Path) -> None:
    """They read what the experts of their group read, as often."""
    entries = collected(write_model(tiny("grovemoe"), tmp_path / "grove.gguf")).imatrix.entries
    for il in range(2):
        own, further = (entries[f"blk.{il}.ffn_up_{kind}.weight"] for kind in ("exps", "chexps"))
        np.testing.assert_array_equal(further.counts, own.counts.reshape(-1, 2).sum(axis=1))
        np.testing.assert_allclose(further.sums, own.sums.reshape(4, 2, -1).sum(axis=1), rtol=1e-5)


def test_latent_attention(mla_file: Path) -> None:
    imatrix = collected(mla_file).imatrix
    k_b, v_b, kv_b = (imatrix.entries[f"blk.0.attn_{part}.weight"] for part in ("k_b", "v_b", "kv_b"))
    assert len(k_b.counts) == len(v_b.counts) == 4 and kv_b.sums.shape == (1, v_b.sums.shape[1])
    assert k_b.counts.tolist() == [2 * N_CTX] * 4
    nope, rank = k_b.sums.shape[1], kv_b.sums.shape[1]
    assert shape_of(imatrix.weights("blk.0.attn_k_b.weight", (nope, rank, 4))) == (4, nope)
    assert shape_of(imatrix.weights("blk.0.attn_k_b.weight", (nope, 4 * rank))) == (1, nope)
    assert shape_of(imatrix.weights("blk.0.attn_v_b.weight", (rank, 8, 4))) == (4, rank)
    assert shape_of(imatrix.weights("blk.0.attn_kv_b.weight", (rank, 64))) == (1, rank)


def test_output_tensor(moe_file: Path) -> None:
    params = ImatrixParams(n_ctx=N_CTX, chunks=1, ppl=False, output_name="output.weight")
    found = collected(moe_file, params).imatrix.entries
    assert found["output.weight"].counts.tolist() == [N_CTX]
    assert "output.weight" not in collected(moe_file).imatrix.entries


def test_windows() -> None:
    ids = np.arange(100, dtype=np.int32)
    table = windows(ids, ImatrixParams(n_ctx=30, first_chunk=1))
    assert table.shape == (2, 30) and table[0, 0] == 30
    assert len(windows(ids, ImatrixParams(n_ctx=30, chunks=1))) == 1
    with pytest.raises(IkError, match="after 3 chunks are left out"):
        windows(ids, ImatrixParams(n_ctx=30, first_chunk=3))
    with pytest.raises(UsageError, match="--chunks 0"):
        windows(ids, ImatrixParams(chunks=0))


# --- files ------------------------------------------------------------------------------------------------------------
def matrix() -> Imatrix:
    sums = np.array([[2.0, 4.0], [0.0, 0.0], [9.0, 3.0]], np.float32)
    dense = ImatrixEntry(np.array([[10.0, 30.0]], np.float32), np.array([10], np.float32))
    experts = ImatrixEntry(sums, np.array([2, 0, 3], np.float32))
    return Imatrix({"blk.0.a.weight": dense, "blk.0.e.weight": experts}, ("text",), 5, 2)


@pytest.mark.parametrize("name", ["i.dat", "i.gguf"])
def test_files_keep_means(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save(matrix(), path, as_gguf=name.endswith("gguf"))
    back = read_imatrix(path)
    assert back.n_chunks == 5 and back.datasets == ("text",)
    assert back.entries["blk.0.a.weight"].values.tolist() == [1, 3]
    assert back.entries["blk.0.e.weight"].values.tolist() == [1, 2, 1, 1, 3, 1]
    assert back.entries["blk.0.a.weight"].counts.tolist() == [5.0 if name == "i.dat" else 10.0]


def test_rows_of_a_dat_file_are_estimated(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    save(matrix(), path, as_gguf=False)
    found = load(path, matrix())
    assert found.entries["blk.0.a.weight"].counts.tolist() == [10]
    assert found.entries["blk.0.e.weight"].counts.tolist() == pytest.approx([5 / 3, 0, 5 / 3])
    assert in_calls(found).entries["blk.0.e.weight"].values == pytest.approx([1, 2, 1, 1, 3, 1])


def test_statistics() -> None:
    a, b = (ImatrixEntry(np.array([v], np.float32), np.array([1], np.float32)) for v in ([1, 1, 2, 4], [1, 1, 2, 0]))
    first, second = statistics(Imatrix({"blk.1.w": a, "blk.0.w": b}))
    assert (first.name, first.total, first.entropy) == ("blk.1.w", 8, pytest.approx(1.75))
    assert first.cosine == pytest.approx(6 / np.sqrt(22 * 6)) and np.isnan(second.cosine)
    assert second.active == 0.75


def test_layer_similarity() -> None:
    similarity, x = LayerSimilarity(), np.array([[1, 0], [0, 2]], np.float32)
    g, w = Graph(), Weight("w", T.F32, (2,))
    x_node = leaf(g, "x", 2)
    for il, kind, value in ((0, "attn_norm", x), (0, "ffn_norm", x), (1, "attn_norm", x[::-1])):
        g.il = il
        similarity(g.rms_norm(x_node, w, 1e-6, kind), value)
    assert similarity.means() == {("attention", 0): 1.0, ("layer", 0): 0.0, ("feed-forward", 0): 0.0}


# --- the command ------------------------------------------------------------------------------------------------------
def command(tmp_path: Path, name: str, **options: Any) -> RunConfig:
    imatrix = ImatrixConfig(output=tmp_path / name, **options)
    base = RunConfig(command="imatrix", model=default_model(), n_ctx=128, n_threads=1, n_threads_batch=1, warmup=False)
    return replace(
        base, imatrix=imatrix, perplexity=PerplexityConfig(chunks=2), prompt=PromptConfig(file=default_text())
    )


def execute(config: RunConfig) -> int:
    return imatrix_command.run(ModelRun(config, planner=None))  # type: ignore[arg-type]


def test_command_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(command(tmp_path, "all.gguf", save_frequency=1)) == 0
    text = capsys.readouterr()
    assert text.out.startswith("[1]") and "Final estimate: PPL over 2 chunks for n_ctx=128 = " in text.out
    first = tmp_path / "all.gguf.at_1"
    assert read_imatrix(first).n_chunks == 1
    rest = command(tmp_path, "resumed.gguf", in_file=(first,), from_chunk=1, ppl=False)
    assert execute(replace(rest, perplexity=PerplexityConfig(chunks=1))) == 0
    assert capsys.readouterr().out == "\n"
    found, wanted = read_imatrix(tmp_path / "resumed.gguf"), read_imatrix(tmp_path / "all.gguf")
    assert found.n_chunks == wanted.n_chunks == 2 and list(found.entries) == list(wanted.entries)
    for name, entry in wanted.entries.items():
        np.testing.assert_allclose(found.entries[name].values, entry.values, rtol=1e-3, err_msg=name)


def test_merging_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, out = tmp_path / "one.dat", tmp_path / "out.gguf"
    save(matrix(), one, as_gguf=False)
    assert main(["imatrix", "--in-file", str(one), "--in-file", str(one), "-o", str(out), "--hide-imatrix"]) == 0
    found = read_imatrix(out)
    assert found.n_chunks == 10 and found.datasets == ()
    assert found.entries["blk.0.a.weight"].values.tolist() == [1, 3]
    capsys.readouterr()
    assert main(["imatrix", "--in-file", str(one), "--show-statistics"]) == 0
    assert "| blk.0.a.weight | 2 | 4.00 | 1.0000 | 3.0000 |" in capsys.readouterr().out
    assert main(["imatrix", "--show-statistics"]) == 2


def test_resuming_into_the_same_file_counts_once(tmp_path: Path) -> None:
    assert execute(command(tmp_path, "i.dat", ppl=False)) == 0
    again = command(tmp_path, "i.dat", ppl=False, in_file=(tmp_path / "i.dat",), from_chunk=2, output_frequency=1)
    assert execute(again) == 0
    assert read_imatrix(tmp_path / "i.dat").n_chunks == 4


def test_command_refuses_before_it_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, cut = tmp_path / "one.dat", tmp_path / "cut.dat"
    save(matrix(), one, as_gguf=False)
    cut.write_bytes(one.read_bytes()[:60])
    assert main(["imatrix", "--in-file", str(cut), "-o", str(tmp_path / "o.dat")]) == 1
    assert "cut.dat: entry 2 of 2 is damaged or cut short" in capsys.readouterr().err
    assert main(["imatrix", "--in-file", str(one), "-o", str(tmp_path / "no" / "o.dat")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["imatrix", "--in-file", str(one), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_merging_different_models_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    save(matrix(), one, as_gguf=True)
    save(Imatrix({"blk.0.a.weight": matrix().entries["blk.0.a.weight"]}), two, as_gguf=True)
    assert main(["imatrix", "--in-file", str(one), "--in-file", str(two), "-o", str(tmp_path / "o.dat")]) == 0
    assert "two.gguf: lacks 1 of 2 entries (blk.0.e.weight)" in capsys.readouterr().err


# --- against exact arithmetic and the reference -----------------------------------------------------------------------
def test_f32_cache_gives_exact_values(shared_dir: Path, tmp_path: Path) -> None:
    model = shared_dir / "golden" / "models" / "stories260K-d256.f32.gguf"
    prompt = PromptConfig(file=shared_dir / "golden" / "tinystories.txt")
    run = replace(command(tmp_path, "i.dat", ppl=False), model=model, prompt=prompt, type_k="f32", type_v="f32", mla=1)
    params = ImatrixParams(n_ctx=128, chunks=2, ppl=False)
    seen: list[Any] = []
    cfg = GraphConfig(n_ctx=128, type_k=T.F32, type_v=T.F32)
    exact = ReferenceSession(model, cfg, dtype=np.float64, observe=lambda node, x: seen[0](node, x))
    seen.append(watch([exact._graphs[EXPAND_MIN_TOKENS <= 128]]))
    with Session.open(run, n_ctx=128) as session:
        tokens = tokenize(session, load_text(run), "imatrix")[:256]
        found = collect(session, tokens, params).imatrix
        bos = bos_of(session) or 0
    for row in tokens.reshape(2, 128):
        exact.clear()
        pos = np.arange(128, dtype=np.int32)
        exact.decode(Batch(np.where(pos == 0, bos, row).astype(np.int32), pos, np.zeros_like(pos), np.ones(128, bool)))
    for name, entry in seen[0].take().imatrix(2, 128).entries.items():
        np.testing.assert_allclose(found.entries[name].values, entry.values, rtol=3e-6, err_msg=name)


def test_same_values_as_the_reference(shared_dir: Path, tmp_path: Path) -> None:
    """The reference's own modes (-fa on, off) differ from each other by 1.4e-3, and by 2e-4 in the quadratic mean."""
    model = shared_dir / "golden" / "models" / "stories260K-d256.f32.gguf"
    run = command(tmp_path, "i.dat", ppl=False)
    prompt = PromptConfig(file=shared_dir / "golden" / "tinystories.txt")
    run = replace(run, model=model, n_ctx=512, prompt=prompt, perplexity=PerplexityConfig(chunks=20))
    assert execute(run) == 0
    found, wanted = (
        read_imatrix(p) for p in (tmp_path / "i.dat", shared_dir / "data" / "stories260K-d256.imatrix.dat")
    )
    assert found.entries.keys() == wanted.entries.keys() and found.n_chunks == wanted.n_chunks
    for name, entry in wanted.entries.items():
        assert found.entries[name].counts.tolist() == entry.counts.tolist()
        ratio = found.entries[name].values.astype(np.float64) / entry.values - 1
        before_attention = name.startswith("blk.0.attn_") and "output" not in name  # only its sums in f32 tell here
        assert np.abs(ratio).max() < (3e-5 if before_attention else 1.5e-3), name
        assert np.sqrt((ratio**2).mean()) < 2.1e-4 and abs(ratio.mean()) < 1e-4, name


def half_precision_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention (n, heads, width) with an online softmax whose weighted sums of V are kept in float16."""
    n, n_head = q.shape[:2]
    q, k, v = (x.astype(np.float16).astype(np.float32) for x in (q, k, v))
    k, v = (np.repeat(x, n_head // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->ijh", q, k, optimize=True) * np.float32(scale)
    acc, norm = np.zeros(q.shape, np.float16), np.zeros((n, n_head), np.float32)
    largest = np.full((n, n_head), -np.inf, np.float32)
    for j in range(n):
        score, old = scores[j:, j], largest[j:].copy()
        largest[j:] = new = np.maximum(score, old)
        shrink, weight = np.exp(old - new)[..., None], np.exp(score - new)
        scaled = (acc[j:] * shrink).astype(np.float16) + np.float64(v[j]) * weight[..., None]
        acc[j:] = scaled.astype(np.float32).astype(np.float16)
        norm[j:] = norm[j:] * shrink[..., 0] + weight
    return acc / norm[..., None]


@pytest.mark.slow
def test_cause_of_the_difference_from_the_reference(shared_dir: Path, tmp_path: Path) -> None:
    """Heads of 32 take a path of the reference that sums V in float16, and its sums over rows are in float32."""
    model = shared_dir / "golden" / "models" / "stories260K-d256.f32.gguf"
    prompt = PromptConfig(file=shared_dir / "golden" / "tinystories.txt")
    run = replace(command(tmp_path, "i.dat"), model=model, prompt=prompt, mla=1)
    wanted = read_imatrix(shared_dir / "data" / "stories260K-d256.imatrix.dat").entries
    parts: dict[str, np.ndarray] = {}
    sums = {name: np.zeros(256, np.float32) for name in ("blk.0.attn_q.weight", "blk.0.attn_output.weight")}

    def add(name: str, x: np.ndarray) -> None:
        for row in x.astype(np.float64):
            sums[name] = (sums[name] + row * row).astype(np.float32)

    def look(node: Node, value: np.ndarray) -> None:
        parts[node.name] = value.copy()
        if node.name == "kqv-0":
            q, k, v = (parts[name].reshape(len(value), -1, 32) for name in ("Qcur-0", "Kcur-0", "Vcur-0"))
            out = half_precision_attention(q, k, v, node.op.scale)
            add("blk.0.attn_output.weight", out.reshape(len(value), -1))
            add("blk.0.attn_q.weight", parts["attn_norm-0"])

    with Session.open(run, n_ctx=512) as session:
        ids = windows(tokenize(session, load_text(run), "imatrix"), ImatrixParams(chunks=20))
        ids[:, 0] = bos_of(session) or 0
        session.observer = look
        for row in ids:
            session.clear()
            pos = np.arange(512, dtype=np.int32)
            session.decode(Batch(row, pos, np.zeros_like(pos), pos == 511))
    for name, values in sums.items():
        np.testing.assert_allclose(values / np.float32(ids.size), wanted[name].values, rtol=3e-5, err_msg=name)
