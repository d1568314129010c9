"""The arithmetic of `--fit` and of proposals: every byte is counted once, on the device where it will lie."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepseek_shapes import LITE, expert_types
from factories import tiny_model
from gguf_files import write_model
from header_models import write_deepseek

from ikcli.engine.plan import fit, memory_plan
from ikcli.engine.plan.devices import described_machine
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_device_spec

GIB, MIB = 2**30, 2**20
BASE = replace(RunConfig(command="plan"), n_threads=1, n_threads_batch=1, n_ctx=4096, n_ubatch=64, n_gpu_layers=99)
RULES = (r"blk\.[1-3]\.ffn_up_exps=CUDA0", r"blk\.4\.attn_output=CPU", r"blk\.5\.ffn_(gate|down)_exps=CUDA1")


def planner_for(path: Path, spec: str) -> Planner:
    file = open_gguf(path, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(path))
    return Planner(file, hp, described_machine(parse_device_spec(spec), None))


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Six layers of DeepSeek-V2-Lite, five with experts."""
    path = tmp_path_factory.mktemp("six") / "six.gguf"
    return planner_for(write_deepseek(path, replace(LITE, n_layer=6), expert_types("q4_0", "q4_0")), "2*cuda:2GiB")


def _in_all(costs: fit._Costs) -> int:
    return sum(costs.block) + sum(costs.up_gate) + sum(costs.down) + costs.output + sum(costs.fixed.values())


@pytest.mark.parametrize("rules", [(), RULES])
@pytest.mark.parametrize("no_kv_offload", [False, True])
def test_every_byte_is_counted_once(planner: Planner, rules: tuple[str, ...], no_kv_offload: bool) -> None:
    config = replace(BASE, override_tensor=rules, no_kv_offload=no_kv_offload)
    costs, weights = fit._costs(planner, config), planner.gpu_weights(config)
    wanted: dict[str, int] = {}
    for rule in rules:
        pattern, device = rule.split("=")
        n_bytes = sum(n for name, n in weights.items() if re.search(pattern, name))
        wanted[device] = wanted.get(device, 0) + n_bytes
        assert n_bytes > 0
    assert costs.fixed == wanted
    cache = 0 if no_kv_offload else sum(planner.gpu_cache(config).values())
    assert _in_all(costs) == sum(weights.values()) - weights["token_embd.weight"] + cache
    assert [il for il in range(6) if costs.experts(il) == 0] == [0] and (costs.up_gate[2] > 0) and costs.output > 0


def test_the_output_of_a_tied_model_is_its_embeddings(tmp_path: Path) -> None:
    for tied in (True, False):
        planner = planner_for(write_model(tiny_model("llama", tied=tied), tmp_path / f"{tied}.gguf"), "cuda:2GiB")
        weights, costs = planner.gpu_weights(BASE), fit._costs(planner, BASE)
        name = "token_embd.weight" if tied else "output.weight"
        assert costs.output == weights[name] + weights["output_norm.weight"]


@pytest.mark.parametrize("rules", [(), RULES])
@pytest.mark.parametrize("tensor_split", [(), (2.0, 1.0)])
def test_what_is_chosen_leaves_the_reserve(
    planner: Planner, rules: tuple[str, ...], tensor_split: tuple[float, ...]
) -> None:
    """By the plan's own bytes: weights and cache of every GPU, those that rules put there included."""
    config = replace(BASE, override_tensor=rules, tensor_split=tensor_split, n_gpu_layers=7)
    free = dict(zip(planner.machine.names, planner.machine.free, strict=True))
    seen = set()
    for reserve in (0, 400 * MIB, 800 * MIB, 1200 * MIB):
        choice = fit._choose(planner, config, dict.fromkeys(free, reserve))
        seen.add((choice.n_gpu_layers, len(choice.on_cpu)))
        parts = planner.static_bytes(fit._apply(planner, config, choice))
        least = fit._costs(planner, config).fixed
        assert all(parts[name] <= max(free[name] - reserve, least.get(name, 0)) for name in free)
    assert len(seen) > 1


@pytest.mark.parametrize(("mib", "margin"), [(0, RESERVE_BYTES), (1024, 1024 * MIB)])
def test_a_small_margin_is_what_kernels_and_graphs_need(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, mib: int, margin: int
) -> None:
    class Asked(Exception):
        pass

    def choose(planner: Planner, config: RunConfig, reserve: dict[str, int]) -> fit._Choice:
        raise Asked(reserve)

    monkeypatch.setattr(fit, "_choose", choose)
    monkeypatch.setattr(planner, "may_fit", lambda *args, **settings: False)
    with pytest.raises(Asked) as asked:
        fit.fit(planner, replace(BASE, fit_margin=mib))
    assert set(asked.value.args[0].values()) == {margin + fit._FIRST_GUESS}


