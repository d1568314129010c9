"""Importance weights where data is scarce: experts with few rows, tensors with the same input, merging both formats."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_deepseek2, tiny_model
from recipe_models import info
from tiers import some_architectures
from tiny_architectures import tiny

from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.imatrix.collect import watch
from ikcli.imatrix.matrix import load, save
from ikcli.models import GraphConfig
from ikcli.quant.custom_rules import parse_custom_rules
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, merge, read_imatrix
from ikcli.quant.imatrix_lookup import _AS_THE_REFERENCE, _MORE, DRAW, count_experts, reference_relatives, relatives
from ikcli.quant.imatrix_use import weighted_choices, why_missing
from ikcli.quant.recipes import RecipeOptions, choose_types

UP = "blk.0.ffn_up_exps.weight"


def entry(means: list[list[float]], counts: list[float]) -> ImatrixEntry:
    n = np.array(counts, np.float32)
    return ImatrixEntry(np.array(means, np.float32) * np.maximum(n, 1)[:, None], n)


def weights(e: ImatrixEntry, name: str = UP, shape: tuple[int, ...] = (2, 5, 3)) -> np.ndarray:
    found = Imatrix({name: e}).weights(name, shape)
    assert found is not None
    return np.asarray(found)


def dat(path: Path, values: dict[str, list[float]], n_calls: int = 4) -> Path:
    """A legacy file as other programs write it."""
    out = struct.pack("<i", len(values))
    for name, v in values.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_calls, len(v))
        out += np.array(v, "<f4").tobytes()
    path.write_bytes(out + struct.pack("<ii", n_calls, 0))
    return path


# --- experts with few rows --------------------------------------------------------------------------------------------
def test_experts_are_drawn_towards_their_layer_by_their_rows() -> None:
    means, counts = [[1.0, 9.0], [5.0, 2.0], [0.0, 0.0]], [4.0, 60000.0, 0.0]
    found = weights(entry(means, counts))
    layer = (4 * np.array(means[0]) + 60000 * np.array(means[1])) / 60004
    share = DRAW / (4 + DRAW)
    assert found[0] == pytest.approx(np.array(means[0]) * (1 - share) + layer * share)
    assert found[1] == pytest.approx(means[1], rel=1e-3) and found[2] == pytest.approx(layer)
    assert share == pytest.approx(8 / 9)


def test_stored_sums_stay_raw() -> None:
    e = entry([[1.0, 9.0], [5.0, 2.0]], [4.0, 0.0])
    before = e.sums.copy()
    weights(e, shape=(2, 5, 2))
    np.testing.assert_array_equal(e.sums, before)
    assert e.values.tolist() == [1.0, 9.0, 1.0, 1.0]


def test_heads_are_not_experts() -> None:
    name = "blk.0.attn_k_b.weight"
    assert weights(entry([[1.0, 9.0], [5.0, 2.0]], [1.0, 1.0]), name, (2, 5, 2)).tolist() == [[1.0, 9.0], [5.0, 2.0]]


@pytest.mark.parametrize("filled", [0.0, 1.0])
def test_experts_without_data_in_dat_files(tmp_path: Path, filled: float) -> None:
    """ik_llama.cpp and llama.cpp write 1 for them, converters leave 0; experts with data are as they were."""
    path = dat(tmp_path / "m.dat", {UP: [4.0, 36.0, filled * 4, filled * 4, 20.0, 8.0]})
    assert read_imatrix(path).weights(UP, (2, 5, 3)) == pytest.approx(np.array([[1.0, 9.0], [3.0, 5.5], [5.0, 2.0]]))


def test_without_any_data_all_columns_weigh_the_same(tmp_path: Path) -> None:
    assert (weights(entry([[0.0, 0.0]] * 3, [0.0] * 3)) == 1).all()
    path = dat(tmp_path / "m.dat", {UP: [4.0] * 6})
    assert (np.asarray(read_imatrix(path).weights(UP, (2, 5, 3))) == 1).all()


# --- tensors with the same input --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("have", "want", "found"),
    [
        ("attn_qkv", "attn_k", True), ("attn_q", "attn_qkv", True), ("attn_v", "attn_qkv", True),
        ("attn_qk", "attn_q", True), ("attn_q_a", "attn_kv_a_mqa", True), ("attn_kv_a_mqa", "attn_q_a", True),
        ("attn_kv_a_mqa", "attn_q", True), ("ffn_gate_up", "ffn_up", True), ("ffn_gate_up", "ffn_gate", True),
        ("ffn_up", "ffn_gate_up", True), ("ffn_gate_exps", "ffn_gate_up_exps", True),
        ("ffn_up_shexp", "ffn_gate_shexp", True), ("ffn_gate_shexp", "ffn_up_shexp", True),
        ("ffn_up_shexp", "ffn_gate_inp", True), ("ffn_gate_inp", "ffn_gate_shexp", True),
        ("ffn_gate", "ffn_up", True), ("ffn_gate_exps", "ffn_up_exps", True), ("ssm_in", "ssm_ba", True),
        ("attn_qkv", "attn_gate", True), ("ssm_beta", "attn_k", True), ("ssm_g_a", "ssm_f_a", True),
        ("ffn_gate_inp", "ffn_up", False), ("ssm_in", "ssm_out", False), ("ffn_gate_exps", "ffn_down_exps", False),
        ("attn_q", "attn_q_b", False), ("attn_q", "attn_output", False), ("ffn_up_shexp", "ffn_down_shexp", False),
        ("ffn_up", "ffn_up_shexp", False), ("attn_kv_a_mqa", "attn_kv_b", False),
    ],
)  # fmt: skip
def test_fused_and_neighbouring_tensors(have: str, want: str, found: bool) -> None:
    m = Imatrix({f"blk.3.{have}.weight": entry([[1.0, 2.0]], [9.0])})
    assert (m.find(f"blk.3.{want}.weight", (2, 5)) is not None) == found
    assert m.find(f"blk.4.{want}.weight", (2, 5)) is None and m.find(f"blk.3.{want}.bias") is None
    assert f"blk.3.{want}.weight" not in relatives(f"blk.3.{want}.weight")


def test_the_same_input_is_a_relation_of_both() -> None:
    for part in (*_AS_THE_REFERENCE, *_MORE):
        name = f"blk.0.{part}.weight"
        for other in relatives(name):
            assert name in relatives(other), (name, other)


@pytest.mark.parametrize(("have", "want"), [("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps")])
def test_types_that_need_data_take_that_of_the_neighbour(have: str, want: str) -> None:
    names, n_mat = [f"blk.0.{part}.weight" for part in (have, want)], 2 if "exps" in have else 1
    tensors = [info(name, 256, 8, *([2] if n_mat > 1 else [])) for name in names]
    options = RecipeOptions(file_type=7, custom=parse_custom_rules(["ffn=iq2_xxs"]))
    for known in names:
        m = Imatrix({known: entry([[2.0] * 256] * n_mat, [9.0] * n_mat)})
        chosen = choose_types(tensors, {"general.architecture": "llama"}, options, m)
        assert [c.new for c in chosen] == [GGMLType.IQ2_XXS] * 2


def is_dense(name: str) -> bool:
    return name.split(".")[2] in ("ffn_gate", "ffn_up", "ffn_gate_up")


@pytest.mark.parametrize("arch", some_architectures())
def test_matrices_of_one_node_serve_each_other(arch: str) -> None:
    """Also in blocks whose attention and feed forward lie side by side, but there only within each of them."""
    graphs = list(ReferenceSession(tiny(arch), GraphConfig(n_ctx=32, mla=1))._graphs)
    for node, found in watch(graphs[:1]).streams.items():
        names = [name for s in found for name in s.names if name.startswith("blk.")]
        for part in (("attn_", "ssm_"), ("ffn_",)):
            mine = [n for n in names if n.split(".")[2].startswith(part) and ".attn_kv_b" not in n]
            for name in mine:
                same = [o for o in mine if o != name and o.split(".")[1] == name.split(".")[1]]
                same = [o for o in same if re.findall("_(?:ch)?exps", o) == re.findall("_(?:ch)?exps", name)]
                # names do not tell whether a dense feed forward beside experts has their input (grok) or not (gemma4)
                same = [o for o in same if is_dense(o) == is_dense(name)]
                assert set(same) <= set(relatives(name)), (node, name)


def test_neighbours_share_a_node_in_the_graphs() -> None:
    """Whatever the table adds to the lookups of the reference must be fed by one node where a model has both."""
    experts: dict[str, Any] = {"expert_count": 8, "expert_used_count": 3}
    models = [
        tiny_model("qwen3moe", expert_feed_forward_length=48, **experts),
        tiny_model("llama"),
        tiny_deepseek2(),
        tiny_deepseek2(q_lora_rank=0),
    ]
    pairs: set[tuple[str, str]] = set()
    for model in models:
        graphs = list(ReferenceSession(model, GraphConfig(n_ctx=32, mla=1))._graphs)
        source = {name: node for node, found in watch(graphs[:1]).streams.items() for s in found for name in s.names}
        for name in source:
            for other in set(relatives(name)) - set(reference_relatives(name)):
                if other in source:
                    assert source[name] is source[other], (name, other)
                    pairs.add((name.split(".")[2], other.split(".")[2]))
    assert {("attn_q", "attn_v"), ("attn_q_a", "attn_kv_a_mqa"), ("ffn_gate_inp", "ffn_up_shexp")} <= pairs


@pytest.mark.parametrize("arch", some_architectures())
def test_every_matrix_of_every_architecture_is_watched(arch: str) -> None:
    """What `ik quantize` would quantize has importance data, or a reason to have none."""
    model = tiny(arch)
    streams = watch(list(ReferenceSession(model, GraphConfig(n_ctx=32, mla=1))._graphs)[:1]).all_streams()
    found = Imatrix({name: ImatrixEntry(s.sums, s.counts) for s in streams for name in s.names})
    tensors = [info(name, *t.shape, type=t.type) for name, t in model.tensors.items()]
    choices = weighted_choices(choose_types(tensors, model.metadata, RecipeOptions(file_type=7)))
    missing = [c.name for c in choices if not found.fits(c.name, c.shape)]
    assert len(choices) >= 6
    assert {why_missing(name, model.tensors, ()) for name in missing} <= {
        "output (collected with --process-output)",
        "embeddings (rows are looked up, not multiplied)",
        "visual experts (collected with --mmproj and --image)",
    }


def test_neighbours_of_another_size_are_passed_over() -> None:
    m = Imatrix({"blk.0.attn_k.weight": entry([[1.0, 2.0]], [9.0])})
    assert m.weights("blk.0.attn_q.weight", (3, 5)) is None and not m.fits("blk.0.attn_q.weight", (3, 5))
    assert m.find("blk.0.attn_q.weight", (2, 5)) == "blk.0.attn_k.weight"
    with pytest.raises(FormatError, match="belongs to another model"):
        m.weights("blk.0.attn_k.weight", (3, 5))


def test_excluded_tensors_are_not_served_by_new_neighbours() -> None:
    names = [f"blk.0.{part}.weight" for part in ("attn_q", "attn_k", "ffn_gate", "ffn_up")]
    m = Imatrix({n: entry([[1.0, 2.0]], [9.0]) for n in names}).filtered(exclude=["attn_q", "ffn_gate"])
    assert m.find("blk.0.attn_q.weight") is None and m.find("blk.0.attn_v.weight") == "blk.0.attn_k.weight"
    assert m.find("blk.0.ffn_gate.weight") == "blk.0.ffn_up.weight"  # as the reference does


# --- merging and converting -------------------------------------------------------------------------------------------
def test_experts_without_data_add_nothing_when_merged(tmp_path: Path) -> None:
    """The 1 that a .dat file holds for them is no measurement."""
    known = Imatrix({UP: entry([[50.0, 70.0], [3.0, 4.0], [0.0, 0.0]], [10.0, 10.0, 0.0])})
    part = load(dat(tmp_path / "m.dat", {UP: [4.0, 4.0, 20.0, 8.0, 8.0, 4.0]}))
    both = merge([known, part]).entries[UP]
    assert both.counts.tolist() == [10.0, 2058.0, 2048.0]
    assert both.values[:2].tolist() == [50.0, 70.0] and both.values[4:].tolist() == [2.0, 1.0]


def test_experts_of_two_dat_files_are_told_from_the_sizes(tmp_path: Path) -> None:
    router = {"blk.0.ffn_gate_inp.weight": [4.0, 8.0]}
    a = dat(tmp_path / "a.dat", {**router, UP: [4.0, 4.0, 20.0, 8.0, 8.0, 4.0]})
    b = dat(tmp_path / "b.dat", {**router, UP: [36.0, 12.0, 4.0, 4.0, 8.0, 4.0]})
    both = merge([read_imatrix(p) for p in (a, b)]).entries[UP]
    assert both.values.tolist() == [9.0, 3.0, 5.0, 2.0, 2.0, 1.0] and both.counts.tolist() == [4.0, 4.0, 8.0]
    sizes = {UP: 6, "blk.0.ffn_gate_inp.weight": 2, "blk.0.ffn_down_exps.weight": 12}
    assert count_experts("blk.0.ffn_down_exps.weight", sizes) == 3
    assert count_experts("blk.1.ffn_down_exps.weight", sizes) == count_experts("blk.0.ffn_gate_inp.weight", sizes) == 1


def test_files_with_other_numbers_of_experts_do_not_merge() -> None:
    a, b = entry([[1.0]] * 4, [1.0] * 4), entry([[1.0, 2.0]] * 2, [1.0] * 2)
    with pytest.raises(FormatError, match="has 2 matrices, an earlier file 4"):
        merge([Imatrix({UP: a}), Imatrix({UP: b})])


@pytest.mark.parametrize("through", ["m.dat", "m.gguf"])
def test_conversions_keep_what_the_formats_have_in_common(tmp_path: Path, through: str) -> None:
    """From one format through the other and back: names, datasets, chunks, means, and counts where they are known."""
    names = ["blk.10.attn_q.weight", "blk.2.attn_q.weight", UP]
    made = Imatrix(dict.fromkeys(names, entry([[1.0, 3.0]], [1024.0])), ("a.txt", "b.txt"), 2, 512)
    made.entries[UP] = entry([[2.0, 4.0], [0.5, 8.0]], [24.0, 48.0])
    first = tmp_path / ("m.gguf" if through == "m.dat" else "m.dat")
    save(made, first, as_gguf=first.suffix == ".gguf")
    save(load(first), tmp_path / through, as_gguf=through == "m.gguf")
    back = load(tmp_path / through)
    assert set(back.entries) == set(names) and (back.datasets, back.n_chunks) == (("a.txt", "b.txt"), 2)
    assert back.entries[names[0]].counts.tolist() == [1024.0]
    for name in names:
        np.testing.assert_array_equal(back.entries[name].values, made.entries[name].values)
    assert weights(back.entries[UP], shape=(2, 5, 2)) == pytest.approx(np.array([[2.0, 4.0], [0.5, 8.0]]))
