"""`ik serve --cache-disk`, killed at random moments or with a full disk: answers stay right, what was written stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Server

from ikcli.server.prefix import node_file

pytestmark = [
    pytest.mark.slow("starts servers again and again"),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes, mounts a file system"),
]
ONE_BY_ONE = ("-np", "1", "-c", "1024", "-t", "1", "-b", "1", "-ub", "1", "--no-warmup")
"""Micro-batches of another size may round differently."""
RNG = random.Random(3)
SHARED = [[RNG.randrange(100, 1900) for _ in range(540)] for _ in range(2)]
TEXTS = [shared + [RNG.randrange(100, 1900) for _ in range(200)] for shared in SHARED for _ in range(4)]
ROUNDS = 10


@contextmanager
def serving(log: Path, *options: str) -> Iterator[Server]:
    server = Server(*ONE_BY_ONE, *options, log=log)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def answer(server: Server, prompt: list[int]) -> tuple[Any, dict[str, Any]]:
    """Tokens with the log-probabilities of the likeliest, and the timings."""
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 3, "ignore_eos": True}
    found = server.post("/completion", body).json()
    return found["completion_probabilities"], found["timings"]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of a server that reuses nothing."""
    with serving(tmp_path_factory.mktemp("plain") / "log", "-cram", "0") as server:
        found = []
        for text in TEXTS:
            server.post("/slots/0?action=erase", {})
            found.append(answer(server, text)[0])
        return found


def about_of(path: Path) -> dict[str, Any]:
    """What a file says about its model."""
    with path.open("rb") as f:
        found = node_file._header(f.read(node_file._HEAD.size), f.read)
    assert found is not None, path
    return dict(found["about"])


def on_disk(folder: Path) -> dict[str, list[int]]:
    """The texts up to the end of each file."""
    paths = sorted(folder.glob("*.rows"))
    texts: dict[str, list[int]] = {}
    for path in paths:  # those of earlier positions first
        content = node_file.peek(path, about_of(paths[0]))
        assert content is not None, path
        before = texts[content.after][: content.start] if content.start else []
        assert len(before) == content.start
        texts[path.name] = before + content.tokens.tolist()
    return texts


def covered(texts: dict[str, list[int]], prompt: list[int]) -> int:
    """How many of the first tokens of a prompt files hold."""
    most = 0
    for text in texts.values():
        same = next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt))
        )
        most = max(most, same)
    return min(most, len(prompt) - 1)


def test_killed_at_random_moments(tmp_path: Path, right: list[Any]) -> None:
    """Whatever file was seen before a kill is whole after it, all of them are used, and all answers are right."""
    rng, folder = random.Random(11), tmp_path / "cache"
    n_seen, n_reused = 0, 0
    for n in range(ROUNDS):
        texts = on_disk(folder)
        with serving(tmp_path / f"log{n}", "--cache-disk", str(folder), "-cram", "6") as server:
            if texts:
                assert (
                    f"prompt cache on disk: {len(texts)} files" in server.text() and "are ignored" not in server.text()
                )
            i = rng.randrange(len(TEXTS))
            found, timings = answer(server, TEXTS[i])
            assert found == right[i]
            assert timings["cache_n"] == timings["cache_disk_n"] == covered(texts, TEXTS[i]), "all that was written"
            n_reused += timings["cache_disk_n"]
            killing = threading.Timer(rng.uniform(0.0, 1.5), server.process.send_signal, (signal.SIGKILL,))
            killing.start()
            seen = set()
            with suppress(httpx.HTTPError, KeyError):
                while True:
                    i = rng.randrange(len(TEXTS))
                    assert answer(server, TEXTS[i])[0] == right[i]
                    seen = {path.name for path in folder.glob("*.rows")}
            killing.join()
            assert server.process.wait() == -signal.SIGKILL
        assert "Traceback" not in server.text()
        left = on_disk(folder)
        assert seen <= left.keys(), "what was written stays"
        n_seen += len(seen)
    assert n_seen > 0 < n_reused
    with serving(tmp_path / "log", "--cache-disk", str(folder)) as server:
        assert [answer(server, text)[0] for text in TEXTS] == right
        time.sleep(0.1)
        assert "damaged" not in server.text() and "cannot" not in server.text()


@contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[None]:
    """Mount a file system of this size, if this machine lets us."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)], capture_output=True
    )
    if os.geteuid() or mounted.returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_serving_goes_on(tmp_path: Path, right: list[Any]) -> None:
    folder = tmp_path / "small"
    with small_disk(folder, 4 << 20):
        with serving(tmp_path / "log", "--cache-disk", str(folder), "-cram", "16") as server:
            for _ in range(3):
                assert [answer(server, text)[0] for text in TEXTS] == right
            timings = answer(server, TEXTS[0])[1]
            assert timings["cache_n"] == len(TEXTS[0]) - 1, "RAM has what the disk has no room for"
            lines = [line for line in server.text().splitlines() if "No space left on device" in line]
            assert len(lines) == 1 and "the prompt cache goes on in RAM" in lines[0], server.text()
            assert server.stop() == 0 and "Traceback" not in server.text()
        n_whole = len(on_disk(folder))
        assert n_whole > 0 and not list(folder.glob(".*"))
        with serving(tmp_path / "log2", "--cache-disk", str(folder), "-cram", "16") as server:
            assert f"prompt cache on disk: {n_whole} files" in server.text()
            assert [answer(server, text)[0] for text in TEXTS] == right
