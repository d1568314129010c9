"""bench: tests and combinations made of the options, what is decoded for a test, every form of output."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import add_heads
from fake_session import FakeSession
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.bench import tests as bench
from ikcli.bench.drafts import Drafting
from ikcli.bench.tests import (
    BenchModel,
    BenchResult,
    BenchTest,
    bench_tests,
    combinations,
    mean_and_deviation,
    measure,
    params_label,
)
from ikcli.cli.parser import parse
from ikcli.commands._bench_output import FIELDS, make_writer, values
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.main import main
from ikcli.settings.run import RunConfig

MODEL = BenchModel("m's.gguf", 'deepseek2 16B "IQ4_NL"', 7 * 2**30 + 2**28, 15_706_000_000)


def parsed(*argv: str):
    return parse("bench", argv)


def result(config: RunConfig | None = None, test: BenchTest | None = None) -> BenchResult:
    return BenchResult(test or BenchTest(512, 0), config or parsed("-t", "3").config, MODEL, "2025-05-01T10:00:00Z",
                       (500_000_000, 400_000_000))  # fmt: skip


def written(form: str, argv: tuple[str, ...] = ("-t", "3"), n: int = 2) -> str:
    out = io.StringIO()
    found = parsed(*argv)
    writer = make_writer(form, out)
    writer.header(found.config, found.alternatives)
    for _ in range(n):
        writer.result(result(found.config))
    writer.footer()
    return out.getvalue()


def test_labels_and_order_of_tests() -> None:
    made = bench_tests(parsed("-p", "512,0,64", "-n", "128", "-pg", "100,24", "-gp", "8192,64").config)
    assert [t.label for t in made] == ["pp512", "pp64", "tg128", "pp100+tg24", "tg64@pp8192"]
    assert [t.n_timed for t in made] == [512, 64, 128, 124, 64]
    assert [t.label for t in bench_tests(parsed().config)] == ["pp512", "tg128"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("-p", "-5"), "0 or more"), (("-p", "0", "-n", "0"), "nothing to measure"), (("-r", "0"), "at least 1")],
)
def test_impossible_tests_are_refused(argv, message) -> None:
    with pytest.raises(UsageError, match=message):
        bench_tests(parsed(*argv).config)


def test_combinations() -> None:
    p = parsed("-t", "1,2", "-fa", "0,1", "-ctk", "f16,q8_0")
    made = [
        (c.type_k, c.flash_attn, c.n_threads, c.n_threads_batch)
        for c in combinations(p.config, p.alternatives, p.given)
    ]
    assert made == [
        (k, fa, t, t) for k in ("f16", "q8_0") for fa in (False, True) for t in (1, 2)
    ]  # fmt: skip
    p = parsed("-t", "1,2", "-tb", "4")
    assert [(c.n_threads, c.n_threads_batch) for c in combinations(p.config, p.alternatives, p.given)] == [
        (1, 4),
        (2, 4),
    ]
    p = parsed("-tgb", "4,16;2,8")
    assert [(c.n_threads, c.n_threads_batch) for c in combinations(p.config, {}, p.given)] == [(4, 16), (2, 8)]
    p = parsed()
    assert list(combinations(p.config, p.alternatives, p.given)) == [p.config]


def test_what_is_decoded() -> None:
    fake = FakeSession(np.zeros((8, 8), np.float32), n_ctx=64, n_batch=16)
    rng = np.random.default_rng(1)
    assert len(measure(fake, BenchTest(20, 2), 2, False, rng)) == 2
    once = [("rm", -1, 0), ("decode", 16, 0), ("decode", 4, 16), ("decode", 1, 20), ("decode", 1, 21)]
    assert fake.log == once * 2
    fake.log.clear()
    measure(fake, BenchTest(0, 3), 1, True, rng)
    assert [n for kind, n, _ in fake.log if kind == "decode"] == [1, 1, 1, 1]


def test_tests_at_a_depth() -> None:
    made = bench_tests(parsed("-p", "16", "-n", "2", "-d", "0,32", "-gp", "8,4").config)
    assert [t.label for t in made] == ["pp16", "tg2", "tg4@pp8", "pp16 @ d32", "tg2 @ d32", "tg4@pp8 @ d32"]
    assert [t.n_cells for t in made] == [16, 2, 12, 48, 34, 44] and made[3].n_timed == 16
    fake = FakeSession(np.zeros((8, 8), np.float32), n_ctx=64, n_batch=16)
    assert len(measure(fake, made[3], 2, False, np.random.default_rng(1))) == 2
    prefilled = [("rm", -1, 0), ("decode", 16, 0), ("decode", 16, 16)]
    assert [step for step in fake.log if step[0] != "checkpoint"] == prefilled + [("rm", 0, 32), ("decode", 16, 32)] * 2
    fields = values(result(test=made[3]))
    assert (fields["n_depth"], fields["test"]) == (32, "pp16 @ d32")


def test_tests_with_drafts() -> None:
    p = parsed("-p", "16", "-n", "4", "-pg", "8,4", "-gp", "8,4", "--spec-type", "ngram-simple:n_max=3",
               "--spec-type", "mtp", "--draft-max", "2,99")  # fmt: skip
    found = [[t.label for t in bench_tests(c)] for c in combinations(p.config, p.alternatives, p.given)]
    for n, labels in zip((2, 7), found, strict=True):
        kind = f"ngram-simple:3+mtp:{n}"
        assert labels == ["pp16", "tg4", f"tg4 {kind}", "pp8+tg4", "tg4@pp8", f"tg4@pp8 {kind}"]


@pytest.mark.parametrize("kind", ["mtp:p_min=0,n_max=3", "ngram-simple:ngram_size_n=1"])
def test_generation_with_drafts_is_greedy(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose wrong drafts cannot all be rolled back."""
    model = add_heads(tiny("qwen35", context_length=2048))
    path = write_model(model, tmp_path / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})
    text, n = np.random.default_rng(5).integers(0, 96, 20, dtype=np.int32), 40
    config = parsed("-m", str(path), "-n", str(n), "-p", "0", "--spec-type", kind, "-ub", "32").config
    with Session.open(config, n_ctx=64, n_step=1) as session, closing(Drafting(session)) as drafting:
        session.decode(Batch.single(text))
        computed: dict[int, int] = {}
        step, each = session.step, session.step_each

        def noted(batch: Batch) -> Any:
            computed.update(zip(batch.pos.tolist(), batch.tokens.tolist(), strict=True))
            return step(batch)

        def noted_each(tokens: list[int], pos: list[int], seqs: list[int]) -> Any:
            computed.update(zip(pos, tokens, strict=True))
            return each(tokens, pos, seqs)

        monkeypatch.setattr(session, "step", noted)
        monkeypatch.setattr(session, "step_each", noted_each)
        drafting.generate(session, text, n, np.random.default_rng(6))
        n_drafted, n_accepted = drafting.take_counts()
        assert session.sequences.n_past[0] == 20 + n and n_drafted > n_accepted and sorted(computed)[-1] == 19 + n
        wanted = [int(np.random.default_rng(6).integers(0, session.n_vocab))]
        session.clear()
        session.decode(Batch.single(text))
        for i in range(n - 1):
            wanted.append(int(session.decode(Batch.single([wanted[-1]], 20 + i)).argmax()))
    assert [computed[20 + i] for i in range(n)] == wanted


