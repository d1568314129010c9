"""The script that measures a model in stages: its ideal, its proxies, and a run of one and two processes."""

from __future__ import annotations

import importlib
import json
import socket
import threading
from pathlib import Path
from types import ModuleType

import pytest

from ikcli.settings.run import default_model

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)  # its processes import it, too
    return importlib.import_module("stages")


def test_the_ideal(script: ModuleType) -> None:
    """100 ms a token, 150 ms for three, 1 s for a micro-batch; two stages, the larger one 0.6 of the weights."""
    setting = script.Setting(Path("m"), 2, 0.01, 8.0, 0.5, 4, 6, 2, 400, 100, 1)  # a megabyte per second
    found = script.Found({}, 0.6, 1000, 2, ())
    alone = {script.ONE: 10.0, script.SEVERAL: 20.0, script.PROMPT: 100.0}
    best = script.ideals(setting, found, alone, {1: 0.001, 3: 0.001, 100: 0.002})
    assert best[script.ONE] == pytest.approx(1 / (0.1 + 2 * 0.01 + 0.001 + 3 * 0.001))
    assert best[script.SEVERAL] == pytest.approx(6 / (2 * 0.6 * 0.15))
    assert best[script.PROMPT] == pytest.approx(400 / (1 * (1 + 3 * 0.6) + 2 * 0.01 + 0.1 + 3 * 0.002))


def test_a_proxy_delivers_all_in_order(script: ModuleType) -> None:
    data = bytes(range(256)) * 4000
    with socket.create_server(("127.0.0.1", 0)) as server, script.Proxies(0.001, 8000) as proxies:
        sender = socket.create_connection(proxies.before(server.getsockname()))
        receiver, _ = server.accept()
        with sender, receiver:
            thread = threading.Thread(target=lambda: (sender.sendall(data), sender.shutdown(socket.SHUT_WR)))
            thread.start()
            found = bytearray()
            while piece := receiver.recv(1 << 16):
                found += piece
            receiver.sendall(b"back")
            assert sender.recv(16) == b"back"
            thread.join()
    assert found == data


@pytest.mark.slow  # a whole measurement, in processes
def test_one_and_two_processes(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "found.jsonl"
    words = ["-m", "demo", "--stages", "2", "--delay", "0.2", "-n", "2", "-p", "32", "-ub", "16", "-r", "1"]
    script.main([*words, "--sequences", "2", "--json", str(kept)])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    measured = [row for row in rows if len(row) == 9 and row[0] == "2"]
    assert [row[3] for row in measured] == ["one sequence", "2 sequences", "prompt"]
    assert all(float(cell) > 0 for row in measured for cell in row[4:])
    found = json.loads(kept.read_text())["found"]
    assert 0.5 <= found["largest"] < 1 and found["crossing"] == 1024
    mapped = found["mapped"]
    size = default_model().stat().st_size / 2**20
    assert len(mapped) == 2 and sum(own for _, own in mapped) > 0.9 * size
    # of the others no more than the pages at their edges
    assert all(have < own + 1 < size - 1 for have, own in mapped)
