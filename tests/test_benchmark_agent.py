"""The script that records a coding agent's requests and replays them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load

AGENT = """
import json, sys, urllib.request
url, task, stream = sys.argv[1:]
read = {"name": "read_file", "parameters": {"required": ["file_path"], "properties": {"file_path": {}}}}
tools = [{"type": "function", "function": {"name": "shell", "parameters": {"required": ["command"]}}},
         {"type": "function", "function": read}]
messages = [{"role": "system", "content": "You are an agent. " * 8}, {"role": "user", "content": task}]
while True:
    body = {"model": "m", "messages": messages, "tools": tools, "stream": stream == "yes"}
    data = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())).read()
    if stream == "yes":
        events = [json.loads(line[6:]) for line in data.decode().split("\\n\\n")[:-2]]
        message, end = events[0]["choices"][0]["delta"], events[1]["choices"][0]["finish_reason"]
    else:
        message, end = (json.loads(data)["choices"][0][name] for name in ("message", "finish_reason"))
    messages.append(message)
    if end == "stop":
        break
    call = message["tool_calls"][0]
    text = open(json.loads(call["function"]["arguments"])["file_path"]).read()
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("agent")


def recorded(script: ModuleType, folder: Path, stream: str = "yes") -> Path:
    project = folder / "project"
    (project / ".git").mkdir(parents=True)
    (project / ".git" / "config").write_text("not a file of the project")
    for i in range(6):
        (project / f"{i}.py").write_text(f"# file {i}\n" + f"x{i} = {i}\n" * 20)
    (folder / "agent.py").write_text(AGENT)
    words = ["record", str(folder / "out.jsonl"), "--folder", str(project), "--sessions", "2", "--turns", "3", "--"]
    assert script.main([*words, sys.executable, str(folder / "agent.py"), "{url}", "{task}", stream]) == 0
    return folder / "out.jsonl"


@pytest.mark.parametrize("stream", ["yes", "no"])
def test_sessions_are_recorded(script: ModuleType, tmp_path: Path, stream: str) -> None:
    requests = [json.loads(line) for line in recorded(script, tmp_path, stream).read_text().splitlines()]
    assert [(r["session"], len(r["messages"])) for r in requests] == [(i, 2 + 2 * n) for i in (0, 1) for n in range(4)]
    read = [[m["content"][:8] for m in r["messages"] if m["role"] == "tool"] for r in requests[3::4]]
    assert read == [["# file 0", "# file 2", "# file 4"], ["# file 1", "# file 3", "# file 5"]]
    turns = [(r["session"], len(r["messages"])) for r in script.in_turns(requests)]
    assert turns == [(i, 2 + 2 * n) for n in range(4) for i in (0, 1)]


def test_what_cannot_be_recorded(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 files; 32 are needed"):
        script.main(["record", str(tmp_path / "out"), "--folder", str(tmp_path), "--", "x"])
    tools = [{"function": {"name": "shell", "parameters": {"required": ["command"]}}}, {"function": {"name": "read"}}]
    with pytest.raises(SystemExit, match="shell"):
        script.call_of(tools, tmp_path)


def test_distinct_positions(script: ModuleType) -> None:
    assert script.n_distinct([[1, 2, 3], [1, 2, 4, 5], [1, 2], [7], [1, 2, 3]]) == 6
    assert script.n_distinct([]) == 0


@pytest.mark.slow("runs servers")
def test_replay(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, ik = recorded(script, tmp_path), f"{sys.executable} -m ikcli"
    assert script.main(["replay", str(file), "--ik", ik, "--before", ik, "-r", "2", "-n", "2", "-cram", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 requests of 2 sessions in turns" in lines[0]
    rows: dict[str, Any] = {line.split(" | ")[0]: line.split(" | ") for line in lines[4:]}
    assert [*rows] == ["| ik", "| before"] and 1 <= float(rows["| ik"][2]) < 1.1
