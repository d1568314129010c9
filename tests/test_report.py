"""`ik report`: what is read from results and logs, what is refused, and the page made of it."""

# ruff: noqa: E501  (lines of logs)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless import chromium

from ikcli.errors import FormatError
from ikcli.main import main
from ikcli.report.page import distinct_names, page, pareto
from ikcli.report.read import read_results
from ikcli.report.results import Results
from ikcli.report.svg import Curve, Dot, log_ticks, nice_ticks, plot
from ikcli.settings.run import default_model

SWEEP = """\
llama_model_loader: loaded meta data with 30 key-value pairs and 27 tensors from models/b-Q8_0.gguf (version GGUF V3 (latest))
llm_load_print_meta: model params     = 4.200 B
llm_load_print_meta: model size       = 4.272 GiB (8.533 BPW)

main: n_kv_max = 1024, n_batch = 2048, n_ubatch = 128, flash_attn = 1, n_gpu_layers = -1, n_threads = 16, n_threads_batch = 16

|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   128 |     32 |      0 |    0.100 |  1280.00 |    0.400 |    80.00 |
|   128 |     32 |    128 |    0.200 |   640.00 |    0.500 |    64.00 |
|   128 |     32 |    oops |    0.200 |   640.00 |    0.500 |    64.00 |
"""
BATCHED = """\
main: n_kv_max = 8192, n_batch = 2048, n_ubatch = 512, is_pp_shared = 0, n_gpu_layers = 99, n_threads = 8

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    1 |    192 |    1.000 |   128.00 |    4.000 |    16.00 |    5.000 |    38.40 |
|   128 |     64 |    2 |    384 |    1.000 |   256.00 |    4.000 |    32.00 |    5.000 |    76.80 |
"""
BENCH = """\
| model                          |       size |     params | backend    | threads | fa |          test |              t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | -: | ------------: | ---------------: |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CPU        |      16 |  1 |         pp512 |    120.50 ± 1.25 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CPU        |      16 |  1 |         tg128 |             9.75 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CPU        |      16 |  1 |         tg128 |

build: 0a1b2c3d (3900)
"""
RECORD = {
    "build_commit": "abc", "build_number": 7, "cpu_info": "EPYC", "gpu_info": "", "model_filename": "m/q4.gguf",
    "model_type": "llama 7B", "model_size": 3 * 2**30, "n_threads": 8, "flash_attn": True, "n_prompt": 512, "n_gen": 0,
    "avg_ts": 100.5, "stddev_ts": 2.5, "test_time": "2026-11-25T00:00:00Z",
}  # fmt: skip
KLD = """\
llama_model_loader: loaded meta data with 28 key-value pairs and 27 tensors from {name}.gguf (version GGUF V3 (latest))
llm_load_print_meta: model size       = {size} GiB (16.022 BPW)

====== Perplexity statistics ======
Mean PPL(Q)                   :  10.703261 ±   0.411262
Mean PPL(base)                :  10.500000 ±   0.187949
Cor(ln(PPL(Q)), ln(PPL(base))):  99.83%
Mean ln(PPL(Q)/PPL(base))     :  -0.000117 ±   0.005053
Mean PPL(Q)/PPL(base)         :   1.019883 ±   0.005052
Mean PPL(Q)-PPL(base)         :  -0.108824 ±   4.689112

====== KL divergence statistics ======
Mean    KLD:   {kld} ±   0.000904
Maximum KLD:   0.086064
99.9%   KLD:   0.083903
Median  KLD:   0.000213
 0.1%   KLD:   0.000128

====== Token probability statistics ======
Mean    Δp: -0.002 ± 0.002 %
Maximum Δp:  0.021%
RMS Δp    :  0.022 ± 0.010 %
Same top p: 98.387 ± 1.136 %
"""
TYPES = """\
| tensor | type | bpw | RMSE | relative | weighted | max error | rows | scales 0..max | zero | at end | codes | entropy |
|:---|:---|---:|---:|---:|---:|---:|---:|:---|---:|---:|:---|---:|
| a.weight | q4_0 | 4.500 | 0.103667 | 9.4773% |  | 0.540039 | 16/512 |  |  |  | ▃▁ | 3.67/4 |
| all | q4_0 | 4.500 | 0.2 | 9% |  | 0.5 | 16/512 |  |  |  | ▃▁ | 3.67/4 |
| all | iq4_k | 4.500 | 0.1 | 6% |  | 0.5 | 16/512 |  |  |  | ▃▁ | 3.67/4 |
"""


