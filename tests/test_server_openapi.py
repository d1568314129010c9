"""Requests made from the OpenAPI document, well-formed and not: no internal errors."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from live_server import Server

INTENDED = (501, 503)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openapi")
    options = (
        "-np",
        "2",
        "-c",
        "512",
        "--metrics",
        "--props",
        "--slot-save-path",
        str(folder),
        "--no-context-shift",
        "-n",
        "8",
    )
    found = Server(*options, log=folder / "log")
    found.wait_ready()
    yield found
    assert found.stop() == 0
    assert "Traceback" not in found.text() and "internal error" not in found.text()


def test_document_and_page(server: Server) -> None:
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.") and "/v1/chat/completions" in document["paths"]
    assert server.get("/docs").status_code == 200


@pytest.mark.slow
def test_requests_from_the_document_cause_no_internal_error(server: Server) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    failed: dict[str, Any] = {}
    seen: Counter[int] = Counter()
    for result in schema.get_all_operations():
        _try(result.ok(), server, failed, seen)
    assert not failed, failed
    assert seen[200] > 100 and seen[400] > 100, seen


def _try(operation: Any, server: Server, failed: dict[str, Any], seen: Counter[int]) -> None:
    from schemathesis import GenerationMode

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        with httpx.Client(base_url=server.base, timeout=600) as client:

            @settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                request = case.as_transport_kwargs(base_url=server.base)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kwargs = {k: v for k, v in request.items() if k in ("json", "params", "headers", "cookies", "data")}
                    answer = client.request(request["method"], request["url"], **kwargs)
                seen[answer.status_code] += 1
                if answer.status_code >= 500 and answer.status_code not in INTENDED:
                    failed[operation.label] = (answer.status_code, answer.text[:300], kwargs)

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong about a request without fields
                send()
