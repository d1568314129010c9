"""The outer layer of the server: errors, bodies, keys, CORS, loading, static files, logs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_tokenizer
from server_client import Client

from ikcli.errors import UsageError
from ikcli.server.http import body, jsontext
from ikcli.server.http.logs import ServerLog
from ikcli.server.slots.log import log_timings
from ikcli.server.slots.messages import RequestTimings
from ikcli.settings.run import RunConfig


def error_of(response: Any, status: int, type: str = "invalid_request_error") -> str:
    """The message of an error answer, whose shape is checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and error["type"] == type
    assert error["message"]
    return str(error["message"])


def test_timing_lines_are_those_of_the_reference() -> None:
    """As people quote them; the JSON log has the rates as fields."""
    out, objects = io.StringIO(), io.StringIO()
    timings = RequestTimings(cache_n=7, prompt_n=85, prompt_ms=16115.8, predicted_n=1960, predicted_ms=155304.51)
    for log in (ServerLog(out=out), ServerLog(json=True, out=objects)):
        log_timings(log, {"id_slot": 0, "id_task": 3}, timings, truncated=False)
    texts = [line.partition(" | ")[0] for line in out.getvalue().splitlines()]
    assert texts[-2:] == [
        "INFO [           print_timings] prompt eval time     =   16115.80 ms /    85 tokens"
        " (  189.60 ms per token,     5.27 tokens per second)",
        "INFO [           print_timings] generation eval time =  155304.51 ms /  1960 runs  "
        " (   79.24 ms per token,    12.62 tokens per second)",
    ]
    assert "          total time =  171420.31 ms" in texts[0] and "n_tokens_second=5.274" in out.getvalue()
    total, prompt, generation = map(json.loads, objects.getvalue().splitlines())
    assert (total["t_total"], total["n_cached"], total["truncated"]) == (171420.31, 7, False)
    wanted = {"id_slot": 0, "id_task": 3, "t_prompt_processing": 16115.8, "n_prompt_tokens_processed": 85,
              "t_token": 189.598, "n_tokens_second": 5.274}  # fmt: skip
    assert wanted.items() <= prompt.items()
    wanted = {"id_slot": 0, "t_token_generation": 155304.51, "n_decoded": 1960, "t_token": 79.237,
              "n_tokens_second": 12.62}  # fmt: skip
    assert wanted.items() <= generation.items()
    nothing = io.StringIO()
    log_timings(ServerLog(out=nothing), {}, RequestTimings(prompt_n=3, prompt_ms=1.0))
    assert "0.00 ms /     0 runs" in nothing.getvalue()


def test_health_tells_slots() -> None:
    client = Client()
    for path in ("/health", "/v1/health"):
        assert client.get(path).json() == {"status": "ok", "slots_idle": 2, "slots_processing": 0}
    client.engine.busy = {0, 1}
    response = client.get("/health?fail_on_no_slot=1")
    assert response.status_code == 503 and response.json()["status"] == "no slot available"
    assert client.get("/health").status_code == 200
    assert len(client.get("/health?include_slots").json()["slots"]) == 2


@pytest.mark.parametrize("path", ["/health", "/completion", "/props", "/nothing"])
def test_everything_but_the_models_waits_for_loading(path: str) -> None:
    client = Client()
    client.engine.state = "loading"
    assert error_of(client.get(path), 503, "unavailable_error") == "Loading model"
    for open_path in ("/models", "/v1/models"):
        assert client.get(open_path).json()["data"][0]["meta"] is None
    assert client.get("/api/tags").json()["models"][0]["name"] == "m"
    page = client.get("/")
    assert page.status_code == 503 and "loading" in page.text


