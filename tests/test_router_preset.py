"""Preset files of llama.cpp, folders and the cache as sources of models; one sentence for every mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hub_models import model_bytes, part_bytes

from ikcli import log
from ikcli.cli.model_list import Sources
from ikcli.cli.models_preset import read_preset
from ikcli.cli.parser import parse
from ikcli.errors import UsageError
from ikcli.hub.names import RemoteFile
from ikcli.server.front.models_entries import ModelEntry, ModelsFile
from ikcli.settings.run import default_model

COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; relative paths are those of a folder of the test."""
    from huggingface_hub import constants

    log.forget_notices()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)
    return tmp_path


def sources(*line: str, preset: str | None = None) -> Sources:
    if preset is not None:
        Path("p.ini").write_text(preset, encoding="utf-8")
        line = ("--models-preset", "p.ini", *line)
    return Sources(parse("serve", list(line)))


def read(*line: str, preset: str | None = None) -> ModelsFile:
    return sources(*line, preset=preset).read()


def put(path: str, data: bytes | None = None) -> Path:
    """A model file; without data a link to the demo model."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if data is None:
        target.symlink_to(default_model())
    else:
        target.write_bytes(data)
    return target


def cache(repo: str, name: str, data: bytes | None = None) -> Path:
    """A file in the hub's cache."""
    from ikcli.hub.cache import link, repo_dir

    digest = f"{abs(hash((repo, name))):064x}"
    put(str(repo_dir(repo) / "blobs" / digest), data if data is not None else default_model().read_bytes())
    return link(repo, COMMIT, RemoteFile(name, 1, digest))


def only(file: ModelsFile) -> ModelEntry:
    (entry,) = file.entries.values()
    return entry


def test_a_preset_file() -> None:
    """The forms that keys and values have in llama.cpp."""
    put("my models/demo.gguf")
    file = read(
        preset="""
version = 1

; for all of them
[*]
c = 512
t = 1
LLAMA_ARG_N_GPU_LAYERS = 0     # a variable
jinja = true
load-on-startup = false
tags = local, small

[one]
model = my models/demo.gguf
ctx-size = 1024
no-mmap = true
cache-type-k = q8_0
samplers = penalties;top_k     ; the first one is no comment
alias = gpt-4,tiny
load-on-startup = 1
stop-timeout = 3
sleep-idle-seconds = 60

[two/three:four]
m = "my models/demo.gguf"
LLAMA_ARG_CACHE_RAM = 0
LLAMA_ARG_NO_MMAP = false
kv-offload = off
flash-attn = off
tags = big
""",
    )
    one, two = file.entries.values()
    assert one.names == ("one", "gpt-4", "tiny") and two.names == ("two/three:four",) and file.default is one
    assert (one.config.n_ctx, one.config.n_threads, one.config.n_gpu_layers, one.config.mmap) == (1024, 1, 0, False)
    assert (one.config.type_k, one.config.sampling.samplers) == ("q8_0", "penalties;top_k")
    assert (one.preload, one.stop_timeout, one.ttl, one.sleeps, one.tags) == (True, 3, 60, True, ("local", "small"))
    assert (two.config.n_ctx, two.config.server.cache_ram, two.config.mmap, two.config.flash_attn) == (
        512,
        0,
        True,
        False,
    )
    assert two.config.no_kv_offload and not one.config.no_kv_offload
    assert (two.preload, two.stop_timeout, two.ttl, two.sleeps, two.tags) == (False, None, 0, False, ("big",))
    assert one.source == "preset" and file.max == 4 and file.downloads and parse("serve", one.argv).config == one.config
    assert not any("sleep" in word or "alias" in word for word in one.argv)


def test_the_example_of_the_manual() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "serve-models.md").read_text(encoding="utf-8")
    Path("p.ini").write_text(text.split("```ini\n")[1].split("```")[0], encoding="utf-8")
    preset = read_preset(Path("p.ini"))
    assert list(preset.sections) == ["coder", "user/repo:Q4_K_M"]
    assert preset.defaults.options == ["--ctx-size=8192", "--cache-type-k=q8_0"]
    assert preset.sections["coder"].aliases == ("gpt-4",) and preset.sections["coder"].preload


