"""Start and watch the processes of a pipeline on this machine; on a cluster `ikcli.fleet.ray_stages` does it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ikcli.engine.pipeline.options import StageOptions
from ikcli.settings.run import RunConfig


class Supervisor(Protocol):
    """Starts the stages of a model and reports why one ended."""

    host: str
    """The host on which the command listens for the stages."""

    def begin(self, stages: Sequence[StageOptions]) -> None:
        """Start the stages; the caller must call `close` in any case."""

    def died(self, index: int) -> str:
        """Return why a stage has ended, or an empty text while it runs."""

    def close(self) -> None:
        """End all stages; kill those that do not end within some seconds."""


class LocalSupervisor:
    """Runs stages as processes on this machine.

    They end with the process that started them, which closes their stdin.
    """

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin(self, stages: Sequence[StageOptions]) -> None:
        """Start a process for each stage."""
        command = [sys.executable, "-m", "ikcli.engine.pipeline"]
        self._processes += [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in stages]
        for process, options in zip(self._processes, stages, strict=True):
            assert process.stdin is not None
            with suppress(OSError):  # the process has ended, which `died` reports later
                process.stdin.write(pickle.dumps(options))
                process.stdin.flush()

    def died(self, index: int) -> str:
        """Return why the process of a stage has ended, or an empty text while it runs."""
        code = self._processes[index].poll()
        if code is None:
            return ""
        return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"

    def close(self) -> None:
        """Wait for all processes to end, and kill those that do not within 5 seconds."""
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()


def supervise_here(config: RunConfig, n_bytes: Sequence[int]) -> Supervisor:
    """Return the supervisor of stages of `n_bytes` each, as processes of this machine."""
    assert config.fleet.ray is None, "stages on a cluster need the supervisor of ikcli.fleet.ray_stages"
    return LocalSupervisor()
