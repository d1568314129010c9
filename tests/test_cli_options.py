"""Parsing rules, error messages, suggestions, option files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.cli.parser import all_options, parse
from ikcli.errors import UsageError
from ikcli.settings.option import iter_options
from ikcli.settings.run import KV_TYPES
from ikcli.settings.tools import TOOLS
from ikcli.suggest import edit_distance, nearest


def config(*argv: str, command: str = "sweep-bench"):
    return parse(command, argv).config


@pytest.mark.parametrize(("limit", "n_bytes"), [((), 8 << 30), (("--sessions-limit", "300"), 300 << 20)])
def test_the_former_names_of_the_cache_on_disk(limit: tuple[str, ...], n_bytes: int) -> None:
    server = config("--sessions", "there", *limit, command="serve").server
    assert (server.cache_disk, server.cache_disk_bytes) == (Path("there"), n_bytes)


def error(*argv: str, command: str = "sweep-bench") -> str:
    with pytest.raises(UsageError) as raised:
        parse(command, argv)
    assert raised.value.exit_code == 2
    return str(raised.value)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("-no-fa", "-fa", "-mla", "2"), True),
        (("-no-fa", "-fa", "on", "-mla", "2"), True),
        (("-fa", "1", "-mla", "2"), True),
        (("-fa", "0", "-mla", "2"), False),
        (("-fa", "OFF", "-mla", "2"), False),
        (("-no-fa", "-fa", "auto", "-mla", "2"), True),
        (("-mla", "2", "-no-fa"), False),
        (("-mla", "2", "--flash-attn=off"), False),
        (("-mla", "2", "-no-fa", "--flash-attn", "--host", "0.0.0.0"), True),
        (("-mla", "2", "-no-fa", "-fa"), True),
    ],
)
def test_optional_value_switch(argv, expected) -> None:
    parsed = config(*argv)
    assert (parsed.flash_attn, parsed.mla) == (expected, 2)


@pytest.mark.parametrize("name", ["-fa", "-fmoe", "-rtr", "-thp", "-nkvo", "-mmp", "--context-shift", "--jinja"])
def test_every_optional_value_switch_leaves_the_next_option_alone(name) -> None:
    for value, state in (((), True), (("on",), True), (("0",), False), (("false",), False)):
        parsed = config(name, *value, "-c", "7", command="serve")
        option = {path.option.names: path.path for path in all_options() if name in path.option.names}
        (path,) = option.values()
        head, _, tail = path.partition(".")
        found = getattr(getattr(parsed, head), tail) if tail else getattr(parsed, head)
        assert (found, parsed.n_ctx) == (state, 7)


def test_names_are_whole_names() -> None:
    assert error("-nmoe", "3").startswith("unknown option -nmoe; did you mean -")
    assert error("-cfoo").startswith("unknown option -cfoo")
    assert "unknown option -ngx" in error("-ngx", "1")
    assert error("--ngl", "1") == "unknown option --ngl; did you mean -ngl?"


def test_underscores_equals_and_last_wins() -> None:
    assert config("--ctx_size", "128").n_ctx == 128
    assert config("--ctx_size=128").n_ctx == 128
    assert config("-c", "1", "--ctx-size", "2").n_ctx == 2
    assert config("-ot=exps=CPU").override_tensor == ("exps=CPU",)
    assert config("--n-cpu-moe=3").n_cpu_moe == 3


def test_negative_names_with_a_value() -> None:
    assert [config(f"--no-mmap={value}").mmap for value in ("on", "off", "1")] == [False, True, False]
    assert config("-p", "- one\u00a0two", "-c", "1", command="chat").prompt.prompt == "- one\u00a0two"
    assert config("-p", "@home", command="chat").prompt.prompt == "@home"


def test_accumulating_options_keep_their_order() -> None:
    parsed = config("-ot", "a=CPU, b=CUDA0", "--override-tensor", "c=CPU", "-op", "26,0", "-op", "MUL_MAT_ID=on")
    assert parsed.override_tensor == ("a=CPU", "b=CUDA0", "c=CPU")
    assert parsed.offload_policy == (("MUL_MAT", False), ("MUL_MAT_ID", True))
    assert config("-okv", "a=int:1", "--override-kv", "b=bool:true").override_kv == ("a=int:1", "b=bool:true")


def test_negative_numbers_are_values() -> None:
    assert config("-n", "-1").n_predict == -1
    assert config("-ser", "-1,0").ser is None
    assert config("-s", "-1").seed == -1


@pytest.mark.parametrize("kind", KV_TYPES)
def test_type_names_in_any_case(kind) -> None:
    for text in (kind.lower(), kind.upper(), kind):
        assert config("-ctk", text).type_k == kind


def test_unknown_option_suggestions() -> None:
    assert error("--numactl", "distribute") == "unknown option --numactl; did you mean --numa?"
    assert error("--ctxsize", "1") == "unknown option --ctxsize; did you mean --ctx-size?"
    assert error("--flash-atn") == "unknown option --flash-atn; did you mean --flash-attn?"
    assert error("--treads", "1") == "unknown option --treads; did you mean --threads?"
    assert error("--zzzzzzzz") == "unknown option --zzzzzzzz; see ik sweep-bench --help"


def test_nearest() -> None:
    assert edit_distance("abcd", "acbd") == 1
    assert edit_distance("", "ab") == 2
    assert nearest("perplexty", ["plan", "perplexity"]) == "perplexity"
    assert nearest("qqq", ["plan"]) is None


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("-c",), ("-c needs a value", "-c N", "-c 32768")),
        (("-c", "-fa"), ("-c needs a value",)),
        (("-m", "--foo"), ("-m needs a value", "-m FILE")),
        (("-c", "4k"), ("-c:", '"4k"', "whole number", "-c 32768")),
        (("-c", "-5"), ('"-5"', "less than 0")),
        (("-ub", "0"), ('"0"', "less than 1")),
        (("-mla", "4"), ('"4"', "0, 1, 2, 3", "-mla 3")),
        (("-ctk", "q8_1"), ('"q8_1"', "q8_0", "iq4_nl", "did you mean")),
        (("-t", "many"), ("-t", '"many"', "-t 16")),
        (("-ts", "1,x"), ('"1,x"', "-ts 3,1")),
        (("-ot", "exps"), ('"exps"', "without '='", "-ot")),
        (("-ot", "exps=CPU,blk"), ('"blk"', "without '='")),
        (("-numa=x",), ("-numa",)),
        (("--numa", "x"), ('"x"', "distribute")),
        (("-okv", "a=integer:1"), ("integer", "int, float, bool, str")),
        (("-okv", "a=int:x"), ("not of type int",)),
        (("--no-mmap=maybe",), ("--no-mmap", '"maybe"', "neither on nor off")),
        (("-op", "31,0"), ("31", "MUL_MAT (26)", "MOE_FUSED_UP_GATE (29)")),
        (("-op", "27"), ("no 0 or 1 after it",)),
        (("-op", "27,2"), ("state 2",)),
        (("-ser", "1,6"), ("the order is Kmin,t; did you mean -ser 6,1?",)),
        (("-ser", "1,1"), ("the order is Kmin,t",)),
        (("-ser", "6,1,2"), ("one pair",)),
        (("-ser", "6"), ("one pair",)),
        (("-sm", "row"), ("-sm row", "-sm layer")),
        (("--fit", "-ncmoe", "3"), ("--fit and --n-cpu-moe",)),
        (("model.gguf",), ('unexpected argument "model.gguf"', "-m FILE")),
    ],
)
def test_error_messages(argv, parts) -> None:
    message = error(*argv)
    for part in parts:
        assert part in message


def test_ser_values() -> None:
    assert config("-ser", "6,1").ser == (6, 1.0)
    assert config("-ser", "7,0.4").ser == (7, 0.4)
    assert config("-ser", "1,0.5").ser == (1, 0.5)


def test_offload_policy_all() -> None:
    assert config("-op", "-1,0").offload_policy == (("ALL", False),)


def test_warnings_about_values() -> None:
    parsed = parse("sweep-bench", ["-ot", "exps=CPU --threads 3"])
    assert any('contains " -"' in text and "-ot" in text for text in parsed.warnings)
    parsed = parse("serve", ["--lookup-cache-dynamic", "x.kv.dump"])
    assert any("--slot-save-path" in text for text in parsed.warnings)
    assert parse("chat", ["-p", "a - b -c"]).warnings == ()


def test_upstream_only_options_are_skipped_with_their_values() -> None:
    parsed = parse("sweep-bench", ["-td", "2", "--attention=causal", "-ger", "--spec-replace", "a", "1", "-c", "9"])
    assert parsed.unsupported == ("-td", "--attention", "--spec-replace", "-ger")
    assert parsed.config.n_ctx == 9


def test_info_options() -> None:
    for name in ("-h", "--help", "--usage"):
        assert parse("perplexity", ["-c", "1", name]).info == "help"
    assert parse("perplexity", ["--version"]).info == "version"


def test_option_file(tmp_path: Path) -> None:
    file = tmp_path / "opts.txt"
    file.write_text(
        '# settings\n-fa off\n--ctx_size=64   # small\n\n-ot "blk\\.3\\.ffn=CUDA0"\n-mla 1\n--run-time-repack\n',
        encoding="utf-8",
    )
    parsed = config("-mla", "2", f"@{file}", "-ot", "exps=CPU")
    assert (parsed.flash_attn, parsed.n_ctx, parsed.mla, parsed.run_time_repack) == (False, 64, 2, True)
    assert parsed.override_tensor == ("exps=CPU", r"blk\.3\.ffn=CUDA0")  # the command line comes first and wins
    assert "cannot read" in error("@no-such-file")


def test_rule_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.txt"
    file.write_text("# experts\nblk\\.3\\.ffn=CUDA0\nexps=CPU, attn_kv_b=CPU # rest\n", encoding="utf-8")
    expected = (r"blk\.3\.ffn=CUDA0", "exps=CPU", "attn_kv_b=CPU")
    assert config("-ot", f"@{file}").override_tensor == expected
    assert config("--override-tensor", f"@{file}", "-ot", "a=CPU").override_tensor == (*expected, "a=CPU")


def test_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "ik.toml"
    file.write_text(
        'ctx-size = 4096\nflash_attn = false\noverride-tensor = ["exps=CPU", "attn=CPU"]\ntensor-split = [3, 1]\n'
        'cache-type-k = "Q8_0"\n[sweep-bench]\nn-predict = 16\n[serve]\nport = 1\n',
        encoding="utf-8",
    )
    parsed = parse("sweep-bench", ["--config", str(file), "-c", "128"])
    c = parsed.config
    assert (c.n_ctx, c.flash_attn, c.tensor_split, c.type_k, c.n_predict) == (128, False, (3.0, 1.0), "q8_0", 16)
    assert c.override_tensor == ("exps=CPU", "attn=CPU")
    assert config(f"--config={file}", command="serve").server.port == 1
    file.write_text("ctxsize = 1\n", encoding="utf-8")
    assert "did you mean --ctx-size?" in error("--config", str(file))
    file.write_text("= 1\n", encoding="utf-8")
    assert "not valid TOML" in error("--config", str(file))
    file.write_text("[nonsense]\na = 1\n", encoding="utf-8")
    assert "[nonsense]" in error("--config", str(file))
    assert "--config needs FILE" in error("--config")


WORDS = st.one_of(
    st.sampled_from([name for bound in all_options() for name in (*bound.option.names, *bound.option.negative)]),
    st.sampled_from(["", "-", "--", "=", "-1", "0", "1,0", "on", "1e999", "nan", "~nobody/x", "a=b", "(=CPU", "--x=1"]),
    st.text(max_size=8).filter(lambda text: not text.startswith("@") and "config" not in text),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["sweep-bench", "serve", "bench", "perplexity"]), st.lists(WORDS, max_size=6))
def test_any_arguments_parse_or_give_a_usage_error(command: str, argv: list[str]) -> None:
    try:
        parsed = parse(command, argv)
    except UsageError as problem:
        assert str(problem)
    else:
        assert parsed.info or parsed.config.command == command


def test_declarations_are_consistent() -> None:
    from ikcli.settings.run import RunConfig

    seen: dict[tuple[str, str], str] = {}
    for bound in iter_options(RunConfig):
        option = bound.option
        assert option.help and option.topic
        assert not option.takes_value or option.form, bound.path
        assert option.noop or option.example, bound.path
        for letter in option.commands:
            for name in (*option.names, *option.negative):
                previous = seen.setdefault((letter, name), bound.path)
                # bench and imatrix reuse a few common names for options of their own
                assert previous == bound.path or name in {"--warmup", "-n", "-o"}, (name, previous, bound.path)


def test_every_example_parses() -> None:
    for bound in all_options():
        if bound.option.example:
            letter = bound.option.commands[0]
            command = {"S": "serve", "C": "chat", "W": "sweep-bench", "B": "bench", "P": "perplexity", "I": "imatrix",
                       "D": "batched-bench", "E": "embed"}  # fmt: skip
            parse(command[letter], shlex.split(bound.option.example))


def test_tools_declare_consistently() -> None:
    for command in TOOLS:
        seen: set[str] = set()
        for bound in all_options(command):
            option = bound.option
            assert option.help and (not option.takes_value or (option.form and option.example)), bound.path
            assert not seen & {*option.names, *option.negative}, bound.path
            seen |= {*option.names, *option.negative}
            if option.example:
                assert bound.path in parse(command, shlex.split(option.example)).given


def test_tools_have_the_spelling_rules_of_model_runs(tmp_path: Path) -> None:
    parsed = parse("gguf-split", ["a", "--split_max_size=2G", "b", "--merge=off"])
    assert (parsed.config.args, parsed.config.max_size, parsed.config.merge) == (("a", "b"), 2 << 30, False)
    file = tmp_path / "opts.txt"
    file.write_text("--custom-q a=q8_0\n--pure\n", encoding="utf-8")
    parsed = parse("quantize", ["in", "--custom-q", "b=q6_K", f"@{file}", "Q8_0"])
    assert parsed.config.custom_q == ("b=q6_K", "a=q8_0") and parsed.config.pure
    toml = tmp_path / "ik.toml"
    toml.write_text("[quantize]\npure = true\n[inspect]\njson = true\n", encoding="utf-8")
    parsed = parse("quantize", ["--config", str(toml), "in"])
    assert (parsed.config.pure, parsed.config.args, parsed.given) == (True, ("in",), {"pure", "args"})


def test_errors_of_tools() -> None:
    assert error("a", "b", "c", command="inspect") == (
        'unexpected argument "c"; usage: ik inspect [options] [FILE [OTHER]]'
    )
    assert error("a", command="version") == 'unexpected argument "a"; usage: ik version [options]'
    assert "unknown option -ngl" in error("-ngl", "1", command="inspect")
    assert "unknown option --rope-scale" in error("--rope-scale", "1", command="quantize")
    assert "--rows needs a value; expected --rows N" in error("--rows", "--summary", command="quantize-stats")
    assert "md, jsonl" in error("--output-format", "csv", command="quantize-stats")


@pytest.mark.parametrize("name", ["--quantize-q", "--quantize_q", "--custom-quants", "--tensor-types"])
def test_names_by_their_meaning(name: str) -> None:
    with pytest.raises(UsageError, match=f"unknown option {name}; did you mean --custom-q"):
        parse("quantize", [name, "a=q8_0", "in.gguf", "Q4_K"])
    assert "--custom-q" not in error("--quantize-q", command="serve")