def test_results_with_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-p", "0", "-n", "8", "-r", "2", "-t", "1", "--spec-type", "ngram-simple:ngram_size_n=1,n_max=2"]
    assert main(["bench", *argv, "-o", "jsonl", "-oe", "md"]) == 0
    out, err = capsys.readouterr()
    plain, drafted = (json.loads(line) for line in out.splitlines())
    assert (plain["test"], drafted["test"]) == ("tg8", "tg8 ngram-simple:2")
    assert plain["drafts"] == "" and plain["n_drafted"] == 0
    assert drafted["drafts"] == "ngram-simple:2" and 0 <= drafted["n_accepted"] <= drafted["n_drafted"]
    head, _, first, second = [line for line in err.splitlines() if line.startswith("| ")]
    assert head.split("|")[-2].strip() == "accepted" and first.split("|")[-2].strip() == ""
    assert second.split("|")[-2].strip() == f"{drafted['n_accepted']} of {drafted['n_drafted']}"


def test_lists_and_ranges() -> None:
    assert parsed("-p", "1-3,7,0-8+4,512-4096*2").config.bench.n_prompt == (1, 2, 3, 7, 0, 4, 8, 512, 1024, 2048, 4096)
    for wrong in ("0-8*2", "1-4+0", "4-", "a"):
        with pytest.raises(UsageError, match="-p"):
            parsed("-p", wrong)