def read(tmp_path: Path, *texts: str, label: str = "", **sizes: int) -> Results:
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"file{i}.log")
        paths[-1].write_text(text, encoding="utf-8")
    return read_results([(label, p) for p in paths], sizes)


def test_sweep_bench_of_a_log(tmp_path: Path) -> None:
    found = read(tmp_path, SWEEP)
    (run,) = found.speeds
    assert (run.label, run.line, run.table.kind, len(run.table.rows)) == ("b-Q8_0", 7, "sweep", 2)
    assert run.environment.model_bytes == round(4.272 * 2**30)
    assert run.environment.facts["threads"] == "16"
    assert "n_ubatch 128" in run.environment.facts["settings"]
    assert [(p.line, p.reason) for p in found.problems] == [
        (11, "a row that does not fit the table of speeds before it")
    ]


def test_sizes_that_say_nothing_are_unknown(tmp_path: Path) -> None:
    """Logs print GiB with two or three digits, so a tiny model has none."""
    found = read(tmp_path, BENCH.replace("3.56 GiB", "0.00 GiB"), SWEEP.replace("4.272 GiB", "0.000 GiB"))
    assert [r.environment.model_bytes for r in found.bench] == [None, None] and len(found.problems) == 2
    assert [r.environment.model_bytes for r in found.speeds] == [None]


def test_jsonl_full_tells_what_it_ran_on(tmp_path: Path) -> None:
    config = {
        "model": "x/q4.gguf", "n_threads": 2, "hardware": {"cpu": "EPYC", "isa": "avx512"}, "software": {"ik": "0.1.0"},
        "model_file": {"tensor_bytes": 1000, "file": "q4.gguf"}, "flash_attn": 1,
    }  # fmt: skip
    row = {"pp": 8, "tg": 4, "n_kv": 0, "speed_pp": 10.0, "speed_tg": 5.0}
    lines = [json.dumps({"config": config}), json.dumps(row), json.dumps(row | {"n_kv": 8}), json.dumps(row)[:20]]
    found = read(tmp_path, "\n".join(lines))
    (run,) = found.speeds
    assert (run.label, len(run.table.rows), run.environment.model_bytes) == ("q4", 2, 1000)
    assert (run.environment.facts["machine"], run.environment.facts["program"]) == ("EPYC, avx512", "ik 0.1.0")
    assert [(p.line, p.reason) for p in found.problems] == [(4, "no valid JSON")]
    batched = [json.dumps({"config": config}), *(json.dumps(row | {"pl": n, "speed": 7.0 * n}) for n in (1, 2))]
    (run,) = read(tmp_path, "\n".join(batched)).speeds
    assert (run.table.kind, run.environment.facts["machine"]) == ("batched", "EPYC, avx512")
    assert [(r.n_seq, r.speed) for r in run.table.rows] == [(1, 7.0), (2, 14.0)]


def test_bench_in_all_its_forms(tmp_path: Path) -> None:
    found = read(tmp_path, BENCH)
    assert [(r.test, r.speed, r.deviation, r.settings) for r in found.bench] == [
        ("pp512", 120.5, 1.25, "fa 1"),
        ("tg128", 9.75, 0.0, "fa 1"),
    ]
    assert {r.environment.facts["program"] for r in found.bench} == {"0a1b2c3d (3900)"}
    assert [p.line for p in found.problems] == [5]
    names = list(RECORD)
    quoted = ",".join(f'"{int(v) if isinstance(v, bool) else v}"' for v in RECORD.values())
    forms = [
        json.dumps(RECORD),
        json.dumps([RECORD], indent=2),
        "[\n" + ",\n".join("  {\n" + json.dumps(RECORD, indent=4)[2:-2] + "\n  }" for _ in range(2)) + "\n]\n",
        ",".join(names) + "\n" + quoted,
    ]
    for text, count in zip(forms, (1, 1, 2, 1), strict=True):
        found = read(tmp_path, text)
        assert found.problems == []
        assert [(r.label, r.test, r.speed, r.deviation) for r in found.bench] == [("q4", "pp512", 100.5, 2.5)] * count
        assert found.bench[0].environment.facts["machine"] == "EPYC"
        assert found.bench[0].environment.model_bytes == 3 * 2**30
    at_depth = RECORD | {"n_prompt": 0, "n_gen": 32, "n_depth": 4096}
    assert [r.test for r in read(tmp_path, json.dumps(at_depth)).bench] == ["tg32 @ d4096"]
    found = read(tmp_path, json.dumps(RECORD | {"avg_ts": None}) + "\nINSERT INTO test (a) VALUES ('1');\n" + quoted)
    assert [p.line for p in found.problems] == [1, 2]