def test_what_a_run_needs_beside_the_model_is_counted_once(planner: Planner) -> None:
    """A projector on one GPU: in plans, in quick checks, in the room that `--fit` fills."""
    beside = {"CUDA0": {"projector": 700 * MIB, "images": 100 * MIB}, "CPU": {"projector": 0, "images": MIB}}
    other = planner.on(planner.machine, beside=beside)
    config = replace(BASE, tensor_split=(1.0, 1.0))
    before, after = planner.plan(config).memory, other.plan(config).memory
    for device, more in (("CUDA0", 800 * MIB), ("CUDA1", 0), ("CPU", MIB)):
        assert after.total(device) == before.total(device) + more
        assert other.static_bytes(config)[device] == planner.static_bytes(config)[device] + more
    assert fit._costs(other, config).fixed == {"CUDA0": 800 * MIB, "CPU": MIB}
    first, second = (
        p.plan(p_fit.config).memory for p, p_fit in ((p, fit.fit(p, BASE, 64 * MIB)) for p in (planner, other))
    )
    assert second.fits() and second.total("CUDA0") - 800 * MIB < first.total("CUDA0")
    assert other.on(planner.machine).beside == beside


def test_shares_count_blocks_output_and_experts() -> None:
    costs = fit._Costs([10] * 4, [20] * 4, [10] * 4, 15, {})
    dealt = fit._deal_by_shares(costs, [100, 54], 5, (1.0, 1.0))
    assert dealt is not None and dealt.home == [0, 0, 0, 1] and dealt.on_cpu == (0, 3)
    assert dealt.left == [100 - 3 * 10 - 2 * 30, 54 - 10 - 15]
    assert fit._deal_by_shares(costs, [100, 24], 5, (1.0, 1.0)) is None
    assert fit._deal_by_shares(costs, [100, 25], 5, (1.0, 1.0)) is not None


def test_experts_stay_on_a_gpu_from_the_last_block_on() -> None:
    """Smaller ones before a block whose experts do not fit stay on the CPU too."""
    costs = fit._Costs([10] * 4, [5, 40, 20, 20], [5, 10, 10, 10], 0, {})
    dealt = fit._deal_by_shares(costs, [40 + 30 + 30 + 20], 4, (1.0,))
    assert dealt is not None and dealt.on_cpu == (0, 1) and dealt.left == [20]


def test_nothing_is_added_where_all_experts_are_on_gpus() -> None:
    costs = fit._Costs([10] * 4, [20] * 4, [10] * 4, 15, {})
    for on_cpu in ((), (2, 3)):  # none, or those of another GPU
        dealt = fit._Dealt(5, (2, 3), [0, 0, 1, 1], [99, 9], on_cpu)
        assert fit._fill(costs, dealt, ["CUDA0", "CUDA1"]).rules == ()


def test_blocks_are_dealt_out_by_bytes() -> None:
    costs = fit._Costs([10] * 4, [20] * 4, [10] * 4, 15, {})
    dealt = fit._deal(costs, [50, 95], 5, 2)  # 10, 10, 40, 40, 15
    assert dealt is not None and dealt.home == [0, 0, 1, 1] and dealt.left == [30, 0] and dealt.counts == (2, 3)
    assert dealt.on_cpu == (0, 1) and fit._deal(costs, [50, 94], 5, 2) is None
    some = fit._deal(costs, [50, 95], 3, 2)  # the last three
    assert some is not None and some.home == [-1, 0, 0, 1] and some.on_cpu == (1,) and some.left == [0, 55]


@pytest.mark.parametrize(("left", "part"), [(30, "(up|gate|gate_up)"), (19, "down"), (20, "(up|gate|gate_up)"),
                                            (10, "down"), (9, None)])  # fmt: skip
def test_what_is_left_takes_a_part_that_fits(left: int, part: str | None) -> None:
    costs = fit._Costs([10] * 4, [20] * 4, [10] * 4, 15, {})
    choice = fit._fill(costs, fit._Dealt(5, (5,), [0] * 4, [left], (0, 1)), ["CUDA0"])
    assert choice.rules == ((rf"blk\.1\.ffn_{part}_exps\.=CUDA0",) if part else ())


