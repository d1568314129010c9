"""The file of `ik serve --models`: what it means, and one sentence with file and key for every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ikcli.cli import model_entries as _model_entries
from ikcli.cli.model_entries import check_front
from ikcli.cli.model_list import Sources
from ikcli.cli.parser import parse
from ikcli.engine.plan.planner import Planner
from ikcli.errors import UsageError
from ikcli.server.front.models_entries import ModelsFile
from ikcli.settings.hub import HubConfig
from ikcli.settings.run import default_model

MIB = 2**20


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read_models(path: Path, *line: str) -> ModelsFile:
    return Sources(parse("serve", ["--models", str(path), *line])).read()


def test_models_their_options_and_needs(tmp_path: Path) -> None:
    text = f"""
memory = "4GiB"
ttl = 60
[defaults]
threads = 1
ctx-size = 512
[models.small]
model = "{default_model()}"
aliases = ["gpt-4", "tiny"]
preload = true
cache-ram = 0
[models."other/one"]
ctx_size = 1024
n-gpu-layers = 0
ttl = 0
[groups.g]
members = ["small", "other/one"]
"""
    file = read_models(write(tmp_path, text))
    small, other = file.entries.values()
    assert (small.names, small.preload, small.ttl) == (("small", "gpt-4", "tiny"), True, 60.0)
    assert (small.config.n_ctx, small.config.n_threads, small.config.server.cache_ram) == (512, 1, 0)
    assert (other.config.n_ctx, other.ttl, other.preload) == (1024, 0, False)
    planner = Planner.of_file(small.config)
    assert small.need["CPU"] == planner.plan(small.config).memory.total("CPU")
    assert other.need["CPU"] > small.need["CPU"] + 256 * MIB  # a prompt cache of a default size is among it
    assert file.budget["CPU"] == 4 * 2**30 and file.default is small
    assert file.find("gpt-4") is file.find("small:latest") is small and file.find("gpt") is None
    assert file.partners("small", together=False) == ("other/one",) and not file.partners("small", together=True)
    assert parse("serve", small.argv).config == small.config


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "names no model"),
        ("models = 5", "models must be a table"),
        ("[models.a", "is not valid TOML"),
        ("[models]\na = 5", "models.a must be a table"),
        ("memori = '1GiB'\n[models.a]", "unknown key memori; did you mean memory?"),
        ("memory = '1 parsec'\n[models.a]", "memory has the size"),
        ("memory = 5\n[models.a]", "memory has the size"),
        ("max = true\n[models.a]", "max must be the number of models"),
        ("max = -1\n[models.a]", "max must be the number of models"),
        ("ttl = -1\n[models.a]", "ttl must be a number of seconds"),
        ("[models.a]\nctx-sise = 5", "models.a.ctx-sise is not an option of ik serve; did you mean ctx-size?"),
        ("[models.a]\nctx-size = 'many'", "models.a.ctx-size"),
        ("[models.a]\nctx-size = {}", "models.a.ctx-size"),
        ("[defaults]\nctx-size = 'many'\n[models.a]", "defaults.ctx-size"),
        ("[models.a]\nport = 5", "models.a.port is for all models together"),
        ("[models.a]\nmodels-max = 5", "models.a.models-max is for all models together"),
        ("[models.a]\nalias = 'b'", "models.a.alias: use aliases"),
        ("[models.a]\nsleep-idle-seconds = 5", "models.a.sleep-idle-seconds: use ttl"),
        ("[models.a]\naliases = 'b'", "models.a.aliases must be a list"),
        ("[models.a]\npreload = 1", "models.a.preload must be true or false"),
        ("[models.a]\nttl = 'x'", "models.a.ttl must be a number"),
        ("[models.a]\nmodel = 'absent.gguf'", "models.a: "),
        ("[models.a]\nmodel = '/'", "models.a: "),
        ('[models.a]\nmodel = "\\u0000"', "models.a.model: "),
        ("[models.a]\n[models.b]\naliases = ['a']", "models.b: the name a is that of models.a already"),
        ("[models.'a,b']", "no commas"),
        ("memory = '20MiB'\n[models.a]", "models.a needs"),
        (
            "max = 1\n[models.a]\n[models.b]\n[groups.g]\nmembers = ['a', 'b']\ntogether = true",
            "models.a with its group are 2 models, more than 1 at a time",
        ),
        ("[models.a]\n[groups.g]\nmembers = ['a', 'c']", "table [models.c] does not exist"),
        ("[models.a]\n[groups.g]\nmembers = ['a']", "groups.g.members must be a list of two"),
        ("[models.a]\n[models.b]\n[groups.g]\nmembers = ['a', 'b']\ntogether = 1", "groups.g.together"),
        (
            "[models.a]\n[models.b]\n[groups.g]\nmember = ['a', 'b']",
            "unknown key groups.g.member; did you mean members?",
        ),
        (
            "[models.a]\n[models.b]\n[groups.g]\nmembers = ['a', 'b']\n"
            "[groups.h]\nmembers = ['a', 'b']\ntogether = true",
            "loaded together and exclude each other",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, key: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as found:
        read_models(path)
    assert key in str(found.value) and str(path) in str(found.value) and "\n" not in str(found.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent\.toml"):
        read_models(tmp_path / "absent.toml")
    done = subprocess.run(
        [sys.executable, "-m", "ikcli", "serve", "--port", "0", "--models", str(tmp_path / "absent.toml")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "absent.toml" in done.stderr and "Traceback" not in done.stderr


def test_models_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the server listens; the processes of models, and lists, get the file and no token."""
    asked = []

    def find(model: Path | None, hub: HubConfig) -> Path:
        asked.append((model, hub.repo, hub.token))
        return default_model()

    monkeypatch.setattr(_model_entries, "find_model", find)
    text = "[defaults]\nhf-token = 'secret'\n[models.a]\nhf-repo = 'user/repo:Q4_K_M'\nctx-size = 512\n"
    (entry,) = read_models(write(tmp_path, text)).entries.values()
    assert asked == [(None, "user/repo:Q4_K_M", "secret")]
    assert f"--model={default_model()}" in entry.argv and not any(
        "secret" in one or "repo" in one for one in entry.argv
    )
    assert entry.config.model == default_model() and not entry.config.hub.repo