def test_unknown_paths_and_methods() -> None:
    client = Client()
    assert error_of(client.get("/nothing"), 404, "not_found_error") == "File Not Found"
    error_of(client.post("/v1/chat/completions/"), 404, "not_found_error")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        error_of(client(method, "/completion"), 404, "not_found_error")
    error_of(client.post("/health"), 404, "not_found_error")
    head = client("HEAD", "/health")
    assert head.status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b'"text"', b"null", b"{'a': 1}", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"prompt=a",
     b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 100_000, b'{"a":' * 5000,
     b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_json_object(data: bytes) -> None:
    client = Client()
    for path in ("/completion", "/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses"):
        error_of(client.post(path, content=data), 400)


def test_nesting_is_limited_whatever_the_strings_hold() -> None:
    assert jsontext.parse(b'{"a": "' + b"[" * 5000 + b'"}') == {"a": "[" * 5000}
    assert jsontext.parse(b"[" * 500 + b"]" * 500)
    with pytest.raises(ValueError, match="deep"):
        jsontext.parse(b"[" * 600 + b"]" * 600)


def test_numbers_json_cannot_hold() -> None:
    assert jsontext.dump({"a": [float("inf"), 1.5], "b": float("nan")}) == '{"a":[null,1.5],"b":null}'


