"""`ik serve` and `ik chat` with a projector, as processes: several models, hostile images."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import Server
from PIL import Image

from ikcli.errors import IkError
from ikcli.main import main
from ikcli.vision.decode import decode_image

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vision"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the models with images are not here")
MODEL = ("-m", str(GOLDEN / "gemma3.gguf"), "--mmproj", str(GOLDEN / "gemma3.mmproj.gguf"))
PNG = (GOLDEN / "images" / "small.png").read_bytes() if GOLDEN.is_dir() else b""
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    found = Server(*MODEL, "-a", "seeing", "--media-path", str(GOLDEN / "images"), log=folder / "log")
    found.wait_ready()
    yield found
    assert found.stop() == 0, found.text()


def chat(server: Server, *parts: Any, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, "temperature": 0} | more
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.slow("a server as a process")
def test_other_ways_in(server: Server) -> None:
    wanted = chat(server, {"type": "image_url", "image_url": {"url": URL}}, TEXT)["choices"][0]["message"]["content"]
    named = chat(server, {"type": "image_url", "image_url": {"url": "file://small.png"}}, TEXT)
    assert named["choices"][0]["message"]["content"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, TEXT]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    assert server.post("/v1/messages", body).json()["content"][0]["text"] == wanted
    ollama = {"model": "seeing", "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    turn = {"messages": [{"role": "user", "content": "What is it?", "images": [DATA]}]}
    assert server.post("/api/chat", ollama | turn).json()["message"]["content"] == wanted
    assert (
        server.post("/api/generate", ollama | {"prompt": "What is it?", "images": [DATA]}).json()["response"] == wanted
    )


@pytest.mark.slow("two processes of a server")
def test_several_models_and_replicas(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "gemma"
    folder.mkdir(parents=True)
    (folder / "gemma3.gguf").symlink_to(GOLDEN / "gemma3.gguf")
    (folder / "mmproj-F16.gguf").symlink_to(GOLDEN / "gemma3.mmproj.gguf")
    for options in (("--models-dir", str(tmp_path / "models")), (*MODEL, "-a", "gemma", "--replicas", "2")):
        server = Server(*options, log=tmp_path / "log")
        try:
            server.wait_ready()
            answer = chat(server, {"type": "image_url", "image_url": {"url": URL}}, TEXT, model="gemma")
            assert answer["choices"][0]["message"]["content"] and answer["usage"]["prompt_tokens"] > 16
        finally:
            assert server.stop() == 0, server.text()


@pytest.mark.slow("loads a model")
def test_chat_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    image = str(GOLDEN / "images" / "small.png")
    line = ("-c", "1024", "-t", "1", "-n", "8", "--temp", "0")
    assert main(["chat", *MODEL, *line, "--image", image, "-p", "What is it?"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["chat", "-m", MODEL[1], *line, "--image", image, "-p", "What is it?"]) == 1
    assert "--mmproj FILE" in capsys.readouterr().err
    assert main(["plan", *MODEL, "-c", "1024"]) == 0
    assert "projector: gemma3" in capsys.readouterr().out
    assert main(["plan", "-m", MODEL[3], "-c", "256"]) == 1
    assert "is a projector: name it with --mmproj" in capsys.readouterr().err


# --- hostile files ----------------------------------------------------------------------------------------------------
def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", *more: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def images() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    source = Image.open(BytesIO(PNG)).convert("RGB")
    files = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        out = BytesIO()
        source.save(out, kind)
        files.append(out.getvalue())
    for width, height in ((100_000, 100_000), (2**31 - 1, 1), (1, 2**31 - 1), (0, 5), (60_000, 60_000), (1, 60_000)):
        yield png(width, height)
    yield png(30_000, 30_000, zlib.compress(bytes(1 << 20)))
    yield png(4, 4, zlib.compress(bytes(4 * 13)), chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 24))))
    yield png(4, 4, zlib.compress(bytes(4 * 13)), chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 26))))
    yield from (b"", b"\0", b"GIF89a", b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"\xff\xd8\xff\xe1\xff\xffExif\0\0", b"<svg/>")
    while True:
        data = bytearray(files[int(rng.integers(len(files)))])
        for _ in range(int(rng.integers(1, 12))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        yield bytes(data[: int(rng.integers(len(data)))] if rng.random() < 0.5 else data)


@pytest.mark.slow("hundreds of files")
def test_hostile_images() -> None:
    refused = 0
    for _, data in zip(range(700), images(), strict=False):
        try:
            picture = decode_image(data)
        except IkError as e:
            refused += 1
            assert "\n" not in str(e) and len(str(e)) < 300
        else:
            assert picture.rgb.ndim == 3 and picture.rgb.nbytes <= 3 * 100_000_000
    assert refused > 200


@pytest.mark.slow("a server as a process")
def test_broken_images_in_requests_are_one_sentence(server: Server) -> None:
    for _, data in zip(range(60), images(), strict=False):
        part = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}
        body = {"messages": [{"role": "user", "content": [TEXT, part]}], "max_tokens": 1}
        response = server.post("/v1/chat/completions", body)
        if response.status_code != 200:
            message = json.loads(response.text)["error"]["message"]
            assert response.status_code == 400 and message.startswith("messages[0].content[1]: "), message
    assert "Traceback" not in server.text()
