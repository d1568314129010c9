"""Download models into the hub's cache while the server runs, each in its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ikcli.errors import IkError
from ikcli.hub import client
from ikcli.hub.names import Quant, parse_ref
from ikcli.hub.pull import Access, find, is_cached, is_there, pull_found
from ikcli.server.front.models_events import Events
from ikcli.server.front.threads import in_thread, on_loop
from ikcli.server.http.errors import bad_request
from ikcli.server.http.logs import ServerLog

_EVERY = 0.2  # seconds between two events of one download


class _Cancelled(Exception):
    """Raised when the download is cancelled."""


@dataclass(eq=False)
class ModelDownload:
    """Download of one model. `files` holds bytes done and in total, by URL; `asked` is the name in the request."""

    name: str
    asked: str
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    cancelled: bool = False
    told: float = 0.0

    def progress(self) -> dict[str, dict[str, int]]:
        """Return the progress of each file."""
        return {url: dict(file) for url, file in self.files.items()}


class Downloads:
    """All downloads. `arrived` is called to add a finished model to the list."""

    def __init__(self, access: Access, events: Events, arrived: Callable[[], Awaitable[None]], log: ServerLog) -> None:
        self.running: dict[str, ModelDownload] = {}
        self._access, self._events, self._arrived, self._log = access, events, arrived, log
        self._ending: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()

    def find(self, name: str) -> ModelDownload | None:
        """Return the download of a model by its full name or the requested one."""
        return next((one for one in self.running.values() if name in (one.name, one.asked)), None)

    async def start(self, asked: str) -> None:
        """Start a download. Raise ApiError 400 if the hub has no such model, or if it is already here."""
        async with self._starting:
            try:
                ref = parse_ref(asked)
                info, quant, _ = await in_thread(lambda: find(ref, self._access))
            except IkError as e:
                raise bad_request(str(e)) from None
            name = f"{info.repo}:{quant.name}"
            if (one := self.running.get(name)) is not None:
                raise bad_request(f"{name} is being {'cancelled' if one.cancelled else 'downloaded'} already")
            if is_cached(info, quant):
                await self._arrived()
                raise bad_request(f"{name} has been downloaded already")
            one = ModelDownload(name, asked)
            for file in quant.files:
                done = file.size if is_there(info, file) else 0
                one.files[client.file_url(info.repo, info.commit, file.path)] = {"done": done, "total": file.size}
            self.running[name] = one
        self._log.info("router", "downloading model", model=name)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(one, info, quant, loop), daemon=True).start()

    def cancel(self, one: ModelDownload) -> None:
        """Cancel a download; the next one resumes it."""
        one.cancelled = True

    # --- in the thread of a download ----------------------------------------------------------------------------------
    def _work(self, one: ModelDownload, info: client.RepoInfo, quant: Quant, loop: asyncio.AbstractEventLoop) -> None:
        urls = {
            file.path.rpartition("/")[2]: client.file_url(info.repo, info.commit, file.path) for file in quant.files
        }

        @contextmanager
        def progress(title: str, total: float, done: float) -> Iterator[Callable[[float], None]]:
            file = one.files[urls[title.partition(" (")[0]]]
            file["done"] = 0

            def advance(n: float) -> None:
                if one.cancelled:
                    raise _Cancelled
                file["done"] += int(n)
                if time.monotonic() - one.told >= _EVERY:
                    one.told = time.monotonic()
                    on_loop(loop, lambda: self._events.send(one.name, "download_progress", one.progress()))

            yield advance

        error = ""
        try:
            pull_found(info, quant, self._access, progress)
        except _Cancelled:
            error = "it was cancelled"
        except (IkError, OSError) as e:
            error = str(e)
        except BaseException as e:
            error = f"internal error: {type(e).__name__}: {e}"
        on_loop(loop, lambda: self._end(one, error))

    # --- on the loop --------------------------------------------------------------------------------------------------
    def _end(self, one: ModelDownload, error: str) -> None:
        task = asyncio.ensure_future(self._ended(one, error))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ended(self, one: ModelDownload, error: str) -> None:
        del self.running[one.name]
        if not error:
            try:
                await self._arrived()
            except Exception as e:  # the model has arrived all the same; the next refresh of the list finds it
                self._log.error("router", "the list of models could not be read", error=str(e))
            self._log.info("router", "model downloaded", model=one.name)
            self._events.send(one.name, "download_progress", one.progress())
            self._events.send(one.name, "download_finished")
            return
        self._log.error("router", "model not downloaded", model=one.name, error=error)
        self._events.send(one.name, "download_failed", {"error": error})
