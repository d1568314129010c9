"""Reading sweep-bench runs back from all kinds of text, grouping them, and drawing them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ikcli.bench.sweep import SweepRow
from ikcli.bench.sweep_plot import MAX_TICKS, Point, draw, group, ticks
from ikcli.bench.sweep_read import SpeedRow, SpeedTable, read_file, read_text
from ikcli.commands._sweep_table import RunInfo, SweepPrinter
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.main import main
from ikcli.settings.bench import SweepConfig
from ikcli.settings.run import RunConfig

MAIN = (
    "main: n_kv_max = 8192, n_batch = 2048, n_ubatch = 512, flash_attn = 1, n_gpu_layers = -1, "
    "n_threads = 30, n_threads_batch = 32"
)
TABLE = """\
|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    4.000 |   128.00 |    8.000 |    16.00 |
|   512 |    128 |    512 |    5.120 |   100.00 |   10.000 |    12.80 |
|   512 |    128 |   1024 |   10.240 |    50.00 |   16.000 |     8.00 |
"""
ROWS = [
    SpeedRow(512, 128, 0, 128.0, 16.0),
    SpeedRow(512, 128, 512, 100.0, 12.8),
    SpeedRow(512, 128, 1024, 50.0, 8.0),
]
NOISE = "\n============ Repacked 659 tensors"
LOG = f"""\
llama_model_loader: - type  f32:  108 tensors
INFO [                    main] build info | tid="1402" timestamp=1743550245 build=3615
{{"event": "no row"}}

{MAIN}

