"""Types for a given size: the knapsack, sensitivities, recipes, the options of the command, and the gain on a model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import quant_models

from ikcli.config import default_model
from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.sensitivity import sensitivities, shares
from ikcli.quant.target import Option, TargetOptions, candidates_for, hull, parse_size, recipe_rules, solve
from ikcli.quant.tool import ToolOptions, ToolPlan, plan_quantize

T = GGMLType


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quant_models.write_model(tmp_path_factory.mktemp("m") / "m.gguf")


def option(n_bytes: int, damage: float) -> Option:
    return Option(T.Q8_0, n_bytes, damage)


def test_hull_leaves_out_bad_points() -> None:
    points = [option(10, 9.0), option(20, 8.5), option(30, 3.0), option(40, 3.5), option(50, 2.0), option(30, 4.0)]
    assert hull(points) == [points[0], points[2], points[4]]
    assert hull([option(5, 1.0), option(5, 0.5)]) == [option(5, 0.5)]


def test_solution_is_close_to_the_best(rng: np.random.Generator) -> None:
    curves = []
    for _ in range(5):
        sizes = np.sort(rng.choice(np.arange(10, 100), 4, replace=False))
        damages = np.sort(rng.random(4))[::-1] * rng.uniform(0.1, 3)
        curves.append([option(int(b), float(d)) for b, d in zip(sizes, damages, strict=True)])
    for budget in range(sum(c[0].n_bytes for c in curves), 400, 20):
        picked = solve(curves, budget)
        assert sum(o.n_bytes for o in picked) <= budget
        fitting = [p for p in itertools.product(*curves) if sum(o.n_bytes for o in p) <= budget]
        best = min(sum(o.damage for o in p) for p in fitting)
        worst = sum(c[0].damage for c in curves)
        assert sum(o.damage for o in picked) <= best + 0.1 * (worst - best)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 << 30), ("900M", 900 << 20), ("1.5GB", 1_500_000_000), ("4096", 4096), (".5 kib", 512), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1PB", "0", "1,5G"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--target-size"):
        parse_size(text)


def test_shares_of_the_stream() -> None:
    names = ["blk.0.attn_output.weight", "blk.0.ffn_down.weight", "blk.1.attn_output.weight", "blk.1.attn_q.weight"]
    energies = {names[0]: 1.0, names[1]: 4.0, names[2]: 2.0}
    found = shares(names, {}, energies, 3.0)
    assert found == {(0, "attn"): 1 / 4, (0, "ffn"): 4 / 8, (1, "attn"): 2 / 10}
    assert shares(names, {}, {}, 3.0) == shares(names, {}, energies, None) == {}
    experts = {"general.architecture": "x", "x.expert_used_count": 4, "x.expert_weights_norm": True}
    down = "blk.0.ffn_down_exps.weight"
    assert shares([down], experts, {down: 4.0}, 3.0) == {(0, "ffn_exps"): 1 / 4}


def test_sensitivities_follow_the_shares() -> None:
    names = ["token_embd.weight", "blk.0.attn_output.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"]
    small = sensitivities(names, {}, {names[1]: 0.1, names[3]: 1.0}, 9.0)
    large = sensitivities(names, {}, {names[1]: 5.0, names[3]: 1.0}, 9.0)
    assert large[names[1]] > 4 * small[names[1]] and large[names[2]] > 4 * small[names[2]]
    both = sensitivities([*names, "output.weight"], {}, {}, None)
    assert small[names[0]] == pytest.approx(
        both[names[0]] + both["output.weight"]
    )  # a tied embedding is the output too


def test_candidates(model: Path) -> None:
    name, shape = "blk.0.ffn_up_exps.weight", (256, 32, 4)
    imatrix = Imatrix({name: ImatrixEntry(np.ones((4, 256), np.float32), np.ones(4, np.float32))})
    plain, weighted = (candidates_for(TargetOptions(), name, shape, T.F16, i) for i in (None, imatrix))
    assert T.IQ2_XXS in weighted and T.IQ2_XXS not in plain and T.IQ4_K in plain
    repackable = candidates_for(TargetOptions(repackable=True), name, shape, T.F16, imatrix)
    assert T.IQ4_K in repackable and T.IQ4_KSS not in repackable and T.IQ2_KL not in repackable
    assert set(candidates_for(TargetOptions(), name, (32, 8), T.F16, None)) == {T.IQ4_NL, T.Q5_0, T.Q6_0, T.Q8_0}
    assert candidates_for(TargetOptions(candidates=(T.IQ4_K,)), name, (48, 8), T.F16, None) == [T.F16]


def test_recipe_rules() -> None:
    rules = recipe_rules(
        {"output.weight": T.Q6_K, "blk.0.attn_q.weight": T.IQ4_K, "blk.10.attn_q.weight": T.IQ4_K, "blk.1.a": T.Q8_0}
    )
    assert rules == [r"^output\.weight$=q6_K", r"^blk\.(0|10)\.attn_q\.weight$=iq4_k", r"^blk\.1\.a$=q8_0"]


# --- plans ------------------------------------------------------------------------------------------------------------
FEW = (T.IQ3_K, T.IQ4_K, T.IQ5_K, T.IQ6_K, T.Q4_0, T.Q5_0, T.Q8_0)


def plan(path: Path, recipe: RecipeOptions | None = None, **target: object) -> ToolPlan:
    options = TargetOptions(candidates=FEW, rows=64, **target)  # type: ignore[arg-type]
    return plan_quantize(str(path), "out.gguf", recipe or RecipeOptions(7), ToolOptions(), options)


def test_plan_uses_the_budget_and_no_more(model: Path) -> None:
    last = float("inf")
    for bpw in (5.0, 6.0, 7.0):
        found = plan(model, bpw=bpw)
        assert found.target is not None and found.bpw <= bpw and found.bpw > bpw - 0.5
        assert found.target.n_bytes == found.new_bytes and found.target.damage < last
        last = found.target.damage
        types = {c.name: c.new for c in found.job.choices}
        assert types["blk.0.ffn_up_exps.weight"] == types["blk.0.ffn_gate_exps.weight"]
        assert types["blk.0.ffn_gate_inp.weight"] == T.F32
        assert {c.reason for c in found.job.choices if c.changes} == {"target"}


def test_other_rules_keep_their_tensors(model: Path) -> None:
    from ikcli.quant.custom_rules import parse_custom_rules

    recipe = RecipeOptions(7, custom=parse_custom_rules(["attn_q=q8_0"]), output_tensor_type=T.Q5_0)
    found = {c.name: c for c in plan(model, recipe, bpw=5.5).job.choices}
    assert (found["blk.0.attn_q.weight"].new, found["blk.0.attn_q.weight"].reason) == (T.Q8_0, "rule 1")
    assert (found["output.weight"].new, found["output.weight"].reason) == (T.Q5_0, "--output-tensor-type")


def test_impossible_budget(model: Path) -> None:
    with pytest.raises(UsageError, match=r"the least that the candidate types can reach; with --imatrix"):
        plan(model, bpw=1.0)


def test_damage_is_below_that_of_a_preset() -> None:
    """On the bundled model the predicted damage is far below that of a preset of the same size."""
    import ikcli.quant.target as target

    path = str(default_model())
    preset = plan_quantize(path, "x.gguf", RecipeOptions(10), ToolOptions())  # Q2_K with its mix
    few = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)
    options = TargetOptions(n_bytes=preset.new_bytes, candidates=few, rows=16)
    found = plan_quantize(path, "x.gguf", RecipeOptions(7), ToolOptions(), options)
    assert found.new_bytes <= preset.new_bytes and found.target is not None
    file, sample = open_gguf(path, ()), TargetOptions(candidates=few, rows=16)
    free = [c for c in preset.job.choices if c.changes]
    table = target._measure_all(file, free, sample, None, 1, target.EncodeOptions(), lambda n: None)[0]
    weight = sensitivities([c.name for c in preset.job.choices], file.metadata, {}, None)
    assert found.target.damage < 0.5 * sum(weight[c.name] * table[c.name][c.new] for c in free)


# --- the command ------------------------------------------------------------------------------------------------------
def test_command_writes_a_recipe_that_repeats_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "out.gguf", tmp_path / "recipe.txt"
    target = ["--target-bpw", "6", "--candidates", "iq4_k,q5_0,q8_0,iq6_k", "--target-rows", "32"]
    assert main(["quantize", *target, "--write-recipe", str(recipe), str(model), str(out)]) == 0
    err = capsys.readouterr().err
    used = re.search(r"target: (\d+) of (\d+) bytes used", err)
    assert used is not None and int(used[1]) <= int(used[2]) and "predicted KL divergence" in err
    again = tmp_path / "again.gguf"
    assert main(["quantize", "--custom-q", f"@{recipe}", str(model), str(again), "Q4_0"]) == 0
    a, b = open_gguf(out, ()), open_gguf(again, ())
    assert {n: t.type for n, t in a.tensors.items()} == {n: t.type for n, t in b.tensors.items()}
    assert sum(t.n_bytes for t in a.tensors.values()) == int(used[1])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target-bpw", "4", "--target-size", "1M"], "exclude each other"),
        (["--target-bpw", "x"], "not a number of bits per weight"),
        (["--target-size", "1X"], "is not a size"),
        (["--repackable", "Q4_0"], "--repackable needs --target-size or --target-bpw"),
        (["--target-bpw", "4", "--pure"], "a target needs types to choose from"),
        (["--target-bpw", "4", "--candidates", "q9"], "unknown tensor type"),
    ],
)
def test_refused(model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [a for a in argv if a == "Q4_0"]
    assert main(["quantize", *(a for a in argv if a != "Q4_0"), str(model), "out.gguf", *words]) == 2
    assert message in capsys.readouterr().err
