"""Models by name on commands: `-hf` and `--model-url`, headers alone for plans, `--list`, `ik list`, `ik rm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub
from hub_fixtures import Ik, hub, ik, server
from hub_models import model_bytes, part_bytes

from ikcli.cli.app import checked
from ikcli.cli.parser import parse
from ikcli.commands._sweep_table import settings_dict
from ikcli.gguf.constants import GGMLType
from ikcli.hub import cache
from ikcli.settings.run import default_model

__all__ = ["hub", "ik", "server"]

REPO = "user/tiny-GGUF"
Q8, F16, F32 = model_bytes(GGMLType.Q8_0), model_bytes(), model_bytes(GGMLType.F32)


@pytest.fixture
def repo(hub: FakeHub) -> FakeHub:
    parts = {f"F32/tiny-F32-0000{i + 1}-of-00002.gguf": part for i, part in enumerate(part_bytes(2, GGMLType.F32))}
    hub.add(REPO, {"tiny-F16.gguf": F16, "tiny-Q8_0.gguf": Q8, "tiny-imatrix.gguf": b"GGUF"} | parts)
    return hub


@pytest.fixture
def demo(hub: FakeHub) -> FakeHub:
    hub.add("user/demo", {"demo-Q8_0.gguf": default_model().read_bytes()})
    return hub


# --- running ------------------------------------------------------------------------------------------------------
def test_a_command_downloads_its_model(demo: FakeHub, ik: Ik) -> None:
    line = ("perplexity", "-c", "64", "--chunks", "1", "-t", "2")
    code, out, err = ik(*line, "-hf", "user/demo:Q8_0")
    assert code == 0 and "downloading demo-Q8_0.gguf" in err
    assert out == ik(*line)[1]
    demo.forget()
    assert ik(*line, "-hfr", "user/demo", "-hff", "demo-Q8_0.gguf")[1] == out
    assert not demo.n_sent
    assert ik(*line, "-hf", "user/demo", "--offline")[1] == out


def test_the_reference_reads_m_as_the_file_of_the_repository(demo: FakeHub, ik: Ik, tmp_path: Path) -> None:
    assert ik("tokenize", "-hfr", "user/demo", "-m", "demo-Q8_0.gguf", "-p", "x", "--ids")[0] == 0
    assert demo.asked("GET /cdn/")
    local = tmp_path / "local.gguf"
    local.write_bytes(default_model().read_bytes())
    demo.forget()
    assert ik("tokenize", "-hfr", "user/demo", "-m", str(local), "-p", "x", "--ids")[0] == 0
    assert not demo.requests, "a model file that is there was not used"
    assert "exists and is used, not user/demo" in ik("inspect", "-hfr", "user/demo", "-m", str(local))[2]
    code, _, err = ik("perplexity", "-hff", "demo-Q8_0.gguf")
    assert code == 2 and "add --hf-repo USER/REPO" in err
    assert ik("perplexity", "-hf", "nonsense")[0] == 2


def test_tools_take_models_by_name(demo: FakeHub, ik: Ik) -> None:
    line = ("quantize-stats", "--type", "q8_0", "--rows", "4", "-l", "blk.0.attn_q", "--summary")
    assert ik(*line, "-hf", "user/demo")[:2] == ik(*line)[:2]
    study = ("study", "--types", "q4_0", "-l", "blk.0.attn_q", "--chunks", "1", "-c", "64")
    assert ik(*study, "-hf", "user/demo")[:2] == ik(*study)[:2]


def test_doctor_reads_the_header_alone(demo: FakeHub, ik: Ik) -> None:
    code, out, _ = ik("doctor", "--quick", "-hf", "user/demo")
    assert code == 0 and "5.9M parameters" in out
    assert demo.n_sent < len(default_model().read_bytes()) // 2


def test_environment(demo: FakeHub, tmp_path: Path) -> None:
    """The variables of the hub and of llama.cpp, in a program of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LLAMA_"))} | {
        "HF_ENDPOINT": demo.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_x",
        "LLAMA_ARG_HF_REPO": "user/demo:Q8_0",
    }
    demo.repos["user/demo"].token = "hf_x"
    line = [sys.executable, "-m", "ikcli", "warmup", "--dry-run", "-c", "256"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = [sys.executable, "-m", "ikcli", "pull", "user/demo"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / "home" / "hub" / "models--user--demo"))
    offline = environment | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert subprocess.run(line, env=offline, capture_output=True, text=True).stdout == done.stdout