def test_quality(tmp_path: Path) -> None:
    text = KLD.format(name="q4", size=3.5, kld="0.02") + KLD.format(name="q8", size=7, kld="0.001")
    text += "[1]10.5,[2]10.6,\nFinal estimate: PPL over 53 chunks for n_ctx=512 = 9.4213 +/- 0.05012\n"
    found = read(tmp_path, text)
    assert [(q.label, q.environment.model_bytes, q.values.get("Mean KLD")) for q in found.qualities] == [
        ("q4", round(3.5 * 2**30), (0.02, 0.000904)),
        ("q8", 7 * 2**30, (0.001, 0.000904)),
        ("q8", 7 * 2**30, None),
    ]
    assert found.qualities[0].values["PPL"] == (10.703261, 0.411262)
    assert found.qualities[0].values["PPL ratio"] == (1.019883, 0.005052)
    assert found.qualities[0].values["99.9% KLD"] == (0.083903, None)
    assert found.qualities[0].values["Same top p"] == (98.387, 1.136)
    assert (found.qualities[2].values, found.qualities[2].n_chunks) == ({"PPL": (9.4213, 0.05012)}, 53)
    cut = KLD.format(name="q4", size=3.5, kld="0.02").split("====== KL")[0]
    assert [p.line for p in read(tmp_path, cut + "Final estimate: PPL over 3\n").problems] == [12, 4]
    (q,) = read(tmp_path, "Final estimate: PPL = 5.5 +/- 0.1\n", label="mine", mine=77).qualities
    assert (q.label, q.named, q.environment.model_bytes) == ("mine", True, 77)


def test_errors_of_types(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        TYPES,
        "q4_0::layers.0   : rmse 0.00200000, 0.090000  maxerr 0.10000000, 1.5  95pct<0.1,  median<0.0\n",
    )
    assert [(t.type, t.tensor, t.bpw, t.relative) for t in found.types] == [
        ("q4_0", "a.weight", 4.5, pytest.approx(0.094773)),
        ("q4_0", "", 4.5, 0.09),
        ("iq4_k", "", 4.5, 0.06),
        ("q4_0", "layers.0", 4.5, 0.09),
    ]
    record = {"tensor": None, "type": "q4_0", "bpw": 4.5, "rmse": 0.1, "relative": 0.2, "max_error": 0.3}
    assert [t.relative for t in read(tmp_path, json.dumps(record)).types] == [0.2]


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    for text in ("", "hello\n| a | b |\n"):
        with pytest.raises(FormatError, match="no results in"):
            read(tmp_path, text)
    with pytest.raises(FormatError, match="No such file"):
        read_results([("", tmp_path / "none")])
    (tmp_path / "model.gguf").write_bytes(default_model().read_bytes())
    with pytest.raises(FormatError, match=r"model\.gguf: is not a text"):
        read_results([("", tmp_path / "model.gguf")])


