"""Images in requests: where every API has them, how they reach the prompt, and where they may come from."""

from __future__ import annotations

import asyncio
import base64
import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_tokenizer
from server_client import Client

from ikcli.chat.formats import ChatFormat
from ikcli.chat.images import Images, is_marker, joined, source_of
from ikcli.chat.request import parse_request
from ikcli.errors import IkError, UsageError
from ikcli.server.http.media import Media, MediaError, _is_public
from ikcli.server.http.pictures import Pictures
from ikcli.server.slots.pictures import Picture, keys_of, whole_pictures
from ikcli.settings.run import RunConfig
from ikcli.settings.vision import VisionConfig

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{% if p.type == 'image' %}<image>{% endif %}"
    "{% endfor %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}{{ '\n\n<start_of_image>\n\n' }}{% else %}{{ p.text|trim }}"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
)


@dataclass(frozen=True)
class FakePicture:
    digest: str
    n_tokens: int
    n_positions: int = 1
    n_bytes: int = 1


class FakeReader:
    """Reads "images" of the form `IMGn`, where n is the number of tokens."""

    def __init__(self) -> None:
        self.read_ones: list[bytes] = []

    def read(self, data: bytes) -> list[str | Picture]:
        self.read_ones.append(data)
        if not data.startswith(b"IMG"):
            raise IkError("this is not an image")
        n = int(data[3:])
        return ["<|vision_start|>", FakePicture(data.decode(), n)]


def b64(n: int) -> str:
    return base64.b64encode(b"IMG%d" % n).decode()


def url(n: int) -> str:
    return f"data:image/png;base64,{b64(n)}"


def client_of(template: str = PLAIN, **vision: Any) -> Client:
    engine = FakeEngine(fake_tokenizer(), n_ctx=4096)
    engine.pictures = FakeReader()
    config = RunConfig(command="serve", vision=VisionConfig(**vision))
    return Client(config=config, chat_template=template, engine=engine)


def shown(client: Client) -> str:
    """The prompt that the engine got, with `{n}` for an image of n tokens."""
    request = client.engine.requests[-1]
    text, at = "", 0
    decode = client.engine.tokenizer.decode
    for placed in request.pictures:
        text += decode(request.prompt[at : placed.start])
        assert request.prompt[placed.start : placed.stop] == keys_of(placed.picture)
        text, at = text + f"{{{placed.picture.n_tokens}}}", placed.stop
    assert min(request.prompt[at:], default=0) >= 0
    return (text + decode(request.prompt[at:])).removeprefix("<|bos|>")


def prompt_of(path: str, body: dict[str, Any], template: str = PLAIN, **vision: Any) -> str:
    client = client_of(template, **vision)
    response = client.post(path, body | ({"model": "m", "stream": False} if path.startswith("/api") else {}))
    assert response.status_code == 200, response.text
    return shown(client)


def error(path: str, body: dict[str, Any], **vision: Any) -> str:
    response = client_of(**vision).post(path, body | ({"model": "m"} if path.startswith("/api") else {}))
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    return str(found if isinstance(found, str) else found["message"])


def parts(*items: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": i} if isinstance(i, str) else i for i in items]


def user(*items: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts(*items)}]}


def openai(n: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(n)}}


