"""Answers of a whole server compared with what llama-server's clients rely on, one request after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import WAIT, Server

PROMPT = "def main("
EMOJI = "🤗🎉é漢字"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("conformance")
    options = ("-np", "2", "--metrics", "--slot-save-path", str(folder), "-a", "demo,other", "--seed", "42")
    found = Server(*options, log=folder / "log.txt")
    found.wait_ready()
    yield found
    assert found.stop() == 0, found.text()


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """Forty greedy tokens after PROMPT."""
    return str(complete(server, n_predict=40)["content"])


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/completion", {"prompt": PROMPT, "n_predict": 12, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def stream(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """Data of a stream's events, without [DONE]."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream"
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def refused(response: httpx.Response, status: int = 400, type: str = "invalid_request_error") -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and error["type"] == type
    return str(error["message"])


# --- endpoints ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/completion"), ("GET", "/tokenize"), ("POST", "/health"), ("PUT", "/completion"), ("DELETE", "/slots")],
)
def test_a_wrong_method_is_not_found(server: Server, method: str, path: str) -> None:
    assert refused(httpx.request(method, server.base + path, timeout=WAIT), 404, "not_found_error") == "File Not Found"


def test_names_and_models(server: Server) -> None:
    model = server.get("/v1/models").json()["data"][0]
    assert model["id"] == "demo" and set(model["aliases"]) == {"demo", "other"}
    assert set(model["meta"]) >= {"vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size"}
    props = server.get("/props").json()
    settings = props["default_generation_settings"]
    assert props["total_slots"] == 2 and ".gguf" in props["model_path"]
    assert settings["n_ctx"] == 512 and settings["seed"] == settings["params"]["seed"] == 42
    assert settings["chat_format"] == "Content-only" and settings["grammar_triggers"] == []
    assert server.get("/version").json()["features"] == {"sql": False, "zstd_compression": False}


def test_metrics_are_prometheus_text(server: Server) -> None:
    complete(server, n_predict=3)
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(response.headers["process-start-time-unix"]) > 0
    values = dict(line.split() for line in response.text.splitlines() if not line.startswith("#"))
    assert float(values["llamacpp:tokens_predicted_total"]) >= 3
    assert "# TYPE llamacpp:requests_processing gauge" in response.text


# --- completion ---------------------------------------------------------------------------------------------------
def test_stop_texts_end_the_text_before_them(server: Server, text: str) -> None:
    for stop in (text[3:9], text[:2], text[0], text[10:12]):
        answer = complete(server, n_predict=40, stop=["never", stop])
        assert answer["content"] == text[: text.index(stop)]
        assert (answer["stop_type"], answer["stopping_word"], answer["stopped_word"]) == ("word", stop, True)
        events = stream(server, "/completion", {"prompt": PROMPT, "n_predict": 40, "temperature": 0, "stop": [stop]})
        assert "".join(event["content"] for event in events) == text[: text.index(stop)]
        assert events[-1]["stop"] and events[-1]["stopping_word"] == stop
    assert complete(server, n_predict=40, stop=[text[-4:] + "QQ"])["content"] == text
    assert complete(server, n_predict=40)["generation_settings"]["stop"] == []


def test_characters_are_never_cut(server: Server) -> None:
    grammar = f'root ::= "{EMOJI}"'
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 0, "grammar": grammar}
    pieces = [event["content"] for event in stream(server, "/completion", body)]
    assert "".join(pieces) == EMOJI and not any("\ufffd" in piece for piece in pieces)
    for n in range(1, 6):
        whole = complete(server, n_predict=n, grammar=grammar)
        events = stream(server, "/completion", body | {"n_predict": n})
        assert "".join(event["content"] for event in events) == whole["content"]
        assert whole["tokens_predicted"] == n and whole["stop_type"] == "limit"


def test_token_probabilities(server: Server) -> None:
    n_vocab = server.get("/v1/models").json()["data"][0]["meta"]["n_vocab"]
    first = complete(server, n_predict=1, n_probs=n_vocab)["completion_probabilities"][0]
    assert math.isclose(sum(math.exp(top["logprob"]) for top in first["top_logprobs"]), 1, rel_tol=1e-3)
    assert first["top_logprobs"][0]["id"] == first["id"]
    after = complete(server, n_predict=2, n_probs=5, post_sampling_probs=True)["completion_probabilities"]
    assert all(len(token["top_probs"]) == 5 and token["top_probs"][0]["prob"] >= 0.99 for token in after)
    refused(server.post("/completion", {"prompt": PROMPT, "n_probs": n_vocab + 1}))
    for bias in ([[first["id"], False]], {str(first["id"]): -100}, [[first["token"], -100]]):
        assert not complete(server, n_predict=1, logit_bias=bias)["content"].startswith(first["token"])


def test_settings_do_not_leak(server: Server, text: str) -> None:
    for fields in ({"ignore_eos": True}, {"logit_bias": {"5": 50}}, {"samplers": ["top_k"]}, {"stop": ["e"]}):
        complete(server, id_slot=0, **fields)
        assert complete(server, id_slot=0, n_predict=40)["content"] == text


