"""State shared by all requests: engine, settings, the bridge to the engine's thread, and the chat template."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ikcli.chat.images import Images
from ikcli.errors import UsageError
from ikcli.server.http.bridge import Bridge
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.limits import Limits
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.params import defaults_of
from ikcli.server.http.pictures import Pictures
from ikcli.server.http.prompt_files import PromptFiles
from ikcli.server.http.prompts import ImagePrompts
from ikcli.server.http.running import Running
from ikcli.server.http.usage import Ledger
from ikcli.server.http.users import Users
from ikcli.settings.run import RunConfig

PASSED = "fd:"
"""Prefix of a `host` that names a listening socket, by the file descriptor inherited from the parent process."""


class Front(Protocol):
    """The state that the gateway reads."""

    config: RunConfig
    keys: tuple[str, ...]
    users: Users

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> bool: ...


@dataclass
class ServerState:
    """State of a server; `engine` is an ikcli.server.slots Engine, or a stand-in in tests."""

    config: RunConfig
    engine: Any
    keys: tuple[str, ...] = ()
    log: ServerLog = field(default_factory=ServerLog)
    users: Users = field(default_factory=Users)
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def page_settings(self) -> dict[str, Any]:
        """Initial settings of the web page."""
        return page_settings(self.config.server)[0]

    @cached_property
    def prompt_files(self) -> PromptFiles | None:
        """Writer of prompt files, or None if prompts are not written."""
        folder = self.config.server.log_prompts_dir
        return None if folder is None else PromptFiles(folder, self.log)

    @cached_property
    def running(self) -> Running:
        """Conversations that are being answered."""
        return Running()

    @cached_property
    def ledger(self) -> Ledger:
        """Token usage of requests that a server in front forwards."""
        return Ledger()

    @cached_property
    def defaults(self) -> GenerationBody:
        """Default values of the fields that requests do not set."""
        return defaults_of(self.config)

    @cached_property
    def bridge(self) -> Bridge:
        """Bridge for events from the engine to this loop; its first use must be on the loop."""
        return Bridge(asyncio.get_running_loop())

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return bool(self.engine.state == "ready")

    @property
    def failed(self) -> bool:
        """Whether the model could not be loaded."""
        return bool(self.engine.state == "failed")

    @property
    def timeout(self) -> float:
        """Seconds for reading a request and for a client to take data; 0 means unlimited."""
        return float(self.config.server.timeout)

    @cached_property
    def limits(self) -> Limits:
        """Bounds that requests are checked against; the model must be loaded."""
        if not self.ready:
            raise ApiError(503, "Loading model")
        model = self.engine.model
        first = self.config.server.first_slot
        return Limits(self.engine.tokenizer, model.n_vocab, self.config.n_parallel, len(model.adapters), first)

    @cached_property
    def chat(self) -> Any:
        """The chat template; the model must be loaded."""
        from ikcli.server.http.templates import ChatService

        return ChatService(self.config, self.engine.tokenizer, self.engine.model.metadata)

    @cached_property
    def pictures(self) -> Pictures | None:
        """Reader of the images of requests, or None without a projector; the model must be loaded."""
        reader = self.engine.pictures
        if reader is None:
            return None
        return Pictures(self.config.vision, reader, self.engine.tokenizer, self.engine.model.n_ctx_slot)

    def images(self) -> Images:
        """Return a collector for the images of one request."""
        return Images(reads=self.ready and self.pictures is not None)

    @property
    def image_prompts(self) -> ImagePrompts | None:
        """Maker of raw prompts with images, or None without a projector."""
        return None if self.pictures is None else self.pictures.raw_prompt

    @cached_property
    def grammar(self) -> Any:
        """Compiler of grammars for this vocabulary; the model must be loaded."""
        from ikcli.grammar.grammars import Grammars

        return Grammars(self.engine.tokenizer, lambda message: self.log.warn("grammar", message))

    @property
    def alias(self) -> str:
        """Name of the model in the API."""
        return self.names[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names of the model, the primary one first."""
        return names_of(self.config)


def is_behind(config: RunConfig) -> bool:
    """Return whether another server may be in front of this one.

    Then this server listens only on Unix sockets or sockets passed by its parent.
    """
    return all(host.endswith(".sock") or host.startswith(PASSED) for host in hosts_of(config.server.host))


def hosts_of(host: str) -> tuple[str, ...]:
    """Return the addresses of --host. Raise UsageError if there are none."""
    found = tuple(dict.fromkeys(text for part in host.split(",") if (text := part.strip())))
    if not found:
        raise UsageError("--host names no address")
    return found


def names_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the served model, from `-a` or its file."""
    given = tuple(name for text in config.server.alias.split(",") if (name := text.strip()))
    return given or (config.model.name if config.model is not None else "model",)