{TABLE.replace("16.00 |", "16.00 |" + NOISE)}
llama_print_timings:        load time =   11491.65 ms
"""
BATCHED = """\
main: n_kv_max = 8192, n_batch = 2048, n_ubatch = 512, is_pp_shared = 0, n_gpu_layers = 99, n_threads = 8

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    2 |    384 |    1.000 |   256.00 |    4.000 |    32.00 |    5.000 |    76.80 |
"""


def wrapped(text: str, width: int, prefix: str = "") -> str:
    """What a console of this width makes of a text; its lines end without blanks."""
    pieces = (line[at : at + width] for line in text.splitlines() for at in range(0, max(1, len(line)), width))
    return "".join(f"{prefix}{piece}".rstrip() + "\n" for piece in pieces)


def rows_of(text: str) -> list[list[SpeedRow]]:
    return [table.rows for table in read_text(text)]


def jsonl(output_format: str, capsys: pytest.CaptureFixture[str], **changes: int) -> str:
    config = RunConfig(sweep=SweepConfig(output_format=output_format), n_threads=30, n_threads_batch=32)
    printer = SweepPrinter(replace(config, **changes), RunInfo(8192, 2048, 512))  # type: ignore[arg-type]
    printer.header()
    for n_kv, t_pp, t_tg in ((0, 4.0, 8.0), (512, 5.12, 10.0), (1024, 10.24, 16.0)):
        printer.row(SweepRow(512, 128, n_kv, t_pp, t_tg))
    return capsys.readouterr().out


@pytest.mark.parametrize("text", [TABLE, LOG, TABLE.replace("\n", "\r\n")])
def test_bare_table_and_log(text: str) -> None:
    assert rows_of(text) == [ROWS]


def test_settings_of_the_main_line() -> None:
    expected = {
        "n_kv_max": 8192, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "n_gpu_layers": -1, "n_threads": 30,
        "n_threads_batch": 32,
    }  # fmt: skip
    assert read_text(LOG)[0].settings == expected
    assert read_text(wrapped(LOG, 107))[0].settings == expected
    assert read_text(TABLE)[0].settings == {}


@pytest.mark.parametrize("prefix", ["> ", ">", "> > ", "  > "])
def test_quoted(prefix: str) -> None:
    assert rows_of("".join(f"{prefix}{line}\n" for line in LOG.splitlines())) == [ROWS]


@pytest.mark.parametrize("width", range(24, 112))
def test_wrapped_at_any_width(width: int) -> None:
    assert rows_of(wrapped(f"{MAIN}\n\n{TABLE}", width)) == [ROWS]
    assert rows_of(wrapped(TABLE, width, "> ")) == [ROWS]
    assert read_text(wrapped(BATCHED, width))[0].kind == "batched"


@pytest.mark.parametrize("width", range(24, 112))
def test_wrapped_with_memory_columns(width: int) -> None:
    head, line, *rows = TABLE.splitlines()
    rows = [f"{row}     1234.6 |          - |" for row in rows]
    text = "\n".join([head + "    RSS HWM | VRAM delta |", line + "------------|------------|", *rows])
    assert rows_of(wrapped(text, width)) == [ROWS]


def test_decimal_commas() -> None:
    assert rows_of(TABLE.replace(".", ",")) == [ROWS]
    assert rows_of(TABLE.replace("  128.00", "1.128,50"))[0][0].speed_pp == 1128.5


def test_several_tables_and_their_settings() -> None:
    other = MAIN.replace("n_threads = 30", "n_threads = 16")
    tables = read_text(f"f16:\n{TABLE}\nmore\n{other}\n\n{TABLE}\n{BATCHED}")
    assert [(t.kind, t.settings.get("n_threads"), len(t.rows)) for t in tables] == [
        ("sweep", None, 3), ("sweep", 16, 3), ("batched", 8, 1),
    ]  # fmt: skip


def test_batched_tables_are_read_by_their_own_header() -> None:
    (table,) = read_text(BATCHED)
    assert table.kind == "batched" and table.settings["is_pp_shared"] == 0
    assert table.rows == [SpeedRow(128, 64, 384, 256.0, 32.0, 2, 76.8)]


def test_columns_go_by_name() -> None:
    text = "| note | S_TG t/s | N_KV | S_PP t/s |\n|---|---:|---:|---:|\n| q8_0 | 16.0 | 512 | 128.0 |\n"
    assert rows_of(text) == [[SpeedRow(0, 0, 512, 128.0, 16.0)]]


def test_rows_that_are_cut_or_not_finite() -> None:
    lines = TABLE.splitlines()
    assert rows_of("\n".join([*lines[:3], lines[3][:30], lines[4]])) == [[ROWS[0], ROWS[2]]]
    assert rows_of("\n".join([*lines[:4], lines[4][:-4]])) == [ROWS[:2]]
    assert rows_of(TABLE.replace("128.00", "   nan"))[0][0] == SpeedRow(512, 128, 0, None, 16.0)
    assert rows_of("\n".join(lines[2:])) == [] == rows_of("") == rows_of("|||\n|\n{\n{}\nmain:\n> ")


@pytest.mark.parametrize("output_format", ["jsonl", "jsonl-full"])
def test_jsonl(output_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = jsonl(output_format, capsys)
    for form in (text, wrapped(text, 110), wrapped(text, 80, "> "), f"loading ...\n{text}done\n"):
        (table,) = read_text(form)
        assert table.rows == ROWS and table.settings["n_threads_batch"] == 32
        assert (table.config is None) == (output_format == "jsonl")
    assert read_text(text + TABLE)[1].rows == ROWS == read_text(TABLE + text)[1].rows


def test_appended_jsonl_runs(capsys: pytest.CaptureFixture[str]) -> None:
    plain, full = jsonl("jsonl", capsys), jsonl("jsonl-full", capsys)
    other = jsonl("jsonl-full", capsys, mla=2)
    assert rows_of(plain + plain) == [ROWS, ROWS]
    assert rows_of(full + full) == [ROWS * 2]
    tables = read_text(full + other)
    assert [t.config["mla"] for t in tables if t.config] == [3, 2] and [t.rows for t in tables] == [ROWS, ROWS]


def test_encodings(tmp_path: Path) -> None:
    text = f"{LOG}BOS token = 1 '<｜begin▁of▁sentence｜>'\n"
    (tmp_path / "shell.log").write_bytes(text.encode("utf-16"))
    assert read_file(tmp_path / "shell.log")[0].rows == ROWS
    (tmp_path / "bom.log").write_text("\ufeff" + TABLE, encoding="utf-8")
    assert read_file(tmp_path / "bom.log")[0].rows == ROWS
    (tmp_path / "dos.log").write_bytes(b"BOS token = 1 '<\xb3\xe9\xff>'\n" + LOG.encode("cp437"))
    assert read_file(tmp_path / "dos.log")[0].rows == ROWS


def test_groups_are_means_per_label_and_depth() -> None:
    second = [replace(ROWS[0], speed_pp=132.0, speed_tg=None), SpeedRow(512, 128, 2048, 40.0, 4.0)]
    a, b = group([("a", ROWS), ("b", ROWS[:1]), ("a", second)])
    assert (a.label, b.label) == ("a", "b")
    assert a.pp[0] == Point(0, 130.0, pytest.approx(8**0.5), 2) and a.tg[0] == Point(0, 16.0, 0.0, 1)
    assert [p.n_kv for p in a.pp] == [0, 512, 1024, 2048] and b.pp == (Point(0, 128.0, 0.0, 1),)


@pytest.mark.parametrize("deepest", [0, 1, 15, 16, 17, 1024, 15 * 512, 30720, 100_000, 163_839])
def test_at_most_16_ticks_cover_the_depths(deepest: int) -> None:
    found = ticks(deepest)
    step = found[1] - found[0] if len(found) > 1 else 1
    assert len(found) <= MAX_TICKS and found[0] == 0 and found[-1] <= deepest < found[-1] + step
    assert step & (step - 1) == 0 and (step == 1 or 2 * len(found) >= MAX_TICKS)


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(jsonl("jsonl", capsys))
    Path("b.md").write_text(LOG)
    Path("two.log").write_text(LOG + TABLE.replace("128.00", "100.00"))
    Path("bb.md").write_text(BATCHED)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The labels of every figure that is drawn."""
    from ikcli.bench import sweep_plot

    seen: list[list[str]] = []

    def spy(series, path, phases=("pp", "tg")):  # type: ignore[no-untyped-def]
        seen.append([each.label for each in series])
        draw(series, path, phases)

    monkeypatch.setattr(sweep_plot, "draw", spy)
    return seen