def test_no_page_of_problems_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, page = tmp_path / "x.jsonl", tmp_path / "page.html"
    source.write_text('{"n_kv": 0, \x1b]0;x\n', encoding="utf-8")
    assert main(["report", str(source), "-o", str(page)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no page is written" in err and "\x1b" not in err
    assert not page.exists()


def test_names_tell_what_differs(tmp_path: Path) -> None:
    other = RECORD | {"build_commit": "def"}
    found = read(tmp_path, json.dumps(RECORD) + "\n" + json.dumps(other) + "\n" + json.dumps(RECORD | {"n_gen": 9}))
    assert distinct_names(found.bench, key=lambda r: r.test) == ["q4 (abc (7))", "q4 (def (7))", "q4"]
    same = read(tmp_path, SWEEP, SWEEP)
    assert distinct_names(same.speeds) == ["b-Q8_0 (file0)", "b-Q8_0 (file1)"]
    assert distinct_names(read(tmp_path, SWEEP + SWEEP).speeds) == ["b-Q8_0 (#1)", "b-Q8_0 (#2)"]
    assert distinct_names(read(tmp_path, SWEEP, SWEEP, label="x").speeds) == ["x", "x"]


def test_pareto_front() -> None:
    assert pareto([(2, 2), (1, 3), (3, 1), (2, 3), (4, 1), (1, 4)]) == [1, 0, 2]


def test_ticks() -> None:
    assert nice_ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(5, 5)[0] <= 5 <= nice_ticks(5, 5)[-1]
    assert log_ticks(0.0021, 0.3) == pytest.approx([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5])


def test_plot_is_well_formed() -> None:
    import xml.etree.ElementTree as ET

    svg = plot([Curve('a<b>"', [Dot(0, 1e-4, "t & <u>", 1e-5, "n<"), Dot(0, 1.0, "x")], 9)], "x<", "y&", log=True)
    root = ET.fromstring(svg)
    assert [c.find("title").text for c in root.iter("circle")] == ["t & <u>", "x"]  # type: ignore[union-attr]
    assert "s1 d1" in svg
    assert "nan" not in svg


class Outside(HTMLParser):
    """Everything in a page that would be loaded from somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(str(value))
            if name == "href" and str(value).startswith("#"):
                self.links.add(str(value)[1:])
            elif name in ("src", "href", "action", "data", "srcset", "poster"):
                self.found.append(f"{tag} {name}={value}")
        if tag in ("link", "iframe", "object", "embed", "img", "base"):
            self.found.append(tag)


def everything(tmp_path: Path) -> Results:
    kld = "".join(
        KLD.format(name=n, size=s, kld=k) for n, s, k in (("q2", 2, "0.5"), ("q4", 4, "0.02"), ("q5", 5, "0.03"))
    )
    return read(tmp_path, SWEEP, BATCHED, BENCH, json.dumps(RECORD), kld, TYPES)


def test_page_is_complete_in_itself(tmp_path: Path) -> None:
    text = page(everything(tmp_path), "A <title> & more")
    parser = Outside()
    parser.feed(text)
    assert parser.found == []
    assert parser.links == parser.ids - {"theme"}
    assert len(parser.links) == 7
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", text)
    assert "A &lt;title&gt; &amp; more" in text
    assert "<!--" not in text
    assert text.count("<svg viewBox") > 8
    assert ">oops<" not in text and "oops" in text  # the line that cannot be read is quoted
    assert 'class="series s0 d0 front"' in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.log", SWEEP), ("b.txt", "Final estimate: PPL = 5.5 +/- 0.1\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
    a, b, out = str(tmp_path / "a.log"), str(tmp_path / "b.txt"), tmp_path / "r.html"
    assert main(["report", a, f"mine={b}", "-o", str(out), "--size", "mine=3GiB", "--title", "-T"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: 2 results from 2 files\n"
    assert f"{a}:11: a row that does not fit" in said.err
    assert "<h1>-T</h1>" in out.read_text()
    assert main(["report", a, f"mine={b}", "--json", "--size", "mine=3GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["qualities"][0]["environment"]["model_bytes"] == 3 * 2**30
    for argv, code, problem in (
        ([], 2, "name at least one file"),
        ([str(tmp_path / "none")], 1, "No such file"),
        ([str(tmp_path / "empty")], 1, "no results"),
        ([str(tmp_path)], 1, "cannot be read (Is a directory)"),
        ([a, "-o", str(tmp_path / "no" / "r.html")], 2, "does not exist"),
        ([a, "-o", a], 2, "is one of the files to read"),
        ([a, "--size", "x=3"], 2, "is not LABEL=SIZE"),
        ([a, "-o", str(tmp_path)], 1, "cannot be written"),
    ):
        assert main(["report", *argv]) == code, argv
        said = capsys.readouterr()
        assert (said.out, problem in said.err) == ("", True), (argv, said.err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "b.txt", "empty", "r.html"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.slow  # a page in a browser
def test_page_in_a_browser(tmp_path: Path, browser: Any) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(everything(tmp_path), "Results"), encoding="utf-8")
    tab = browser.new_page(color_scheme="light", viewport={"width": 900, "height": 700})
    seen: list[str] = []
    tab.on("request", lambda request: seen.append(request.url))
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.goto(file.as_uri())
    table = tab.locator("#quality table")
    head = table.locator("th", has_text="Mean KLD")
    column = head.evaluate("th => th.cellIndex")
    values = f"rows => rows.map(row => row.cells[{column}].textContent)"
    head.locator("button").click()
    assert [v.split()[0] for v in table.locator("tbody tr").evaluate_all(values)] == ["0.02", "0.03", "0.5"]
    head.locator("button").click()
    assert [v.split()[0] for v in table.locator("tbody tr").evaluate_all(values)] == ["0.5", "0.03", "0.02"]
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(background)
    tab.click("#theme")
    assert tab.evaluate(background) != light
    tab.locator("#errors-of-types .key").first.hover()
    assert tab.locator("#errors-of-types g.dim").count() == 1
    assert tab.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    tab.close()
    assert seen == [file.as_uri()]
