"""The files of the web page as the server sends them."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path

import pytest
from server_client import Client

FILES = tuple(resources.files("ikcli.server").joinpath("web").iterdir())


def test_files_are_compressed_and_cached() -> None:
    client = Client(ui=True)
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for item in FILES:
        plain = client.get(f"/{item.name}", headers={"accept-encoding": "identity"})
        packed = client.get(f"/{item.name}", headers={"accept-encoding": "br, gzip;q=0.5"})
        assert plain.status_code == packed.status_code == 200
        assert plain.content == packed.content == item.read_bytes()
        assert plain.headers["content-type"].startswith(kinds[item.name.rpartition(".")[2]])
        assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
        again = client.get(f"/{item.name}", headers={"if-none-match": packed.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert "content-encoding" not in client.get("/", headers={"accept-encoding": "gzip;q=0"}).headers
    assert client.get("/").content == client.get("/index.html").content
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_page_needs_no_key_and_no_other_host() -> None:
    client = Client(api_key="key", ui=True)
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for item in FILES:
        assert client.get(f"/{item.name}").status_code == 200
        text = item.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|https?://\w+\.\w", text)
        assert not re.search(r"<[^>]*\son\w+=|<[^>]*\sstyle=|<script>|<style", text)


def test_vendored_parser_is_the_one_that_the_notice_names() -> None:
    notice = Path(__file__).resolve().parents[1] / "NOTICE"
    if not notice.exists():
        pytest.skip("the notice is not where the tests are run")
    text = " ".join(notice.read_text(encoding="utf-8").split())
    found = re.search(r"npm package (markdown-it [\d.]+), unchanged: sha256 ([0-9a-f]{64}) ", text)
    assert found is not None
    web, data = resources.files("ikcli.server").joinpath("web"), resources.files("ikcli").joinpath("data")
    assert hashlib.sha256(web.joinpath("markdown-it.js").read_bytes()).hexdigest() == found[2]
    assert found[1] in data.joinpath("LICENSE-markdown-it.txt").read_text(encoding="utf-8")


def test_page_under_a_prefix() -> None:
    client = Client(api_prefix="/llm/", ui=True)
    page = client.get("/llm").text
    assert '<base href="/llm/">' in page and 'src="app.js"' in page
    assert client.get("/llm/app.js").status_code == 200
    assert "<base" not in Client(ui=True).get("/").text


def test_no_page() -> None:
    for client in (Client(ui=False), Client(ui=True, webui="none")):
        assert client.get("/app.js").status_code == client.get("/").status_code == 404
