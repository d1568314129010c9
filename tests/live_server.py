"""`ik serve` as a process, for tests over real sockets."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

WAIT = 120.0
"""Seconds to wait for what is sure to come, however busy the machine is."""


class Server:
    """`ik serve` as a process; `common` are options of all."""

    common = ("-m", "ikcli", "serve", "--port", "0", "-t", "1", "-c", "1024")

    def __init__(self, *options: str, log: Path) -> None:
        self.log = log
        command = [sys.executable, *self.common, *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.port = 0
        wait_for(self._find_port)
        self.base = f"http://127.0.0.1:{self.port}"

    def _find_port(self) -> bool:
        assert self.process.poll() is None, self.text()
        lines = [line for line in self.text().splitlines() if "HTTP server listening" in line]
        if lines and 'port="' in lines[0]:
            self.port = int(lines[0].partition('port="')[2].partition('"')[0])
        return bool(lines)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        wait_for(lambda: httpx.get(self.base + "/health", timeout=WAIT).status_code == 200)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.base + path, json=body, timeout=WAIT)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base + path, timeout=WAIT)

    def busy(self) -> int:
        return sum(slot["is_processing"] for slot in self.get("/slots").json())

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)


def wait_for(condition: Any) -> None:
    """Wait until `condition()` is true."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