def test_only_generation_counts_after_a_prompt(monkeypatch) -> None:
    clock = iter([0, 100, 130])  # start, after the prompt, end
    monkeypatch.setattr(bench.time, "perf_counter_ns", lambda: next(clock))
    fake = FakeSession(np.zeros((8, 8), np.float32), n_ctx=64, n_batch=16)
    assert measure(fake, BenchTest(8, 2, True), 1, False, np.random.default_rng(1)) == [30]


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([4.0]) == (4.0, 0.0)
    mean, deviation = mean_and_deviation(result().samples_ts)
    assert (mean, round(deviation, 4)) == (1152.0, 181.0193)


@pytest.mark.parametrize(("n", "label"), [(15_706_000_000, "16B"), (6_740_000_000, "6.7B"), (8_030_000_000, "8B"),
                                          (491_820_000, "492M"), (5_922_000, "5.9M"), (222_000, "222K")])  # fmt: skip
def test_parameter_counts_in_names(n, label) -> None:
    assert params_label(n) == label


def test_markdown() -> None:
    lines = written("md", n=1).splitlines()
    tail = "backend    | threads |          test |              t/s |"
    assert lines[0] == "| model                          |       size |     params | " + tail
    assert lines[1] == (
        "| ------------------------------ | ---------: | ---------: | ---------- | ------: | ------------: "
        "| ---------------: |"
    )
    assert lines[2] == (
        '| deepseek2 16B "IQ4_NL"         |   7.25 GiB |    15.71 B | CPU        |       3 |         pp512 '
        "| 1152.00 ± 181.02 |"
    )
    assert lines[3] == "" and lines[4].startswith("build: ik-")


def test_markdown_shows_settings_that_are_not_the_defaults() -> None:
    head, rule, row = written("md", ("-fa", "0,1", "-ctk", "q8_0", "-ser", "6,1", "-b", "512", "-rtr"), 1).splitlines()[
        :3
    ]
    names = [c.strip() for c in head.strip("|").split("|")]
    assert names == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "n_batch",
        "type_k",
        "fa",
        "ser",
        "rtr",
        "test",
        "t/s",
    ]
    assert [c.strip() for c in row.strip("|").split("|")][5:10] == ["512", "q8_0", "0", "6,1", "1"]
    assert len(head) == len(rule) == len(row)


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(written("csv"))))
    assert len(rows) == 2 and list(rows[0]) == list(FIELDS)
    assert rows[0]["model_type"] == MODEL.name and rows[0]["flash_attn"] == "1" and rows[0]["n_prompt"] == "512"
    assert float(rows[0]["avg_ts"]) == 1152 and rows[0]["avg_ns"] == "450000000"


def test_json_and_json_lines() -> None:
    array = json.loads(written("json"))
    lines = [json.loads(line) for line in written("jsonl").splitlines()]
    assert array == lines and len(array) == 2
    assert array[0]["samples_ns"] == [500_000_000, 400_000_000] and array[0]["samples_ts"] == [1024.0, 1280.0]
    assert array[0]["use_mmap"] is True and array[0]["test"] == "pp512" and array[0]["n_threads"] == 3
    assert json.loads(written("json", n=0)) == []


def test_sql() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(written("sql"))
    assert (
        db.execute("select model_filename, n_batch, avg_ts, cuda from test").fetchall()
        == [(MODEL.filename, 2048, 1152.0, 0)] * 2
    )
    db.close()
    assert written("sql", n=0) == ""


def test_threads_of_a_result_are_those_that_ran() -> None:
    config = replace(parsed().config, n_threads=2, n_threads_batch=8)
    assert values(result(config))["n_threads"] == 8
    assert values(result(config, BenchTest(0, 4)))["n_threads"] == 2


def test_command(capsys) -> None:
    assert main(["bench", "-p", "8", "-n", "2", "-gp", "4,1", "-r", "2", "-t", "1", "-fa", "0,1", "-o", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["flash_attn"], r["test"]) for r in rows] == [
        (fa, test) for fa in (False, True) for test in ("pp8", "tg2", "tg1@pp4")
    ]
    assert all(len(r["samples_ns"]) == 2 and r["avg_ts"] > 0 for r in rows)
    assert rows[0]["model_type"].startswith("deepseek2 5.9M")


def test_second_copy_on_stderr_and_interruption(capsys, monkeypatch) -> None:
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    assert main(["bench", "-p", "8", "-t", "1", "-o", "csv", "-oe", "md"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("build_commit,") and "| model " in err and "build: ik-" in err
