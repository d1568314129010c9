"""Lists of models: llama-server's router, OpenAI's and Ollama's, and counters for Prometheus."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from ikcli.chat.formats import ChatFormat
from ikcli.errors import IkError
from ikcli.server.front.models import ModelSupervisor
from ikcli.server.front.models_entries import CACHE, ModelEntry
from ikcli.server.front.models_instance import Instance
from ikcli.server.front.supervisor import DRAINING, READY
from ikcli.server.http.metrics import PREFIX
from ikcli.server.http.routes.ollama_models import details, model_info

_TEXT = {"input_modalities": ["text"], "output_modalities": ["text"]}


def entry(one: Instance, started: int) -> dict[str, Any]:
    """Return an entry of /models: `status.value` is unloaded, loading, loaded, unloading or sleeping.

    Once the model has been loaded, the entry includes its own fields.
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
        "architecture": one.info.get("model", {}).get("architecture", _modalities(one.entry)),
        "status": status,
        "need": dict(one.entry.need),
        "requests_processing": one.n_running,
    }


def _modalities(entry: ModelEntry) -> dict[str, list[str]]:
    """Return what a model reads and writes."""
    return _TEXT | {"input_modalities": ["text", "image"]} if entry.facts.reads_images else _TEXT


def coming(name: str, progress: dict[str, dict[str, int]], started: int) -> dict[str, Any]:
    """Return the entry of a model that is being downloaded."""
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
    """Return an entry of /api/tags."""
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
    """Return the /api/show answer for a model that is not loaded."""
    facts = entry.facts
    found = ["completion"] if facts.generates else []
    with suppress(IkError):  # a broken template only matters once the model is used
        format = ChatFormat.for_model(facts.template or None, jinja=entry.config.server.jinja)
        more = ["tools"] * format.capabilities.tools + ["thinking"] * format.supports_thinking
        found += more if found else []
    found += ["vision"] if facts.reads_images else []
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
    """Return an entry of /api/ps."""
    left = min(max((one.ttl or 0.0) - (time.monotonic() - one.used), 0.0), 1e9)
    expires = _time(time.time() + left)
    gpu = sum(n for device, n in one.entry.need.items() if device != "CPU")
    context = {"context_length": one.entry.facts.n_ctx}
    more = {"expires_at": expires if one.ttl is not None else "9999-12-31T23:59:59Z", "size_vram": gpu}
    return tag(one, started) | more | context | {"size": sum(one.entry.need.values())}


def families(models: ModelSupervisor) -> Iterator[Metric]:
    """Return loads, requests and planned memory by model, for Prometheus."""
    for name, text, value in (
        ("model_loaded", "1 while the model is loaded.", lambda one: one.state in (READY, DRAINING)),
        ("model_loads", "How often the model was loaded.", lambda one: one.n_starts),
        ("model_requests_processing", "Requests that run.", lambda one: one.n_running),
    ):
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model"])
        for model, one in models.instances.items():
            family.add_metric([model], float(value(one)))
        yield family
    memory = GaugeMetricFamily(PREFIX + "model_bytes", "Planned memory.", labels=["model", "device"])
    for model, one in models.instances.items():
        for device, n_bytes in one.entry.need.items():
            memory.add_metric([model, device], n_bytes)
    yield memory