# --- every API --------------------------------------------------------------------------------------------------------
BEGIN = "<|vision_start|>"
CLAUDE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(4)}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]}


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/chat/completions", user("look", openai(3), "well"), "<user>look{3}well<answer>"),
        ("/v1/chat/completions", user(openai(3), openai(5)), "<user>{3}{5}<answer>"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": url(2)}, "a", "b"), "<user>{2}a\nb<answer>"),
        ("/v1/chat/completions", user({"type": "image", "image": b64(2)}), "<user>{2}<answer>"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}, USE | {"content": "b", "tool_calls": [
             {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
             {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "c"}, openai(2)]}]}, "c{2}"),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url(6)}]}]},
         "<user>look{6}<answer>"),
        ("/v1/responses", {"input": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_image", "image_url": url(2)}]}]},
         "{2}"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [CLAUDE, {"type": "text", "text": "what?"}]}]},
         "<user>{4}what?<answer>"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": url(3)}}]}]}, "<user>{3}<answer>"),
        ("/v1/messages", {"messages": [USE, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, CLAUDE]}]}]},
         "see{4}"),
        ("/api/chat", {"messages": [{"role": "user", "content": "look", "images": [b64(3), b64(2)]}]},
         "<user>{3}{2}look<answer>"),
        ("/api/generate", {"prompt": "look", "images": [b64(3)]}, "<user>{3}look<answer>"),
        ("/api/generate", {"prompt": "look", "images": [b64(3)], "raw": True}, "{3}look"),
        ("/completion", {"prompt": {"prompt_string": "a<__media__>b<__media__>", "multimodal_data": [b64(2), url(3)]}},
         "a{2}b{3}"),
        ("/completion", {"prompt": [{"prompt_string": "<__media__>", "multimodal_data": [b64(2)]}]}, "{2}"),
        ("/v1/completions", {"prompt": {"prompt_string": "x<__media__>", "multimodal_data": [b64(2)]}}, "x{2}"),
    ],
)  # fmt: skip
def test_images_of_every_api(path: str, body: dict[str, Any], prompt: str) -> None:
    found = prompt_of(path, body)
    assert found.count(BEGIN) == prompt.count("{")
    assert prompt in found.replace(BEGIN, "")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", user("a", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
         "messages[0].content[1]: this is not an image"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}),
         "messages[0].content[0]: the image is empty"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "data:,"}}), "is empty"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {}}), "messages[0].content[0]: found neither"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "!!"}}), "it is not base64"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a"}}),
         "--media-remote"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
         "--media-path"),
        ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "ftp://x/y"}}), "ftp: addresses"),
        ("/v1/chat/completions", user(openai(5000)), "exceeds the available context size"),
        ("/v1/chat/completions", user({"type": "input_audio", "input_audio": {}}), "this model reads text and images"),
        ("/v1/messages", {"system": "s", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "data": "AAAA"}}]}]},
         "messages[0].content[1]: this is not an image"),
        ("/v1/responses", {"instructions": "s", "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "AAAA"}]}]}, "input[0].content[0]: this is not an image"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["AAAA"]}]}, "messages[0].images[0]: this is not"),
        ("/api/chat", {"messages": [{"role": "user", "images": [5]}]}, "messages[0].images[0]: expected the base64"),
        ("/api/generate", {"prompt": "a", "images": ["AAAA"]}, "images[0]: this is not"),
        ("/api/generate", {"prompt": "a", "images": [b64(2)], "context": [1, 2]}, "context cannot be used with images"),
        ("/api/generate", {"prompt": "a", "images": [b64(2)], "suffix": "s"}, "suffix cannot be used with images"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": [b64(2)]}}, "1 items, but"),
        ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [7]}}, "data[0] must"),
        ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": "x"}}, "prompt.multimodal_data"),
        ("/v1/completions", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [b64(2)]}, "echo": True,
                             "logprobs": 1}, "echo with logprobs"),
    ],
)  # fmt: skip
def test_broken_images_say_where_they_are(path: str, body: dict[str, Any], field: str) -> None:
    found = error(path, body)
    assert field in found and "\n" not in found and len(found) < 300


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", user(openai(3))),
        ("/v1/messages", {"messages": [{"role": "user", "content": [CLAUDE]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(6)}]}]}),
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "images": [b64(3)]}]}),
        ("/api/generate", {"model": "m", "images": [b64(3)]}),
        ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [b64(2)]}}),
    ],
)
def test_without_a_projector_the_error_names_the_option(path: str, body: dict[str, Any]) -> None:
    response = Client(engine=FakeEngine(fake_tokenizer())).post(path, body)
    assert response.status_code == 400 and "--mmproj FILE" in response.text


def test_what_the_server_says_about_images() -> None:
    with_images, without = client_of(), Client(engine=FakeEngine(fake_tokenizer()))
    for client, vision in ((with_images, True), (without, False)):
        props = client.get("/props").json()
        assert props["modalities"] == {"vision": vision, "audio": False} and props["media_marker"] == "<__media__>"
        listed = client.get("/v1/models").json()
        assert ("image" in listed["data"][0]["architecture"]["input_modalities"]) is vision
        assert ("multimodal" in listed["models"][0]["capabilities"]) is vision
        assert ("vision" in client.post("/api/show", {"model": "m"}).json()["capabilities"]) is vision


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", user("look", openai(30))),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [CLAUDE | {"source": {
            "type": "base64", "data": b64(30)}}, {"type": "text", "text": "look"}]}], "max_tokens": 5}),
        ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": url(30)}, {"type": "input_text", "text": "look"}]}]}),
    ],
)  # fmt: skip
def test_counts_include_images(path: str, body: dict[str, Any]) -> None:
    client = client_of()
    n = client.post(path, body).json()["input_tokens"]
    plain = len(client.engine.tokenizer.encode("<user>look<answer>"))
    assert 30 + plain <= n <= 30 + plain + 24  # and the begin token, whose text the fake vocabulary spells