def test_command_writes_two_files(folder: Path, drawn: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep-bench-plot", "a.jsonl", "b.md", "two.log"]) == 0
    written = capsys.readouterr().out.split()
    assert written == ["performance_comparison_pp.png", "performance_comparison_tg.png"]
    assert all(is_png(folder / name) for name in written)
    assert drawn == [["a", "b", "two #1", "two #2"]] * 2


def test_command_writes_one_file_with_labels(
    folder: Path, drawn: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep-bench-plot", "b.md", "two.log", "--labels", "_f16 $x, q8_0", "-o", "out.png"]) == 0
    assert is_png(folder / "out.png") and drawn == [["_f16 $x", "q8_0"]]
    assert "mean of 2 tables" in capsys.readouterr().err
    assert main(["sweep-bench-plot", "two.log", "--labels=x,y", "-o", str(folder)]) == 0
    assert is_png(folder / "performance_comparison_tg.png") and drawn[-1] == ["x", "y"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no file"),
        (["absent.log"], 1, "absent.log"),
        (["bb.md"], 1, "batched-bench"),
        (["empty.md"], 1, "N_KV"),
        (["b.md", "--labels", "a,b"], 2, "2 names for 1 files"),
        (["b.md", "--labels", ","], 2, "empty"),
        (["b.md", "-o", "absent/x.png"], 2, "does not exist"),
        (["b.md", "--label", "x"], 2, "--labels"),
    ],
)
def test_command_errors(
    folder: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.md").write_text("nothing here\n")
    assert main(["sweep-bench-plot", *arguments]) == code
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert not list(folder.glob("*.png"))


def test_mixed_file_draws_what_can_be_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mixed.log").write_text(BATCHED + TABLE)
    assert main(["sweep-bench-plot", "mixed.log", "-o", "mixed.svg"]) == 0
    assert "1 tables of batched-bench left out" in capsys.readouterr().err
    assert (folder / "mixed.svg").read_text().count("<svg") == 1


def test_many_curves_of_uneven_depth(folder: Path) -> None:
    runs = [(f"run {i}", [replace(row, n_kv=row.n_kv * (i + 1)) for row in ROWS]) for i in range(23)]
    draw(group([*runs, ("speeds unknown", [SpeedRow(512, 128, 0, None, None)])]), folder / "many.png")
    assert is_png(folder / "many.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r'pip install "ikcli\[plot\]"'):
        draw(group([("a", ROWS)]), tmp_path / "x.png")
    with pytest.raises(UsageError, match=r"\.png"):
        draw(group([("a", ROWS)]), tmp_path / "x.txt")


def test_the_error_of_a_file_without_rows_names_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ikcli.commands.sweep_bench_plot import run
    from ikcli.settings.tools import SweepPlotConfig

    (tmp_path / "x.md").write_text("| a |\n")
    with pytest.raises(FormatError, match=r"x\.md: no rows"):
        run(SweepPlotConfig((str(tmp_path / "x.md"),), output=str(tmp_path / "p.png")))
    assert SpeedTable().rows == []