def test_options_that_have_other_names_here() -> None:
    put("d.gguf")
    preset = """
[*]
load-mode = mlock
spec-default = true
kv-unified = true
[m]
model = d.gguf
lm = mmap
LLAMA_ARG_KV_OFFLOAD = false
swa-checkpoints = 3
spec-ngram-mod-n-max = 9
"""
    config = read(preset=preset).entries["m"].config
    assert (config.mmap, config.mlock, config.no_kv_offload) == (True, False, True)
    assert (config.server.ctx_checkpoints, [s.type for s in config.server.spec_type]) == (3, ["ngram-mod"])
    assert config.server.spec_set[0].value == 9


def test_the_command_line_wins_over_the_section_and_that_over_all() -> None:
    put("d.gguf")
    preset = """
[*]
c = 256
t = 1
override-kv = x.a=int:1
override-kv = x.b=int:1
[m]
model = d.gguf
c = 512
temp = 0.1
[n]
model = d.gguf
override-kv = x.c=int:1
"""
    m, n = read("-c", "1024", "--temp", "0.5", "--port", "1", preset=preset).entries.values()
    assert [(e.config.n_ctx, e.config.n_threads, e.config.sampling.temperature) for e in (m, n)] == [(1024, 1, 0.5)] * 2
    assert m.config.override_kv == ("x.a=int:1", "x.b=int:1") and n.config.override_kv == ("x.c=int:1",)
    assert not any("port" in word for word in m.argv)
    m, n = read(preset=preset).entries.values()
    assert (m.config.n_ctx, n.config.n_ctx, m.config.sampling.temperature) == (512, 256, 0.1)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("c = 5", "line 1: c stands before any section"),
        ("version = 2", "version 2 is not known"),
        ("[m", "line 1: a section is written [NAME]"),
        ("[]", "line 1: a section is written [NAME]"),
        ("[m]\nmodel = d.gguf\n[m]", "line 3: there is a section [m] already"),
        ("[m]\nmodel", "line 2: this is neither [NAME] nor KEY = VALUE: model"),
        ("[m]\n= 5", "line 2: this is neither"),
        ("[m]\nmodel = d.gguf\nc =", "[m] c has no value"),
        ("[m]\nmodel = d.gguf\nc = many", "[m] c: "),
        ("[m]\nmodel = d.gguf\nc = 5\nctx-size = 6", "[m] ctx-size: c has the same meaning"),
        ("[m]\nmodel = d.gguf\nctx-sise = 5", "[m] ctx-sise is not an option of ik serve; did you mean ctx-size?"),
        ("[m]\nLLAMA_ARG_CTX_SISE = 5", "CTX_SISE is not an option of ik serve; did you mean LLAMA_ARG_CTX_S"),
        ("[m]\nkv-offload = perhaps", "[m] kv-offload"),
        ("[m]\nload-mode = fast", "[m] load-mode: --load-mode: \"fast\" is unknown; it is one of auto"),
        ("[m]\ndocker-repo = gemma3", "[m] docker-repo: models of Docker Hub cannot be downloaded"),
        ("[m]\nload-on-startup = perhaps", "[m] load-on-startup must be true or false"),
        ("[m]\nstop-timeout = soon", "[m] stop-timeout must be a whole number of seconds"),
        ("[*]\nmodel = d.gguf", "[*] model applies to one model"),
        ("[*]\nalias = a", "[*] alias applies to one model"),
        ("[m]\nreplicas = 2", "[m] replicas cannot be used here"),
        ("[m]\nc = 5", "[m] needs model = FILE or hf-repo = USER/REPO:QUANT"),
        ("[m]\nmodel = absent.gguf", "[m]: "),
        ("[m]\nmodel = p.ini", "[m]: p.ini"),
        ("[m]\nmodel = d.gguf\nn-predict = -5", "[m] n-predict"),
        ("[m]\nmodel = d.gguf\nalias = a\n[a]\nmodel = d.gguf", "the model a has the name a, which is that of m"),
        ("[a,b]\nmodel = d.gguf", "[a,b]: names of models must not be empty and have no commas"),
        ("[\0]\nmodel = \0", "p.ini is not an INI file: it has NUL bytes"),
    ],
)  # fmt: skip
def test_mistakes_are_named(preset: str, message: str) -> None:
    put("d.gguf")
    with pytest.raises(UsageError) as found:
        read(preset=preset)
    text = str(found.value)
    assert message in text and "\n" not in text and ("p.ini" in text or "has the name" in text)