def test_applied_templates_and_logged_prompts_have_the_public_marker(tmp_path: Path) -> None:
    assert client_of().post("/apply-template", user("a", openai(3))).json()["prompt"] == "<user>a<__media__><answer>"
    engine = FakeEngine(fake_tokenizer())
    engine.pictures = FakeReader()
    client = Client(chat_template=PLAIN, engine=engine, log_prompts_dir=tmp_path)
    assert client.post("/v1/chat/completions", user("a", openai(3))).status_code == 200
    assert "<user>a" in next(tmp_path.glob("*.txt")).read_text()


def test_an_image_is_read_once_and_its_keys_follow_from_it() -> None:
    client = client_of()
    for _ in range(2):
        client.post("/v1/chat/completions", user(openai(3), openai(3)))
    first, second = client.engine.requests
    assert first.prompt == second.prompt and len(first.pictures) == 2
    assert client.engine.pictures is not None
    assert len(client.engine.pictures.read_ones) == 2  # type: ignore[attr-defined]  # the state is new in every call
    keys = first.prompt[first.pictures[0].start : first.pictures[0].stop]
    assert len(set(keys)) == 3 and all(-(2**31) <= key < 0 for key in keys)
    assert set(keys_of(FakePicture("a", 9))).isdisjoint(keys_of(FakePicture("b", 9)))
    placed = first.pictures
    assert whole_pictures(placed, placed[0].start + 1) == placed[0].start
    assert whole_pictures(placed, placed[0].stop) == placed[0].stop


def test_images_in_a_request_are_known_by_their_text_others_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"IMG3")
    client = client_of(media_path=tmp_path)
    assert client.engine.pictures is not None
    pictures = Pictures(VisionConfig(media_path=tmp_path), client.engine.pictures, client.engine.tokenizer, 100)
    counts = []
    for source, change in ((url(3), b""), (url(3), b""), ("file:a", b""), ("file:a", b"IMG4")):
        if change:
            (tmp_path / "a").write_bytes(change)
        images = Images(reads=True)
        prompt = asyncio.run(pictures.prompt(images.add(source, "p"), images))
        counts.append((prompt.pictures[0].picture.n_tokens, len(client.engine.pictures.read_ones)))  # type: ignore[attr-defined]
    assert counts == [(3, 1), (3, 1), (3, 2), (4, 3)]


# --- templates --------------------------------------------------------------------------------------------------------
def rendered(template: str, *contents: Any) -> list[str]:
    """A conversation divided at its images, each of which is shown by its path."""
    images = Images(reads=True)
    body = {"messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]}
    prompt = ChatFormat(template).render(parse_request(body, images=images)).prompt
    return [part if isinstance(part, str) else f"@{part.path}" for part in images.divide(prompt)]


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
        (FIRST, "<image>"),
        (GEMMA, "<start_of_image>"),
        (PLAIN, ""),
    ],
    ids=["qwen", "before the text", "line ends around it", "text only"],
)
def test_what_a_template_writes_for_an_image(template: str, tokens: str) -> None:
    assert ChatFormat(template).capabilities.image == tokens


def test_images_stand_where_the_template_puts_them() -> None:
    assert rendered(QWEN, parts("a", openai(1), "b"), "ok", parts(openai(2))) == [
        "<|im_start|>user\na", "@messages[0].content[1]", "b<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\n", "@messages[2].content[0]", "<|im_end|>\n<|im_start|>assistant\n",
    ]  # fmt: skip
    assert rendered(FIRST, parts("a", openai(1), "b", openai(2))) == [
        "user: ", "@messages[0].content[1]", "", "@messages[0].content[3]", "ab"]  # fmt: skip
    assert rendered(GEMMA, parts("a", openai(1), "b")) == [
        "<start_of_turn>user\na\n\n", "@messages[0].content[1]", "\n\nb<end_of_turn>\n"]  # fmt: skip


def test_tokens_of_images_in_a_users_text_are_no_images() -> None:
    found = rendered(QWEN, parts("<|vision_start|><|image_pad|><|vision_end|>", openai(1)))
    assert [part for part in found if part.startswith("@")] == ["@messages[0].content[1]"]
    assert "<|image_pad|>" in found[0]
    forged = "<__image_0000000000000000_0__>"
    assert forged in rendered(PLAIN, parts(forged, openai(1)))[0]


def test_markers_are_joined_without_line_ends() -> None:
    images = Images(reads=True)
    marker = images.add("x", "p")
    assert is_marker(marker) and not is_marker(f"a{marker}")
    assert joined(["a", marker, "b", "c", marker]) == f"a{marker}b\nc{marker}"
    assert source_of({"type": "image", "source": {"type": "file", "file_id": "f"}}) == ""


# --- where images come from -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "source",
    [
        "aGk=",
        "aGk",
        " aG\nk= ",
        "data:image/png;base64,aGk=",
        "DATA:;base64,aGk",
        "data:,hi",
        "data:image/png;base64,aGk%3D",
    ],
)
def test_bytes_of_base64(source: str) -> None:
    assert Media(VisionConfig()).load(source) == b"hi"


