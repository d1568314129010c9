"""Workers: a function from a unit to its result, opened on the machine and in the process where it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ikcli.errors import IkError
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import GGUFFile, open_gguf


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that workers read, and the digest that `digest_of` computed of the command's copy."""

    path: Path
    digest: str
    digest_of: Callable[[Path], str]

    def check(self) -> None:
        """Raise IkError if the file at this path is not the one that the command reads."""
        if self.digest_of(self.path) != self.digest:
            raise IkError(
                f"{self.path} on this node is another file than that of the command; "
                "put the same file there, or remove it so that it is fetched"
            )


def input_file(path: Path, digest_of: Callable[[Path], str] = digest.of_file) -> InputFile:
    """Describe a file of the command; its path becomes absolute, since workers run in other directories."""
    return InputFile(path.absolute(), digest_of(path), digest_of)


def input_model(path: Path, overrides: tuple[str, ...] = (), file: GGUFFile | None = None) -> InputFile:
    """Describe a model; `file` saves opening it if the command has done so."""
    digest_of = partial(_model_digest, overrides)
    return InputFile(path.absolute(), digest_of(path) if file is None else digest.of_model(file), digest_of)


def _model_digest(overrides: tuple[str, ...], path: Path) -> str:
    return digest.of_model(open_gguf(path, overrides))


@dataclass(frozen=True, slots=True)
class UnitFunction:
    """Make workers that compute `function(unit)`; can be pickled.

    `opening(setup)` is a context manager that yields the function and releases what it holds. Where a node lacks an
    input, the file is fetched and its path in `setup` is replaced (see `files`). None stands for an input not given.
    """

    opening: Callable[[Any], AbstractContextManager[Callable[[Any], Any]]]
    setup: Any
    inputs: tuple[InputFile | None, ...] = ()

    @property
    def files(self) -> list[tuple[Path, str]]:
        """The files a node must have, each once, with their digests."""
        return list({file.path: (file.path, file.digest) for file in self.inputs if file is not None}.values())

    def __call__(self) -> FunctionWorker:
        """Open the function on this machine; IkError if a file differs from that of the command."""
        for file in self.inputs:
            if file is not None:
                file.check()
        return FunctionWorker(self.opening(self.setup))


class FunctionWorker:
    """A `UnitWorker` that calls an opened function."""

    def __init__(self, opening: AbstractContextManager[Callable[[Any], Any]]) -> None:
        self._stack = ExitStack()
        self._function = self._stack.enter_context(opening)

    def do(self, unit: Any) -> Any:
        """Return the result of a unit."""
        return self._function(unit)

    def close(self) -> None:
        """Release what the function holds."""
        self._stack.close()
