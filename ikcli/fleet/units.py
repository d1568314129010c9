"""Map a function over units of work with any executor, keeping results in a journal and returning them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ikcli.fleet.executor import Executor, Factory
from ikcli.fleet.journal import Journal


def map_units(
    worker: Factory,
    units: Sequence[tuple[str, Any]],
    journal: Journal,
    executor: Executor,
    *,
    ahead: int | None = None,
    keep: Callable[[int, Any], Mapping[str, Any]] = lambda i, result: result,
) -> Iterator[dict[str, Any]]:
    """Yield the record of every (key, unit) in the order of `units`, as soon as all earlier ones are known.

    Units that the journal holds are not computed again. `keep(i, result)` turns the result of `units[i]` into its
    record as soon as the unit ends, in any order; a record holds JSON values, and bytes under `data`.
    `ahead` as in `Executor.run`.
    """
    todo = [i for i, (key, _) in enumerate(units) if key not in journal]
    done = executor.run(worker, [units[i][1] for i in todo], ahead)
    try:
        for key, _ in units:
            while key not in journal:
                n, result = next(done)
                journal.add(units[todo[n]][0], keep(todo[n], result))
            yield journal.take(key)
    finally:
        done.close()
