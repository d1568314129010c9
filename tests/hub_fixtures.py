"""Fixtures for tests that download: a separate hub and empty caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

from ikcli import main
from ikcli.hub import cache, client


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.close()


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub that this process uses, empty; no pause between attempts."""
    from huggingface_hub import constants

    server.reset()
    for name in ("HF_TOKEN", "LLAMA_CACHE", "LLAMA_ARG_HF_REPO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path / "ik" / "kernels")
    monkeypatch.setattr(client, "PAUSE", 0.0)
    return server


Ik = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ik(capsys: pytest.CaptureFixture[str]) -> Ik:
    """Run a command line: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return run