def test_the_token_is_not_a_setting_of_the_run(demo: FakeHub) -> None:
    demo.repos["user/demo"].token = "hf_secret"
    parsed = parse("sweep-bench", ["-hf", "user/demo", "-hft", "hf_secret"])
    started = checked(parsed)
    assert started.config.model is not None and started.config.model.is_file()
    assert "hf_secret" not in json.dumps(settings_dict(started.config))


def test_draft_models_have_names_too(demo: FakeHub) -> None:
    started = checked(parse("serve", ["-hfd", "user/demo:Q8_0", "--spec-type", "draft"]))
    path = started.config.server.model_draft
    assert path is not None and path.name == "demo-Q8_0.gguf" and path.is_relative_to(cache.hub_dir())
    assert started.config.model == default_model()


def test_commands_with_a_file_do_not_load_the_hub() -> None:
    program = """import sys
from ikcli.main import main
main(['plan'])
main(['--help'])
main(['pull', '--help'])
print([name for name in ('huggingface_hub', 'httpx', 'httpx2') if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# --- headers ------------------------------------------------------------------------------------------------------
def buffers(text: str) -> list[str]:
    """The lines of a plan that do not depend on what else runs on the machine."""
    return [line for line in text.splitlines() if "buffer size" in line]


def test_plans_read_the_header_alone(repo: FakeHub, ik: Ik, tmp_path: Path) -> None:
    path = tmp_path / "tiny-Q8_0.gguf"
    path.write_bytes(Q8)
    code, out, err = ik("plan", "-hf", f"{REPO}:Q8_0", "-t", "2")
    assert code == 0
    local = ik("plan", "-m", str(path), "-t", "2")[1]
    assert len(buffers(out)) > 2 and buffers(out) == buffers(local)
    assert not cache.hub_dir().exists(), "the model was downloaded"
    assert "needs" in out and "fits" in out and "Traceback" not in err
    repo.forget()
    assert ik("plan", "-hf", f"{REPO}:Q8_0", "-t", "2")[0] == 0
    assert not repo.asked("cdn"), "the header was read again"
    assert buffers(ik("plan", "-hf", f"{REPO}:Q8_0", "-t", "2", "--offline")[1]) == buffers(local)


def test_all_parts_have_their_headers_read(repo: FakeHub, ik: Ik) -> None:
    code, _, err = ik("plan", "-hf", f"{REPO}:F32", "-t", "2")
    assert code == 0 and "parts are missing" not in err
    described = json.loads(ik("inspect", "-hf", f"{REPO}:F32", "--json")[1])
    assert described["n_tensors"] == 21 and len(described["paths"]) == 2


def test_inspect_reads_the_header_alone(repo: FakeHub, ik: Ik) -> None:
    code, out, _ = ik("inspect", "-hf", f"{REPO}:Q8_0", "--tensors")
    assert code == 0 and "blk.0.attn_q.weight" in out and "q8_0" in out
    assert not cache.hub_dir().exists()
    ik("pull", f"{REPO}:Q8_0")
    assert str(cache.hub_dir()) in ik("inspect", "-hf", f"{REPO}:Q8_0")[1], "the model that is there was not used"


def test_a_file_that_is_no_gguf(hub: FakeHub, ik: Ik) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": b"PK" + bytes(1000)})
    code, _, err = ik("inspect", "-hf", REPO)
    assert code == 1 and f"{hub.url}/{REPO}/resolve" in err and "not a GGUF file" in err


def test_list_of_quants(repo: FakeHub, ik: Ik) -> None:
    ik("pull", f"{REPO}:Q8_0")
    repo.forget()
    code, out, err = ik("pull", REPO, "--list")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert code == 0 and list(rows) == ["Q8_0", "F16", "F32"]
    assert "(downloaded)" in rows["Q8_0"] and "fits: CPU" in rows["F16"] and "(downloaded)" not in rows["F16"]
    assert rows["F32"].startswith("F32 *"), "the first of the repository is the default"
    assert "* is taken when no quant is named" in err
    found = json.loads(ik("pull", REPO, "--list", "--json", "-c", "64")[1])
    q8 = found["quants"][0]
    described = json.loads(ik("inspect", "-hf", f"{REPO}:Q8_0", "--json")[1])
    assert q8["bpw"] == pytest.approx(8 * described["n_bytes"] / described["n_elements"])
    assert q8["fits"] is True and q8["n_ctx"] == 64 and q8["needed"]["CPU"] > 0 and q8["downloaded"]
    assert [q["quant"] for q in json.loads(ik("pull", f"{REPO}:F16", "--list", "--json")[1])["quants"]] == ["F16"]


def test_list_says_what_does_not_fit(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikcli.engine.plan import startup
    from ikcli.engine.plan.devices import Machine

    monkeypatch.setattr(startup, "find_machine", lambda *a, **k: Machine((), 1 << 19))
    code, out, _ = ik("pull", REPO, "--list")
    assert code == 0 and out.count("does not fit: CPU") == 3 and "of 512.00 KiB" in out


def test_list_names_models_that_cannot_run(hub: FakeHub, ik: Ik) -> None:
    strange = (
        model_bytes().replace(b"llama.", b"ollam.").replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0ollam", 1)
    )
    hub.add(REPO, {"m-F16.gguf": strange, "m-Q8_0.gguf": b"not a model"})
    code, out, _ = ik("pull", REPO, "--list")
    assert code == 0 and "ollam" in out and "not a GGUF file" in out


def test_doctor_says_whether_a_quant_fits(repo: FakeHub, ik: Ik) -> None:
    code, out, _ = ik("doctor", "--quick", "-hf", f"{REPO}:Q8_0", "--json")
    assert code == 0 and json.loads(out)["model"]["fits"] is True
    assert not cache.hub_dir().exists()


# --- URLs ---------------------------------------------------------------------------------------------------------
def test_a_model_from_a_url(hub: FakeHub, ik: Ik, tmp_path: Path) -> None:
    hub.plain["dir/m.gguf"] = Q8
    url = f"{hub.url}/files/dir/m.gguf"
    hub.faults.cuts = [1 << 62, 500_000]
    hub.faults.cuts.pop(0)
    code, out, err = ik("pull", url + "?download=true#part")
    path = Path(out.strip())
    assert code == 0 and path.read_bytes() == Q8 and hub.n_sent == len(Q8) + 4
    assert path.is_relative_to(tmp_path / "ik") and list(path.parent.iterdir()) == [path]
    hub.forget()
    assert ik("inspect", "-mu", url)[0] == 0
    assert ik("tokenize", "-mu", url, "-p", "x", "--offline")[0] in (0, 1)
    assert not hub.requests
    code, _, err = ik("pull", url.replace("/m.gguf", "/n.gguf"))
    assert code == 1 and "n.gguf does not exist; check the name" in err
    code, _, err = ik("pull", url.replace("/m.gguf", "/n.gguf"), "--offline")
    assert code == 1 and "run once without --offline" in err


def test_parts_from_a_url(hub: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    for i, part in enumerate(part_bytes(2)):
        hub.plain[f"m-0000{i + 1}-of-00002.gguf"] = part
    url = f"{hub.url}/files/m-00001-of-00002.gguf"
    described = json.loads(ik("inspect", "-mu", url, "--json")[1])
    assert described["n_tensors"] == 21 and not (tmp_path / "llama").exists()
    code, out, _ = ik("pull", url)
    assert code == 0 and Path(out.strip()).is_relative_to(tmp_path / "llama")
    assert [p.read_bytes() for p in sorted(Path(out.strip()).parent.iterdir())] == list(part_bytes(2))


def test_a_url_of_something_else(hub: FakeHub, ik: Ik) -> None:
    hub.plain["page.gguf"] = b"<!doctype html>" * 1000
    code, _, err = ik("pull", f"{hub.url}/files/page.gguf")
    assert code == 1 and "is not a GGUF file (it starts with b'<!do')" in err and hub.n_sent == 4


def test_a_url_whose_file_changes_between_two_runs(hub: FakeHub, ik: Ik) -> None:
    hub.plain["m.gguf"] = Q8
    target = cache.url_path(f"{hub.url}/files/m.gguf")
    target.parent.mkdir(parents=True)
    target.with_name("m.gguf.incomplete").write_bytes(b"old bytes")
    target.with_name("m.gguf.incomplete.etag").write_text('"old"')
    assert ik("pull", f"{hub.url}/files/m.gguf")[0] == 0
    assert target.read_bytes() == Q8


def test_a_url_of_the_hub_goes_into_its_cache(demo: FakeHub, ik: Ik) -> None:
    out = ik("pull", f"{demo.url}/user/demo/resolve/main/demo-Q8_0.gguf")[1]
    assert out.startswith(str(cache.repo_dir("user/demo")))


# --- list and rm --------------------------------------------------------------------------------------------------
def test_list_and_rm(repo: FakeHub, ik: Ik) -> None:
    assert "no models in" in ik("list")[2]
    assert json.loads(ik("list", "--json")[1]) == []
    repo.plain["m-Q4_0.gguf"] = F16
    url = f"{repo.url}/files/m-Q4_0.gguf"
    for name in (f"{REPO}:Q8_0", f"{REPO}:F16", f"{REPO}:F32", url):
        assert ik("pull", name)[0] == 0
    found = json.loads(ik("list", "--json")[1])
    assert [m["name"] for m in found[:3]] == [f"{REPO}:F32", f"{REPO}:F16", f"{REPO}:Q8_0"]
    assert [m["quant"] for m in found] == ["F32", "F16", "Q8_0", "Q4_0"] and found[2]["n_bytes"] == len(Q8)
    assert all(m["complete"] and Path(m["path"]).is_file() and m["last_used"].startswith("20") for m in found)
    table = ik("list")[1].splitlines()
    assert len(table) == 5 and table[1].startswith(f"{REPO}:F32") and found[0]["path"] in table[1]
    code, _, err = ik("rm", f"{REPO}:Q8_0")
    assert code == 2 and "add -y" in err
    code, out, _ = ik("rm", f"{REPO}:Q8_0", url, "-y")
    assert code == 0 and f"removed {REPO}:Q8_0 (1.21 MiB)" in out
    assert [m["quant"] for m in json.loads(ik("list", "--json")[1])] == ["F32", "F16"]
    contents = list((cache.repo_dir(REPO) / "blobs").iterdir())
    assert len(contents) == 3 and not cache.url_path(url).exists()
    code, _, err = ik("rm", f"{REPO}:Q8_0", "-y")
    assert code == 1 and f"{REPO}:Q8_0 is not in the cache; there is {REPO}:F32, {REPO}:F16" in err
    ik("plan", "-hf", f"{REPO}:Q8_0")
    assert (cache.headers_dir() / cache.repo_dir(REPO).name).is_dir()
    assert ik("rm", REPO, "-y")[0] == 0
    assert not cache.repo_dir(REPO).exists() and not list(cache.headers_dir().iterdir())


def test_rm_asks_on_a_terminal(repo: FakeHub, ik: Ik, monkeypatch: pytest.MonkeyPatch) -> None:
    ik("pull", f"{REPO}:Q8_0")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, _, err = ik("rm", f"{REPO}:Q8_0")
    assert code == 1 and f"remove {REPO}:Q8_0 (1.21 MiB)? [y/N]" in err and "nothing removed" in err
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert ik("rm", f"{REPO}:Q8_0")[0] == 0
    assert json.loads(ik("list", "--json")[1]) == []


def test_rm_of_a_download_that_was_interrupted(repo: FakeHub, ik: Ik) -> None:
    part = cache.repo_dir(REPO) / "blobs" / "abc.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(2048))
    assert ik("rm", REPO, "-y")[:2] == (0, f"removed {REPO} (2.00 KiB)\n")
    assert not part.exists()


def test_list_shows_models_whose_parts_are_missing(repo: FakeHub, ik: Ik) -> None:
    path = Path(ik("pull", f"{REPO}:F32")[1].strip())
    path.unlink()
    assert f"{REPO}:F32 (parts missing)" in ik("list")[1]


class Terminal:
    """Standard input that is a terminal on which one line has been typed."""

    def __init__(self, line: str) -> None:
        self.line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.line