def test_body_size_and_content_type(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    form = client.post("/tokenize", content=b'{"content": "Hello"}', headers={"content-type": "text/plain"})
    assert form.json() == {"tokens": [259]}
    error_of(client.post("/tokenize", files={"file": b"x"}), 415)
    monkeypatch.setattr(body, "MAX_BODY", 100)
    message = error_of(client.post("/tokenize", {"content": "x" * 200}), 413)
    assert "100" in message
    pieces = [b'{"content": "', *[b"x" * 17] * 5, b'"}']  # each far below the limit
    exact = client.post("/tokenize", content=_pieces(pieces))
    assert exact.status_code == 200 and sum(map(len, pieces)) == 100
    assert "100" in error_of(client.post("/tokenize", content=_pieces([*pieces, b" "])), 413)
    assert "100" in error_of(client.post("/tokenize", content=_pieces([b" ", *pieces])), 413)
    lies = {"content-length": "1", "transfer-encoding": "chunked"}
    error_of(client.post("/tokenize", content=_pieces([*pieces, b" "]), headers=lies), 413)
    error_of(client.post("/tokenize", content=b"{}", headers={"content-length": "101"}), 413)
    assert client.post("/tokenize", content=b"{}", headers={"content-length": "100"}).status_code == 200


async def _pieces(parts: list[bytes]) -> Any:
    for part in parts:
        yield part


def test_anthropic_errors_have_their_shape() -> None:
    response = Client().post("/v1/messages", {"max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["type"] == "error" and "messages" in response.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://a.example", "localhost", "web.mydomain.fr"])
def test_cors_repeats_the_origin(origin: str) -> None:
    client = Client()
    asked = client("OPTIONS", "/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 200 and asked.content == b""
    assert asked.headers["access-control-allow-origin"] == origin
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert asked.headers["access-control-allow-methods"] == "GET, POST"
    assert asked.headers["access-control-allow-headers"] == "*"
    for path in ("/health", "/nothing", "/v1/props"):
        response = client.get(path, headers={"Origin": origin})
        assert response.headers.get_list("access-control-allow-origin") == [origin]


def test_cors_origins_can_be_limited() -> None:
    client = Client(cors_origins="localhost,https://good.example")
    allowed = {"http://localhost:3000": True, "http://127.0.0.1": True, "http://[::1]:8080": True,
               "https://good.example": True, "https://evil.example": False,
               "http://localhost.evil.example": False}  # fmt: skip
    for origin, expected in allowed.items():
        headers = client.get("/health", headers={"Origin": origin}).headers
        assert ("access-control-allow-origin" in headers) is expected, origin


def test_api_prefix() -> None:
    client = Client(api_prefix="/llm/")
    assert client.get("/llm/health").status_code == 200
    error_of(client.get("/health"), 404, "not_found_error")
    error_of(client.get("/llmhealth"), 404, "not_found_error")


def test_static_folder(tmp_path: Path) -> None:
    root = tmp_path / "public"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (root / "index.html").write_text("<!doctype html>page")
    (root / "sub" / "a.js").write_text("1")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    client = Client(path=root)
    assert client.get("/").text == "<!doctype html>page"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/sub/a.js").text == "1"
    for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/sub/../../secret.txt", "/..%2fsecret.txt", "/link.txt",
                 "/sub", "/%00", "/..%5csecret.txt", "//etc/passwd"):  # fmt: skip
        response = client.get(path)
        assert response.status_code == 404 and "secret" not in response.text.replace(path, ""), path
    assert client.get("/health").json()["status"] == "ok"


def test_missing_static_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the directory does not exist"):
        Client(path=tmp_path / "absent").get("/")


def test_no_page_if_unwanted() -> None:
    for client in (Client(ui=False), Client(webui="none")):
        error_of(client.get("/"), 404, "not_found_error")


def test_log_lines() -> None:
    client = Client()
    client.get("/props?a=1&b=x%0AINFO%20forged")
    line = client.log.getvalue()
    assert line.startswith('INFO [      log_server_request] request | tid="')
    assert line.endswith('status=200 method="GET" path="/props" params={"a":"1","b":"x\\nINFO forged"}\n')
    assert line.count("\n") == 1
    assert ' remote_addr="127.0.0.1" remote_port=' in line


def test_json_log_and_no_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    ServerLog(json=True).warn("f", "m", id_slot=0)
    entry = json.loads(capsys.readouterr().out)
    assert entry["level"] == "WARN" and entry["function"] == "f" and entry["msg"] == "m" and entry["id_slot"] == 0
    client = Client()
    client.post("/completion", {"prompt": "a very private prompt"})
    assert "private" not in client.log.getvalue()
    loud = Client(config=RunConfig(command="serve", verbose=True))
    loud.post("/completion", {"prompt": "a very private prompt"})
    assert "VERB [              log_prompt] request body" in loud.log.getvalue()
    assert "private" in loud.log.getvalue()


def test_internal_errors_hide_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()

    def fail(**_: Any) -> None:
        raise RuntimeError("the secret reason")

    monkeypatch.setattr(client.engine, "metrics", fail)
    client.config = client.config.__class__(server=client.config.server.__class__(metrics=True))
    message = error_of(client.get("/metrics"), 500, "server_error")
    assert "secret" not in message
    assert "the secret reason" in client.log.getvalue()


def test_models_list() -> None:
    client = Client(alias="one, two")
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    model = body["data"][0]
    assert model["id"] == "one" and model["aliases"] == ["one", "two"]
    assert model["object"] == "model" and model["owned_by"] == "llamacpp" and isinstance(model["created"], int)
    assert set(model["meta"]) == {"vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"}
    assert model["max_model_len"] == 256
    assert body["models"][0]["slug"] == "one" and body["models"][0]["context_window"] == 256


def test_props() -> None:
    client = Client()
    props = client.get("/props").json()
    assert props["total_slots"] == 2 and props["model_alias"] == "m" and props["model_path"].endswith(".gguf")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["bos_token"] == "<|bos|>" and props["eos_token"] == "<|eos|>"
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 256 and defaults["temperature"] == 0.8 and defaults["params"]["top_k"] == 40
    assert "im_start" in props["chat_template"]
    assert client.get("/v1/props").json()["n_ctx"] == 512
    error_of(client.post("/props", {}), 501, "not_supported_error")
    assert Client(props=True).post("/props", {}).json() == {"success": True}


def test_metrics() -> None:
    error_of(Client().get("/metrics"), 501, "not_supported_error")
    response = Client(metrics=True).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.headers["process-start-time-unix"] == "1000"
    lines = response.text.splitlines()
    assert "# TYPE llamacpp:prompt_tokens_total counter" in lines
    assert "llamacpp:prompt_tokens_total 12.0" in lines
    assert "# TYPE llamacpp:requests_processing gauge" in lines
    for name in ("prompt_seconds_total", "tokens_predicted_total", "tokens_predicted_seconds_total", "n_decode_total",
                 "prompt_tokens_seconds", "predicted_tokens_seconds", "requests_deferred", "kv_cache_usage_ratio",
                 "kv_cache_tokens", "n_tokens_max", "n_busy_slots_per_decode"):  # fmt: skip
        assert any(line.startswith(f"llamacpp:{name} ") for line in lines), name


def test_slots() -> None:
    error_of(Client(slots=False).get("/slots"), 501, "not_supported_error")
    client = Client()
    slots = client.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert slots[0]["state"] == 0 and slots[0]["is_processing"] is False and slots[0]["n_ctx"] == 256
    assert "params" not in slots[0] and slots[0]["temperature"] == 0.8
    client.post("/completion", {"prompt": "a", "temperature": 0.5})
    assert client.get("/slots").json()[0]["params"]["temperature"] == 0.5
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200
    client.engine.busy = {0, 1}
    error_of(client.get("/slots?fail_on_no_slot=1"), 503, "unavailable_error")


def test_slot_actions(tmp_path: Path) -> None:
    error_of(Client().post("/slots/0?action=erase"), 501, "not_supported_error")
    client = Client(slot_save_path=tmp_path)
    saved = client.post("/slots/1?action=save", {"filename": "a.bin"}).json()
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": 7, "n_written": 1000, "timings": {"save_ms": 1.5}}
    restored = client.post("/slots/0?action=restore", {"filename": "a.bin"}).json()
    assert restored["n_restored"] == 7 and restored["n_read"] == 1000 and restored["timings"] == {"restore_ms": 1.5}
    assert client.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 7}
    error_of(client.post("/slots/0?action=restore", {"filename": "b.bin"}), 400)
    error_of(client.post("/slots/0?action=dance", {"filename": "a.bin"}), 400)
    error_of(client.post("/slots/0", {"filename": "a.bin"}), 400)
    for number in ("2", "99", "-1", "x", "1e3", "99999999999999999999"):
        assert "slots are 0 to 1" in error_of(client.post(f"/slots/{number}?action=erase"), 400)
    for name in (
        "../a",
        "a/b",
        "",
        ".",
        "..",
        ".hidden",
        "a\\b",
        "a\nb",
        "c:d",
        "x" * 300,
        "con",
        "a.",
        5,
        None,
        ["a"],
    ):
        error_of(client.post("/slots/0?action=save", {"filename": name}), 400)
    assert list(client.engine.saved) == [tmp_path / "a.bin"]