def test_base64_for_urls() -> None:
    assert Media(VisionConfig()).load("-_-_") == b"\xfb\xff\xbf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    (inside / "sub").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"a")
    (inside / "sub" / "c").write_bytes(b"c")
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "d").write_bytes(b"d")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "out").symlink_to(tmp_path)
    (inside / "in").symlink_to(inside / "sub")
    os.mkfifo(inside / "pipe")
    return inside


@pytest.mark.parametrize(
    ("name", "data"),
    [("a%20b.png", b"a"), ("a b.png", b"a"), ("sub/c", b"c"), ("/sub/c", b"c"), ("in/c", b"c"), ("sub/../sub/c", b"c")],
)
def test_files_below_the_folder(folder: Path, name: str, data: bytes) -> None:
    assert Media(VisionConfig(media_path=folder)).load(f"file://{name}") == data


def test_a_file_by_its_whole_path(folder: Path) -> None:
    assert Media(VisionConfig(media_path=folder)).load(f"file://{folder}/sub/c") == b"c"
    assert Media(VisionConfig(media_path=folder)).load(f"file://localhost{folder}/sub/c") == b"c"


@pytest.mark.parametrize(
    "name",
    ["../secret", "link", "out/secret", "%2e%2e/secret", "sub/../../secret", "/etc/passwd", "../media2/d", "missing",
     "", "a%00b", "..", ".", "sub", "pipe", "~/x"],
)  # fmt: skip
def test_files_elsewhere_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(MediaError):
        Media(VisionConfig(media_path=folder)).load(f"file://{name}")
    with pytest.raises(MediaError):
        Media(VisionConfig(media_path=folder)).load(f"file://{folder}/{name}" if name else "file://")


def test_limits_of_files_and_data(folder: Path) -> None:
    (folder / "big").write_bytes(bytes(1 << 21))
    media = Media(VisionConfig(media_path=folder), max_bytes=1 << 20)
    for source in ("file://big", "A" * (1 << 21), "data:;base64," + "A" * (1 << 21), "data:," + "A" * (1 << 22)):
        with pytest.raises(MediaError, match="more than 1 MiB"):
            media.load(source)
    with pytest.raises(UsageError, match="is not a folder"):
        Media(VisionConfig(media_path=folder / "sub" / "c"))


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        where = {"/loop": "/loop", "/away": "http://10.1.2.3/x", "/go": "/ok?a=b", "/file": "file:///etc/passwd"}
        if self.path in where:
            self.send_response(302)
            self.send_header("Location", where[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = b"x" * (3 << 20) if self.path == "/big" else b"ok"
        self.send_response(404 if self.path == "/none" else 200)
        if self.path not in ("/big", "/slow"):
            self.send_header("Content-Length", str(5 << 20 if self.path == "/claims" else len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
            if self.path == "/slow":
                stop.wait(5)
        except OSError:
            pass

    def log_message(self, *args: Any) -> None:
        pass


stop = threading.Event()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_images_of_the_web(site: str) -> None:
    media = Media(VisionConfig(media_remote=True, media_private=True), max_bytes=1 << 20)
    assert media.load(f"{site}/ok") == b"ok" and media.load(f"{site}/go") == b"ok"
    for path, problem in (("/loop", "redirects more than"), ("/none", "status 404"), ("/big", "more than 1 MiB"),
                          ("/claims", "more than 1 MiB"), ("/file", "is not an http")):  # fmt: skip
        with pytest.raises(MediaError, match=problem):
            media.load(site + path)
    with pytest.raises(MediaError, match="cannot be loaded"):
        media.load("http://127.0.0.1:9/x")


@pytest.mark.parametrize("path", ["/ok", "/away"])
def test_private_networks_are_refused(site: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    media = Media(VisionConfig(media_remote=True))
    if path == "/away":  # a public address that redirects to a private one
        monkeypatch.setattr("ikcli.server.http.media._is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(MediaError, match="private network"):
        media.load(site + path)


@pytest.mark.parametrize(
    ("address", "public"),
    [("8.8.8.8", True), ("127.0.0.1", False), ("10.0.0.1", False), ("169.254.169.254", False), ("192.168.1.1", False),
     ("::1", False), ("fe80::1%eth0", False), ("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False),
     ("2002:7f00:1::", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
     ("2606:4700:4700::1111", True), ("fd00::1", False)],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert _is_public(address) is public


def test_a_slow_address_ends(site: str) -> None:
    media = Media(VisionConfig(media_remote=True, media_private=True), seconds=0.05)
    with pytest.raises(MediaError, match="did not answer within"):
        media.load(f"{site}/slow")