@pytest.mark.parametrize(("given", "most"), [(None, 7), (-1, 7), (3, 3), (7, 7), (99, 7), (0, 0)])
def test_a_given_ngl_is_the_most(planner: Planner, given: int | None, most: int) -> None:
    assert fit._most_layers(planner, replace(BASE, n_gpu_layers=given)) == most


@pytest.mark.parametrize(("ngl", "on_cpu", "n_cpu", "rules"), [
    (7, (1, 2, 3), 4, []),
    (7, (2, 3), 0, [r"blk\.(2|3)\.ffn_(up|down|gate|gate_up)_exps\.=CPU"]),
    (3, (3, 4), 5, []),  # blocks 0 to 2 are on the CPU as a whole
    (3, (4,), 0, [r"blk\.(4)\.ffn_(up|down|gate|gate_up)_exps\.=CPU"]),
])  # fmt: skip
def test_the_first_experts_of_what_is_on_gpus_are_a_number(
    planner: Planner, ngl: int, on_cpu: tuple[int, ...], n_cpu: int, rules: list[str]
) -> None:
    found = fit._apply(planner, BASE, fit._Choice(ngl, (), on_cpu))
    assert found.n_cpu_moe == n_cpu and list(found.override_tensor) == rules


# --- proposals -------------------------------------------------------------------------------------------------------
class Fits:
    """A planner for which a run fits as `when` says; keeps what it was asked."""

    def __init__(self, when: Any, **hp: Any) -> None:
        self.when, self.hp, self.asked = when, SimpleNamespace(**hp), list[Any]()

    def fits(self, config: RunConfig) -> bool:
        self.asked.append(config)
        return bool(self.when(config))


def test_smaller_micro_batches_down_to_128() -> None:
    plan: Any = SimpleNamespace(config=replace(BASE, n_ubatch=512))
    for most, wanted in ((256, ["-ub 256"]), (128, ["-ub 128"]), (64, [])):
        planner: Any = Fits(lambda config, most=most: config.n_ubatch <= most)
        assert list(memory_plan._smaller_batch(planner, plan)) == wanted
        assert planner.asked[-1].n_ubatch == max(most, 128)


@pytest.mark.parametrize(("latent", "mla", "change"), [
    (512, 3, "-ctk q8_0"), (512, 0, "-ctk q8_0 -ctv q8_0"), (0, 3, "-ctk q8_0 -ctv q8_0"),
])  # fmt: skip
def test_smaller_cache_types(latent: int, mla: int, change: str) -> None:
    """With MLA there is one cache tensor, of the type of keys."""
    planner: Any = Fits(lambda config: True, kv_lora_rank=latent)
    plan: Any = SimpleNamespace(config=replace(BASE, mla=mla))
    assert list(memory_plan._smaller_cache_type(planner, plan)) == [change]
    assert (planner.asked[0].type_k, planner.asked[0].type_v) == ("q8_0", "q8_0" if "-ctv" in change else BASE.type_v)
    for other in ({"type_k": "q8_0"}, {"flash_attn": False}):
        plan = SimpleNamespace(config=replace(BASE, mla=mla, **other))
        assert list(memory_plan._smaller_cache_type(planner, plan)) == []


def test_experts_that_rules_placed_do_not_move(planner: Planner) -> None:
    """The fewest blocks whose other experts are enough, by bytes, before anything is planned."""
    config = replace(BASE, override_tensor=(r"blk\.1\.ffn_.*_exps=CUDA0",), tensor_split=(1.0, 0.0))
    weights, placement = planner.gpu_weights(config), planner.place(config)
    block = sum(n for name, n in weights.items() if re.match(r"blk\.2\.ffn_.*_exps", name))
    for lacks, wanted in ((1, 3), (block, 3), (block + 1, 4), (2 * block, 4), (4 * block, 6)):
        memory = SimpleNamespace(short=lambda device, lacks=lacks: lacks if device == "CUDA0" else 0)
        plan: Any = SimpleNamespace(config=config, placement=placement, memory=memory)
        asker: Any = Fits(lambda config: True)
        asker.gpu_weights = planner.gpu_weights
        assert list(memory_plan._fewer_experts(asker, plan)) == [f"--n-cpu-moe {wanted}"]
        assert [c.n_cpu_moe for c in asker.asked] == [wanted]  # a plan is made once
