"""Lists of models: llama-server's router, OpenAI's and Ollama's, and counters for Prometheus."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric

from ikcli.chat.formats import ChatFormat
from ikcli.errors import IkError
from ikcli.server.http.metrics import CONTENT_TYPE, PREFIX
from ikcli.server.http.routes.ollama_models import details, model_info
from ikcli.server.http.users import Users
from ikcli.server.router.entries import CACHE, ModelEntry
from ikcli.server.router.instance import LOADED, UNLOADING, Instance
from ikcli.server.router.manager import Manager

METRICS_TYPE = CONTENT_TYPE


_TEXT = {"input_modalities": ["text"], "output_modalities": ["text"]}


def entry(one: Instance, started: int) -> dict[str, Any]:
    """An entry of /models: `status.value` is unloaded, loading, loaded, unloading or sleeping.

    With what the model itself has said, once it was loaded.
    """
    status: dict[str, Any] = {"value": one.status, "args": list(one.entry.argv), "preload": one.entry.preload}
    if one.failure is not None:
        status |= {"failed": True, "error": one.failure.message, "exit_code": one.exit_code}
    return one.info.get("model", {}) | {
        "id": one.entry.name,
        "object": "model",
        "created": started,
        "owned_by": "llamacpp",
        "aliases": list(one.entry.aliases),
        "tags": list(one.entry.tags),
        "path": str(one.entry.config.model),
        "source": one.entry.source,
        "architecture": one.info.get("model", {}).get("architecture", _TEXT),
        "status": status,
        "need": dict(one.entry.need),
        "requests_processing": one.n_running,
    }


def coming(name: str, progress: dict[str, dict[str, int]], started: int) -> dict[str, Any]:
    """The entry of a model that is being downloaded."""
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "llamacpp",
        "aliases": [],
        "tags": [],
        "source": CACHE,
        "architecture": _TEXT,
        "status": {"value": "downloading", "progress": progress},
    }


def tag(one: Instance, started: int) -> dict[str, Any]:
    """An entry of /api/tags."""
    facts = one.entry.facts
    return {
        "name": one.entry.name,
        "model": one.entry.name,
        "modified_at": _time(started),
        "size": facts.size,
        "digest": hashlib.sha256(one.entry.name.encode()).hexdigest(),
        "details": details(facts.arch, facts.n_params, facts.file_type),
    }


def shown(entry: ModelEntry, started: int) -> dict[str, Any]:
    """/api/show of a model that is not loaded."""
    facts = entry.facts
    found = ["completion"] if facts.generates else []
    with suppress(IkError):  # a template that nobody can read, which is no matter before the model is used
        format = ChatFormat.for_model(facts.template or None, jinja=entry.config.server.jinja)
        more = ["tools"] * format.capabilities.tools + ["thinking"] * format.supports_thinking
        found += more if found else []
    found += ["embedding"] if facts.pooling != "rank" else []
    return {
        "template": facts.template,
        "model_info": model_info(facts.arch, facts.n_params, facts.n_ctx, facts.n_embd),
        "modelfile": "",
        "parameters": "",
        "modified_at": _time(started),
        "details": details(facts.arch, facts.n_params, facts.file_type),
        "capabilities": found,
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def running(one: Instance, started: int) -> dict[str, Any]:
    """An entry of /api/ps."""
    left = min(max((one.ttl or 0.0) - (time.monotonic() - one.used), 0.0), 1e9)
    expires = _time(time.time() + left)
    gpu = sum(n for device, n in one.entry.need.items() if device != "CPU")
    context = {"context_length": one.entry.facts.n_ctx}
    more = {"expires_at": expires if one.ttl is not None else "9999-12-31T23:59:59Z", "size_vram": gpu}
    return tag(one, started) | more | context | {"size": sum(one.entry.need.values())}


def metrics_text(manager: Manager, users: Users) -> bytes:
    """What the models take and do; counters of a model itself are at /metrics?model=NAME while it is loaded."""
    registry = CollectorRegistry(auto_describe=False)
    made = {
        name: Gauge(PREFIX + name, text, ["model"], registry=registry)
        for name, text in (
            ("model_loaded", "1 while the model is loaded."),
            ("model_loads", "How often the model was loaded."),
            ("model_requests_processing", "Requests that run."),
        )
    }
    memory = Gauge(PREFIX + "model_bytes", "Planned memory.", ["model", "device"], registry=registry)
    for name, one in manager.instances.items():
        made["model_loaded"].labels(name).set(one.state in (LOADED, UNLOADING))
        made["model_loads"].labels(name).set(one.n_loads)
        made["model_requests_processing"].labels(name).set(one.n_running)
        for device, n_bytes in one.entry.need.items():
            memory.labels(name, device).set(n_bytes)
    if users:
        registry.register(_OfUsers(users))
    return generate_latest(registry)


class _OfUsers:
    def __init__(self, users: Users) -> None:
        self._users = users

    def collect(self) -> Iterator[Metric]:
        """Counters by user."""
        return self._users.collect(PREFIX)
