"""docs/quants.md: what it shows is what docs/quants.jsonl says, nothing is missing, and the values are plausible."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import quant_models

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize

T = GGMLType
TOOLS = Path(__file__).resolve().parents[1] / "tools"
AGAIN = "run python tools/gen_quants_doc.py"


class Tools(NamedTuple):
    """The modules behind the page; they are scripts beside the package."""

    data: ModuleType
    page: ModuleType
    quality: ModuleType
    speed: ModuleType


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    sys.path.insert(0, str(TOOLS))
    try:
        import quants_data
        import quants_page
        import quants_quality
        import quants_speed

        yield Tools(quants_data, quants_page, quants_quality, quants_speed)
    finally:
        sys.path.remove(str(TOOLS))


def quality(tools: Tools) -> dict[tuple[str, bool, bool], dict[str, Any]]:
    """Records of quality by name, preset or not, with or without importance matrix."""
    found = [r for r in tools.data.read_records() if r["kind"] == "quality"]
    return {(r["name"], r.get("preset", False), r["imatrix"]): r for r in found}


def test_page_shows_the_records(tools: Tools) -> None:
    text = tools.data.PAGE.read_text(encoding="utf-8")
    assert text == tools.page.page(tools.data.read_records()), AGAIN
    assert "{{" not in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_tables_are_regular(tools: Tools) -> None:
    width = 0
    for line in tools.data.PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            assert not width or line.count("|") == width, line
            width = line.count("|")
        else:
            width = 0


def test_nothing_is_missing(tools: Tools) -> None:
    records = tools.data.read_records()
    keys = {tools.data.record_key(r) for r in records}
    assert len(keys) == len(records) and records == tools.data.merged(records, [])
    levels = ["", *sorted({r["level"] for r in records if r.get("level")})]
    heads: list[dict[str, Any]] = [tools.speed._head(t) for level in levels for t in tools.speed.tasks(level)]
    for imatrix in (False, True):
        heads += [{"kind": "quality", "name": TYPES[t].name, "imatrix": imatrix} for t in tools.data.table_types()]
        heads += [{"kind": "quality", "name": n, "preset": True, "imatrix": imatrix} for n in tools.data.presets()]
    missing = [head for head in heads if tools.data.record_key(head) not in keys]
    assert not missing, f"{AGAIN} --quality --speed: {missing[:5]}"
    timed = [r for r in records if r["kind"] in ("speed", "encode") or r.get("part") == "speed"]
    for level in levels:
        rounds = {r["round"] for r in timed if r.get("level", "") == level}
        assert len(rounds) == 1, f"the speeds are of different rounds; {AGAIN} --speed --restart"


def test_types_of_the_page_are_all_that_can_be_written(tools: Tools) -> None:
    from ikcli.quant.encoders import available_types

    shown = {*tools.data.speed_types(), *(t for t in T if TYPES[t].kind == "ternary"), T.F32}
    old = {T.Q4_0_4_4, T.Q4_0_4_8, T.Q4_0_8_8} | tools.data.UNMEASURED
    assert available_types() - shown - old == set()


def test_quality_is_plausible(tools: Tools) -> None:
    """Bounds that a broken encoder, decoder or kernel would cross: they leave a factor of about two."""
    found = quality(tools)
    for (name, preset, _), r in found.items():
        assert r["ppl"] > 0 and 0 <= r["same_top"] <= 1 and r["kld"] >= -1e-6
        if not preset:
            bpw = min(r["bpw"], 9)
            assert r["kld"] < 2 * 4 ** (2 - bpw) + 0.002, (name, r["kld"])
    for name in ("f16", "bf16"):
        assert found[name, False, False]["kld"] < 1e-4
    for better, worse in (
        ("q8_0", "q6_K"), ("q6_K", "q5_K"), ("iq6_k", "iq5_k"), ("q5_K", "q4_K"), ("iq5_k", "iq4_k"), ("q4_K", "q3_K"),
        ("iq4_k", "iq3_k"), ("iq4_kt", "iq3_kt"), ("iq3_kt", "iq2_kt"), ("iq3_k", "iq2_k"), ("q3_K", "q2_K"),
        ("iq3_s", "iq2_s"), ("iq2_s", "iq2_xs"), ("iq2_xs", "iq2_xxs"), ("iq2_xxs", "iq1_m"), ("iq4_ks", "iq4_kss"),
        ("iq4_ks", "iq3_ks"), ("iq3_ks", "iq2_ks"), ("iq4_k", "q4_K"), ("q4_K", "q4_0"), ("iq2_kt", "iq1_kt"),
    ):  # fmt: skip
        assert found[better, False, True]["kld"] < found[worse, False, True]["kld"], (better, worse)


def test_importance_matrix_helps_where_it_matters(tools: Tools) -> None:
    found = quality(tools)
    for t in tools.data.table_types():
        name, bpw = TYPES[t].name, tools.data.bpw(t)
        with_it, without = found[name, False, True]["kld"], found[name, False, False]["kld"]
        if bpw < 5:
            assert with_it < 1.05 * without, name  # KLD scatters by some 2 %


def test_records_replace_those_of_the_same_key(tools: Tools, tmp_path: Path) -> None:
    old = [
        {"kind": "speed", "name": "q4_0", "model": "demo", "pp": 1},
        {"kind": "speed", "name": "q4_0", "model": "random", "pp": 2},
    ]
    new = tools.data.merged(old, [{"kind": "speed", "name": "q4_0", "model": "demo", "pp": 3}])
    assert [r["pp"] for r in new] == [3, 2]
    tools.data.write_records(new, tmp_path / "r.jsonl")
    assert tools.data.read_records(tmp_path / "r.jsonl") == new and [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_page_without_records(tools: Tools) -> None:
    text = tools.page.page([])
    assert "| `q4_K` | 4.500 |  |" in text and "{{" not in text


def test_rounds_of_speed(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"kind": "about", "part": "speed", "round": 2}
    done = {"kind": "encode", "name": "q4_0", "round": 2}
    stale = {"kind": "encode", "name": "q8_0", "round": 1}
    monkeypatch.setattr(tools.speed, "read_records", lambda: [about, done, stale])

    def left(names: list[str], restart: bool = False) -> list[str]:
        found = tools.speed.SpeedRound(names, tmp_path, restart, 0.0)
        assert list(found.run()) == [] or restart
        return [t.name for t in found.todo if t.kind == "encode"]

    assert "q8_0" in left([]) and "q4_0" not in left([]) and left(["q4_0"]) == ["q4_0"]
    assert tools.speed.SpeedRound([], tmp_path, True, 0.0).round == 3
    assert len(tools.speed.SpeedRound([], tmp_path, True, 0.0).todo) == len(tools.speed.tasks())


def test_another_instruction_set(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikcli.native import isa

    level = isa.current().name
    about = {"kind": "about", "part": "speed", "round": 2, "isa": "avx9", "threads": 2, "date": "2026-11"}
    monkeypatch.setattr(tools.speed, "read_records", lambda: [about])
    todo = tools.speed.SpeedRound([], tmp_path, True, 0.0).todo
    assert {(t.kind, t.model, t.level) for t in todo} == {("speed", "random", level)}
    head = tools.speed._head(todo[0])
    assert tools.data.record_key(head) != tools.data.record_key(head | {"level": ""})
    ours, other = {"pp_ratio": 1.25, "tg_ratio": 2.5}, {"pp_ratio": 3.5, "tg_ratio": 4.5}
    q4_0 = {"kind": "speed", "name": "q4_0", "model": "random"}
    more = [about | {"isa": level, "level": level}, q4_0 | ours, q4_0 | other | {"level": level}]
    text = tools.page.page([about | {"random_bytes": 1, "demo_bytes": 1}, *more])
    assert f"PP AVX9 | TG AVX9 | PP {tools.page._level_name(tools.page._Records(more), level)}" in text
    assert "| `q4_0` | 4.500 | 1.25 | 2.50 | 3.50 | 4.50 |" in text


@pytest.mark.parametrize("type", [T.IQ4_K, T.Q4_0_R8, T.IQ2_KS])
def test_models_of_repeated_rows(tools: Tools, type: GGMLType, tmp_path: Path) -> None:
    file = open_gguf(quant_models.write_model(tmp_path / "f16.gguf"), ())
    del file.tensors["blk.0.ffn_down_exps.weight"]  # its rows are too short for most types
    tools.speed._convert(file, tmp_path / "typed.gguf", type, 32)
    typed = open_gguf(tmp_path / "typed.gguf", ())
    assert typed.tensors["blk.0.attn_q.weight"].type == type
    assert typed.tensors["token_embd.weight"].type == (TYPES[type].base or type)
    assert typed.tensors["blk.0.ffn_gate_inp.weight"].type == T.F32
    name, shape = "blk.0.ffn_up_exps.weight", quant_models.SHAPES["blk.0.ffn_up_exps.weight"]
    x = dequantize(typed.data(name), type, shape)
    assert (x == x[:1]).all()
    before = dequantize(file.data(name), T.F16, shape)
    assert np.abs(x[0] - before[0]).mean() < 0.3 * np.abs(before[0]).mean()


def test_text_is_cut_between_paragraphs(tools: Tools) -> None:
    first, second = tools.quality.halves("a b\n\nc d\n\ne f\n\ng h")
    assert first == "a b\n\nc d\n\ne f\n\n" and second == "g h"
