"""Command lines written for llama.cpp: every option of its server is known, and means the same or says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ikcli.cli.parser import parse
from ikcli.cli.upstream import IGNORED, INSTEAD, OTHER_COMMANDS, REFUSED
from ikcli.engine.plan.tensor_rules import cpu_rules, match_rules
from ikcli.errors import UsageError
from ikcli.main import main
from ikcli.settings.drafts import stages
from ikcli.settings.records import ScaledFile, SpecSetting, SpecStage

OPTIONS = Path(__file__).parent / "data" / "llama_server_options.txt"


def server_options() -> list[tuple[str, list[str]]]:
    """Spelling and its value, if any."""
    found = []
    for line in OPTIONS.read_text().splitlines():
        names, equals, value = line.partition(" = ")
        if not line.startswith("#"):
            found += [(name, value.split() if equals else []) for name in names.split()]
    return found


def config(*argv: str, command: str = "serve") -> Any:
    return parse(command, argv).config


def test_every_option_of_the_server_is_known() -> None:
    options = server_options()
    assert len(options) > 300
    for name, value in options:
        parsed = parse("serve", [name, *value, "-c", "77"])
        assert parsed.config.n_ctx == 77, name  # nothing of what follows was taken for a value


def test_tables_do_not_contradict_each_other() -> None:
    from ikcli.cli.parser import names_of

    tables = [IGNORED.keys(), INSTEAD.keys(), REFUSED.keys(), OTHER_COMMANDS.keys(), names_of("serve").keys()]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("argv", "mmap", "mlock"),
    [
        (["-lm", "mmap+mlock"], True, True),
        (["--load-mode", "MLOCK"], False, True),
        (["--load-mode=none"], False, False),
        (["-lm", "dio"], False, False),
        (["--no-mmap", "--mlock", "-lm", "mmap"], True, False),
        (["--no-mmap", "-lm", "auto"], False, False),
    ],
)
def test_how_a_file_is_read(argv: list[str], mmap: bool, mlock: bool) -> None:
    c = config(*argv)
    assert (c.mmap, c.mlock) == (mmap, mlock)


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["-ngl", "all"], "n_gpu_layers", -1),
        (["-ngl", "auto"], "n_gpu_layers", None),
        (["-dev", "none"], "n_gpu_layers", 0),
        (["-np", "-1"], "n_parallel", 1),
        (["--top-k", "0.0"], "sampling.top_k", 0),
        (["-kvo"], "no_kv_offload", False),
        (["-nkvo", "--kv-offload"], "no_kv_offload", False),
        (["-fit", "on"], "fit", True),
        (["--fit", "off"], "fit", False),
        (["--fit", "-fitt", "512,2048"], "fit_margin", 2048),
        (["--no-op-offload"], "offload_policy", (("ALL", False),)),
        (["--op-offload"], "offload_policy", ()),
        (["-lv", "4"], "verbose", True),
        (["-lv", "3"], "verbose", False),
        (["--log-verbose"], "verbose", True),
        (["--log-jsonl"], "server.log_format", "json"),
        (["-C", "0x5", "-Cr", "4-5,7"], "cpus", frozenset((0, 2, 4, 5, 7))),
        (["-ctxcp", "3"], "server.ctx_checkpoints", 3),
        (["-cpent", "99"], "server.ctx_checkpoints_interval", 99),
        (["--spec-draft-n-max", "5"], "server.draft_max", 5),
        (["--lora", "a.gguf,b", "--lora", "c"], "adapters.lora", (Path("a.gguf"), Path("b"), Path("c"))),
        (
            ["--lora-scaled", "a.gguf:0.5,b.gguf:-1"],
            "adapters.lora_scaled",
            (ScaledFile(Path("a.gguf"), 0.5), ScaledFile(Path("b.gguf"), -1.0)),
        ),
        (
            ["--override-kv", "a.b=int:1,c.d=str:x,y,e=bool:true"],
            "override_kv",
            ("a.b=int:1", "c.d=str:x,y", "e=bool:true"),
        ),
        (["--spec-default"], "server.spec_type", (SpecStage("ngram-mod"),)),
        (["--spec-type", "draft-mtp,ngram-mod"], "server.spec_type", (SpecStage("mtp"), SpecStage("ngram-mod"))),
        (["--spec-ngram-mod-n-match", "9"], "server.spec_set", (SpecSetting("ngram-mod", "size_n", 9),)),
    ],
)  # fmt: skip
def test_meaning(argv: list[str], path: str, value: object) -> None:
    found = config(*argv)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_other_spellings_in_files(tmp_path: Path) -> None:
    file = tmp_path / "ik.toml"
    file.write_text('load-mode = "mlock"\nspec-default = true\nop-offload = true\nno-op-offload = false\n')
    c = config("--config", str(file))
    assert (c.mmap, c.mlock, c.server.spec_type, c.offload_policy) == (False, True, (SpecStage("ngram-mod"),), ())


def test_other_spellings_in_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_LOAD_MODE", "mlock")
    monkeypatch.setenv("LLAMA_ARG_KV_OFFLOAD", "false")
    monkeypatch.setenv("LLAMA_ARG_ALIAS", "fast")
    parsed = parse("serve", ["--mmap"])
    assert (parsed.config.mmap, parsed.config.mlock, parsed.config.no_kv_offload) == (True, True, True)
    assert parsed.config.server.alias == "fast" and not parsed.unsupported


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-lm", "fast"], '-lm: "fast" is unknown; it is one of auto, none, mmap'),
        (["--load-mode"], "--load-mode: needs a value"),
        (["--docker-repo", "gemma3"], "-hf USER/REPO:QUANT"),
        (["--gpt-oss-20b-default"], "-hf USER/REPO:QUANT"),
        (["-ngl", "most"], '-ngl: "most" is not a whole number; expected -ngl N|all|auto'),
        (["-C", "xyz"], "is not a hexadecimal number"),
        (["-Cr", "5-2"], "is not a range of CPUs"),
        (["-fitt", "-1"], "is less than 0"),
        (["--spec-ngram-mod-n-max", "x"], "n_max=x, which is not a number"),
        (["--spec-set", "ngram-mod"], "is not of the form TYPE:KEY=VALUE"),
        (["--spec-type", "draft-magic"], "names draft-magic"),
        (["--lora", "a.gguf,,b.gguf"], "has an empty name"),
    ],
)
def test_messages(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse("serve", argv)
    assert message in str(raised.value)


def test_names_of_drafters_elsewhere() -> None:
    asked = parse("serve", ["--spec-type", "draft-eagle3,draft-dspark,draft_simple"])
    assert [s.type for s in asked.config.server.spec_type] == ["eagle3", "dspark", "draft"] and not asked.warnings


def test_a_file_with_a_comma_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a,b.gguf"
    path.touch()
    assert config("--lora", str(path)).adapters.lora == (path,)


def test_settings_of_drafters() -> None:
    asked = parse("serve", ["--spec-type", "ngram-mod:n_max=4", "--spec-type", "ngram-simple,ngram-map-k4v",
                            "--spec-ngram-mod-n-max", "9", "--spec-ngram-size-n", "5",
                            "--spec-ngram-map-k-size-m", "7"]).config  # fmt: skip
    assert stages(asked) == (
        SpecStage("ngram-mod", n_max=4, size_n=5), SpecStage("ngram-simple", size_n=5),
        SpecStage("ngram-map-k4v", size_n=5),
    )  # fmt: skip


def test_dense_weights_on_the_cpu() -> None:
    names = [
        f"blk.{il}.{name}.weight" for il in range(3) for name in ("ffn_up", "ffn_down_exps", "ffn_gate_shexp", "attn_q")
    ]
    placed = match_rules(cpu_rules(False, 0, 2), names).buffer_of
    assert placed == {"blk.0.ffn_up.weight": "CPU", "blk.1.ffn_up.weight": "CPU"}


def test_switches_of_bench_with_values() -> None:
    assert config("-nopo", "1", "-p", "8", command="bench").offload_policy == (("ALL", False),)
    assert config("-nopo", "0", "-nr", "--no-host", "0", "-p", "8", command="bench").offload_policy == ()
    c = config("-p", "8", "-d", "0,64", "-fa", "on", "-dev", "CUDA0/CUDA1", "--delay", "1", command="bench")
    assert (c.bench.n_depth, c.device) == ((0, 64), ("CUDA0", "CUDA1"))


def test_other_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path))
    assert main(["serve", "--list-devices"]) == 0
    assert "RAM" in capsys.readouterr().out
    assert main(["serve", "-cl"]) == 0


def test_log_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ik.log"
    assert main(["plan", "-c", "256", "--audio", "x", "--log-file", str(path)]) == 0
    kept, notice = path.read_text(), "not supported, ignored: --audio\n"
    assert capsys.readouterr().err == notice and kept.startswith(notice)
    assert main(["plan", "-c", "256", "--log-file", str(tmp_path / "no" / "x.log")]) == 2
    assert "--log-file: cannot write" in capsys.readouterr().err
    assert path.read_text() == kept  # closed again