def test_options_of_the_command_line_are_those_of_all_models(tmp_path: Path) -> None:
    path = write(
        tmp_path, "max = 2\nttl = 9\n[defaults]\nctx-size = 512\nthreads = 1\n[models.a]\nthreads = 2\n[models.b]"
    )
    file = read_models(path)
    assert file.max == 2 and [entry.ttl for entry in file.entries.values()] == [9, 9]
    assert [(e.config.n_ctx, e.config.n_threads) for e in file.entries.values()] == [(512, 2), (512, 1)]
    file = read_models(path, "-c", "1024", "-t", "3", "--models-max", "0", "--sleep-idle-seconds", "7", "--port", "1")
    assert file.max == 0 and [(e.ttl, e.sleeps) for e in file.entries.values()] == [(7, True)] * 2
    assert [(e.config.n_ctx, e.config.n_threads) for e in file.entries.values()] == [(1024, 3), (1024, 3)]
    assert not any("port" in one or "sleep" in one or "models" in one for one in file.default.argv)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--replicas", "2"], "--replicas cannot be used with several models"),
        (["--dry-run"], "--dry-run cannot be used with several models"),
        (["-m", "x.gguf"], "--model is for one model, and --models for several; drop one of them"),
        (["-hf", "a/b"], "--hf-repo is for one model"),
        (["-a", "x"], "--alias is for one model"),
        (["--models-dir", "d"], "--models-dir cannot be used beside --models"),
    ],
)
def test_options_that_several_models_cannot_have(line: list[str], message: str) -> None:
    check_front(parse("serve", ["--models", "m.toml", "--port", "1", "--api-key", "k", "--metrics", "-v", "-c", "512"]))
    with pytest.raises(UsageError, match=message):
        check_front(parse("serve", ["--models", "m.toml", *line]))


def test_a_variable_that_names_a_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "x.gguf")
    with pytest.raises(UsageError, match=r"--model \(LLAMA_ARG_MODEL\) is for one model, and --models for several"):
        check_front(parse("serve", ["--models", "m.toml"]))
    monkeypatch.delenv("LLAMA_ARG_MODEL")
    monkeypatch.setenv("LLAMA_ARG_MODELS_DIR", "models")
    with pytest.raises(UsageError, match=r"--model is for one model, and --models-dir \(LLAMA_ARG_MODELS_DIR\) for"):
        check_front(parse("serve", ["-m", "x.gguf"]))
