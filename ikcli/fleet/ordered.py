"""Units whose results are wanted in order, whoever ends first; what a journal holds is not done again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ikcli.fleet.executor import Executor, Factory
from ikcli.fleet.journal import Journal


def in_order(
    work: Executor, factory: Factory, units: Sequence[tuple[str, Any]], journal: Journal, ahead: int | None = None
) -> Iterator[dict[str, Any]]:
    """The record of every (key, unit) in the order of `units`, as soon as those before are there.

    Workers return records: what JSON can hold, and bytes under `data`. `ahead` as in `Executor.run`.
    """
    todo = [(key, unit) for key, unit in units if key not in journal]
    done = work.run(factory, [unit for _, unit in todo], ahead)
    try:
        for key, _ in units:
            while key not in journal:
                i, record = next(done)
                journal.add(todo[i][0], record)
            yield journal.take(key)
    finally:
        done.close()
