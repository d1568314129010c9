"""Perplexity against a direct computation with a bigram model, its printed lines, and what happens with NaN."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_session import FakeSession, FakeTokenizer

from ikcli.cli.parser import ModelRun
from ikcli.commands import perplexity as perplexity_command
from ikcli.commands._chunk_lines import eta_text
from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.measure.perplexity import PerplexityParams, run
from ikcli.measure.stats import for_row_blocks, safe_exp, token_nll
from ikcli.measure.text import tokenize, unescape
from ikcli.settings.measure import PerplexityConfig
from ikcli.settings.prompt import PromptConfig
from ikcli.settings.run import RunConfig, default_model
from ikcli.tokenizer.tokenizer import Tokenizer

N_VOCAB = 8


@pytest.fixture
def table(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 2, (N_VOCAB, N_VOCAB)).astype(np.float32)


@pytest.fixture
def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, N_VOCAB, 200, dtype=np.int32)


def bigram_nll(table: np.ndarray, tokens: np.ndarray, positions: list[int]) -> np.ndarray:
    """-log p(tokens[i+1] | tokens[i]) in float64, one position at a time."""
    out = []
    for i in positions:
        row = table[tokens[i]].astype(np.float64)
        out.append(math.log(np.exp(row).sum()) - row[tokens[i + 1]])
    return np.array(out)


def scored(n_ctx: int, n_chunk: int) -> list[int]:
    return [c * n_ctx + j for c in range(n_chunk) for j in range(n_ctx // 2, n_ctx - 1)]


@pytest.mark.parametrize(
    ("n_ctx", "n_batch"),
    [(16, 64), (16, 16), (16, 5), (15, 15), (16, 20), (50, 64)],
    ids=["4 windows", "1 window", "pieces", "odd", "not a multiple", "long"],
)
def test_run_equals_direct_computation(table: np.ndarray, tokens: np.ndarray, n_ctx: int, n_batch: int) -> None:
    n_seq = max(1, n_batch // n_ctx)
    session = FakeSession(table, n_ctx=n_ctx * n_seq, n_seq_max=n_seq, n_batch=min(n_batch, n_ctx * n_seq))
    seen: list[float] = []
    params = PerplexityParams(n_ctx=n_ctx, n_batch=n_batch)
    result = run(session, tokens, params, on_chunk=lambda c: seen.append(c.ppl))
    n_chunk = len(tokens) // n_ctx
    nll = bigram_nll(table, tokens, scored(n_ctx, n_chunk))
    assert result.n_chunks == n_chunk and result.n_tokens == len(nll)
    assert result.ppl == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    error = math.sqrt(((nll**2).mean() - nll.mean() ** 2) / (len(nll) - 1))
    assert result.error == pytest.approx(result.ppl * error, rel=1e-6)
    first = bigram_nll(table, tokens, scored(n_ctx, 1))
    assert seen[0] == pytest.approx(math.exp(first.mean()), rel=1e-6)
    assert seen[-1] == result.ppl and len(seen) == n_chunk


def test_chunks_limit_and_bos(table: np.ndarray, tokens: np.ndarray) -> None:
    session = FakeSession(table, n_ctx=32, n_seq_max=2, n_batch=32)
    result = run(session, tokens, PerplexityParams(n_ctx=16, n_batch=32, chunks=3))
    assert result.n_chunks == 3 and len(result.chunks) == 3
    assert session.cache[0][0] == session.tokenizer.bos_id
    assert session.cache[0][1:] == tokens[33:48].tolist()
    plain = FakeSession(table, n_ctx=16, n_batch=16, tokenizer=FakeTokenizer(add_bos=False))
    run(plain, tokens, PerplexityParams(n_ctx=16, n_batch=16, chunks=1))
    assert plain.cache[0] == tokens[:16].tolist()


def test_strided_scores_the_end_of_each_window(table: np.ndarray, tokens: np.ndarray) -> None:
    session = FakeSession(table, n_ctx=24, n_batch=10)
    result = run(session, tokens, PerplexityParams(n_ctx=24, n_batch=10, stride=7, chunks=4))
    positions = [c * 7 + j for c in range(4) for j in range(24 - 7 - 1, 23)]
    assert result.ppl == pytest.approx(math.exp(bigram_nll(table, tokens, positions).mean()), rel=1e-6)
    everything = run(session, tokens, PerplexityParams(n_ctx=24, n_batch=10, stride=7))
    assert everything.n_chunks == math.ceil((200 - 24) / 7)
    assert session.cache[0][0] == tokens[7 * (everything.n_chunks - 1)]


def test_a_text_of_two_windows_is_enough(table: np.ndarray, tokens: np.ndarray) -> None:
    params = PerplexityParams(n_ctx=16, n_batch=16)
    assert run(FakeSession(table, n_ctx=16, n_batch=16), tokens[:32], params).n_chunks == 2
    with pytest.raises(IkError, match="the text has 31 tokens"):
        run(FakeSession(table, n_ctx=16, n_batch=16), tokens[:31], params)
    strided = run(FakeSession(table, n_ctx=16, n_batch=16), tokens[:32], replace(params, stride=15))
    assert [c.start for c in strided.chunks] == [0, 15]
    assert [c.start for c in run(FakeSession(table, n_ctx=16), tokens[:50], params).chunks] == [0, 16, 32]


@pytest.mark.parametrize(
    ("params", "kind", "words"),
    [
        (PerplexityParams(n_ctx=128), IkError, "needs at least 256"),
        (PerplexityParams(n_ctx=2), UsageError, "too small"),
        (PerplexityParams(n_ctx=16, chunks=0), UsageError, "--chunks"),
        (PerplexityParams(n_ctx=16, stride=16), UsageError, "--ppl-stride"),
    ],
)
def test_impossible_sizes(
    table: np.ndarray, tokens: np.ndarray, params: PerplexityParams, kind: type[IkError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        run(FakeSession(table), tokens, params)


@pytest.mark.parametrize("in_session", [True, False], ids=["session raises", "logits are NaN"])
@pytest.mark.parametrize("n_seq", [1, 4])
def test_first_bad_chunk_is_named(table: np.ndarray, in_session: bool, n_seq: int) -> None:
    tokens = np.arange(160, dtype=np.int32) % 5
    tokens[16 * 5 + 12] = 7
    session = FakeSession(table.copy(), n_ctx=16 * n_seq, n_seq_max=n_seq, n_batch=16 * n_seq)
    if in_session:
        session.fail_on = 7
    else:
        session.table[7, 0] = np.nan
    params = PerplexityParams(n_ctx=16, n_batch=16 * n_seq)
    seen: list[float] = []
    with pytest.raises(NonFiniteError, match=r"chunk 6 .*--check-tensors"):
        run(session, tokens, params, on_chunk=lambda c: seen.append(c.ppl))
    assert len(seen) == 6 and np.isfinite(seen[:5]).all() and math.isnan(seen[5])

    tolerant = PerplexityParams(n_ctx=16, n_batch=16 * n_seq, fail_on_nan=False)
    result = run(session, tokens, tolerant)
    positions = [i for i in scored(16, 10) if i // 16 != 5]
    assert result.n_chunks == 9
    assert result.ppl == pytest.approx(math.exp(bigram_nll(table, tokens, positions).mean()), rel=1e-6)


def test_minus_infinity_for_another_token_is_fine() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], dtype=np.float32)
    assert token_nll(logits, np.array([0], dtype=np.int32))[0] == pytest.approx(math.log(2))
    assert math.isinf(token_nll(logits, np.array([1], dtype=np.int32))[0])


def test_large_vocabulary_in_threads(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 5, (37, 50001)).astype(np.float32)
    targets = rng.integers(0, 50001, 37, dtype=np.int32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)) - logits[np.arange(37), targets]
    assert np.abs(token_nll(logits, targets, 1) - exact).max() < 2e-6
    assert np.array_equal(token_nll(logits, targets, 3), token_nll(logits, targets, 1))


def test_row_blocks_cover_every_row_once() -> None:
    seen = np.zeros(100, dtype=int)

    def work(rows: slice) -> None:
        seen[rows] += 1

    for_row_blocks(work, 100, 100_000, 4)
    assert (seen == 1).all()


def test_eta_and_overflow() -> None:
    assert eta_text(14.916, 561, 4) == "14.92 seconds per pass - ETA 34.85 minutes"
    assert eta_text(14.916, 561, 2) == "14.92 seconds per pass - ETA 1 hours 9.72 minutes"
    assert safe_exp(1e4) == math.inf and math.isnan(safe_exp(math.nan))


def test_names_of_control_tokens() -> None:
    file = open_gguf(default_model())
    session = SimpleNamespace(tokenizer=Tokenizer.from_metadata(file.metadata, "demo"))
    plain, parsed = (list(tokenize(session, "a<|bos|>b", parse_special=special)) for special in (False, True))
    bos = session.tokenizer.bos_id
    assert len(parsed) == 4 < len(plain) and parsed[2] == bos and plain.count(bos) == 1


def test_unescape() -> None:
    assert unescape(rb"a\nb\t\\n\x41\q\x4\'\"") == b"a\nb\t\\nA\\q\\x4'\""


class Opener:
    """Stands in for the engine's session class."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.sessions: list[FakeSession] = []

    def open(
        self,
        config: RunConfig,
        *,
        n_ctx: int | None = None,
        n_seq_max: int = 1,
        planner: object = None,
        media: None = None,
    ) -> FakeSession:
        session = FakeSession(self.table, n_ctx=n_ctx or 256, n_seq_max=n_seq_max, n_batch=config.n_batch)
        self.sessions.append(session)
        return session


