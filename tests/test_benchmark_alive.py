"""The benchmark program that stays alive: it answers lines, and keeps its filled cache in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import FOLDER, load

from ikcli.settings.run import default_model

PROGRAM = """
import sys
print("some line of a log")
print("ready", flush=True)
for line in sys.stdin:
    name, n = line.split()[:2]
    if name == "pp" and {fails}:
        sys.exit("no memory for the batch")
    print(line.strip(), file=open({log!r}, "a"))
    print("answer", {{"fill": 0, "pp": 2.0, "tg": 0.5}}[name], flush=True)
"""


@pytest.fixture(scope="module")
def alive() -> ModuleType:
    return load("alive")


def fake(tmp_path: Path, *, fails: bool = False) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(fails=fails, log=str(tmp_path / "log"))]


@pytest.mark.slow  # starts two programs
def test_a_session_fills_its_cache_once(alive: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    command = [sys.executable, str(FOLDER / "alive.py"), "-m", str(default_model()), "-c", "96", "-ub", "32"]
    kept = []
    for _ in range(2):
        with alive.Alive(command) as program:
            assert program.ask(f"fill 48 {path}") == 48
            pp, tg = program.speeds(32, 8)  # what they decode is forgotten again: both fit many times
            assert pp > 0 and tg > 0 and all(program.speeds(48, 48) for _ in range(3))
            kept.append((path.read_bytes(), path.stat().st_mtime_ns))
    assert kept[0] == kept[1] and len(kept[0][0]) > 48


def test_speeds_are_tokens_per_second(alive: ModuleType, tmp_path: Path) -> None:
    with alive.Alive(fake(tmp_path)) as program:
        assert program.speeds(512, 32) == (256.0, 64.0)


def test_an_end_is_reported_with_the_log(alive: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(alive.NoTable, match=r"exit code 1.*\n.*no memory for the batch"),
        alive.Alive(fake(tmp_path, fails=True)) as program,
    ):
        program.speeds(512, 32)


def test_families_let_living_programs_take_turns(
    alive: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("families")
    monkeypatch.setattr(script, "make", lambda family, type_, options: tmp_path / f"{family}-{type_}.gguf")
    monkeypatch.setattr(script, "roofs", lambda *_: {"0": [512.0, 128.0], "512": [512.0, 128.0]})
    monkeypatch.setattr(script.alive, "compile_reference", lambda folder, target: target)
    monkeypatch.setattr(script.alive.Alive, "__init__", _start_fake(alive, tmp_path))
    (tmp_path / "llama-sweep-bench").touch()
    file = tmp_path / "turns.json"
    argv = ["qwen3", "--types", "Q8_0", "--alive", "--folder", str(tmp_path), "--reference", str(tmp_path)]
    argv += ["--depths", "0,512", "--tg", "32", "-r", "2", "--json", str(file)]
    assert script.main(argv) == 0
    cell = "256 (1.00, 50 %) | 64.0 (1.00, 50 %)"
    out = capsys.readouterr().out
    assert f"| qwen3 | Q8_0 | 0 | {cell} |" in out and f"| qwen3 | Q8_0 | 512 | {cell} |" in out
    assert len(json.loads(file.read_text())["cells"]["qwen3 Q8_0 native"]["turns"]) == 2
    asked = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert asked == ["pp", "tg"] * 4 + ["fill"] * 2 + ["pp", "tg"] * 4
    with pytest.raises(SystemExit):
        script.main([*argv, "--idle", "1"])


def test_a_ratio_compares_what_was_measured_in_the_same_turn() -> None:
    turns = [(100, 90), (100, 90), (100, 125), (150, 125), (150, 125)]  # the machine became faster within the third
    cell = {
        "turns": [{"ik": {"0": [9, ik]}, "reference": {"0": [9, other]}} for ik, other in turns] + [{"ik": {}}],
        "roofs": [{"0": [18, 200]}],
    }
    text, ratio = load("families").shown(cell, "0", 1)
    assert ratio == pytest.approx(100 / 90) and text == "100 (1.11, 50 %)"


def _start_fake(alive: ModuleType, tmp_path: Path) -> object:
    original = alive.Alive.__init__

    def start(self: object, command: list[str], variables: object = None) -> None:
        original(self, fake(tmp_path), variables)

    return start
