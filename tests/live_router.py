"""`ik serve` with several models as a process, and the processes behind it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
from live_server import WAIT, Server

HI = [{"role": "user", "content": "hi"}]


class Router(Server):
    """A server of several models; options of a model are in its file."""

    common = ("-m", "ikcli", "serve", "--port", "0")

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def states(self) -> dict[str, str]:
        return {one["id"]: one["status"]["value"] for one in self.get("/v1/models").json()["data"]}

    def states_of(self, key: str) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {key}"}
        data = httpx.get(self.base + "/v1/models", headers=headers, timeout=WAIT).json()["data"]
        return {one["id"]: one["status"]["value"] for one in data}

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": model, "messages": HI, "max_tokens": 3} | fields)


def children_of(pid: int) -> list[int]:
    """Processes started by one, by what the system says of their parents."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
