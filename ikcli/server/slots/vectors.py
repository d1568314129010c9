"""Control vectors of a server: list, load, unload and scale them while it runs, from threads other than the engine's.

Requests that begin afterwards use the new setting; requests in progress keep theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ikcli.engine.run.control_vectors import ControlVector, ControlVectors, VectorUse, in_use
from ikcli.errors import IkError
from ikcli.models import HParams
from ikcli.server.slots.states import EngineError


@dataclass(frozen=True, slots=True)
class LoadedVector:
    """A control vector of the list: its name, scale and layers."""

    name: str
    use: VectorUse


@dataclass(frozen=True, slots=True)
class VectorChange:
    """A new scale of the vector with this number, and perhaps new layers."""

    number: int
    scale: float
    first: int | None = None
    last: int | None = None


class ServedVectors:
    """The control vectors of a server; see the module. `changed` is called with the vectors in use when they change."""

    def __init__(
        self, vectors: ControlVectors, hp: HParams, *, staged: bool, changed: Callable[[tuple[VectorUse, ...]], None]
    ) -> None:
        self._vectors, self._hp, self._staged, self._changed = vectors, hp, staged, changed
        self._lock = threading.Lock()
        self.items = tuple(LoadedVector(str(path), use) for path, use in vectors.given)

    def load(self, name: str, path: Path, scale: float, first: int | None, last: int | None) -> int:
        """Add a file to the list, once; return its number.

        Raise EngineError 400 if it is not a matching control vector.
        """
        use = VectorUse("", scale, 1 if first is None else first, self._hp.n_layer if last is None else last)
        with self._lock:
            names = [item.name for item in self.items]
            if name in names:
                number = names.index(name)
                self._set(number, LoadedVector(name, use._replace(digest=self.items[number].use.digest)))
                return number
            if self._staged:
                text = "With --stages control vectors are those of the command line; only their scales change"
                raise EngineError(501, "not_supported_error", text)
            try:
                vector = ControlVector.open(path, self._hp)
            except IkError as e:
                raise EngineError(400, "invalid_request_error", str(e).replace(str(path), name)) from None
            self._vectors.known[vector.digest] = vector
            self._set(len(names), LoadedVector(name, use._replace(digest=vector.digest)))
            return len(names)

    def unload(self, number: int) -> None:
        """Remove a vector; the numbers of later ones decrease by one.

        Raise EngineError 400 if the number does not exist.
        """
        with self._lock:
            self._check(number)
            self._take(self.items[:number] + self.items[number + 1 :])

    def apply(self, changes: Sequence[VectorChange]) -> None:
        """Set scales; vectors that are not named get 0. Raise EngineError 400 for numbers that do not exist."""
        with self._lock:
            items = [LoadedVector(item.name, item.use._replace(scale=0.0)) for item in self.items]
            for change in changes:
                self._check(change.number)
                name, use = items[change.number].name, items[change.number].use
                first, last = (
                    old if new is None else new for old, new in ((use.first, change.first), (use.last, change.last))
                )
                items[change.number] = LoadedVector(name, VectorUse(use.digest, change.scale, first, last))
            self._take(tuple(items))

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self.items):
            known = f"ids are 0 to {len(self.items) - 1}" if self.items else "none is loaded"
            raise EngineError(400, "invalid_request_error", f"invalid control vector id {number}, {known}")

    def _set(self, number: int, item: LoadedVector) -> None:
        self._take((*self.items[:number], item, *self.items[number + 1 :]))

    def _take(self, items: tuple[LoadedVector, ...]) -> None:
        self.items = items
        self._changed(in_use(item.use for item in items))
