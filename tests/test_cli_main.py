"""The `ik` program as a process and as a function: exit codes, streams, lazy imports, names it is called by."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import some

from ikcli import log, main
from ikcli.cli import help as _help
from ikcli.cli.parser import all_options, parse
from ikcli.cli.table import BY_NAME, COMMANDS
from ikcli.engine.plan import devices
from ikcli.errors import IkError, UnsupportedError
from ikcli.settings.tools import TOOLS

RUN_COMMANDS = [info.name for info in COMMANDS if info.runs_model]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


@pytest.mark.parametrize("name", ["-h", "--help", "--usage", "help"])
def test_main_help(capsys, name) -> None:
    code, out, err = run(capsys, name)
    assert (code, err) == (0, "")
    for info in COMMANDS:
        assert info.name in out


@pytest.mark.parametrize("command", RUN_COMMANDS)
@pytest.mark.parametrize("name", ["-h", "--help", "--usage"])
def test_command_help(capsys, command, name) -> None:
    code, out, err = run(capsys, command, name)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= _help.WIDTH
    for spelling in ("-ngl", "--override-tensor", "-fmoe", "-amb", "-rtr"):
        assert spelling in out
    assert (("--port" in out), ("--sweep-stride" in out)) == (command == "serve", command == "sweep-bench")


def test_help_as_a_command(capsys) -> None:
    assert run(capsys, "help", "plan") == run(capsys, "plan", "--help")


def test_version(capsys) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("ik 0.")
    for command in BY_NAME:
        assert run(capsys, command, "--version")[:2] == (0, out)
    assert "numpy" in run(capsys, "perplexity", "-v", "--version")[1]
    assert "physical cores" in run(capsys, "version", "-v")[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("serv",), "unknown command serv; did you mean serve?"),
        (("sweep-bench", "--numactl", "distribute"), "unknown option --numactl; did you mean --numa?"),
        (("bench", "-c", "x"), '-c: "x" is not a whole number'),
        (("version", "--nonsense"), "--nonsense"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(capsys, argv, message) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_no_arguments_print_help_and_fail(capsys) -> None:
    code, out, _ = run(capsys)
    assert code == 2 and out.startswith("usage: ik")


def test_notices_come_once_on_stderr(capsys, monkeypatch) -> None:
    argv = shlex.split("--alias A --host h --alias B --port 1 -ger --attention causal -op 27,0 -m none.gguf")
    code, out, err = run(capsys, "sweep-bench", *argv)
    assert (code, out) == (1, "")
    assert err.splitlines()[:3] == [
        "ignored here: --alias --host --port",
        "not supported, ignored: --attention -ger",
        "offload policy: MUL_MAT_ID off",
    ]
    assert err.splitlines()[3].startswith("error: ") and "none.gguf" in err.splitlines()[3]


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (IkError("no luck"), 1, "error: no luck\n"),
        (UnsupportedError("cannot"), 1, "error: cannot\n"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, "error: out of memory; lower -c, -ub or -b, or keep mmap on\n"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 1,
         "error: cannot open x.txt: No such file or directory\n"),
    ],
)  # fmt: skip
def test_failures(capsys, monkeypatch, raised, code, text) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(main, "_dispatch", fail)
    assert run(capsys, "x") == (code, "", text)


@pytest.mark.parametrize(
    ("program", "argv", "expected"),
    [
        ("llama-perplexity", ["-c", "1"], ["perplexity", "-c", "1"]),
        ("/opt/llama-sweep-bench", [], ["sweep-bench"]),
        ("llama-server", ["-fa"], ["serve", "-fa"]),
        ("llama-cli", [], ["chat"]),
        ("llama-gguf-split", [], ["gguf-split"]),
        ("llama-bench.exe", [], ["bench"]),
        ("ik", ["plan"], ["plan"]),
    ],
)
def test_llama_names(program, argv, expected) -> None:
    assert main._with_program_name(argv, program) == expected
    assert expected[0] in BY_NAME


def python(code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, env={**os.environ, **env}, timeout=60, check=False
    )


LOADED = """
import sys
from ikcli.main import main
code = main(sys.argv[1:])
heavy = {"numba", "llvmlite", "tokenizers", "gguf", "numpy", "rich"} & set(sys.modules)
print("loaded:", sorted(heavy), "typer" in sys.modules, code)
"""


@pytest.mark.parametrize(
    ("argv", "typer"),
    some([(("--help",), False), (("perplexity", "--help"), True), (("sweep-bench", "--help"), True),
          (("plan", "-h"), True), (("serve", "--help"), True), (("warmup", "--help"), True)],
         [(("--help",), False), (("serve", "--help"), True)], unpack=True),  # each is a process
)  # fmt: skip
def test_help_imports_nothing_heavy(argv, typer) -> None:
    result = python(LOADED, *argv)
    assert result.stdout.decode().splitlines()[-1] == f"loaded: [] {typer} 0", result.stderr


def test_output_is_utf8_whatever_the_locale_says() -> None:
    code = "from ikcli import log; log.utf8_streams(); print('\\u00b1 \\ud800'); log.log('\\u00b1')"
    result = python(code, PYTHONIOENCODING="cp437", LC_ALL="C")
    assert (result.returncode, result.stdout.split()[0], result.stderr.strip()) == (0, b"\xc2\xb1", b"\xc2\xb1")


def test_log_lines_are_not_wrapped(capsys) -> None:
    log.warn("x" * 500)
    assert capsys.readouterr().err == "warning: " + "x" * 500 + "\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--help",), 0),
        (("inspect", "--tensors"), 0),
        (("plan", "--device-spec", "cpu:1MiB"), 1),  # does not fit: the answer is the exit code
        (("chat", "-p", "Once", "-n", "9", "-t", "1", "-c", "256"), 141),
        # processes of further commands
        *some(
            [
                (("sweep-bench", "--help"), 0),
                (("help", "quants"), 0),
                (("inspect", "--json"), 0),
                (("tokenize", "-p", "hello"), 0),
                (("plan",), 0),
                (("perplexity", "--dry-run"), 0),
                (("inspect", "none.gguf"), 1),
                (("sweep-bench", "-c", "128", "-ub", "64", "-t", "1"), 141),
            ],
            (),
            unpack=True,
        ),
    ],
)
def test_a_reader_that_goes_ends_a_run_and_nothing_else(argv: tuple[str, ...], code: int) -> None:
    program = [sys.executable, "-m", "ikcli.main", *argv]
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    err = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait() == code, err
    assert not any(word in err for word in ("Traceback", "BrokenPipe", "Exception"))


def test_notice_once_and_progress_without_a_terminal(capsys) -> None:
    log.forget_notices()
    log.notice_once("a")
    log.notice_once("a")
    with log.progress("loading", 3) as advance:
        advance(1)
    assert capsys.readouterr().err == "a\n"


HUB = ("--hf-repo", "--hf-file", "--hf-token", "--model-url", "--offline")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ik ", {info.name for info in COMMANDS}),
        ("ik sw", {"sweep-bench", "sweep-bench-plot"}),
        ("ik sweep-bench --ctx", {"--ctx-size"}),
        ("ik sweep-bench -ng", {"-ngl"}),
        ("ik sweep-bench -c 1 --por", set()),
        ("ik server --por", {"--port"}),
        ("ik plan -ctk q8", {"q8_0", "q8_KV"}),
        ("ik plan -m ", set()),  # the shell offers files
        ("ik quantize in.gguf --target-b", {"--target-bpw"}),
        (
            "ik devices --",
            {"--model", "--self-test", "--json", *HUB},
        ),
        ("ik nonsense --", {"--install-completion", "--show-completion"}),
        ("ik doctor --", {"--model", "--ctx-size", "--ubatch-size", "--threads", "--quick", "--json", *HUB}),
    ],
)
def test_completion(capsys, monkeypatch, line, expected) -> None:
    words = line.split(" ")
    monkeypatch.setenv("_IK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as stop:
        main.main([])
    assert stop.value.code == 0 and set(capsys.readouterr().out.split()) == expected


TOOLS_LOADED = """
import sys
from ikcli.main import main
main(sys.argv[1:])
print("loaded:", sorted({"ikcli.settings.run", "ikcli.settings.option"} & set(sys.modules)))
"""


def test_the_list_of_commands_needs_no_declarations() -> None:
    assert python(TOOLS_LOADED, "--help").stdout.decode().splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("command", list(TOOLS))
def test_help_and_errors_of_tools(capsys, command) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: ik {command}")
    for bound in all_options(command):
        assert all(name in out for name in (*bound.option.names, *bound.option.negative))
    assert max(len(line) for line in out.splitlines()) <= _help.WIDTH
    code, out, err = run(capsys, command, "--nonsense")
    assert (code, out) == (2, "") and err.startswith("error: unknown option --nonsense")


def test_dry_run_and_plan_print_the_same(capsys, monkeypatch: pytest.MonkeyPatch, shared_dir: Path) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 2**34)
    model = str(shared_dir / "golden" / "models" / "tiny-deepseek2.f16.gguf")
    line = ["-m", model, "-c", "512", "-ngl", "99", "-ot", "exps=CPU", "-t", "1"]
    code, out, err = run(capsys, "plan", *line)
    assert code == 0
    assert "KV self size  =    1.12 MiB, c^KV (f16):    1.12 MiB, kv^T: not used, n_ctx = 512" in out
    assert "attention 0/2 layers, shared experts 0/1, routed experts 0/1 on GPU" in out
    assert "no CUDA device: -ngl 99 has no effect, everything runs on the CPU" in err
    assert 'rule 1 "exps=CPU": 3 matches' in err
    dry = run(capsys, "sweep-bench", "--dry-run", *line)
    assert dry[:2] == (code, out)


def test_startup_checks_against_the_model(capsys, shared_dir: Path) -> None:
    models = shared_dir / "golden" / "models"
    deepseek, llama = str(models / "tiny-deepseek2.f16.gguf"), str(models / "tiny-llama.f16.gguf")
    code, _, err = run(capsys, "plan", "-m", deepseek, "-ser", "99,1")
    assert code == 0 and "warning: -ser 99,1 has no effect: each token uses all " in err
    assert "the model has no experts" in run(capsys, "plan", "-m", llama, "-ser", "2,0.5")[2]
    assert "-mla 2 is ignored: llama models" in run(capsys, "plan", "-m", llama, "-mla", "2", "-c", "64")[2]
    assert "-mla" not in run(capsys, "plan", "-m", llama, "-c", "64")[2]
    code, _, err = run(capsys, "plan", "-m", llama, "-no-fa", "-ctv", "q8_0")
    assert code == 2 and "add -fa, or use -ctv f16" in err
    argv = ("plan", "-m", deepseek, "-ot", "nothing_like_it=CPU")
    code, _, err = run(capsys, *argv)
    assert code == 0 and 'warning: -ot: rule "nothing_like_it=CPU" matches no tensor' in err
    code, _, err = run(capsys, *argv, "--strict")
    assert code == 2 and "matches no tensor" in err


def test_given_fields_are_known() -> None:
    assert parse("plan", ["-mla", "2", "--ctx-size=1"]).given == {"mla", "n_ctx"}
