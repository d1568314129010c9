"""Downloads from a hub: complete, resumed, repeated, checked; what stays when they fail, and what is said then."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, FakeHub
from hub_fixtures import Ik, hub, ik, server
from hub_models import model_bytes, part_bytes

from ikcli.gguf.constants import GGMLType
from ikcli.hub import cache, download
from ikcli.log import shown_size

__all__ = ["hub", "ik", "server"]

REPO = "user/tiny-GGUF"
Q8, F16 = model_bytes(GGMLType.Q8_0), model_bytes()


@pytest.fixture
def repo(hub: FakeHub) -> FakeHub:
    files = {"tiny-F16.gguf": F16, "tiny-Q8_0.gguf": Q8, "mmproj-F16.gguf": b"GGUF projector", "README.md": b"# tiny"}
    hub.add(REPO, files)
    return hub


def in_a_process(hub: FakeHub, call: str) -> str:
    """What a function of huggingface_hub returns in a program of its own, with the same hub and cache."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache.hub_dir())}
    program = f"from huggingface_hub import *; print({call})"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def blob(data: bytes) -> Path:
    return cache.repo_dir(REPO) / "blobs" / hashlib.sha256(data).hexdigest()


def test_a_model_goes_into_the_cache_of_the_hub(repo: FakeHub, ik: Ik) -> None:
    code, out, err = ik("pull", f"{REPO}:q8_0")
    path = cache.repo_dir(REPO) / "snapshots" / COMMIT / "tiny-Q8_0.gguf"
    assert (code, out) == (0, f"{path}\n")
    assert path.read_bytes() == Q8 and path.is_symlink() and path.resolve() == blob(Q8)
    assert (cache.repo_dir(REPO) / "refs" / "main").read_text() == COMMIT
    assert "downloading tiny-Q8_0.gguf" in err and "tiny-Q8_0.gguf: 100%" in err and "downloaded 1.21 MiB" in err
    assert not list(cache.hub_dir().rglob("*.incomplete"))
    repo.forget()
    assert ik("pull", f"{REPO}:Q8_0")[1] == out
    assert not repo.asked("GET /(cdn|user)"), "a file that is there was asked for"
    assert in_a_process(repo, f"try_to_load_from_cache({REPO!r}, 'tiny-Q8_0.gguf')") == str(path)


def test_the_first_quant_is_the_default(repo: FakeHub, ik: Ik) -> None:
    assert ik("pull", REPO)[1].endswith("tiny-F16.gguf\n")
    repo.add(REPO, {"tiny-F16.gguf": F16, "tiny-Q4_K_M.gguf": Q8})
    assert ik("pull", REPO)[1].endswith("tiny-Q4_K_M.gguf\n")


def test_what_is_there_already_is_used(repo: FakeHub, ik: Ik) -> None:
    """As another program stored it."""
    found = in_a_process(repo, f"hf_hub_download({REPO!r}, 'tiny-Q8_0.gguf')")
    repo.forget()
    code, out, err = ik("pull", f"{REPO}:Q8_0")
    assert (code, out.strip()) == (0, found) and "all there already" in err
    assert repo.n_sent == 0


def test_all_parts(repo: FakeHub, ik: Ik) -> None:
    parts = part_bytes(3)
    repo.add(REPO, {f"F16/tiny-F16-0000{i + 1}-of-00003.gguf": part for i, part in enumerate(parts)})
    code, out, err = ik("pull", f"{REPO}:F16")
    first = Path(out.strip())
    assert code == 0 and first.name == "tiny-F16-00001-of-00003.gguf"
    assert [p.read_bytes() for p in sorted(first.parent.iterdir())] == list(parts)
    assert "tiny-F16-00002-of-00003.gguf (2 of 3)" in err
    assert ik("inspect", str(first))[0] == 0


def test_a_cut_connection_is_resumed(repo: FakeHub, ik: Ik) -> None:
    repo.faults.cuts = [100_000, 500_000]
    code, out, _ = ik("pull", f"{REPO}:Q8_0")
    assert code == 0 and Path(out.strip()).read_bytes() == Q8
    assert repo.n_sent == len(Q8), "bytes were sent twice"
    assert len(repo.asked(r"GET /cdn/.* bytes=\d+-")) == 2


def test_a_busy_server_is_asked_again(repo: FakeHub, ik: Ik) -> None:
    repo.faults.statuses = [503, 429]
    assert ik("pull", f"{REPO}:Q8_0")[0] == 0
    repo.faults.statuses = [500] * 5
    code, _, err = ik("pull", f"{REPO}:F16")
    assert code == 1 and "answers 500 for user/tiny-GGUF; try again later, or use what is there with --offline" in err


