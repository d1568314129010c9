"""The Ray actor of every task: it holds an object that was made on its node and calls the object's methods by name.

An outcome is (result, problem). Our own errors travel as values, because Ray would wrap them in its exceptions. Reading
the outcome of an actor that died, or whose node was lost, raises DiedError. References to outcomes can be awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ikcli.errors import IkError
from ikcli.fleet.ray_cluster import last_line

Outcome = tuple[Any, str]


class DiedError(Exception):
    """An actor ended without an outcome; says why."""


class Holder:
    """The side of an actor that runs on its node."""

    def __init__(self) -> None:
        self._object: Any = None
        self._problem = "its actor holds nothing yet"

    def placed(self) -> None:
        """Return as soon as Ray has found a place and started the process."""

    def make(self, factory: Callable[[], Any]) -> Outcome:
        """Make the object."""
        try:
            self._object, self._problem = factory(), ""
        except (IkError, OSError, MemoryError) as error:
            self._problem = _sentence(error)
        return None, self._problem

    def call(self, method: str, *args: Any) -> Outcome:
        """Call a method of the object; while there is none, the problem says why."""
        if self._problem:
            return None, self._problem
        try:
            return getattr(self._object, method)(*args), ""
        except (IkError, OSError, MemoryError) as error:
            return None, _sentence(error)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, IkError) else f"a worker failed: {error or type(error).__name__}"


class RayActor:
    """The command's side of an actor. Calls run one after the other, or `max_concurrency` (an option) at a time.

    `ray` is the connected module, `options` are those of `ray.remote`: processors, resources, placement. `placed` is a
    reference that is ready when the process runs, `begun` one to the outcome of making the object.
    """

    def __init__(self, ray: Any, factory: Callable[[], Any], **options: Any) -> None:
        """Ask Ray for a place, and have `factory` make the object there; returns at once."""
        self._ray = ray
        self._handle = ray.remote(**options)(Holder).remote()
        self.placed = self._handle.placed.remote()
        self.begun = self._handle.make.remote(factory)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and return a reference to the outcome."""
        return self._handle.call.remote(method, *args)

    def outcome(self, ref: Any) -> Outcome:
        """Wait for an outcome; DiedError if there will be none. Programming errors of methods come as Ray has them."""
        try:
            found: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            if ref != self.begun:
                raise
            raise DiedError(last_line(error)) from None
        except self._ray.exceptions.RayError as error:
            raise DiedError(last_line(error)) from None
        return found

    def kill(self) -> None:
        """End the process at once; an actor that is only out of reach would keep its place."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._handle)
