"""Stages in threads of the test's own process: nothing is imported or compiled again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ikcli.engine.pipeline.options import StageOptions
from ikcli.engine.pipeline.process import work


class Threads:
    """As `LocalSupervisor`."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def begin(self, stages: Sequence[StageOptions]) -> None:
        self._threads += [threading.Thread(target=work, args=(o,), daemon=True) for o in stages]
        for thread in self._threads:
            thread.start()

    def died(self, index: int) -> str:
        return "" if self._threads[index].is_alive() else "its thread ended"

    def close(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
