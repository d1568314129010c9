"""/completion and /v1/completions: fields in, shapes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from server_client import Client
from test_server_chat import HI
from test_server_http import error_of

from ikcli.chat.parser import ChatParser, ParserSettings
from ikcli.cli.parser import parse
from ikcli.errors import UsageError
from ikcli.sampling.params import DEFAULT_SAMPLERS, SamplerParams
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.params import defaults_of
from ikcli.server.http.schema import names_of
from ikcli.server.http.shapes.chat import ChatShape
from ikcli.server.http.shapes.common import Naming
from ikcli.server.http.shapes.native import NativeShape
from ikcli.server.slots.messages import Bans, Delta, Failure, GenerationRequest, RequestTimings, TokenInfo
from ikcli.settings.run import RunConfig
from ikcli.settings.sampling import SamplingConfig, sampling_values

TEXT = "Hello, wörld!"


def sent(client: Client, **fields: Any) -> GenerationRequest:
    """What the engine gets for these fields."""
    response = client.post("/completion", {"prompt": "Hello", **fields})
    assert response.status_code == 200, response.text
    return client.engine.requests[-1]


def test_answer_has_the_fields_of_both_forks() -> None:
    body = Client().post("/completion", {"prompt": "Hello", "n_predict": 2}).json()
    assert body["content"] == body["generated_text"] == "Hello, " and body["stop"] is True
    assert body["stop_type"] == "limit" and body["stopped_limit"] is True and body["stopped_eos"] is False
    assert body["stopped_word"] is False and body["stopping_word"] == ""
    assert body["tokens"] == [] and body["tokens_predicted"] == 2 and body["tokens_evaluated"] == 2
    assert body["prompt"] == "Hello" and body["model"] == "m" and body["index"] == 0 and body["id_slot"] == 0
    assert body["truncated"] is False and body["has_new_line"] is False and body["tokens_cached"] == 4
    settings = body["generation_settings"]
    assert settings["n_predict"] == settings["max_tokens"] == 2 and settings["n_ctx"] == 256
    assert settings["samplers"] == list(DEFAULT_SAMPLERS) and settings["seed"] == 0xFFFFFFFF
    timings = body["timings"]
    assert timings["cache_n"] == 1 and timings["prompt_n"] == 1 and timings["predicted_n"] == 2
    assert timings["prompt_per_token_ms"] == 2.0 and timings["predicted_per_second"] == 500.0
    assert timings["n_ctx"] == 256 and timings["n_past"] == 4


def test_plain_events_are_those_of_any_request() -> None:
    """Events without timings and probabilities are written in another way."""
    names, vocab = Naming("m", "m", "cmpl-1", 0), (TokenInfo(7, math.nan), TokenInfo(8, math.nan))
    for text in ("a", 'q"\\\n\t\x01', "\u00e9\u20ac\U0001f600", "\ud800"):
        event = Delta(text, vocab, RequestTimings(cache_n=3, prompt_n=4, predicted_n=5), 2)
        made = []
        for per_token in (False, True):
            options = GenerationBody(timings_per_token=per_token)
            data = NativeShape(names, options, None, ["x"], [{}]).delta(1, event)
            assert data.startswith(b"data: ") and data.endswith(b"}\n\n")
            made.append(json.loads(data[6:]))
        assert list(made[0].items()) == list(made[1].items())[:-1] and list(made[1])[-1] == "timings"


def test_plain_chunks_are_those_of_any_request() -> None:
    """Chunks of content without timings and probabilities are written in another way."""
    names = Naming("m", "model \x00", "chatcmpl-1", 7)
    for text in ("a", 'q"\\\n\t\x01', "\u00e9\u20ac\U0001f600", "\ud800"):
        event = Delta(text, (), RequestTimings(cache_n=3, prompt_n=4, predicted_n=5), 2)
        made = []
        for per_token in (False, True):
            options = GenerationBody(timings_per_token=per_token)
            shape = ChatShape(names, options, None, lambda: ChatParser(ParserSettings()))
            events = [shape.delta(i, event) for i in (0, 1, 1)]
            made.append([json.loads(e[6:]) for data in events for e in data.split(b"\n\n") if e])
        for chunk in made[1]:
            chunk.pop("timings", None)
        assert made[0] == made[1] and len(made[0]) == 5


def test_stream_is_framed_as_events() -> None:
    client = Client()
    response = client.post("/completion", {"prompt": "Hello", "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert "[DONE]" not in response.text and "\r" not in response.text
    events = client.events("/completion", {"prompt": "Hello"})
    assert "".join(event["content"] for event in events) == TEXT
    assert [event["stop"] for event in events] == [False] * 4 + [True]
    assert all(len(event["tokens"]) == 1 for event in events[:-1])
    last = events[-1]
    assert last["content"] == "" and last["tokens"] == [] and last["generated_text"] == TEXT
    assert last["stop_type"] == "eos" and "generation_settings" in last and "timings" in last
    assert "timings" not in events[0]
    timed = client.events("/completion", {"prompt": "Hello", "timings_per_token": True})
    assert all("timings" in event for event in timed)


def test_progress_events() -> None:
    events = Client().events("/completion", {"prompt": "Hello", "return_progress": True})
    shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert shown == [{"total": 2, "cache": 1, "processed": n, "time_ms": 1.0} for n in (1, 2)]
    assert "prompt_progress" not in Client().post("/completion", {"prompt": "a", "return_progress": True}).json()


def test_tokens_and_probabilities() -> None:
    client = Client()
    body = client.post("/completion", {"prompt": "Hello", "return_tokens": True, "n_probs": 2}).json()
    assert body["tokens"][0] == 259 and len(body["tokens"]) == 4
    first = body["completion_probabilities"][0]
    assert first["id"] == 259 and first["token"] == "Hello" and first["bytes"] == list(b"Hello")
    assert first["logprob"] == -0.5 and [c["id"] for c in first["top_logprobs"]] == [259, 260]
    assert first["content"] == "Hello" and first["probs"][0] == {"tok_str": "Hello", "prob": math.exp(-0.5)}
    body = client.post("/completion", {"prompt": "Hello", "n_probs": 2, "post_sampling_probs": True}).json()
    first = body["completion_probabilities"][0]
    assert first["prob"] == math.exp(-0.5) and len(first["top_probs"]) == 2 and "logprob" not in first
    for event in client.events("/completion", {"prompt": "Hello", "n_probs": 1})[:-1]:
        assert len(event["completion_probabilities"]) == 1


def test_response_fields() -> None:
    fields = ["content", "generation_settings/n_predict", "nothing", "timings/cache_n/x"]
    body = Client().post("/completion", {"prompt": "Hello", "n_predict": 1, "response_fields": fields}).json()
    assert body == {"content": "Hello", "generation_settings/n_predict": 1}


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), ([259, 259], 1), ([259, "Hello"], 1), (["Hello", 259], 1), ({"prompt_string": "Hello"}, 1),
     (["Hello", "b"], 2), ([[259], "Hello", {"prompt_string": [1, 2]}], 3), (["Hello"], 1)],
)  # fmt: skip
def test_forms_of_prompts(prompt: Any, count: int) -> None:
    client = Client()
    body = client.post("/completion", {"prompt": prompt}).json()
    assert len(client.engine.requests) == count
    if count == 1:
        assert body["content"] == TEXT
    else:
        assert [item["index"] for item in body] == list(range(count))


def test_bos_is_added_to_text_only() -> None:
    client = Client()
    bos = client.engine.tokenizer.bos_id
    for prompt, tokens in (("Hello", (bos, 259)), ([259], (259,)), (["Hello", 259], (bos, 259, 259)),
                           ([259, "Hello"], (259, 259)), ("", (bos,))):  # fmt: skip
        client.post("/completion", {"prompt": prompt})
        assert client.engine.requests[-1].prompt == tokens


@pytest.mark.parametrize(
    "prompt",
    [None, 5, True, 1.5, [], {}, {"prompt_string": None}, [[]], [None], [True], [1, None], [1, {}], [1.5], [-1], [9999],
     [[1, 9999]], {"prompt_string": "a", "multimodal_data": ["x"]}, [10**30], ["a"] * 300],
)  # fmt: skip
def test_prompts_that_are_none(prompt: Any) -> None:
    client = Client()
    assert "prompt" in error_of(client.post("/completion", {"prompt": prompt}), 400)
    assert "prompt" in error_of(client.post("/v1/completions", {"prompt": prompt}), 400)
    assert not client.engine.requests


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"stop": [1]}, "stop[0]"), ({"stop": 5}, "stop"), ({"stop": [None]}, "stop[0]"),
     ({"samplers": [1]}, "samplers[0]"),
     ({"samplers": ["top_k", "magic"]}, "magic"), ({"samplers": "kz"}, "z"), ({"samplers": 5}, "samplers"),
     ({"repeat_last_n": -2}, "repeat_last_n"), ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
     ({"n_probs": 10**9}, "n_probs"), ({"n_probs": -1}, "n_probs"), ({"id_slot": 2}, "id_slot"),
     ({"id_slot": 99}, "id_slot"), ({"id_slot": -2}, "id_slot"), ({"temperature": "hot"}, "temperature"),
     ({"temperature": True}, "temperature"), ({"temperature": 1e39}, "temperature"), ({"top_k": 1.5}, "top_k"),
     ({"top_k": 10**20}, "top_k"), ({"top_p": []}, "top_p"), ({"min_p": {}}, "min_p"), ({"stream": 1}, "stream"),
     ({"stream": "true"}, "stream"), ({"cache_prompt": "yes"}, "cache_prompt"), ({"n_predict": -3}, "n_predict"),
     ({"n_predict": "8"}, "n_predict"), ({"max_tokens": 2.5}, "max_tokens"), ({"seed": "x"}, "seed"),
     ({"seed": 10**30}, "seed"), ({"mirostat": 3}, "mirostat"), ({"min_keep": -1}, "min_keep"),
     ({"grammar": 5}, "grammar"), ({"json_schema": "x"}, "json_schema"), ({"json_schema": 5}, "json_schema"),
     ({"json_schema": {}, "grammar": "root ::= \"a\""}, "json_schema"), ({"logit_bias": 5}, "logit_bias"),
     ({"logit_bias": [5]}, "logit_bias[0]"), ({"logit_bias": [[1]]}, "logit_bias[0]"),
     ({"logit_bias": [[1, "x"]]}, "logit_bias[0]"), ({"logit_bias": [[9999, 1]]}, "logit_bias[0]"),
     ({"logit_bias": {"9999": 1}}, "9999"), ({"logit_bias": {"1": True}}, "logit_bias"),
     ({"logit_bias": [[None, 1]]}, "logit_bias[0]"), ({"n_cmpl": 0}, "n_cmpl"), ({"n": 1000}, "n"),
     ({"lora": [{"id": 0, "scale": 1}]}, "lora"), ({"stream_options": 5}, "stream_options"),
     ({"stream_options": {"include_usage": "yes"}}, "include_usage"), ({"dry_sequence_breakers": []}, "dry_sequence"),
     ({"dry_sequence_breakers": 5}, "dry_sequence"), ({"banned_strings": [5]}, "banned_strings[0]"),
     ({"response_fields": [5]}, "response_fields[0]"), ({"speculative.n_max": -1}, "speculative.n_max"),
     ({"speculative.p_min": 2}, "speculative.p_min"), ({"n_keep": -2}, "n_keep"), ({"n_discard": -1}, "n_discard"),
     ({"n_indent": -1}, "n_indent"), ({"t_max_predict_ms": "x"}, "t_max_predict_ms"), ({"repeat_penalty": 0}, "repeat"),
     ({"penalty_prompt": 5}, "penalty_prompt"), ({"penalty_prompt": [9999]}, "penalty_prompt[0]"),
     ({"sse_ping_interval": -2}, "sse_ping_interval"), ({"adaptive_decay": 1}, "adaptive_decay"),
     ({"stop": ["x"] * 2000}, "stop"), ({"ignore_eos": 1}, "ignore_eos")],
)  # fmt: skip
def test_wrong_fields_are_named(fields: dict[str, Any], name: str) -> None:
    client = Client()
    assert name in error_of(client.post("/completion", {"prompt": "a", **fields}), 400)
    assert name in error_of(client.post("/v1/completions", {"prompt": "a", **fields}), 400)
    assert not client.engine.requests


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"top_k": "40"}, 'top_k must be an integer, not "40"'),
        ({"top_k": 1.5}, "top_k must be an integer, not 1.5"),
        ({"top_k": True}, "top_k must be an integer, not true"),
        ({"n": 65}, "n must be from 1 to 64, not 65"),
        ({"max_tokens": -3}, "max_tokens must be from -2 to 2147483647, not -3"),
        ({"adaptive_decay": 1}, "adaptive_decay must be from 0 to 0.99, not 1"),
        ({"adaptive_target": 1.5}, "adaptive_target must be at most 1, not 1.5"),
        ({"n_probs": -1}, "n_probs must be at least 0, not -1"),
        ({"n_probs": 10**6}, "n_probs must be at most 264, the size of the vocabulary"),
        ({"repeat_penalty": 0}, "repeat_penalty must be greater than 0, not 0"),
        ({"temperature": [1]}, "temperature must be a number, not an array"),
        ({"temperature": False}, "temperature must be a number, not false"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": 1e39}, "temperature must be a finite number"),
        ({"speculative.n_max": -1}, "speculative.n_max must be from 0 to 2147483647, not -1"),
        ({"speculative.p_min": "x" * 50}, f'speculative.p_min must be a number, not "{"x" * 40}"...'),
        ({"stream": "yes"}, 'stream must be true or false, not "yes"'),
        ({"grammar": {}}, "grammar must be a string, not an object"),
        ({"stop": 5}, "stop must be a string or an array of strings, not 5"),
        ({"stop": ["a", {}]}, "stop[1] must be a string, not an object"),
        ({"json_schema": "{}"}, 'json_schema must be an object, not "{}"'),
        ({"stream_options": 1}, "stream_options must be an object, not 1"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage must be true or false, not 1"),
    ],
)
def test_sentences_about_wrong_fields(fields: dict[str, Any], sentence: str) -> None:
    for route in ("/completion", "/v1/completions"):
        response = Client().post(route, {"prompt": "a", **fields})
        assert response.status_code == 400 and response.json()["error"]["message"] == sentence


def test_null_means_the_default() -> None:
    client = Client()
    names = {name: None for field in GenerationBody.model_fields for name in names_of(GenerationBody, field)}
    nulls = sent(client, **names, best_of=None, echo=None, suffix=None, logprobs=None)
    plain = sent(client)
    assert nulls == plain
    assert client.post("/v1/completions", {"prompt": "a", **names, "best_of": None, "suffix": None}).status_code == 200


def test_fields_reach_the_engine() -> None:
    client = Client()
    numbers = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "tfs_z": 0.9, "typical_p": 0.8,
               "top_n_sigma": 1.5, "xtc_probability": 0.2, "xtc_threshold": 0.3, "mirostat": 2, "mirostat_tau": 4.0,
               "mirostat_eta": 0.2, "repeat_last_n": -1, "repeat_penalty": 1.1, "presence_penalty": 0.1,
               "frequency_penalty": 0.2, "penalize_nl": True, "dry_multiplier": 0.8, "dry_base": 2.0,
               "dry_allowed_length": 3, "dry_penalty_last_n": 9, "dry_sequence_breakers": ["x"],
               "adaptive_target": 0.4, "adaptive_decay": 0.5, "min_keep": 2, "n_probs": 3,
               "post_sampling_probs": True, "ignore_eos": True, "dynatemp_range": 0.3, "dynatemp_exponent": 1.2,
               "seed": 42}  # fmt: skip
    request = sent(client, **numbers, samplers=["temperature", "typ_p"], logit_bias=[[1, 2.0]], penalty_prompt=[5])
    for name, value in numbers.items():
        got = getattr(request.sampling, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert request.sampling.samplers == ("temperature", "typical_p")
    assert request.sampling.logit_bias == ((1, 2.0),) and request.sampling.penalty_prompt == (5,)
    others = {"n_predict": 3, "stop": ["a", "b"], "cache_prompt": False, "id_slot": 1, "n_keep": 2, "n_discard": 4,
              "n_indent": 1, "t_max_predict_ms": 9}  # fmt: skip
    request = sent(client, **others)
    for name, value in others.items():
        assert getattr(request, name) == (tuple(value) if isinstance(value, list) else value), name
    request = sent(client, **{"speculative.n_max": 4, "speculative.n_min": 1, "speculative.p_min": 0.5})
    assert (request.speculation.n_max, request.speculation.n_min, request.speculation.p_min) == (4, 1, 0.5)


def test_every_sampling_value_of_the_command_line_is_a_default() -> None:
    values: dict[str, Any] = {}
    for item, _ in sampling_values():
        values[item.name] = not item.default if isinstance(item.default, bool) else item.default + 1
    client = Client(config=RunConfig(command="serve", sampling=SamplingConfig(**values)))
    request, shown = sent(client), client.get("/props").json()["default_generation_settings"]
    assert {name: getattr(request.sampling, name) for name in values} == values
    assert {name: shown[name] for name in values} == values


def test_the_document_has_names_and_limits() -> None:
    paths = Client().get("/openapi.json").json()["paths"]
    content = paths["/v1/completions"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    found = schema["properties"]
    null = {"type": "null"}
    assert schema["required"] == ["prompt"] and null not in found["prompt"]["anyOf"]
    assert found["n"]["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 64}, null]
    assert found["n"] == found["n_cmpl"] and found["max_tokens"] == found["n_predict"]
    assert found["repeat_penalty"]["anyOf"] == [{"type": "number", "exclusiveMinimum": 0}, null]
    assert found["speculative.p_min"]["anyOf"] == [{"type": "number", "minimum": 0, "maximum": 1}, null]
    texts = {"type": "array", "items": {"type": "string"}}
    assert found["stop"]["anyOf"] == [{"type": "string"}, texts, null]
    assert all(value["description"] for value in found.values())
    assert found.keys() >= {name for field in GenerationBody.model_fields for name in names_of(GenerationBody, field)}


def test_requests_do_not_leak_into_each_other() -> None:
    client = Client()
    plain = sent(client)
    sent(client, logit_bias={"5": -1}, ignore_eos=True, stop=["a"], samplers=["top_k"], grammar="", n_probs=2)
    assert sent(client) == plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [([[5, 1.5]], ((5, 1.5),)), ([[5, False]], ((5, -math.inf),)), ({"5": 1}, ((5, 1.0),)),
     ([["Hello", -1]], ((259, -1.0),)), ({"Hello": False}, ((259, -math.inf),)),
     ([{"token": 5, "bias": 2}], ((5, 2.0),)),
     ([["oo", 1]], ((111, 1.0),)), ([], ()), ({}, ()), ([[5, 1], [5, 2]], ((5, 2.0),))],
)  # fmt: skip
def test_forms_of_logit_bias(value: Any, expected: Any) -> None:
    assert sent(Client(), logit_bias=value).sampling.logit_bias == expected


def test_other_forms() -> None:
    client = Client()
    assert sent(client, stop="END").stop == ("END",)
    assert sent(client, stop=["", "a"]).stop == ("a",)
    assert sent(client, samplers="kt").sampling.samplers == ("top_k", "temperature")
    assert sent(client, samplers="top_k;temperature").sampling.samplers == ("top_k", "temperature")
    assert sent(client, dry_sequence_breakers='["\\n", ":"]').sampling.dry_sequence_breakers == ("\n", ":")
    assert sent(client, seed=-1).sampling.seed == -1 and sent(client, seed=2**32 - 1).sampling.seed == -1
    assert sent(client, temperature=-1).sampling.temperature == -1.0
    assert sent(client, top_k=40.0).sampling.top_k == 40
    assert sent(client, max_tokens=5).n_predict == 5
    assert sent(client, max_completion_tokens=6, max_tokens=5).n_predict == 6
    assert sent(client, n_predict=7, max_completion_tokens=6).n_predict == 7
    assert sent(client, n_predict=0).n_predict == 0 and sent(client, n_predict=-1).n_predict == -1
    assert sent(client, dry_base=0.5).sampling.dry_base == 1.75


def test_several_answers() -> None:
    client = Client()
    body = client.post("/completion", {"prompt": ["Hello", "b"], "n_cmpl": 2, "seed": 7}).json()
    assert [item["index"] for item in body] == [0, 1, 2, 3]
    assert [r.sampling.seed for r in client.engine.requests] == [7, 8, 7, 8]
    events = client.events("/completion", {"prompt": "Hello", "n": 3})
    for index in range(3):
        assert "".join(e["content"] for e in events if e["index"] == index) == TEXT


def test_zero_tokens() -> None:
    body = Client().post("/completion", {"prompt": "Hello", "n_predict": 0}).json()
    assert body["content"] == "" and body["tokens_predicted"] == 0 and body["stop_type"] == "limit"
    assert body["timings"]["predicted_per_second"] == 0.0


def test_failures_have_their_status() -> None:
    client = Client()
    for stream in (False, True):
        response = client.post("/completion", {"prompt": "a" * 400, "stream": stream})
        assert "context size" in error_of(response, 400, "exceed_context_size_error")
        assert response.json()["error"]["n_prompt_tokens"] == 401 and response.json()["error"]["n_ctx"] == 256
    client.engine.script = Script(failure=Failure(500, "server_error", "not finite"), fail_after=2)
    error_of(client.post("/completion", {"prompt": "a"}), 500, "server_error")
    events = client.events("/completion", {"prompt": "a"})
    assert [event["content"] for event in events[:2]] == ["Hello", ", "]
    assert events[-1] == {"error": {"code": 500, "message": "not finite", "type": "server_error"}}


def test_banned_texts_and_patterns() -> None:
    client = Client()
    assert sent(client).bans == Bans()
    fields = {"banned_strings": ["z"], "banned_regex": ["a+", "b"], "banned_regex_case_insensitive": ["C"],
              "banned_n": -1, "banned_bias": -5, "banbuffer_size": 7, "rewind_count_max": 9,
              "saturate_predict": True}  # fmt: skip
    bans = sent(client, **fields).bans
    assert (bans.strings, [p.text for p in bans.patterns]) == (("z",), ["a+", "b", "C"])
    assert [p.search("xc") for p in bans.patterns] == [-1, -1, 1]
    assert (bans.n_tokens, bans.bias, bans.n_held, bans.most_rewinds, bans.counts) == (-1, -5.0, 6, 9, False)
    assert sent(client, banned_bias=-999, banned_regex=[]).bans == Bans()
    for wrong, words in (
        ({"banned_regex": ["(a"]}, 'banned_regex: "(a" is not a regular expression of RE2: missing )'),
        ({"banned_regex_case_insensitive": ["(a)\\1"]}, "a back reference"),
        ({"banned_regex": 5}, "banned_regex must be"),
        ({"banned_strings": ["a"] * 1000, "banned_regex": ["b"] * 25}, "at most 1024"),
        ({"banned_strings": ["a"], "banned_n": 0, "rewind_count_max": 0}, "rewind_count_max 0"),
        ({"banned_n": -2}, "banned_n"),
    ):
        assert words in error_of(client.post("/completion", {"prompt": "a", **wrong}), 400, "invalid_request_error")


def test_bans_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "slop.txt"
    path.write_text('"a tapestry"\n\nshivers\n')
    config = parse("serve", ["--banned-string-file", str(path), "--banned-n", "2"]).config
    server = Client(banned_string_file=path, banned_n=2)
    assert sent(server).bans == Bans(("a tapestry", "shivers"), n_tokens=2)
    assert sent(server, banned_strings=["x"]).bans == Bans(("x",), n_tokens=2)
    path.unlink()
    with pytest.raises(UsageError, match="--banned-string-file: cannot read"):
        defaults_of(config)


def test_server_limit_and_defaults() -> None:
    sampling = SamplingConfig(temperature=0.3, samplers="top_k;temp")
    config = RunConfig(command="serve", n_predict=3, seed=9, sampling=sampling)
    client = Client(config=config)
    assert sent(client).n_predict == 3 and sent(client, n_predict=10).n_predict == 3
    assert sent(client, n_predict=2).n_predict == 2
    request = sent(client, n_predict=-2)
    assert (request.n_predict, request.within_context) == (3, True)
    request = sent(client)
    assert not request.within_context
    assert request.sampling == SamplerParams(seed=9, temperature=0.3, samplers=("top_k", "temperature"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "n_predict": -2}),
        ("/completion", {"prompt": "a", "max_tokens": -2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -2}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": -2}),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": -2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": -2}),
        ("/v1/messages", {"messages": HI, "max_tokens": -2}),
        ("/api/chat", {"model": "m", "messages": HI, "stream": False, "options": {"num_predict": -2}}),
        ("/api/generate", {"model": "m", "prompt": "a", "stream": False, "options": {"num_predict": -2}}),
    ],
)
def test_minus_2_is_until_the_context_is_full(path: str, body: dict[str, Any]) -> None:
    client = Client()
    assert client.post(path, body).status_code == 200
    request = client.engine.requests[-1]
    assert (request.n_predict, request.within_context) == (-2, True)


def test_a_server_whose_limit_is_the_context() -> None:
    client = Client(config=RunConfig(command="serve", n_predict=-2))
    for wanted, limit in ((None, -2), (-1, -2), (-2, -2), (0, 0), (7, 7)):
        request = sent(client, n_predict=wanted)
        assert (request.n_predict, request.within_context) == (limit, True)


def test_wrong_options_are_named() -> None:
    for sampling, name in ((SamplingConfig(logit_bias=("x",)), "--logit-bias"),
                           (SamplingConfig(json_schema="{"), "schema"),
                           (SamplingConfig(samplers="magic"), "magic")):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            defaults_of(RunConfig(sampling=sampling))
    given = SamplingConfig(logit_bias=("5+1.5", "6-2"), dry_sequence_breakers=("none",))
    assert defaults_of(RunConfig(sampling=given)).logit_bias == ((5, 1.5), (6, -2.0))


def test_openai_answer() -> None:
    client = Client()
    body = client.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "model": "gpt"}).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "gpt"
    assert body["system_fingerprint"].startswith("b")
    assert body["choices"] == [{"text": "Hello, ", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"completion_tokens": 2, "prompt_tokens": 2, "total_tokens": 4,
                             "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip
    assert client.post("/v1/completions", {"prompt": "a"}).json()["choices"][0]["finish_reason"] == "stop"
    assert client.post("/v1/completions", {"prompt": "a"}).json()["model"] == "m"


def test_openai_prompts_in_an_array_give_one_object() -> None:
    body = Client().post("/v1/completions", {"prompt": ["Hello", "b"], "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 16


def test_openai_stream() -> None:
    client = Client()
    events = client.events("/v1/completions", {"prompt": "Hello", "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 4
    texts = [event["choices"][0] for event in events[:-2]]
    assert "".join(choice["text"] for choice in texts) == TEXT
    assert [choice["finish_reason"] for choice in texts] == [None] * 4 + ["stop"]
    assert len({event["id"] for event in events[:-1]}) == 1


def test_echo_and_logprobs() -> None:
    client = Client()
    body = client.post("/v1/completions", {"prompt": "Hello!", "echo": True, "max_tokens": 0, "logprobs": 1}).json()
    choice = body["choices"][0]
    assert choice["text"] == "Hello!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Hello", "!"] and logprobs["text_offset"] == [0, 5]
    assert logprobs["token_logprobs"] == [-0.5, -0.5] and len(logprobs["top_logprobs"]) == 2
    body = client.post("/v1/completions", {"prompt": [259, 33], "echo": True, "max_tokens": 1, "logprobs": 0}).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", "!", "Hello"] and logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {}, {}] and logprobs["text_offset"] == [0, 5, 6]
    events = client.events("/v1/completions", {"prompt": "Hello!", "echo": True})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "Hello!" + TEXT


def test_best_of() -> None:
    client = Client()
    body = client.post("/v1/completions", {"prompt": "Hello", "best_of": 3, "n": 2}).json()
    assert len(client.engine.requests) == 3 and [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": "x"}, {"best_of": 2, "stream": True}, {"echo": 1},
                  {"logprobs": "x"}, {"logprobs": -1}, {"suffix": 5}):  # fmt: skip
        error_of(client.post("/v1/completions", {"prompt": "Hello", **wrong}), 400)


def test_suffix_needs_fill_in_tokens() -> None:
    error_of(Client().post("/v1/completions", {"prompt": "a", "suffix": "b"}), 501, "not_supported_error")
    assert Client().post("/v1/completions", {"prompt": "a", "suffix": ""}).status_code == 200
    extra = {"<|fim_prefix|>": 3, "<|fim_suffix|>": 3, "<|fim_middle|>": 3}
    client = Client(engine=FakeEngine(fake_tokenizer(extra=extra)))
    client.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    shown = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert shown == "<|bos|><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"grammar": 'root ::= "'}, "grammar"), ({"grammar": 'x ::= "a"'}, "grammar"),
     ({"grammar": "root ::= undefined"}, "grammar"),
     ({"grammar": "root ::= " + "(" * 20000}, "grammar"), ({"grammar": 'root ::= "a"{5,2}'}, "grammar"),
     ({"json_schema": {"type": 123}}, "json_schema"), ({"json_schema": {"type": "hiccup"}}, "json_schema"),
     ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
     ({"json_schema": {"$ref": "http://127.0.0.1:9/x"}}, "json_schema"),
     ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema"), ({"json_schema": False}, "json_schema")],
)  # fmt: skip
def test_wrong_grammars_are_refused(fields: dict[str, Any], name: str) -> None:
    client = Client()
    for path in ("/completion", "/v1/completions"):
        assert name in error_of(client.post(path, {"prompt": "a", **fields}), 400)
    chat = {"messages": [{"role": "user", "content": "a"}], **fields}
    assert name in error_of(client.post("/v1/chat/completions", chat), 400)
    assert not client.engine.requests


def test_grammars_reach_the_engine() -> None:
    client = Client()
    for fields in ({"grammar": 'root ::= "H" | "e"'}, {"json_schema": {"const": 5}}, {"json_schema": True}):
        constraint = sent(client, **fields).constraint
        assert constraint is not None
        mask = constraint().mask()
        assert mask is not None and mask.any() and not mask.all()
    assert sent(client, grammar="").constraint is None