def test_files_that_are_no_presets() -> None:
    with pytest.raises(UsageError, match=r"cannot read absent\.ini"):
        read("--models-preset", "absent.ini")
    put("d.gguf")
    with pytest.raises(UsageError, match=r"d\.gguf is not an INI file"):
        read("--models-preset", "d.gguf")
    with pytest.raises(UsageError, match=r"no model found in p\.ini"):
        read("--no-models-cache", preset="[*]\nc = 5")


def test_what_has_no_meaning_here_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    put("d.gguf")
    entry = only(read(preset="[*]\nhost = 1.2.3.4\naudio = y\n[m]\nmodel = d.gguf\nport = 5\nprio = 2\naudio = x"))
    err = capsys.readouterr().err
    assert "p.ini: ignored, as they are for all models together: host, port" in err
    assert "p.ini: ignored, as they have no effect here: audio, prio" in err
    assert not any("audio" in word or "1.2.3.4" in word for word in entry.argv)


def test_models_that_cannot_all_be_loaded_at_the_start() -> None:
    put("d.gguf")
    preset = "[*]\nload-on-startup = true\n[m]\nmodel = d.gguf\n[n]\nmodel = d.gguf"
    assert all(entry.preload for entry in read(preset=preset).entries.values())
    with pytest.raises(UsageError, match=r"2 models are to be loaded at the start \(m, n\), and only 1 may be"):
        read("--models-max", "1", preset=preset)
    assert len(read("--models-max", "0", preset=preset).entries) == 2


def test_models_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    put("models/a.gguf")
    put("models/mmproj-a.gguf", b"x")
    put("models/.hidden.gguf", b"x")
    put("models/notes.txt", b"x")
    put("models/broken.gguf", b"not a model")
    for i, data in enumerate(part_bytes(3), 1):
        put(f"models/split/tiny-F16-{i:05d}-of-00003.gguf", data)
    put("models/pair/x.gguf")
    put("models/pair/y.gguf")
    put("models/vision/v.gguf")
    put("models/vision/mmproj-F16.gguf", b"x")
    put("models/a/b.gguf")
    put("models/c,d.gguf")
    Path("models/empty").mkdir()
    file = read("--models-dir", "models", "-c", "256")
    assert list(file.entries) == ["a", "pair/x", "pair/y", "split", "vision"]
    assert {entry.source for entry in file.entries.values()} == {"folder"} and file.max == 4
    assert str(file.entries["split"].config.model).endswith("tiny-F16-00001-of-00003.gguf")
    reading = {name for name, entry in file.entries.items() if entry.facts.reads_images}
    assert reading == {"vision"} and "--mmproj=models/vision/mmproj-F16.gguf" in file.entries["vision"].argv
    assert len(file.entries["split"].stamp) == 3 and file.entries["a"].config.n_ctx == 256
    err = capsys.readouterr().err
    assert "the model broken is left out: models/broken.gguf" in err and "the model c,d is left out" in err
    assert "models/a.gguf is left out: models/a/b.gguf has the name a already" in err


def test_folders_without_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--models-dir absent: cannot read absent"):
        read("--models-dir", "absent")
    put("file.gguf")
    with pytest.raises(UsageError, match=r"--models-dir file\.gguf: cannot read"):
        read("--models-dir", "file.gguf")
    Path("empty").mkdir()
    with pytest.raises(UsageError, match="no model found in empty"):
        read("--models-dir", "empty", "--no-models-cache")
    assert not read("--models-dir", "empty").entries  # more can be downloaded
    err = capsys.readouterr().err
    assert "--models-dir empty has no GGUF file" in err and "POST /models or ik pull downloads one" in err


