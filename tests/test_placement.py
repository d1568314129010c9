"""Layer splits and tensor rules against known results for full-size models."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from deepseek_shapes import V3, names

from ikcli.engine.plan import placement
from ikcli.engine.plan.placement import place, split_layers
from ikcli.engine.plan.tensor_rules import check_rules, cpu_rules, layer_text, match_rules, parse_rule, rule_lines
from ikcli.errors import UsageError
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_rules

V3_NAMES = names(V3, "ik")
GPUS = [f"CUDA{i}" for i in range(15)]


@pytest.mark.parametrize(
    ("shares", "ngl", "n_layer", "counts", "output"),
    [
        ((42, *[25] * 13, 40), 62, 61, (7, 4, 4, 3, 4, 4, 4, 4, 3, 4, 4, 4, 4, 3, 5), 14),
        ((38, 26, *[24] * 7, 25, *[24] * 4, 33), 99, 61, (7, 4, 4, 3, 4, 4, 4, 4, 4, 4, 4, 3, 4, 4, 4), 14),
        ((17, 20, 21, 45), 27, 61, (5, 5, 6, 11), -1),
        ((1, 1), 99, 61, (31, 30), 1),
        ((1, 1, 1), 99, 61, (21, 21, 19), 2),
        ((1, 1, 1, 1), 99, 61, (16, 15, 16, 14), 3),
        ((1, 1), 99, 60, (31, 29), 1),
        ((1, 1), 99, 27, (14, 13), 1),
        ((3, 1), 99, 8, (7, 1), 1),
        ((3, 1), 4, 8, (3, 1), -1),
    ],
)
def test_layer_split(shares, ngl, n_layer, counts, output) -> None:
    split = split_layers(n_layer, ngl, shares)
    assert tuple(split.count(i) for i in range(len(shares))) == counts
    assert split.output == output
    n_cpu = n_layer - sum(counts)
    assert split.blocks[:n_cpu] == (-1,) * n_cpu  # the first blocks stay on the CPU


def test_layer_split_edges() -> None:
    assert split_layers(4, 0, (1,)) == split_layers(4, 99, ())
    assert split_layers(4, -1, (1,)) == split_layers(4, 5, (1,))
    assert split_layers(4, 4, (1,)).output == -1


def count(*patterns: str) -> list[int]:
    rules = [parse_rule(f"{pattern}=CPU") for pattern in patterns]
    return [len(use.won) for use in match_rules(rules, V3_NAMES).uses]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("exps", 174),
        (r"\.ffn_.*_exps\.", 174),
        (".ffn_.*_exps.", 174),
        ("down_exps", 58),
        ("attn_kv_b", 61),
        ("shexp", 174),
        ("exp_probs_b", 58),
        ("ffn_gate_inp", 58),
        ("_norm", 245),
        ("attn", 610),
        ("ffn", 476),
        (r"blk\.(3)\.ffn_.*", 8),
        (r"blk\.(3|4)\.ffn_.*", 16),
        (r"blk\.(3|4|5|6|7|8)\.ffn_.*", 48),
        (r"blk\.(3|4|5|6|7|8|9|10|11)\.ffn_.*", 72),
        (r"blk\.[0-10]\.ffn", 8),
        (r"blk\.[0-9]\.ffn", 68),
        (r"[6-9]\.*exps", 0),
        (r"[3-5]\.*exps", 0),
        (r"[1-6][0-9]\.*exps", 0),
        ("[3-5].*exps", 117),
        ("[6-9].*exps", 75),
        ("[1-6][0-9].*exps", 153),
        ("6.ffn_down_exps", 6),
        (r"blk\.(2[5-9]|[3-6][0-9])\..*_exps\.", 108),
        (r"blk\.([1-6])\..*_exps\.", 12),
        (r"blk\.([7-9]|1[0])\..*_exps\.", 12),
    ],
)
def test_match_counts(pattern, expected) -> None:
    assert count(pattern) == [expected]


def test_first_match_wins() -> None:
    assert count("exps", "attn_kv_b") == [174, 61]
    assert count(r"blk\.(3)\.ffn_.*", "exps") == [8, 171]
    assert count("exps", r"blk\.(3|4|5)\.ffn_.*") == [174, 15]
    assert count(r"blk\.(3|4|5)\.ffn_.*", "exps") == [24, 165]
    assert count("exps", "blk.*[02468].ffn.", "blk.*[13579].ffn.") == [174, 153, 149]
    assert sum(count("[6-9].*exps", "[1-6][0-9].*exps")) == 165
    assert sum(count("down_exps", "gate_exps", "up_exps")) == 174


def warnings_for(*texts: str, strict: bool = False) -> list[str]:
    return check_rules(match_rules([parse_rule(text) for text in texts], V3_NAMES), V3_NAMES, strict)


def test_shadowed_rule() -> None:
    matches = match_rules([parse_rule("exps=CPU"), parse_rule(r"blk\.(3|4|5)\.ffn_.*=CUDA1")], V3_NAMES)
    assert rule_lines(matches)[1] == (
        r'rule 2 "blk\.(3|4|5)\.ffn_.*=CUDA1": 24 matches, 9 already taken by rule 1 "exps=CPU"'
    )
    (small,) = check_rules(matches, V3_NAMES)
    assert "0 of 9 expert tensors" in small and small.startswith("rule 2")
    lost = warnings_for("exps=CPU", "down_exps=CUDA0")
    assert len(lost) == 1 and lost[0].endswith('58 already taken by rule 1 "exps=CPU", so it does nothing')
    assert warnings_for(r"blk\.(3|4|5)\.ffn_.*=CUDA1", "exps=CPU") == []


@pytest.mark.parametrize(("first", "said"), [("[01]", False), ("[012]", True)])
def test_a_rule_that_loses_more_than_half_says_so(first: str, said: bool) -> None:
    names = [f"blk.{il}.ffn_up.weight" for il in range(4)]
    rules = [parse_rule(rf"blk\.{first}=CUDA1"), parse_rule("ffn_up=CPU")]
    found = check_rules(match_rules(rules, names), names)
    assert any("already taken by rule 1" in text for text in found) == said


def test_digit_class_and_escaped_dot_star_name_the_blocks() -> None:
    (text,) = warnings_for(r"blk\.[0-10]\.ffn=CUDA0")
    assert "[0-10]" in text and "blocks 0-1" in text
    text, nothing = warnings_for("exps=CPU", r"[3-5]\.*exps=CUDA0")
    assert "matches nothing" in text and "[3-5].*exps" in text
    assert "matches no tensor" in nothing and "117 tensors" in nothing


def test_no_match_is_an_error_only_if_strict() -> None:
    assert any("matches no tensor" in text for text in warnings_for("exps=CPU", "attn_qkv=CPU"))
    (alone,) = warnings_for("attn_qkv=CPU")
    assert re.match(r'-ot: rule "attn_qkv=CPU" matches no tensor of this model; nearest: attn_\w+', alone)
    with pytest.raises(UsageError, match="matches no tensor"):
        warnings_for("exps=CPU", "attn_qkv=CPU", strict=True)
    with pytest.raises(UsageError) as raised:
        warnings_for("EXPS=CPU", strict=True)
    assert raised.value.exit_code == 2 and "(?i)EXPS (174 tensors" in str(raised.value)


def test_bad_rules() -> None:
    with pytest.raises(UsageError, match=r"unknown buffer .GPU0.*CPU, CUDA0"):
        parse_rule("exps=GPU0")
    with pytest.raises(UsageError, match=r"valid buffers are CPU, CUDA0$"):
        parse_rule("exps=CUDA1", ("CPU", "CUDA0"))
    with pytest.raises(UsageError) as raised:
        parse_rule(r"blk\.(3=CPU")
    assert str(raised.value).endswith("    blk\\.(3\n         ^")
    with pytest.raises(ValueError, match="without '='"):
        parse_rules("exps=CPU,attn")


def test_expert_options_follow_the_rules() -> None:
    rules = [parse_rule(r"blk\.0\.=CUDA0"), *cpu_rules(False, 5, 0)]
    uses = match_rules(rules, V3_NAMES).uses
    assert len(uses[1].matched) == 6 and layer_text(uses[1].matched) == "blocks 3-4"
    assert len(match_rules(cpu_rules(True, 0, 0), V3_NAMES).uses[0].matched) == 174
    assert cpu_rules(False, 0, 0) == []


def test_place_on_gpus() -> None:
    config = replace(RunConfig(), n_gpu_layers=99, override_tensor=(r"blk\.(3)\.ffn_.*=CUDA0", "exps=CPU"))
    placed = place(V3_NAMES, 61, config, GPUS[:1])
    assert placed.buffer_of["token_embd.weight"] == "CPU"
    assert placed.buffer_of["output.weight"] == placed.buffer_of["blk.3.ffn_up_exps.weight"] == "CUDA0"
    assert placed.buffer_of["blk.4.ffn_up_exps.weight"] == "CPU"
    assert sum(buffer == "CPU" for buffer in placed.buffer_of.values()) == 172
    assert placement.placement_sentence(placed.buffer_of) == (
        "attention 61/61 layers, shared experts 58/58, routed experts 1/58 on GPU"
    )
    assert len(placed.notices) == 2 and placed.warnings == ()


def test_rule_table_is_short_unless_verbose() -> None:
    rules = tuple(f"blk\\.{il}\\.ffn_up_exps=CPU" for il in range(3, 61))
    config = replace(RunConfig(), override_tensor=rules)
    sizes = dict.fromkeys(V3_NAMES, 2**20)
    notices = place(V3_NAMES, 61, config, n_bytes=sizes).notices
    assert len(notices) == 21 and notices[-1] == "... and 38 more rules (-v shows all)"
    notices = place(V3_NAMES, 61, replace(config, verbose=True), n_bytes=sizes).notices
    assert len(notices) == 58 + 58
    assert notices[-1] == "Tensor blk.60.ffn_up_exps.weight (size = 1.00 MiB) buffer type overridden to CPU"


def test_split_modes_and_shares() -> None:
    config = replace(RunConfig(), split_mode="none", main_gpu=1)
    assert placement.device_shares(config, 2) == (0.0, 1.0)
    assert set(split_layers(8, 99, (0.0, 1.0)).blocks) == {1}
    with pytest.raises(UsageError, match="-mg 1"):
        placement.device_shares(config, 1)
    assert placement.device_shares(replace(RunConfig(), tensor_split=(3.0,)), 2) == (3.0, 0.0)
    with pytest.raises(UsageError, match="-ts names 3"):
        placement.device_shares(replace(RunConfig(), tensor_split=(1.0, 1.0, 1.0)), 2)
    assert placement.device_shares(RunConfig(), 2, (6, 2)) == (6.0, 2.0)


def test_gpu_options_without_a_gpu_give_one_line() -> None:
    rules = (r"blk\.(3)\.ffn_.*=CUDA0", r"blk\.(4)\.ffn_.*=CUDA1", "exps=CPU")
    config = replace(RunConfig(), n_gpu_layers=99, override_tensor=rules)
    placed = place(V3_NAMES, 61, config)
    assert placed.notices[0] == ("no CUDA device: -ngl 99 and 2 CUDA rules have no effect, everything runs on the CPU")
    assert set(placed.buffer_of.values()) == {"CPU"}
    assert placement.no_device_notice(replace(RunConfig(), n_gpu_layers=63)).startswith(
        "no CUDA device: -ngl 63 has no effect"
    )
    assert placement.no_device_notice(replace(RunConfig(), override_tensor=("exps=CPU",))) == ""
    nonsense = replace(RunConfig(), override_tensor=("nonsense=CPU",))
    assert "matches no tensor" in place(V3_NAMES, 61, nonsense).warnings[0]
    with pytest.raises(UsageError, match="matches no tensor"):
        place(V3_NAMES, 61, replace(nonsense, strict=True))
    dense = [name for name in V3_NAMES if "_exps" not in name]
    without = replace(RunConfig(), n_cpu_moe=2)
    assert place(dense, 61, without).warnings[0].startswith("--n-cpu-moe: rule ")
    with pytest.raises(UsageError, match="--n-cpu-moe: rule "):
        place(dense, 61, replace(without, strict=True))


@pytest.mark.parametrize(
    ("ngl", "offloading", "offloaded", "n_lines"), [(63, 61, 62, 3), (62, 61, 62, 3), (61, 61, 61, 2), (27, 27, 27, 2)]
)
def test_offload_lines(ngl, offloading, offloaded, n_lines) -> None:
    lines = placement.offload_lines(61, ngl)
    assert len(lines) == n_lines
    assert lines[0] == f"llm_load_tensors: offloading {offloading} repeating layers to GPU"
    assert lines[-1] == f"llm_load_tensors: offloaded {offloaded}/62 layers to GPU"


@pytest.mark.parametrize(
    ("n_expert", "used", "threshold"), [(256, 8, 1024), (128, 8, 512), (160, 6, 853.3), (64, 6, 341.3)]
)
def test_offload_threshold(n_expert, used, threshold) -> None:
    assert placement.offload_threshold(32, n_expert, used) == pytest.approx(threshold, abs=0.05)


def test_a_block_is_on_the_gpu_if_all_of_it_is() -> None:
    names = [f"blk.{il}.attn_{part}.weight" for il in range(3) for part in ("q", "k")]
    for on_cpu, wanted in (((), 3), (("blk.0.attn_q.weight",), 2), (("blk.0.attn_k.weight", "blk.2.attn_q.weight"), 1)):
        buffers = {name: "CPU" if name in on_cpu else "CUDA0" for name in names}
        assert placement.placement_sentence(buffers) == f"attention {wanted}/3 layers on GPU"


@pytest.mark.parametrize(("rules", "said"), [(("ffn=CPU",), False), (("ffn=CUDA0",), True),
                                             (("ffn=CUDA0", "attn=CUDA1"), False)])  # fmt: skip
def test_gpus_without_a_rule_are_named_where_others_have_one(rules: tuple[str, ...], said: bool) -> None:
    names = [f"blk.{il}.{part}.weight" for il in range(2) for part in ("attn_q", "ffn_up")]
    config = RunConfig(command="bench", override_tensor=rules, n_gpu_layers=99)
    notices = placement.place(names, 2, config, ("CUDA0", "CUDA1")).notices
    assert any("no -ot rule" in text for text in notices) == said