@pytest.mark.parametrize(
    "fields", [{"repeat_penalty": 1.8}, {"presence_penalty": 2}, {"dry_multiplier": 5, "dry_allowed_length": 1}]
)
def test_penalties_have_an_effect(server: Server, fields: dict[str, Any]) -> None:
    plain = complete(server, n_predict=100)["content"]
    assert complete(server, n_predict=100, **fields)["content"] != plain


def test_long_prompts_name_the_limit(server: Server) -> None:
    long = "ab " * 600
    message = {"messages": [{"role": "user", "content": long}], "max_tokens": 4}
    for path, body in (("/completion", {"prompt": long}), ("/v1/chat/completions", message), ("/v1/messages", message)):
        for streamed in (False, True):
            response = server.post(path, body | {"stream": streamed})
            text = refused(response, 400, "exceed_context_size_error")
            assert "exceeds the available context size" in text
            error = response.json()["error"]
            assert error["n_prompt_tokens"] >= 600 and error["n_ctx"] == 512


def test_numbers_out_of_range_are_named(server: Server) -> None:
    message = refused(server.post("/completion", {"prompt": PROMPT, "n_predict": 2**40}))
    assert "n_predict" in message and "2147483647" in message and str(2**40) in message


def test_infill_checks_its_fields_first(server: Server) -> None:
    refused(server.post("/infill", {"input_suffix": "x"}))
    refused(server.post("/infill", {"input_prefix": 5, "input_suffix": "x"}))
    refused(server.post("/infill", {"input_prefix": "a", "input_suffix": "x"}), 501, "not_supported_error")


# --- constrained answers ------------------------------------------------------------------------------------------
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "properties make an object": ({"properties": {"a": {"const": 1}}, "required": ["a"]}, {"a": 1}),
    "no further properties": ({"type": "object", "properties": {}}, {}),
    "items make a tuple": ({"items": [{"const": 1}, {"const": True}]}, [1, True]),
    "prefixItems make a tuple": ({"prefixItems": [{"const": 1}, {"const": 2}]}, [1, 2]),
    "allOf is one object": (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"const": 2}}, "required": ["y"]}],
            "$defs": {"a": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}},
        },
        {"x": 1, "y": 2},
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_mean_what_they_mean_elsewhere(server: Server, name: str) -> None:
    schema, expected = SCHEMAS[name]
    assert json.loads(complete(server, n_predict=80, json_schema=schema)["content"]) == expected


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {"type": "string", "format": "date-time"}])
def test_values_come_to_an_end(server: Server, schema: dict[str, Any]) -> None:
    answer = complete(server, n_predict=120, json_schema=schema)
    assert json.loads(answer["content"]) is not None and answer["stop_type"] == "eos"


def test_long_constants_are_kept(server: Server) -> None:
    schema = {"const": [10**20, "98765432109876543210987"]}
    assert json.loads(complete(server, n_predict=120, json_schema=schema)["content"]) == schema["const"]


def test_tools_take_keywords_that_answers_refuse(server: Server) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "not": {"required": ["m"]},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 100}
    choice = server.post("/v1/chat/completions", body | {"tools": [tool], "tool_choice": "required"}).json()["choices"][
        0
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["n"] in (1, 2)
    assert "not" in refused(server.post("/completion", {"prompt": PROMPT, "json_schema": parameters}))


# --- slots --------------------------------------------------------------------------------------------------------
def test_saved_slots_are_listed_renamed_and_deleted(server: Server, tmp_path: Path) -> None:
    prompt = "What is the capital of France?"
    complete(server, prompt=prompt, id_slot=1, n_predict=4)
    held = server.get("/slots/list").json()
    assert [slot["slot_id"] for slot in held] == [0, 1] and prompt in held[1]["prompt"]
    saved = server.post("/slots/1?action=save", {"filename": "one.bin"}).json()
    listed = server.get("/list").json()
    assert [entry["filename"] for entry in listed] == ["one.bin"]
    assert listed[0]["token_count"] == saved["n_saved"] == held[1]["token_count"]
    assert listed[0]["filesize"] == saved["n_written"] and prompt in listed[0]["prompt"]
    rename = {"old_filename": "one.bin", "new_filename": "two.bin"}
    assert server.post("/rename_prompt", rename).json() == {"status": "renamed"} | rename
    refused(server.post("/rename_prompt", rename), 404, "not_found_error")
    refused(server.post("/rename_prompt", {"old_filename": "two.bin", "new_filename": "../x"}))
    refused(server.post("/rename_prompt", {"old_filename": "two.bin", "new_filename": "two.bin"}), 409)
    refused(server.post("/delete_prompt", {"filename": "log.txt"}), 404, "not_found_error")
    assert server.post("/slots/0?action=restore", {"filename": "two.bin"}).json()["n_restored"] == saved["n_saved"]
    assert complete(server, prompt=prompt, id_slot=0, n_predict=1)["timings"]["prompt_n"] == 1
    assert server.post("/delete_prompt", {"filename": "two.bin"}).json() == {"status": "deleted", "filename": "two.bin"}
    assert server.get("/list").json() == []