@pytest.fixture
def opener(table: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Opener:
    fake = Opener(table)
    monkeypatch.setattr("ikcli.engine.run.opening.open_session", fake.open)
    return fake


def command(tmp_path: Path, text: str, **options: object) -> RunConfig:
    file = tmp_path / "text.txt"
    file.write_text(text)
    ppl = PerplexityConfig(**options)  # type: ignore[arg-type]
    return RunConfig(
        command="perplexity", n_ctx=32, n_batch=64, n_threads=1, prompt=PromptConfig(file=file), perplexity=ppl
    )


def execute(config: RunConfig) -> int:
    return perplexity_command.run(ModelRun(config, planner=None))  # type: ignore[arg-type]


TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 4


def test_command_prints_values_and_final_estimate(
    opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(command(tmp_path, TEXT)) == 0
    out, err = capsys.readouterr()
    n_chunk = (len(TEXT) + 1) // 32
    values, final, rest = out.split("\n")
    assert re.fullmatch(r"(\[\d+\]\d+\.\d{4},)+", values) and values.count(",") == n_chunk and rest == ""
    found = re.fullmatch(r"Final estimate: PPL over (\d+) chunks for n_ctx=32 = ([\d.]+) \+/- ([\d.]{7,})", final)
    assert found and int(found[1]) == n_chunk and values.endswith(f"[{n_chunk}]{found[2]},")
    assert f"perplexity: calculating perplexity over {n_chunk} chunks, n_ctx=32, batch_size=64, n_seq=2" in err
    assert re.search(r"perplexity: [\d.]+ seconds per pass - ETA [\d.]+ minutes\n", err)
    assert re.search(r"perplexity: tokenization took [\d.e-]+ ms\n", err)
    session = opener.sessions[0]
    assert (session.n_ctx, session.n_seq_max, session.closed) == (64, 2, True)


def test_command_output_type_1(opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(command(tmp_path, TEXT, output_type=1, chunks=2)) == 0
    first, second, blank, final, _ = capsys.readouterr().out.split("\n")
    assert re.fullmatch(r"       0  \d+\.\d{4}  \d\.\d{6}  \d\.\d{6}", first)
    assert second.startswith("      32  ") and blank == "" and final.startswith("Final estimate: PPL over 2 chunks")


def test_command_strided(opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(command(tmp_path, TEXT, stride=8)) == 0
    assert opener.sessions[0].n_ctx == 64 + 4 and opener.sessions[0].n_seq_max == 1
    assert "n_ctx=68 = " in capsys.readouterr().out
    with pytest.raises(UsageError, match="--ppl-stride"):
        execute(command(tmp_path, TEXT, stride=8, logits_file=tmp_path / "x"))


def test_command_errors_name_the_file(opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IkError, match=r"text\.txt: the text has 6 tokens"):
        execute(command(tmp_path, "short"))
    assert opener.sessions[0].closed
    config = command(tmp_path, TEXT)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(IkError, match=r"text\.txt.*-f"):
        execute(config)
    capsys.readouterr()


def test_command_stops_at_nan(opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opener.table[3, 3] = np.nan
    text = "VW" * 50 + "a" * 100  # tokens 4 and 5, then 3
    base = tmp_path / "base.kld"
    with pytest.raises(NonFiniteError, match="chunk 4 "):
        execute(command(tmp_path, text, logits_file=base))
    assert capsys.readouterr().out.endswith(",[4]nan,\n")
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]
    assert execute(command(tmp_path, text, fail_on_nan=False)) == 0
    out, err = capsys.readouterr()
    assert "]nan," in out and "Final estimate: PPL over 3 chunks" in out and "3 chunks were not finite" in err
    opener.table[:] = np.nan
    with pytest.raises(NonFiniteError, match="no chunk"):
        execute(command(tmp_path, text, fail_on_nan=False))
