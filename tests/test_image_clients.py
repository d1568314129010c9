"""The client libraries of OpenAI, Anthropic and Ollama send an image to a running server, and read the answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import WAIT, Server

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vision"
pytestmark = [
    pytest.mark.skipif(not GOLDEN.is_dir(), reason="the models with images are not here"),
    pytest.mark.slow("a server as a process"),
]
PNG = GOLDEN / "images" / "small.png"
TEXT = "What is it?"
N = 8


class Asked:
    """A server, and what it answers to the image and `TEXT` in a chat completion of its own."""

    def __init__(self, server: Server) -> None:
        self.server, self.data = server, base64.b64encode(PNG.read_bytes()).decode()
        self.url = f"data:image/png;base64,{self.data}"
        self.parts = [{"type": "image_url", "image_url": {"url": self.url}}, {"type": "text", "text": TEXT}]
        body = {"messages": [{"role": "user", "content": self.parts}], "max_tokens": N, "temperature": 0}
        found = server.post("/v1/chat/completions", body).json()
        self.text = str(found["choices"][0]["message"]["content"])
        self.n_prompt = int(found["usage"]["prompt_tokens"])
        assert self.text and self.n_prompt > 12


@pytest.fixture(scope="module", params=["gemma3", "qwen25vl"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    name = request.param
    model = ("-m", str(GOLDEN / f"{name}.gguf"), "--mmproj", str(GOLDEN / f"{name}.mmproj.gguf"), "-a", "seeing")
    server = Server(*model, log=tmp_path_factory.mktemp(name) / "log")
    try:
        server.wait_ready()
        yield Asked(server)
        assert "Traceback" not in server.text()
    finally:
        assert server.stop() == 0, server.text()


# --- OpenAI -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def openai(asked: Asked) -> Iterator[Any]:
    library = pytest.importorskip("openai")
    with library.OpenAI(base_url=asked.server.base + "/v1", api_key="none", timeout=WAIT, max_retries=0) as client:
        yield client


def test_openai_chat(asked: Asked, openai: Any) -> None:
    body: dict[str, Any] = {"model": "seeing", "messages": [{"role": "user", "content": asked.parts}], "max_tokens": N,
                            "temperature": 0}  # fmt: skip
    answer = openai.chat.completions.create(**body)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (asked.text, asked.n_prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == asked.n_prompt - 1
    chunks = list(openai.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == asked.text
    assert chunks[-1].usage.prompt_tokens == asked.n_prompt


def test_openai_responses(asked: Asked, openai: Any) -> None:
    content = [{"type": "input_image", "image_url": asked.url, "detail": "auto"}, {"type": "input_text", "text": TEXT}]
    body: dict[str, Any] = {"model": "seeing", "input": [{"role": "user", "content": content}], "max_output_tokens": N,
                            "temperature": 0}  # fmt: skip
    answer = openai.responses.create(**body)
    assert (answer.output_text, answer.usage.input_tokens) == (asked.text, asked.n_prompt)
    events = list(openai.responses.create(**body, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == asked.text
    counted = openai.responses.input_tokens.count(model="seeing", input=body["input"])
    assert counted.input_tokens == asked.n_prompt


def test_openai_reads_which_image_is_broken(openai: Any) -> None:
    import openai as library

    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(library.BadRequestError, match=r"messages\[0\]\.content\[0\]: "):
        openai.chat.completions.create(model="seeing", messages=[{"role": "user", "content": broken}])


# --- Anthropic --------------------------------------------------------------------------------------------------------
@pytest.fixture
def anthropic(asked: Asked) -> Iterator[Any]:
    library = pytest.importorskip("anthropic")
    with library.Anthropic(base_url=asked.server.base, api_key="none", timeout=WAIT, max_retries=0) as client:
        yield client


def image_block(asked: Asked) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": asked.data}}


def test_anthropic_messages(asked: Asked, anthropic: Any) -> None:
    messages = [{"role": "user", "content": [image_block(asked), {"type": "text", "text": TEXT}]}]
    body: dict[str, Any] = {"model": "seeing", "messages": messages, "max_tokens": N,
                            "extra_body": {"temperature": 0}}  # fmt: skip
    answer = anthropic.messages.create(**body)
    usage = answer.usage
    assert answer.content[0].text == asked.text
    assert usage.input_tokens + usage.cache_read_input_tokens == asked.n_prompt
    with anthropic.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == asked.text
    assert stream.get_final_message().content[0].text == asked.text
    assert anthropic.messages.count_tokens(model="seeing", messages=messages).input_tokens == asked.n_prompt


def test_anthropic_reads_an_image_in_a_result(asked: Asked, anthropic: Any) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
    tool = {"name": "screenshot", "description": "Look at the screen.", "input_schema": {"type": "object"}}
    counts = []
    for content in ([image_block(asked)], [{"type": "text", "text": "x"}]):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]}]  # fmt: skip
        body: dict[str, Any] = {"model": "seeing", "messages": messages, "tools": [tool], "max_tokens": N}
        usage = anthropic.messages.create(**body).usage
        counts.append(usage.input_tokens + usage.cache_read_input_tokens)
        counted = anthropic.messages.count_tokens(model="seeing", messages=messages, tools=[tool])
        assert counted.input_tokens == counts[-1]
    assert counts[0] > counts[1] + 8


# --- Ollama -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def ollama(asked: Asked) -> Iterator[Any]:
    library = pytest.importorskip("ollama")
    with library.Client(host=asked.server.base, timeout=WAIT) as client:
        yield client


@pytest.mark.parametrize("image", [str(PNG), PNG, "bytes", "base64"], ids=["name", "path", "bytes", "base64"])
def test_ollama(asked: Asked, ollama: Any, image: Any) -> None:
    image = {"bytes": PNG.read_bytes() if PNG.exists() else b"", "base64": asked.data}.get(image, image)
    options = {"num_predict": N, "temperature": 0}
    body: dict[str, Any] = {"model": "seeing", "options": options}
    messages = [{"role": "user", "content": TEXT, "images": [image]}]
    answer = ollama.chat(**body, messages=messages)
    assert (answer.message.content, answer.prompt_eval_count) == (asked.text, asked.n_prompt)
    assert "".join(c.message.content for c in ollama.chat(**body, messages=messages, stream=True)) == asked.text
    assert ollama.generate(**body, prompt=TEXT, images=[image]).response == asked.text
    made = ollama.generate(**body, prompt=TEXT, images=[image], stream=True)
    assert "".join(c.response for c in made) == asked.text


# --- the server's own -------------------------------------------------------------------------------------------------
def test_completion_with_multimodal_data(asked: Asked) -> None:
    prompt = {"prompt_string": f"<__media__>{TEXT}", "multimodal_data": [asked.data]}
    body = {"prompt": prompt, "n_predict": N, "temperature": 0}
    found = asked.server.post("/completion", body).json()
    plain = asked.server.post("/completion", {"prompt": TEXT, "n_predict": 1}).json()
    assert found["content"] and found["tokens_evaluated"] >= plain["tokens_evaluated"] + 12
    streamed = asked.server.post("/completion", body | {"stream": True}).text
    assert streamed.count("data: ") > 1 and '"stop":true' in streamed.replace(" ", "")
