"""Run a server of several models."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ikcli.server.front.child import Child
from ikcli.server.front.environment import environment_behind, options_behind
from ikcli.server.front.models import ModelSupervisor
from ikcli.server.front.models_app import build_app
from ikcli.server.front.models_entries import ModelEntry, ModelsFile
from ikcli.server.front.models_state import ModelsState
from ikcli.server.front.server import FrontOptions, FrontServer, serve_front
from ikcli.server.http.errors import ApiError
from ikcli.settings.run import RunConfig

_OF_SEVERAL = "LLAMA_ARG_MODELS_"
"""Prefix of the variables that would turn a process into a server of several models itself."""


def serve_models(
    config: RunConfig, file: ModelsFile, read: Callable[[], ModelsFile] | None = None, *, single: bool = False
) -> int:
    """Serve until a signal comes.

    `read` reads the list of models again. `single`: there is only one model, and clients see a server of this model.
    Raise IkError if the address is taken or options are wrong. Return 1 if the only model cannot be loaded.
    """
    options = FrontOptions.of(config)

    @contextmanager
    def opened() -> Iterator[FrontServer]:
        with tempfile.TemporaryDirectory(prefix="ik-") as folder:
            make = lambda entry, socket: child_of(config, entry, socket)  # noqa: E731
            models = ModelSupervisor(file, make, Path(folder), options.log)
            state = ModelsState(config, models, options.keys, options.log, options.users, read=read, single=single)
            yield ModelsServer(options, state)

    return serve_front(options, opened)


def child_of(config: RunConfig, entry: ModelEntry, socket: Path) -> Child:
    """Return the process of a model without starting it."""
    server = config.server
    argv = [*entry.argv, f"--alias={','.join(entry.names)}", *options_behind(server)]
    return Child(
        entry.name, argv, socket, grace=float(server.shutdown_timeout), prefix=server.log_format != "json",
        environment=environment_behind(_OF_SEVERAL),
    )  # fmt: skip


class ModelsServer(FrontServer):
    """Server that exits if the only model cannot be loaded."""

    def __init__(self, options: FrontOptions, state: ModelsState) -> None:
        super().__init__(options, build_app(state), state.supervisor)
        self._models, self._single = state.supervisor, state.single
        self._first: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """See FrontServer."""
        if self._single:
            self._first = asyncio.ensure_future(self._load_first())

    async def _load_first(self) -> None:
        try:
            await self._models.load(next(iter(self._models.instances)))
        except ApiError as e:
            if not self.should_exit:
                self.problem, self.should_exit = e.message, True

    def handle_exit(self, sig: int, frame: object) -> None:
        """End the event streams too, which would otherwise stay open; see SignalServer."""
        super().handle_exit(sig, frame)
        self.loop.call_soon_threadsafe(self._models.events.close)