def test_a_download_goes_on_in_the_next_run(repo: FakeHub, ik: Ik) -> None:
    repo.faults.cuts = [400_000]
    repo.faults.statuses = []
    original = repo.faults

    # the line stays dead after 400 kB: every further request is refused
    class Dead(list[int]):
        def pop(self, index: Any = -1) -> int:
            original.statuses = [503] * 10
            return super().pop(index)

    repo.faults.cuts = Dead([400_000])
    code, _, err = ik("pull", f"{REPO}:Q8_0")
    part = download.incomplete_path(blob(Q8))
    assert code == 1 and part.stat().st_size == 400_000
    assert "answers 503" in err and f"390.62 KiB are kept in {part}, and the same command goes on from there" in err
    assert not (cache.repo_dir(REPO) / "snapshots").exists(), "a model that is not whole has a name"
    repo.faults.statuses, repo.n_sent = [], 0
    code, out, err = ik("pull", f"{REPO}:Q8_0")
    assert code == 0 and Path(out.strip()).read_bytes() == Q8
    assert repo.n_sent == len(Q8) - 400_000
    assert "of which 390.62 KiB are there already" in err


def test_a_server_without_ranges_sends_it_again(repo: FakeHub, ik: Ik) -> None:
    repo.faults.cuts, repo.faults.no_ranges = [400_000], True
    code, out, _ = ik("pull", f"{REPO}:Q8_0")
    assert code == 0 and Path(out.strip()).read_bytes() == Q8


def test_wrong_bytes_are_removed(repo: FakeHub, ik: Ik) -> None:
    repo.faults.flip = True
    code, out, err = ik("pull", f"{REPO}:Q8_0")
    assert (code, out) == (1, "")
    assert "is damaged (its SHA-256 is not the one the hub has) and was removed; try again" in err
    assert not [p for p in cache.hub_dir().rglob("*") if p.is_file() and p.stat().st_size > 1000]
    repo.faults.flip = False
    assert ik("pull", f"{REPO}:Q8_0")[0] == 0


def test_a_damaged_part_of_an_earlier_run_is_noticed(repo: FakeHub, ik: Ik) -> None:
    part = download.incomplete_path(blob(Q8))
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    assert ik("pull", f"{REPO}:Q8_0")[0] == 1
    assert not part.exists()
    part.write_bytes(Q8 + b"more than there is")
    assert ik("pull", f"{REPO}:Q8_0")[0] == 0


