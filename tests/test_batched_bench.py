"""batched-bench: which tests are made of the options, what is decoded for one, shared prompts, the printed lines."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ikcli.bench import batched as batched_bench
from ikcli.bench.batched import BatchedRow, run
from ikcli.bench.sweep_read import read_text
from ikcli.cli.parser import parse
from ikcli.commands.batched_bench import BatchedPrinter
from ikcli.engine.plan.bench_cases import BatchedTest, batched_tests
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UsageError
from ikcli.main import main
from ikcli.settings.run import RunConfig, default_model

HEAD = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
RULE = "|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|"


def config(*argv: str) -> RunConfig:
    return replace(parse("batched-bench", argv).config, model=default_model())


@pytest.fixture(scope="module")
def session():
    with Session.open(RunConfig(model=default_model(), n_threads=1, n_threads_batch=1, n_ubatch=32, n_batch=48,
                                warmup=False), n_ctx=256, n_seq_max=4, n_step=4) as opened:  # fmt: skip
        yield opened


def test_options_make_all_combinations_in_order() -> None:
    made = batched_tests(config("-npp", "8,16", "-ntg", "4", "-npl", "1,3", "-pps")).fitting
    assert [(t.pp, t.tg, t.pl, t.shared) for t in made] == [
        (8, 4, 1, True), (8, 4, 3, True), (16, 4, 1, True), (16, 4, 3, True),
    ]  # fmt: skip
    assert [t.n_kv for t in made] == [12, 20, 20, 28]
    assert [t.n_cells for t in made] == [12, 36, 20, 60]
    assert [t.pl for t in batched_tests(config()).fitting] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("argv", [("-npl", "0"), ("-npp", "-1"), ("-ntg", "2,-3")])
def test_impossible_counts_are_refused(argv) -> None:
    with pytest.raises(UsageError, match="-npl 1,2,4"):
        batched_tests(config(*argv))


def test_other_commands_accept_and_list_the_options() -> None:
    parsed = parse("sweep-bench", ["-npp", "8", "-ntg", "2", "-npl", "1,2", "-pps", "-c", "64"])
    assert parsed.ignored == ("-npp", "-ntg", "-npl", "-pps") and parsed.unsupported == ()
    assert parse("batched-bench", ["-npp", "8", "-pps"]).ignored == ()


@pytest.mark.parametrize("shared", [False, True])
def test_every_sequence_gets_a_prompt_and_its_tokens(session, shared) -> None:
    seen = []
    original = session.submit, session.step
    try:
        session.submit = lambda batch: seen.append(batch) or original[0](batch)
        session.step = lambda batch: seen.append(batch) or original[1](batch)
        (row,) = run(session, [BatchedTest(20, 3, 4, shared)])
    finally:
        session.submit, session.step = original
    generated = [b for b in seen if len(b) == 4 and b.logits.all()]
    assert [b.pos.tolist() for b in generated] == [[20 + i] * 4 for i in range(3)]
    assert all(b.seq.tolist() == [0, 1, 2, 3] for b in generated)
    prompts = seen[: len(seen) - 3]
    assert sum(len(b) for b in prompts) == (20 if shared else 80)
    assert sum(int(b.logits.sum()) for b in prompts) == 1 and max(len(b) for b in prompts) <= 32
    assert [session.sequences.n_past[s] for s in range(4)] == [23] * 4
    assert row.t_pp > 0 and row.t_tg > 0 and row.test.n_kv == (32 if shared else 92)


def test_a_shared_prompt_is_the_same_for_all(session) -> None:
    run(session, [BatchedTest(10, 0, 3, True)])
    first = session.sequences.save(0, 10)
    for seq in (1, 2):
        assert all(
            np.array_equal(a, b) for a, b in zip(first.parts, session.sequences.save(seq, 10).parts, strict=True)
        )


def test_generation_gives_what_single_sequences_give(session) -> None:
    """Dividing the cache anew and either way of generating change nothing but rounding."""
    tokens = np.array([5, 9, 11, 300], np.int32)
    alone = []
    session.sequences.divide(1)
    for t in tokens:
        session.clear()
        session.decode(Batch.single([3, 4, 7]))
        alone.append(session.decode(Batch.single([t], 3))[0].copy())
    session.sequences.divide(4)
    for seq in range(4):
        session.decode(Batch.single([3, 4, 7], 0, seq))
    batch = Batch(tokens, np.full(4, 3, np.int32), np.arange(4, dtype=np.int32), np.ones(4, np.bool_))
    together = session.generate(batch).copy()
    for seq in range(4):
        session.truncate(seq, 3)
    by_decode = session.decode(batch)
    for rows in (together, by_decode):
        assert np.abs(rows - np.array(alone)).max() < 0.05 * np.abs(alone).max()
        assert (rows.argmax(1) == np.array(alone).argmax(1)).all()


def test_dividing_checks_the_count(session) -> None:
    with pytest.raises(IkError, match="cannot be divided between 0"):
        session.sequences.divide(0)


def test_table_lines(capsys) -> None:
    printer = BatchedPrinter(config("-t", "3", "-tb", "4", "-ngl", "0"), 512, 64, 32)
    printer.header()
    printer.row(BatchedRow(BatchedTest(128, 32, 4, False), 0.5, 2.0))
    printer.row(BatchedRow(BatchedTest(128, 32, 4, True), 0.5, 2.0))
    out = capsys.readouterr().out.splitlines()
    assert out[1] == (
        "main: n_kv_max = 512, n_batch = 64, n_ubatch = 32, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = 0, "
        "n_threads = 3, n_threads_batch = 4"
    )
    assert out[3:5] == [HEAD, RULE]
    assert out[5] == (
        "|   128 |     32 |    4 |    640 |    0.500 |  1024.00 |    2.000 |    64.00 |    2.500 |   256.00 |"
    )
    assert out[6].split("|")[4:7] == ["    256 ", "    0.500 ", "   256.00 "]


def test_jsonl_line(capsys) -> None:
    printer = BatchedPrinter(config("--output-format", "jsonl"), 512, 64, 32)
    printer.header()
    printer.row(BatchedRow(BatchedTest(128, 0, 4, False), 0.5, 0.0))
    text = capsys.readouterr().out
    line = json.loads(text)
    assert [t.kind for t in read_text(text)] == ["batched"]
    assert line["pl"] == 4 and line["n_kv"] == 512 and line["speed_pp"] == 1024 and line["speed_tg"] == 0
    assert list(line)[:5] == ["n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared"]


def test_tests_beyond_the_context_are_left_out(capsys) -> None:
    argv = ["-npp", "100", "-ntg", "2", "-npl", "1,2,4", "-c", "256"]
    tests = batched_tests(config(*argv))
    assert ([t.pl for t in tests.fitting], [t.pl for t in tests.left_out]) == ([1, 2], [4])
    assert main(["batched-bench", *argv, "-t", "1"]) == 0
    assert "B 4 needs 408 tokens, -c has 256: left out" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no test fits"):
        batched_tests(config("-npp", "300", "-c", "256"))


def test_command(capsys) -> None:
    argv = ["batched-bench", "-npp", "12", "-ntg", "2", "-npl", "1,9", "-t", "1", "-c", "256"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    (table,) = read_text(out)
    assert table.kind == "batched"
    rows = [line.split("|")[1:5] for line in out.splitlines() if line.startswith("|   ")][1:]
    assert [[int(x) for x in r] for r in rows] == [[12, 2, 1, 14], [12, 2, 9, 126]]
    assert "n_kv_max = 256" in out


def test_nothing_fits_and_interruption(capsys, monkeypatch) -> None:
    assert main(["batched-bench", "-npp", "300", "-c", "256"]) == 2
    assert "no test fits" in capsys.readouterr().err

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(batched_bench, "run", interrupted)
    assert main(["batched-bench", "-npp", "4", "-ntg", "1", "-npl", "1", "-t", "1", "--no-warmup"]) == 130
