"""`ik publish --upload` against a stand-in of the hub: what is sent, what continues after interruptions, refusals."""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub_uploads import UploadHub, repo_files
from hub_fixtures import Ik, hub, ik
from quant_models import write_model

from ikcli.hub.client import HubError
from ikcli.hub.upload import UploadOptions, upload
from ikcli.publish.checksums import MADE_OF, current_sums

__all__ = ["hub", "ik"]

REPO = "me/Tiny-GGUF"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own


@pytest.fixture(autouse=True)
def closed_streams_of_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's log handler keeps a stderr that pytest has closed; it would complain where ours is checked."""
    monkeypatch.setattr(logging, "raiseExceptions", False)


@pytest.fixture(scope="module")
def server() -> Iterator[UploadHub]:
    made = UploadHub()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _plain_uploads(hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token; the library sends over plain HTTP and does not wait between attempts."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)


@pytest.fixture
def models(tmp_path: Path, ik: Ik) -> list[Path]:
    source = write_model(tmp_path / "Tiny-F16.gguf")
    listing = tmp_path / "list.txt"
    listing.write_text("Q8_0\nQ4_0\n")
    keys = [f"general.{k}=str:{v}" for k, v in (("license", "mit"), ("repo_url", "me/Tiny"), ("name", "Tiny"))]
    words = [word for text in keys for word in ("--override-kv", text)]
    assert ik("quantize", *words, "--matrix", str(listing), str(source), str(tmp_path / "q"))[0] == 0
    return [tmp_path / "q" / f"Tiny-{name}.gguf" for name in ("Q4_0", "Q8_0")]


@pytest.fixture
def command(models: list[Path], tmp_path: Path) -> list[str]:
    return ["publish", *map(str, models), "--out", str(tmp_path / "out"), "--upload", REPO]


def in_folder(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != MADE_OF
    }


def oid(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow  # publishes several times
def test_the_folder_arrives_and_a_second_run_sends_nothing(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path
) -> None:
    hub.chunk = 3000  # in parts
    code, out, err = ik(*command, "--private")
    assert code == 0 and "warning" not in err, err
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out") and hub.private == [REPO]
    assert out.splitlines()[-1] == f"{hub.url}/{REPO}/commit/{hub.repos[REPO].commit}"
    assert len(hub.asked("/commit/main")) == 1 and len(hub.asked("PUT")) > 4
    assert ik("pull", f"{REPO}:Q8_0")[0] == 0
    assert set(hub.arrived.values()) == {p.stat().st_size for p in (tmp_path / "out").glob("*.gguf")}
    hub.forget()
    code, _, err = ik(*command)
    assert code == 0 and "exists and is complete" in err and "0 files sent, 6 were there" in err
    assert not hub.asked("PUT|/commit/|preupload")
    (tmp_path / "out" / "README.md").write_text(
        "---\nlicense: mit\n---\n# Mine\n"
    )  # without models: the folder as it is
    code, out, err = ik("publish", "--out", str(tmp_path / "out"), "--upload", REPO, "--json")
    assert code == 0, err
    assert sorted(json.loads(out)["upload"]["sent"]) == ["README.md", "SHA256SUMS"] and not hub.asked("PUT")
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out")
    sums = dict(line.split("  ")[::-1] for line in hub.repos[REPO].files["SHA256SUMS"].decode().splitlines())
    assert sums["README.md"] == oid(tmp_path / "out" / "README.md")


def test_an_upload_goes_on_where_it_broke(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path, models: list[Path]
) -> None:
    hub.breaks = [0] + [500] * 40  # the first content arrives, the second never does
    code, _, err = ik(*command)
    assert code == 1 and "the same command goes on from here" in err and "Traceback" not in err, err
    assert repo_files(hub, REPO) == {} and not hub.asked("/commit/")
    first, second = (oid(path) for path in models)
    assert hub.arrived[first] == models[0].stat().st_size and second not in hub.blobs
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.gguf")}
    hub.forget()
    hub.breaks = []
    code, _, err = ik(*command)
    assert code == 0, err
    assert hub.arrived == {second: models[1].stat().st_size}
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.gguf")} == made
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out")


def test_passing_failures_are_repeated(hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path) -> None:
    hub.breaks = [700, 700]
    code, _, err = ik(*command)
    assert code == 0, err
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out")


def test_a_commit_whose_answer_is_lost_is_not_made_twice(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path
) -> None:
    hub.lost_commits = 1
    code, _, err = ik(*command)
    assert code == 1 and "the same command goes on" in err
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out")
    hub.forget()
    assert ik(*command)[0] == 0 and not hub.asked("/commit/|PUT")


@pytest.mark.slow  # publishes several times
def test_an_interrupt_leaves_a_folder_that_goes_on(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    def interrupt(*args: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", interrupt)
        code, _, err = ik(*command)
    assert code == 130 and "Traceback" not in err
    sent = dict(hub.arrived)
    assert ik(*command)[0] == 0 and hub.arrived == sent
    assert repo_files(hub, REPO) == in_folder(tmp_path / "out")


@pytest.mark.slow  # publishes several times
def test_branches_and_pull_requests(hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path) -> None:
    hub.add("you/Tiny-GGUF", {"README.md": b"# yours"})
    to = [*command[:-1], "you/Tiny-GGUF"]
    code, out, err = ik(*to, "--create-pr")
    assert code == 0, err
    assert out.splitlines()[-1] == f"{hub.url}/you/Tiny-GGUF/discussions/1"
    assert repo_files(hub, "you/Tiny-GGUF") == {"README.md": b"# yours"}
    assert repo_files(hub, "you/Tiny-GGUF@refs/pr/1") == in_folder(tmp_path / "out")
    hub.forget()
    assert ik(*to, "--revision", "refs/pr/1")[0] == 0 and not hub.asked("/commit/|PUT|/branch/")
    assert ik(*to, "--revision", "v2")[0] == 0
    assert not hub.asked("PUT") and repo_files(hub, "you/Tiny-GGUF@v2") == in_folder(tmp_path / "out")


@pytest.mark.slow  # publishes several times
def test_a_folder_of_other_models_is_not_taken(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path, models: list[Path]
) -> None:
    assert ik(*command)[0] == 0
    for changed in ([*command, "--note", "new"], [*command[:2], *command[3:]]):
        code, _, err = ik(*changed)
        assert code == 2 and "made of other files or options" in err and "without models" in err
    os.utime(models[0], ns=(1, 1))
    code, _, err = ik(*command)
    assert code == 2 and "made of other files or options" in err
    (tmp_path / "out" / "Tiny-Q8_0.gguf").unlink()
    code, _, err = ik("publish", "--out", str(tmp_path / "out"), "--upload", REPO)
    assert code == 1 and "Tiny-Q8_0.gguf is gone" in err


def test_refusals_come_before_the_folder(
    hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str, code: int = 2) -> str:
        found, out, err = ik(*words)
        assert found == code and "Traceback" not in err and not out and not (tmp_path / "out").exists(), (found, err)
        return err

    assert "needs the network" in refused(*command, "--offline")
    assert "drop it or --revision" in refused(*command, "--create-pr", "--revision", "x")
    assert "names a quant" in refused(*command[:-1], "me/x:Q8_0")
    assert "is not user/repo" in refused(*command[:-1], "nowhere")
    assert "needs --upload" in refused(*command[:-2], "--private")
    assert "name at least one model" in refused("publish", "--out", str(tmp_path / "out"))
    assert "does not let this token write" in refused(*command, "--token", "hf_reader", code=1)
    monkeypatch.delenv("HF_TOKEN")
    assert "needs a token" in refused(*command)
    assert not hub.asked("POST|PUT")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install huggingface_hub" in refused(*command, code=1)


def test_errors_of_the_hub_are_sentences(hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path) -> None:
    code, _, err = ik(*command[:-1], "you/New-GGUF")
    assert code == 1 and "does not let this token write to you/New-GGUF (403)" in err
    bare = tmp_path / "bare"
    bare.mkdir()
    code, _, err = ik("publish", "--out", str(bare), "--upload", REPO)
    assert code == 1 and "it was not made by ik publish" in err
    hub.add(REPO, {})
    code, _, err = ik(*command, "--private")
    assert code == 0 and "is public; --private counts" in err


def test_digests_follow_what_was_changed(hub: UploadHub, ik: Ik, command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ik(*command)[0] == 0
    before = current_sums(out)
    (out / "extra.png").write_bytes(b"picture")
    (out / ".hidden").write_text("mine")
    after = current_sums(out)
    assert set(after) - set(before) == {"extra.png"} and after["SHA256SUMS"] != before["SHA256SUMS"]
    assert current_sums(out) == after
    (out / "SHA256SUMS").write_text("nonsense\n")
    code, _, err = ik("publish", "--out", str(out), "--upload", REPO)
    assert code == 1 and '"nonsense" is not a digest' in err


def test_a_file_that_disappears_while_others_are_sent(hub: UploadHub, tmp_path: Path) -> None:
    files = {name: name.encode() * 1000 for name in ("a.gguf", "b.gguf")}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    digests = {name: oid(tmp_path / name) for name in files}
    with pytest.raises(HubError, match=r"b\.gguf: .*the same command goes on from here"):
        upload(tmp_path, digests, UploadOptions(REPO), lambda *_: (tmp_path / "b.gguf").unlink())
    assert not repo_files(hub, REPO)
