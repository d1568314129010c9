"""Types of every tensor for every preset, against answers of the reference; custom rules, options, refusals."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import add_heads
from real_models import REAL
from recipe_models import MODELS, info, model, run_lengths
from tiers import some
from tiny_architectures import tiny

from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.custom_rules import check_uses, parse_custom_rules, rule_table, rule_uses
from ikcli.quant.formats import format_by_name
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.recipes import RecipeOptions, TypeChoice, choose_types, plain_twin

# Made with llama-quantize --dry-run of ik_llama.cpp (commit 8337e4cd3) on the models of `recipe_models`: some presets
# in full, and for every preset in the order of the file type numbers the crc32 of the lines `name=type`.
# "released": the last byte of that crc32 for the matrices of the models of `real_models`, without
# importance matrix and, for presets that look at it, with one. "heads": the types of a head (MTP).
ANSWERS = json.loads((Path(__file__).parent / "data" / "recipe_answers.json").read_text())
OF_MAINLINE = {"TQ1_0", "TQ2_0"}  # which the reference does not write
REFERENCE = [f for f in FILE_TYPES.values() if not OF_MAINLINE & set(f.names)]
PRESETS = [(name, f.number) for f in REFERENCE for name in f.names]
T = GGMLType


def number(name: str) -> int:
    return dict(PRESETS)[name]


def full_imatrix(tensors: list[Any]) -> Imatrix:
    entries: dict[str, ImatrixEntry] = {}
    for t in tensors:
        n_mat = t.shape[2] if len(t.shape) > 2 else 1
        entries[t.name] = ImatrixEntry(np.ones((n_mat, t.shape[0]), np.float32), np.ones(n_mat, np.float32))
    return Imatrix(entries)


def choose(key: str, name: str, imatrix: bool = False, **options: Any) -> list[TypeChoice]:
    tensors, metadata = model(**MODELS[key])
    recipe = RecipeOptions(number(name), ignore_imatrix_rules=True, **options)
    return choose_types(tensors, metadata, recipe, full_imatrix(tensors) if imatrix else None)


def by_name(choices: list[TypeChoice]) -> dict[str, str]:
    return {c.name: TYPES[c.new].name for c in choices}


# Of models with and without groups, experts and an importance matrix; the other sizes repeat the same decisions.
FEW = ["mha", "gqa2+imatrix", "moe", "moe+imatrix"]
FEW_RELEASED = ["deepseek2-v3", "gemma4-e4b", "glm4-32b"]  # whose thirds of the presets are all


@pytest.mark.parametrize("key", some(ANSWERS["checksums"], FEW))
def test_every_preset_chooses_as_the_reference(key: str) -> None:
    name, _, imatrix = key.partition("+")
    expected = ANSWERS["checksums"][key].split()
    assert len(expected) == len(PRESETS) > 80
    wrong: list[str] = []
    for (preset, _), answer in zip(PRESETS, expected, strict=True):
        if answer == "-":
            with pytest.raises(UsageError, match="needs a multiple of 64"):
                choose(name, preset, bool(imatrix))
            continue
        lines = "\n".join(f"{k}={v}" for k, v in by_name(choose(name, preset, bool(imatrix))).items())
        if f"{zlib.crc32(lines.encode()):08x}" != answer:
            wrong.append(preset)
    assert not wrong


@pytest.mark.parametrize(("key", "preset"), [(k, p) for k, presets in ANSWERS["readable"].items() for p in presets])
def test_presets_in_full(key: str, preset: str) -> None:
    types = {n: t for n, t in by_name(choose(key, preset)).items() if "norm" not in n and "gate_inp" not in n}
    assert run_lengths(types) == ANSWERS["readable"][key][preset]


class _Everything(Imatrix):
    """An importance matrix with weights for every tensor."""

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> str | None:
        return name


LOOK_AT_IMATRIX = [
    "Q4_0", "Q5_0", "Q4_0_R8", "IQ3_XXS", "IQ3_KT", "IQ3_XXS_R4", "IQ4_NL", "IQ4_XS", "IQ4_KS", "IQ4_KSS", "IQ4_KS_R4",
    "IQ4_NL_R4", "IQ4_XS_R8",
]  # fmt: skip
ONCE = [f.names[0] for f in REFERENCE if f.names]


def released(key: str, presets: list[str], imatrix: Imatrix | None) -> dict[str, str]:
    """By preset the last byte of the crc32 of the choices for a released model."""
    found: dict[str, str] = {}
    tensors = [info(name, *shape) for name, shape in REAL[key].matrices.items()]
    metadata = REAL[key].metadata
    for preset in presets:
        recipe = RecipeOptions(number(preset), ignore_imatrix_rules=True)
        lines = (f"{c.name}={TYPES[c.new].name}" for c in choose_types(tensors, metadata, recipe, imatrix))
        found[preset] = f"{zlib.crc32(chr(10).join(lines).encode()) & 255:02x}"
    return found


@pytest.mark.parametrize("key", some(ANSWERS["released"], FEW_RELEASED))
def test_every_preset_of_released_models(key: str) -> None:
    """As the reference, every third one for every model; only there embeddings of single layers are interleaved."""
    first = list(ANSWERS["released"]).index(key) % 3
    for answer, presets, matrix in zip(
        ANSWERS["released"][key].split(), (ONCE, LOOK_AT_IMATRIX), (None, _Everything({})), strict=True
    ):
        expected = dict(zip(presets, (answer[i : i + 2] for i in range(0, len(answer), 2)), strict=True))
        third = presets[first::3]
        found = released(key, third, matrix)
        other = ["BF16_R16"] if key == "gemma4-e4b" and "BF16_R16" in third else []
        assert [p for p in third if found[p] != expected[p]] == other


def test_heads_get_no_less_than_the_reference_gives_them() -> None:
    """And the same, except that embeddings of a head, too, are read row by row: their type is not interleaved."""
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "expert_feed_forward_length": 256}
    whole = add_heads(tiny("glm4moe", **sizes), own=True)
    tensors = [info(name, *t.shape, type=t.type) for name, t in whole.tensors.items()]
    answers = dict(ANSWERS["heads"])
    names = answers.pop("tensors").split()
    assert set(ONCE) - set(answers) == {"F32"}
    for preset, text in answers.items():
        recipe = RecipeOptions(number(preset), ignore_imatrix_rules=True)
        chosen = by_name(choose_types(tensors, whole.metadata, recipe))
        for name, expected in zip(names, text.split(), strict=True):
            wanted = plain_twin(format_by_name(expected).type)[0] if "embed" in name else format_by_name(expected).type
            assert chosen[f"blk.3.{name}.weight"] == TYPES[wanted].name, (preset, name)
            assert TYPES[wanted].bpw >= format_by_name(expected).bpw


def test_custom_rules_first_match_wins_and_beats_the_mix() -> None:
    rules = parse_custom_rules([r"blk\.0\.=q8_0, attn_v=IQ5_K", "\n# comment\nffn_(up|down)=q6_k\nattn=q5_K\n"])
    assert [(r.pattern, r.type) for r in rules] == [
        (r"blk\.0\.", T.Q8_0), ("attn_v", T.IQ5_K), ("ffn_(up|down)", T.Q6_K), ("attn", T.Q5_K)
    ]  # fmt: skip
    choices = choose("mha", "Q4_K_M", custom=rules)
    types = by_name(choices)
    assert types["blk.0.attn_v.weight"] == "q8_0" and types["blk.1.attn_v.weight"] == "iq5_k"
    assert types["blk.1.ffn_down.weight"] == "q6_K" and types["blk.1.ffn_gate.weight"] == "q4_K"
    assert types["blk.0.attn_norm.weight"] == "f32"
    uses = rule_uses(rules, choices)
    assert [(len(u.matched), len(u.won), len(u.kept)) for u in uses] == [
        (8, 7, 1), (32, 31, 0), (64, 62, 0), (160, 93, 31)
    ]  # fmt: skip
    assert uses[3].lost_to == {0: 5, 1: 31}
    assert "| 2 | iq5_k | 32 | 31 |" in rule_table(uses)[3]
    notes = check_uses(uses, [c.name for c in choices])
    assert any('rule 4 "attn=q5_K": 31 of 160 matched tensors stay' in note for note in notes)


def test_a_rule_that_lost_most_of_its_tensors_is_named() -> None:
    """With half of them left it does what it says."""
    metadata = {"general.architecture": "llama", "llama.block_count": 4}
    tensors = [info(f"blk.{il}.ffn_up.weight", 256, 32) for il in range(4)]
    for blocks, named in (("0|1", False), ("0|1|2", True), ("0|1|2|3", True)):
        rules = parse_custom_rules([rf"blk\.({blocks})\.=q8_0,ffn_up=q4_0"])
        choices = choose_types(tensors, metadata, RecipeOptions(number("Q4_K_M"), custom=rules))
        notes = check_uses(rule_uses(rules, choices), [t.name for t in tensors])
        n = blocks.count("|") + 1
        lost = f'rule 2 "ffn_up=q4_0": 4 matches, {n} already taken by rule 1' + ", so it does nothing" * (n == 4)
        assert notes == ([lost] if named else [])


def test_rule_that_matches_nothing_is_named_with_a_hint() -> None:
    rules = parse_custom_rules(["attn_q=q8_0,ffn_dwn=q4_0"])
    choices = choose("mha", "Q4_K_M", custom=rules)
    (note,) = check_uses(rule_uses(rules, choices), [c.name for c in choices])
    assert note.startswith('--custom-q: rule "ffn_dwn=q4_0" matches no tensor of this model; nearest: ffn_down')
    with pytest.raises(UsageError, match=r'rule "ffn_dwn=q4_0" matches no tensor of this model; nearest: ffn_down'):
        check_uses(rule_uses(rules, choices), [c.name for c in choices], strict=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn_q", 'rule "attn_q" is not of the form RE=TYPE'),
        ("=q8_0", "is not of the form"),
        ("attn(=q8_0", "not a valid regular expression"),
        ("attn=q9_k", 'rule "attn=q9_k": unknown tensor type'),
        ("attn=q8_K", "unknown tensor type"),  # an activation type
    ],
)
def test_bad_rules_are_quoted(text: str, message: str) -> None:
    with pytest.raises(UsageError) as problem:
        parse_custom_rules([f"ok=q8_0,{text}"])
    assert message in str(problem.value)


@pytest.mark.parametrize("name", ["q5_k", "Q5_K", "q5_K", "IQ4_NL_r4", "q8_kv", "BF16"])
def test_type_names_in_any_case(name: str) -> None:
    (rule,) = parse_custom_rules([f"x={name}"])
    assert TYPES[rule.type].name.lower() == name.lower()


def test_options_for_one_tensor_beat_everything() -> None:
    rules = parse_custom_rules(["output.weight=q4_0,token_embd=q4_0,gate_inp=q4_0"])
    choices = choose("moe", "Q4_K_M", custom=rules, output_tensor_type=T.Q8_0, token_embedding_type=T.Q6_K_R4)
    types = by_name(choices)
    assert types["output.weight"] == "q8_0" and types["token_embd.weight"] == "q6_K"
    assert types["blk.0.ffn_gate_inp.weight"] == "f32"
    assert by_name(choose("moe", "Q4_K_M", ffn_gate_inp_type=T.BF16))["blk.0.ffn_gate_inp.weight"] == "bf16"
    with pytest.raises(UsageError, match="--ffn-gate-inp-type q6_K"):
        choose_types([info("blk.0.ffn_gate_inp.weight", 96, 8)], {}, RecipeOptions(15, ffn_gate_inp_type=T.Q6_K))


def test_flags_act_inside_the_mix_and_lose_to_custom_rules() -> None:
    rules = parse_custom_rules([r"blk\.3\.attn_k=q4_0"])
    types = by_name(choose("mha", "IQ4_XS", custom=rules, attn_k_type=T.Q5_K, ffn_down_type=T.Q6_0))
    assert (types["blk.2.attn_k.weight"], types["blk.3.attn_k.weight"]) == ("q5_K", "q4_0")
    assert types["blk.0.ffn_down.weight"] == "q6_0"


def test_pure_and_copy_skip_mix_and_rules() -> None:
    rules = parse_custom_rules(["attn=q8_0"])
    pure = choose("mha", "Q4_K_M", custom=rules, pure=True)
    assert {c.new for c in pure if not c.reason.startswith("kept")} == {T.Q4_K}
    assert all(not c.changes for c in choose("mha", "Q4_K_M", copy=True))


def test_extra_output_follows_the_original_and_must_be_smaller() -> None:
    choices = choose("mha", "Q8_0", extra_output_type=T.Q4_0)
    index = next(i for i, c in enumerate(choices) if c.name == "output_extra.weight")
    extra = choices[index]
    assert choices[index - 1].name == "output.weight" and (extra.new, extra.source) == (T.Q4_0, "output.weight")
    assert len(choose("mha", "Q8_0", extra_output_type=T.F32)) == len(choices) - 1
    tied = choose("gqa2", "Q8_0", extra_output_type=T.Q4_0)
    assert [c.source for c in tied if c.source] == ["token_embd.weight"]


def test_groups_that_do_not_fill_become_plain() -> None:
    tensors = [info(f"blk.{i}.ffn_up.weight", 256, n) for i, n in enumerate((8, 12, 6))]
    found = [c.new for c in choose_types(tensors, {}, RecipeOptions(number("Q8_K_R8")))]
    assert found == [T.Q8_K_R8, T.Q8_0, T.Q8_0]
    found = [c.new for c in choose_types(tensors, {}, RecipeOptions(number("Q6_K_R4")))]
    assert found == [T.Q6_K_R4, T.Q6_K_R4, T.Q6_K]


def test_rows_without_any_block_size_stay_in_half_precision() -> None:
    (choice,) = choose_types([info("blk.0.ffn_up.weight", 40, 8)], {}, RecipeOptions(number("Q8_0")))
    assert choice.new == T.F16


@pytest.mark.parametrize("preset", ["IQ2_XS", "IQ2_XXS", "IQ2_S", "Q2_K_S", "IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ2_XS_R4"])
def test_low_bit_presets_need_an_importance_matrix(preset: str) -> None:
    tensors, metadata = model()
    with pytest.raises(IkError, match=f"Please do not use {preset} quantization without an importance matrix"):
        choose_types(tensors, metadata, RecipeOptions(number(preset)))
    choose_types(tensors, metadata, RecipeOptions(number(preset)), full_imatrix(tensors))
    choose_types(tensors, metadata, RecipeOptions(number(preset), ignore_imatrix_rules=True))


def test_low_bit_tensors_need_an_entry() -> None:
    tensors, metadata = model()
    imatrix = full_imatrix(tensors)
    del imatrix.entries["blk.3.attn_q.weight"]  # attn_k sees the same
    choose_types(tensors, metadata, RecipeOptions(number("IQ2_XXS")), imatrix)
    del imatrix.entries["blk.3.ffn_up.weight"]  # and ffn_gate as well
    choose_types(tensors, metadata, RecipeOptions(number("IQ2_XXS")), imatrix)
    del imatrix.entries["blk.3.ffn_gate.weight"]
    with pytest.raises(IkError, match=r"iq2_xxs for tensor blk\.3\.ffn_(up|gate)\.weight needs importance weights"):
        choose_types(tensors, metadata, RecipeOptions(number("IQ2_XXS")), imatrix)
    with pytest.raises(IkError, match="there is no --imatrix"):
        choose_types(tensors, metadata, RecipeOptions(number("IQ2_KT")))


def test_mla_tensors_missing_from_the_matrix_become_q8_0() -> None:
    tensors = [info("blk.0.attn_k_b.weight", 128, 512), info("blk.0.attn_v_b.weight", 512, 128)]
    tensors.append(info("blk.0.ffn_up.weight", 256, 8))
    imatrix = full_imatrix(tensors[2:])
    types = [c.new for c in choose_types(tensors, {}, RecipeOptions(number("IQ4_K")), imatrix)]
    assert types == [T.Q8_0, T.Q8_0, T.IQ4_K]
    imatrix.entries["blk.0.attn_kv_b.weight"] = ImatrixEntry(np.ones((1, 512), np.float32), np.ones(1, np.float32))
    choices = choose_types(tensors, {}, RecipeOptions(number("IQ4_K")), imatrix)
    assert [c.new for c in choices] == [T.Q8_0, T.IQ4_K, T.IQ4_K]
    custom = parse_custom_rules(["attn_k_b=q6_0"])
    assert choose_types(tensors, {}, RecipeOptions(number("IQ4_K"), custom=custom), imatrix)[0].new == T.Q6_0
    assert (
        choose_types(tensors, {}, RecipeOptions(number("IQ4_K")))[0].new == T.Q5_0
    )  # no matrix: only the row fallback


def test_sizes_are_exact() -> None:
    for c in choose("moe", "IQ4_KS"):
        n_rows = int(np.prod(c.shape[1:]))
        if c.new == T.IQ4_KS:
            assert c.n_bytes == n_rows * (4 + c.shape[0] // 256 * 136)
