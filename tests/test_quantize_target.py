"""Types for a given size: knapsack, sensitivities, calibration, placement, recipes, options, gain on a model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import quant_models

from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.main import main
from ikcli.quant.calibration import Damage, fit, make_groups
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.knapsack import TypeOption, hull, solve
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.sensitivity import KEY_FACTOR, sensitivities, shares
from ikcli.quant.target import CpuShare, SizeBudget, TargetOptions, candidates_for
from ikcli.quant.target_report import recipe_rules, recipe_text
from ikcli.quant.tool import ToolOptions, ToolPlan, plan_quantize
from ikcli.settings.run import default_model, default_text

T = GGMLType


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quant_models.write_model(tmp_path_factory.mktemp("m") / "m.gguf")


def option(n_bytes: int, damage: float) -> TypeOption:
    return TypeOption(T.Q8_0, n_bytes, damage)


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
        found = solve(curves, budget)
        assert found.n_bytes <= budget
        fitting = [p for p in itertools.product(*curves) if sum(o.n_bytes for o in p) <= budget]
        best = min(sum(o.damage for o in p) for p in fitting)
        worst = sum(c[0].damage for c in curves)
        assert found.damage <= best + 0.1 * (worst - best)
        assert found.bound <= best + 1e-12


def test_shares_of_the_stream() -> None:
    names = ["blk.0.attn_output.weight", "blk.0.ffn_down.weight", "blk.1.attn_output.weight", "blk.1.attn_q.weight"]
    energies = {names[0]: 1.0, names[1]: 4.0, names[2]: 2.0}
    found = shares(names, {}, energies, 3.0)
    assert found == {(0, "attn"): 1 / 4, (0, "ffn"): 4 / 8, (1, "attn"): 2 / 10}
    equal = shares(names, {}, {}, 3.0)  # nothing known: every branch is as strong as the embedding
    assert list(equal.values()) == [1 / 2, 1 / 3, 1 / 4]
    experts = {"general.architecture": "x", "x.expert_used_count": 4, "x.expert_weights_norm": True}
    down = "blk.0.ffn_down_exps.weight"
    assert shares([down], experts, {down: 4.0}, 3.0) == {(0, "ffn_exps"): 1 / 4}
    experts |= {"x.expert_count": 64, "x.expert_weights_norm": False}
    assert shares([down], experts, {down: 64.0}, 3.0) == {(0, "ffn_exps"): 1 / 4}


def test_sensitivities_follow_the_shares() -> None:
    names = [f"blk.0.attn_{kind}.weight" for kind in ("output", "q", "k", "v")]
    names += ["token_embd.weight", "blk.0.ffn_down.weight"]
    small = sensitivities(names, {}, {names[0]: 1.0, names[5]: 1.0}, 9.0)
    large = sensitivities(names, {}, {names[0]: 9.0, names[5]: 1.0}, 9.0)
    assert [large[n] / small[n] for n in names[:4]] == pytest.approx([5.0] * 4)
    assert large[names[0]] == large[names[1]] == large[names[3]] == large[names[2]] / KEY_FACTOR
    scores = sensitivities(names, {}, {names[0]: 1.0, names[5]: 1.0, names[1]: 3.0, names[2]: 1.0}, 9.0)
    assert [scores[n] / small[n] for n in names[:4]] == pytest.approx([1.0, 3.0, 3.0, 1.0])
    both = sensitivities([*names, "output.weight"], {}, {}, None)
    tied = both["token_embd.weight"] + both["output.weight"]  # a tied embedding is the output too
    assert small["token_embd.weight"] == pytest.approx(tied)


# --- calibration ------------------------------------------------------------------------------------------------------
def test_damage_goes_through_its_points() -> None:
    d = Damage(2.0, ((0.01, 0.1), (0.04, 0.8)))
    assert d.of(0.01) == pytest.approx(0.2) and d.of(0.04) == pytest.approx(1.6)
    assert d.of(0.02) == pytest.approx(2 * 0.1 * 8**0.5)  # a line on logarithmic axes, of slope 1.5
    assert d.of(0.0025) == pytest.approx(0.2 / 8) and d.of(0.0) == 0.0
    assert Damage(1.0, ((0.01, 0.1), (0.011, 9.0))).of(0.022) == pytest.approx(9.0 * 2**1.75)  # slopes are limited
    assert Damage(3.0, ((0.01, 0.1),)).of(0.02) == pytest.approx(0.6)
    assert Damage(1.0).of(0.2) > 2 * Damage(1.0).of(0.1) > 0.2


def test_groups_and_their_trials() -> None:
    errors = {T.IQ2_K: 0.08, T.IQ3_K: 0.02, T.IQ4_K: 0.004, T.IQ5_K: 0.001}
    names = [f"blk.{i}.{kind}.weight" for i in range(8) for kind in ("attn_q", "ffn_up_exps", "ffn_gate_exps")]
    table = dict.fromkeys([*names, "output.weight"], errors)
    groups = make_groups(table, dict.fromkeys(table, 4.4), most=6)
    assert sorted(n for g in groups for n in g.names) == sorted(table)
    assert len(groups) == 1 + 2 * 2 and all(len(g.names) in (1, 4, 8) for g in groups)
    assert groups[0].title == "blk.0-3.attn_q.weight"
    assert [set(t.values()) for t in groups[0].trials] == [{T.IQ3_K}, {T.IQ5_K}]
    assert [set(t.values()) for t in make_groups(table, dict.fromkeys(table, 3.0), most=6)[0].trials] == [
        {T.IQ2_K},
        {T.IQ3_K},
    ]


def test_fit_recovers_what_was_measured() -> None:
    table = {"blk.0.a": {T.IQ2_K: 0.08, T.IQ4_K: 0.005}, "blk.1.a": {T.IQ2_K: 0.08, T.IQ4_K: 0.005}}
    group = make_groups(table, dict.fromkeys(table, 3.4), most=1)[0]
    damages = fit(
        group, [0.3 if T.IQ2_K in t.values() else 0.01 for t in group.trials], table, {"blk.0.a": 1, "blk.1.a": 3}
    )
    for type, kld in ((T.IQ2_K, 0.3), (T.IQ4_K, 0.01)):
        assert sum(damages[n].of(table[n][type]) for n in table) == pytest.approx(kld)
    assert damages["blk.1.a"].of(0.02) == pytest.approx(3 * damages["blk.0.a"].of(0.02))


def test_candidates(model: Path) -> None:
    name, shape = "blk.0.ffn_up_exps.weight", (256, 32, 4)
    imatrix = Imatrix({name: ImatrixEntry(np.ones((4, 256), np.float32), np.ones(4, np.float32))})
    plain, weighted = (candidates_for(TargetOptions(), name, shape, T.F16, i) for i in (None, imatrix))
    assert T.IQ2_XXS in weighted and T.IQ2_XXS not in plain and T.IQ4_K in plain
    repackable = candidates_for(TargetOptions(repackable=True), name, shape, T.F16, imatrix)
    assert T.IQ4_K in repackable and T.IQ4_KSS not in repackable and T.IQ2_KL not in repackable
    on_cpu = candidates_for(TargetOptions(), name, shape, T.F16, imatrix)
    dense = candidates_for(TargetOptions(), "blk.0.ffn_up.weight", shape, T.F16, None)
    assert T.IQ4_KSS in dense and T.IQ4_KSS not in on_cpu  # experts are for the CPU: interleaved twins wanted
    known = TargetOptions(placement=CpuShare(lambda n: "exps" in n, frozenset({"cpu"})))
    assert T.IQ4_KT in candidates_for(known, "blk.0.ffn_up.weight", shape, T.F16, None)
    assert T.IQ4_KT not in [*dense, *candidates_for(known, name, shape, T.F16, imatrix)]
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
        found = plan(model, total=SizeBudget(bpw=bpw))
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
    found = {c.name: c for c in plan(model, recipe, total=SizeBudget(bpw=5.5)).job.choices}
    assert (found["blk.0.attn_q.weight"].new, found["blk.0.attn_q.weight"].reason) == (T.Q8_0, "rule 1")
    assert (found["output.weight"].new, found["output.weight"].reason) == (T.Q5_0, "--output-tensor-type")


def test_impossible_budget(model: Path) -> None:
    with pytest.raises(UsageError, match=r"the least that the candidate types can reach; with --imatrix"):
        plan(model, total=SizeBudget(bpw=1.0))


def test_sides_have_budgets_of_their_own(model: Path) -> None:
    found = plan(model, cpu=SizeBudget(bpw=4.6), gpu=SizeBudget(bpw=7.5))
    assert found.target is not None
    for side, bpw in (("cpu", 4.6), ("gpu", 7.5)):
        mine = [c for c in found.job.choices if ("exps" in c.name) == (side == "cpu")]
        n_elements = sum(int(np.prod(c.shape)) for c in mine)
        assert bpw - 0.6 < 8 * sum(c.n_bytes for c in mine) / n_elements <= bpw
    total = SizeBudget(n_bytes=found.new_bytes)
    rest = plan(model, total=total, gpu=SizeBudget(bpw=7.5)).target  # the CPU gets the rest
    assert rest is not None and rest.budget == found.new_bytes
    with pytest.raises(UsageError, match="target of the CPU tensors"):
        plan(model, cpu=SizeBudget(bpw=1.0), gpu=SizeBudget(bpw=7.5))


def test_cpu_tensors_can_be_written_interleaved(model: Path) -> None:
    types = {c.name: c.new for c in plan(model, total=SizeBudget(bpw=5.0), r4=True).job.choices}
    assert TYPES[types["blk.0.ffn_up_exps.weight"]].is_interleaved
    assert not TYPES[types["blk.0.attn_q.weight"]].is_interleaved


def test_calibration_decides(model: Path) -> None:
    """A tensor that the model hardly needs gets the smallest type, one that it needs badly the largest."""
    trials = []

    def measure(wanted, encoding):  # type: ignore[no-untyped-def]
        trials.extend(wanted)
        return [sum(1e-6 if "attn_q" in n else 10.0 if "attn_v" in n else 0.1 for n in trial) for trial in wanted]

    found = plan(model, total=SizeBudget(bpw=5.5), calibrate=measure)
    types = {c.name: c.new for c in found.job.choices}
    assert TYPES[types["blk.0.attn_q.weight"]].bpw < 4 and TYPES[types["blk.0.attn_v.weight"]].bpw > 6
    assert found.target is not None and found.target.measured is not None
    assert trials[-1] == {c.name: c.new for c in found.job.choices if c.changes}
    assert any("on the calibration text" in line for line in recipe_text(found.job.choices, found.target))


@pytest.mark.slow  # measures many mixtures of a model
def test_calibrated_recipe_beats_a_preset_of_its_size(tmp_path: Path) -> None:
    """On the bundled model, with the preset's own types, on text that the calibration has not seen."""
    from ikcli.quant.encoding import Encoding
    from ikcli.study.calibrate import Calibrator
    from ikcli.study.resident import ResidentOptions

    path, text = default_model(), default_text().read_text("utf-8")
    seen, unseen = tmp_path / "seen.txt", tmp_path / "unseen.txt"
    seen.write_text(text[:8000], "utf-8")
    unseen.write_text(text[40000:48000], "utf-8")
    preset = plan_quantize(str(path), "x.gguf", RecipeOptions(10), ToolOptions())  # Q2_K with its mix
    types = {c.name: c.new for c in preset.job.choices if c.changes}
    options = TargetOptions(
        total=SizeBudget(n_bytes=preset.new_bytes),
        candidates=tuple(sorted(set(types.values()))),
        rows=16,
        calibrate=Calibrator(ResidentOptions(path, seen, chunks=6, n_ctx=128)).measure,
        calibrate_groups=1,
    )
    found = plan_quantize(str(path), "x.gguf", RecipeOptions(7), ToolOptions(), options)
    assert found.new_bytes <= preset.new_bytes and found.target is not None
    ours, theirs = Calibrator(ResidentOptions(path, unseen, chunks=12, n_ctx=128)).measure(
        [found.target.types, types], Encoding()
    )
    assert 0 < ours < theirs


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
    assert "| CPU | ffn_up_exps | 0 |" in err and "; KLD " in recipe.read_text()
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
        (["--target-size", "1X"], '--target-size: "1X" has the size "1X"; write a number above 0 with a unit, 12GiB'),
        (["--target-size", "1"], "is below"),
        (["--repackable", "Q4_0"], "--repackable needs --target-size or --target-bpw"),
        (["--target-size", "gpu=1M"], "give --target-size-cpu or the --target-size of both"),
        (["--target-size", "gpu=1M,disk=2M"], "is not of the form gpu=...,cpu=..."),
        (["--target-bpw", "4", "--target-size-gpu", "1M", "--target-size-cpu", "1M"], "both sides have a budget"),
        (["--target-bpw", "4", "--cpu-tensors", "exqs"], "leaves no tensor for the CPU"),
        (["--target-bpw", "4", "-ot", "exps"], "-ot has a rule without '='"),
        (["--target-bpw", "4", "-ot", "exps=CPU", "--gpu", "attn"], "-ot tells where tensors go"),
        (["--target-bpw", "4", "--calibrate", "nowhere.txt"], "text file nowhere.txt does not exist"),
        (["--target-bpw", "4", "--calibrate-chunks", "2"], "--calibrate-chunks needs --calibrate TEXT"),
        (["--target-bpw", "4", "--pure"], "a target needs types to choose from"),
        (["--target-bpw", "4", "--candidates", "q9"], "unknown tensor type"),
    ],
)
def test_refused(model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [a for a in argv if a == "Q4_0"]
    assert main(["quantize", *(a for a in argv if a != "Q4_0"), str(model), "out.gguf", *words]) == 2
    assert message in capsys.readouterr().err