def test_slots_that_have_other_numbers(tmp_path: Path) -> None:
    """Several servers behind one port number their slots on from each other; the engine counts from 0."""
    client = Client(first_slot=4, slot_save_path=tmp_path)
    assert [slot["id"] for slot in client.get("/slots").json()] == [4, 5]
    answer = client.post("/completion", {"prompt": "a", "id_slot": 5}).json()
    assert client.engine.requests[-1].id_slot == 1 and answer["id_slot"] == 4  # the fake engine says 0
    assert client.events("/completion", {"prompt": "a"})[0]["id_slot"] == 4
    assert client.engine.requests[-1].id_slot == -1
    for number in (0, 3, 6):
        assert "slots are 4 to 5" in error_of(client.post("/completion", {"prompt": "a", "id_slot": number}), 400)
        assert "slots are 4 to 5" in error_of(client.post(f"/slots/{number}?action=erase"), 400)
    assert client.post("/slots/5?action=erase").json() == {"id_slot": 5, "n_erased": 7}


def test_endpoints_of_what_is_not_there() -> None:
    client = Client()
    assert client.get("/lora-adapters").json() == []
    assert client.post("/lora-adapters", []).json() == {"success": True}
    for value in ({}, [1], [{}], [{"id": 0}], [{"id": 0, "scale": 1}], [{"id": "a", "scale": 1}]):
        error_of(client.post("/lora-adapters", value), 400)
    assert client.get("/control-vectors").json() == []
    for path, value in (("load", {"path": "a"}), ("unload", {"id": 0}), ("apply", [])):
        message = error_of(client.post(f"/control-vectors/{path}", value), 501, "not_supported_error")
        assert message.endswith("Start it with `--control-vector-path`")