def test_a_full_disk_is_seen_before(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    code, _, err = ik("pull", f"{REPO}:Q8_0")
    assert code == 1 and "1.21 MiB are needed, 1.00 MiB are free; remove models with ik rm" in err
    assert repo.n_sent == 0


def test_a_disk_that_becomes_full(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "_one_request", write)
    code, _, err = ik("pull", f"{REPO}:Q8_0")
    assert code == 1 and "is full; 0 bytes of user/tiny-GGUF are kept, and the same command goes on" in err


def test_a_cache_that_cannot_be_written(repo: FakeHub, ik: Ik, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")
    code, _, err = ik("pull", f"{REPO}:Q8_0")
    assert code == 1 and "HF_HOME names another cache" in err


def test_stopped_from_the_keyboard(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    real = download._one_request

    def stopped(source: Any, part: Path, out: Any, done: int, advance: Any) -> Any:
        def counted(n: float) -> None:
            advance(n)
            raise KeyboardInterrupt

        return real(source, part, out, done, counted)

    monkeypatch.setattr(download, "_one_request", stopped)
    code, _, err = ik("pull", f"{REPO}:Q8_0")
    kept = download.incomplete_path(blob(Q8)).stat().st_size
    assert code == 130 and 0 < kept < len(Q8)
    assert f"interrupted; {shown_size(kept)} are kept, and the same command goes on from there" in err
    monkeypatch.undo()


def test_two_programs_download_it_once(repo: FakeHub) -> None:
    environment = os.environ | {"HF_ENDPOINT": repo.url, "HF_HUB_CACHE": str(cache.hub_dir())}
    line = [sys.executable, "-m", "ikcli", "pull", f"{REPO}:Q8_0"]
    running = [
        subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    outs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0] and outs[0] == outs[1]
    assert Path(outs[0].decode().strip()).read_bytes() == Q8 and repo.n_sent == len(Q8)


def test_the_token_goes_to_the_hub_alone(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.repos[REPO].token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert ik("pull", f"{REPO}:Q8_0")[0] == 0
    assert {t for path, t in repo.tokens if not path.startswith("/cdn/")} == {"hf_secret"}
    assert {t for path, t in repo.tokens if path.startswith("/cdn/")} == {""}, "the token went to another host"
    repo.plain["m.gguf"] = Q8
    repo.forget()
    assert ik("pull", repo.url.replace("127.0.0.1", "localhost") + "/files/m.gguf")[0] == 0
    assert {t for _, t in repo.tokens} == {""}, "the token of the hub went to another host"
    repo.forget()
    other = repo.url.replace("127.0.0.1", "localhost") + "/files/other/m.gguf"
    repo.plain["other/m.gguf"] = Q8
    assert ik("pull", other, "-hft", "mine")[0] == 0
    assert {t for _, t in repo.tokens} == {"mine"}


def test_private_and_unknown_repositories(repo: FakeHub, ik: Ik) -> None:
    repo.repos[REPO].token = "right"
    text = "does not exist on 127.0.0.1:"
    code, _, err = ik("pull", REPO)
    assert code == 1 and text in err and "or is private: check the name, or give a token with -hft or HF_TOKEN" in err
    code, _, err = ik("pull", "no/such")
    assert code == 1 and "no/such " + text in err and "check the name" in err
    assert ik("pull", REPO, "-hft", "wrong")[0] == 1
    assert ik("pull", REPO, "-hft", "right")[0] == 0


@pytest.mark.parametrize("token", ["", "wrong"])
def test_gated_repositories(repo: FakeHub, ik: Ik, token: str) -> None:
    repo.repos[REPO].token, repo.repos[REPO].gated = "right", True
    code, _, err = ik("pull", REPO, *(["-hft", token] if token else []))
    way = "with the account of this token" if token else "and give your token with -hft or HF_TOKEN"
    assert code == 1 and f"{REPO} is gated: accept its conditions on {repo.url}/{REPO} {way}" in err
    assert err.count("\n") == 2, err  # what is downloaded, and the error
    assert ik("pull", REPO, "-hft", "right")[0] == 0


def test_quants_and_files_that_are_not_there(repo: FakeHub, ik: Ik) -> None:
    code, _, err = ik("pull", f"{REPO}:Q8_1")
    assert code == 1 and f"{REPO} has no Q8_1; did you mean Q8_0? it has F16, Q8_0" in err
    code, _, err = ik("pull", REPO, "-hff", "tiny-Q8_1.gguf")
    assert code == 1 and "did you mean tiny-Q8_0.gguf?" in err
    assert ik("pull", REPO, "-hff", "tiny-Q8_0.gguf")[1].endswith("tiny-Q8_0.gguf\n")


def test_offline(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = ik("pull", f"{REPO}:Q8_0", "--offline")
    assert code == 1 and f"run once without --offline: ik pull {REPO}:Q8_0" in err
    path = ik("pull", f"{REPO}:Q8_0")[1]
    repo.forget()
    assert ik("pull", f"{REPO}:Q8_0", "--offline")[:2] == (0, path)
    assert ik("pull", REPO, "--offline")[:2] == (0, path)  # the first that is there
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ik("pull", f"{REPO}:Q8_0")[:2] == (0, path)
    assert ik("pull", f"{REPO}:F16")[0] == 1
    assert not repo.requests


def test_without_network_the_cache_is_used_and_said_so(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path = ik("pull", f"{REPO}:Q8_0")[1]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, out, err = ik("pull", f"{REPO}:Q8_0")
    assert (code, out) == (0, path) and "using what is in the cache" in err
    code, _, err = ik("pull", f"{REPO}:F16")
    assert code == 1 and "no answer for user/tiny-GGUF from 127.0.0.1:9" in err and "check the network" in err
    assert err.count("\n") == 2 and err.startswith("the server does not answer, or not to the end: trying again")


def test_checkpoints(repo: FakeHub, ik: Ik) -> None:
    files = {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"[]", "original/x.pth": b"no"}
    repo.add("user/ckpt", files | {"consolidated.safetensors": b"twice", "README.md": b"text"})
    code, _, err = ik("pull", "user/ckpt")
    assert code == 1 and "has no GGUF model; if it has safetensors, ik pull --checkpoint user/ckpt" in err
    code, out, _ = ik("pull", "--checkpoint", "user/ckpt")
    assert code == 0
    assert {p.name: p.read_bytes() for p in Path(out.strip()).iterdir()} == {
        name: files[name] for name in ("model.safetensors", "config.json", "tokenizer.json")
    }
    code, _, err = ik("pull", "--checkpoint", REPO)
    assert code == 1 and "has no safetensors" in err


@pytest.mark.parametrize("path", ["../../outside.gguf", "/etc/outside.gguf", "a/../../../../outside.gguf"])
def test_names_that_leave_the_cache_are_refused(hub: FakeHub, ik: Ik, path: str, tmp_path: Path) -> None:
    hub.add(REPO, {path: Q8})
    code, _, err = ik("pull", REPO)
    assert code == 1 and "says nothing usable about" in err
    assert not list(tmp_path.rglob("outside*"))


def test_usage(ik: Ik) -> None:
    assert ik("pull")[0] == 2
    assert ik("pull", "a/b", "c/d")[0] == 2
    assert ik("pull", "nonsense")[0] == 2
    assert ik("pull", "https://x.y/m.gguf", "--list")[0] == 2
    assert ik("pull", "https://x.y/m.bin")[0] == 2
    assert ik("rm")[0] == 2