def test_sections_are_options_of_models_that_other_sources_have(capsys: pytest.CaptureFixture[str]) -> None:
    put("models/a.gguf")
    put("models/b.gguf")
    cache("user/repo", "x-Q4_K_M.gguf")
    cache("user/repo", "x-Q8_0.gguf")
    cache("user/other", "y-Q8_0.gguf", b"broken")
    preset = "[*]\nt = 1\n[b]\nc = 256\n[user/repo:q8_0]\nc = 512\n[user/absent:Q4_0]\nc = 128"
    file = read("--models-dir", "models", preset=preset)
    assert list(file.entries) == ["b", "user/repo:q8_0", "a", "user/repo:Q4_K_M"]
    found = {name: (e.config.n_ctx, e.config.n_threads, e.source) for name, e in file.entries.items()}
    assert found["b"] == (256, 1, "folder") and found["user/repo:q8_0"] == (512, 1, "cache")
    assert found["a"] == (0, 1, "folder") and found["user/repo:Q4_K_M"] == (0, 1, "cache")
    assert file.find("user/repo:Q8_0") is file.entries["user/repo:q8_0"]
    err = capsys.readouterr().err
    assert "p.ini: [user/absent:Q4_0] is not in the cache; it is served when" in err
    assert "the model user/other:Q8_0 is left out" in err
    file = read("--models-dir", "models", preset="[user/repo]\nc = 512")
    assert file.entries["user/repo"].aliases == ("user/repo:Q4_K_M",) and "user/repo:Q8_0" in file.entries
    with pytest.raises(UsageError, match=r"\[user/repo:Q8_0\] needs model = FILE"):
        read("--no-models-cache", "--models-dir", "models", preset="[user/repo:Q8_0]\nc = 512")


def test_the_cache_alone_and_beside_a_table() -> None:
    cache("user/repo", "x-Q8_0.gguf")
    assert only(read("--models-cache")).name == "user/repo:Q8_0"
    Path("m.toml").write_text("[defaults]\nthreads = 1\n[models.a]\n")
    assert list(read("--models", "m.toml").entries) == ["a"] and not read("--models", "m.toml").downloads
    assert list(read("--models", "m.toml", "--models-cache").entries) == ["a", "user/repo:Q8_0"]


def test_a_cached_model_that_a_preset_has_is_hidden_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ikcli.cli import model_entries as _model_entries

    path = cache("user/repo", "x-Q8_0.gguf")
    monkeypatch.setattr(_model_entries, "find_model", lambda model, hub: model or path)
    preset = "[mine]\nhf-repo = user/repo:Q8_0\n"
    assert list(read(preset=preset).entries) == ["mine", "user/repo:Q8_0"]
    assert list(read(preset=preset + "dedup-cache-models = true").entries) == ["mine"]
    assert list(read(preset="[*]\ndedup-cache-models = on\n" + preset).entries) == ["mine"]


def test_sources_are_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    """What is new appears, what has gone goes, what is another file is another model, and the budget stays."""
    put("models/a.gguf")
    changed = put("models/b.gguf", model_bytes())
    found = sources("--models-dir", "models", "-c", "256")
    first = found.read()
    Path("models/a.gguf").unlink()
    put("models/c.gguf")
    changed.unlink()
    put("models/b.gguf")
    second = found.read()
    assert list(first.entries) == ["a", "b"] and list(second.entries) == ["b", "c"]
    assert not second.entries["b"].like(first.entries["b"]) and second.budget == first.budget
    with pytest.raises(
        UsageError, match=r"\[n\]: user/absent is not in the cache; download it with ik pull user/absent"
    ):
        again = sources(preset="[m]\nmodel = models/b.gguf")
        again.read()
        put("p.ini", b"[m]\nmodel = models/b.gguf\n[n]\nhf-repo = user/absent")
        again.read()
    third = found.read()
    assert all(third.entries[name].like(entry) for name, entry in second.entries.items())