def test_version() -> None:
    assert Client().get("/version").json()["version"]


def test_tokenize_and_back() -> None:
    client = Client()
    tokenizer = client.engine.tokenizer
    for text in ("Hello", "a<|im_start|>b", "wörld 日本", ""):
        tokens = client.post("/tokenize", {"content": text}).json()["tokens"]
        assert tokens == tokenizer.encode(text, add_special=False)
        assert client.post("/detokenize", {"tokens": tokens}).json() == {"content": text}
    added = client.post("/tokenize", {"content": "Hello", "add_special": True}).json()["tokens"]
    assert added == [tokenizer.bos_id, 259]
    plain = client.post("/tokenize", {"content": "<|im_start|>", "parse_special": False}).json()["tokens"]
    assert len(plain) == len("<|im_start|>")
    pieces = client.post("/tokenize", {"content": "Helloö", "with_pieces": True}).json()["tokens"]
    assert pieces[0] == {"id": 259, "piece": "Hello"}
    assert [p["piece"] for p in pieces[1:]] == [[195], [182]]
    assert client.post("/tokenize", {}).json() == {"tokens": []}
    assert client.post("/tokenize", {"content": ["Hello", 5]}).json() == {"tokens": [259, 5]}
    for wrong in ({"content": 5}, {"content": {}}, {"content": "a", "add_special": 1}, {"content": [9999]}):
        error_of(client.post("/tokenize", wrong), 400)
    for wrong in ({"tokens": "a"}, {"tokens": [-1]}, {"tokens": [9999]}, {"tokens": ["a"]}, {"tokens": [True]}):
        error_of(client.post("/detokenize", wrong), 400)


def test_openapi_describes_every_field() -> None:
    client = Client()
    document = client.get("/openapi.json").json()
    schema = document["paths"]["/completion"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    for name in ("temperature", "n_predict", "max_tokens", "dry_multiplier", "speculative.n_max", "json_schema"):
        assert schema["properties"][name]["description"]
    page = client.get("/docs")
    assert (
        page.status_code == 200
        and "/v1/chat/completions" in page.text
        and "http" not in page.text.lower().split("</style>")[1].replace("chat", "")[:200]
    )


def test_infill() -> None:
    error_of(Client().post("/infill", {"input_prefix": "a", "input_suffix": "b"}), 501, "not_supported_error")
    extra = {"<|fim_prefix|>": 3, "<|fim_suffix|>": 3, "<|fim_middle|>": 3}
    client = Client(engine=FakeEngine(fake_tokenizer(extra=extra)))
    tokenizer = client.engine.tokenizer
    body = {
        "input_prefix": "Hello",
        "input_suffix": "}",
        "prompt": "x",
        "input_extra": [{"filename": "f", "text": "z"}],
    }
    assert client.post("/infill", body).json()["content"] == "Hello, wörld!"
    sent = client.engine.requests[-1].prompt
    assert tokenizer.decode(sent) == "<|bos|>z<|fim_prefix|>Hello<|fim_suffix|>}<|fim_middle|>x"
    client.post("/infill", {"input_prefix": "<|im_end|>", "input_suffix": ""})
    assert tokenizer.special_ids.eot not in client.engine.requests[-1].prompt
    for item in (
        {},
        {"filename": "ok"},
        {"filename": 1},
        {"filename": 1, "text": "a"},
        {"filename": "f", "text": 4},
        7,
    ):
        error_of(client.post("/infill", body | {"input_extra": [item]}), 400)
    for wrong in ({"input_suffix": "b"}, {"input_prefix": "a"}, {"input_prefix": 1, "input_suffix": "b"}):
        error_of(client.post("/infill", wrong), 400)
