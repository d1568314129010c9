"""KL divergence against direct float64 computation, the base file byte for byte, and files written by llama.cpp."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from fake_session import FakeSession, FakeTokenizer

from ikcli.cli.parser import ModelRun
from ikcli.commands import perplexity as command
from ikcli.commands._kl_divergence import CHUNK_HEADER, chunk_line, statistics
from ikcli.engine.run.batch import Batch
from ikcli.errors import FormatError, IkError, NonFiniteError, UsageError
from ikcli.measure import fleet as fleet_windows
from ikcli.measure.chunks import evaluate
from ikcli.measure.kl_divergence import (
    KlChunk,
    KlParams,
    Positions,
    compare_rows,
    gather,
    run,
    summarise,
    windows_of,
)
from ikcli.measure.kld_file import BaseReader, BaseWriter, encode_rows, row_width, rows_per_chunk, split_rows
from ikcli.measure.perplexity import PerplexityParams
from ikcli.measure.perplexity import run as run_perplexity
from ikcli.settings.measure import PerplexityConfig
from ikcli.settings.run import RunConfig

GOLDEN = [
    "stories260K-d256.f32",
    "tiny-deepseek2-mainline.f16",
    "tiny-deepseek2.f16",
    "tiny-deepseek3.f16",
    "tiny-llama.f16",
    "tiny-qwen3.f16",
    "tiny-qwen3moe.f16",
]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def decoded(rows: np.ndarray, n_vocab: int) -> np.ndarray:
    scale, minimum, q = split_rows(rows, n_vocab)
    return q * scale[:, None].astype(np.float64) + minimum[:, None]


@pytest.mark.parametrize("n_vocab", [6, 7, 3001])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_rows_are_exact_to_half_a_step(rng: np.random.Generator, n_vocab: int, spread: float) -> None:
    logits = rng.normal(0, spread, (20, n_vocab)).astype(np.float32)
    rows = encode_rows(logits)
    assert rows.shape == (20, row_width(n_vocab)) and row_width(n_vocab) % 2 == 0
    exact = log_softmax(logits)
    floor = exact.max(axis=1, keepdims=True) - 24.0
    exact = np.maximum(exact, floor)
    scale = split_rows(rows, n_vocab)[0][:, None]
    assert (np.abs(decoded(rows, n_vocab) - exact) <= 0.5 * scale + 1e-5).all()
    assert (split_rows(rows, n_vocab)[2].max(axis=1) == 65535).all()


def test_row_layout_known_answer() -> None:
    rows = encode_rows(np.array([[1.0, 0.0, 0.5], [2.0, 2.0, 2.0]], dtype=np.float32))
    lse = math.log(1 + math.exp(-1) + math.exp(-0.5))
    assert rows.dtype == np.uint16 and rows.shape == (2, 8)
    assert struct.unpack("<ff", rows[0, :4].tobytes()) == pytest.approx((1 / 65535, -1 - lse), rel=1e-6)
    assert rows[0, 4:].tolist() == [65535, 0, 32768, 0]
    assert struct.unpack("<ff", rows[1, :4].tobytes()) == pytest.approx((0, -math.log(3)), rel=1e-6)
    assert rows[1, 4:].tolist() == [0, 0, 0, 0]


def test_compare_equals_direct_computation(rng: np.random.Generator) -> None:
    n_vocab = 700
    base_logits = rng.normal(0, 3, (60, n_vocab)).astype(np.float32)
    logits = base_logits + rng.normal(0, 0.5, base_logits.shape).astype(np.float32)
    targets = rng.integers(0, n_vocab, 60, dtype=np.int32)
    rows = encode_rows(base_logits)
    found = compare_rows(logits, rows, targets, n_threads=2)
    log_base, log_p = decoded(rows, n_vocab), log_softmax(logits)
    at = np.arange(60)
    kld = (np.exp(log_base) * (log_base - log_p) * (log_base > -16)).sum(axis=1)
    assert found.kld == pytest.approx(kld, abs=2e-6) and kld.min() > 0.01
    assert found.nll == pytest.approx(-log_p[at, targets], abs=1e-5)
    assert found.nll_base == pytest.approx(-log_base[at, targets], abs=1e-5)
    assert found.p_diff == pytest.approx(np.exp(log_p[at, targets]) - np.exp(log_base[at, targets]), abs=1e-6)
    same = log_p.argmax(axis=1) == log_base.argmax(axis=1)
    assert found.same_top.tolist() == same.tolist() and 0 < same.sum() < 60


def test_tokens_the_base_never_picks_do_not_count() -> None:
    base = encode_rows(np.array([[0.0, 0.0, -20.0]], dtype=np.float32))
    logits = np.array([[0.0, 0.0, -np.inf]], dtype=np.float32)
    assert compare_rows(logits, base, np.array([0], dtype=np.int32)).kld[0] == pytest.approx(0, abs=1e-6)


def test_summary_against_textbook_formulas(rng: np.random.Generator) -> None:
    n = 400
    base = rng.gamma(2, 1, n)
    nll = base + rng.normal(0.1, 0.3, n)
    kld, p_diff, same = rng.gamma(1, 0.1, n), rng.normal(0, 0.05, n), rng.random(n) < 0.9
    s = summarise(Positions(nll, base, kld, p_diff, same))
    d = nll - base
    assert s.log_ratio == pytest.approx((d.mean(), d.std() / math.sqrt(n - 1)), rel=1e-9)
    assert s.correlation == pytest.approx(np.corrcoef(nll, base)[0, 1], rel=1e-9)
    assert s.ppl[0] == pytest.approx(math.exp(nll.mean())) and s.ppl_base[0] == pytest.approx(math.exp(base.mean()))
    assert s.kld == pytest.approx((kld.mean(), kld.std(ddof=1) / math.sqrt(n)), rel=1e-9)
    assert s.p_diff_rms[0] == pytest.approx(math.sqrt((p_diff**2).mean()))
    share = same.mean()
    assert s.same_top == pytest.approx((share, math.sqrt(share * (1 - share) / (n - 1))))


def write_base(path: Path, table: np.ndarray, tokens: np.ndarray, n_batch: int = 64) -> FakeSession:
    """A base file of a bigram model over windows of 32 tokens."""
    n_seq = max(1, n_batch // 32)
    session = FakeSession(table, n_ctx=32 * n_seq, n_seq_max=n_seq, n_batch=n_batch)
    windows = tokens[: len(tokens) // 32 * 32].reshape(-1, 32)
    with BaseWriter(path, windows, session.n_vocab) as writer:
        run_perplexity(session, tokens, PerplexityParams(n_ctx=32, n_batch=n_batch), on_rows=writer.add)
    return session


@pytest.fixture
def table(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 2, (11, 11)).astype(np.float32)


@pytest.fixture
def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 11, 500, dtype=np.int32)


@pytest.mark.parametrize("n_batch", [64, 32, 10], ids=["2 windows", "1 window", "pieces"])
def test_write_then_compare_with_itself(tmp_path: Path, table: np.ndarray, tokens: np.ndarray, n_batch: int) -> None:
    path = tmp_path / "base.kld"
    write_base(path, table, tokens)
    head = path.read_bytes()[:20]
    assert head == b"_logits_" + struct.pack("<iii", 32, 11, 15)
    base = BaseReader(path)
    assert base.tokens.reshape(-1).tolist() == tokens[:480].tolist()
    again = tmp_path / "again.kld"
    session = write_base(again, table, tokens, n_batch)
    assert again.read_bytes() == path.read_bytes()
    seen: list[KlChunk] = []
    result = run(session, base, KlParams(n_batch=n_batch), on_chunk=seen.append)
    s = result.summary
    assert (result.n_chunks, s.count, len(seen)) == (15, 15 * 15, 15)
    assert abs(s.kld[0]) < 2e-6 and s.same_top[0] == 1 and abs(s.log_ratio[0]) < 1e-5
    assert s.correlation == pytest.approx(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.kld", "base.kld"]


def test_values_of_workers_are_of_their_own_windows(
    tmp_path: Path, table: np.ndarray, tokens: np.ndarray, rng: np.random.Generator
) -> None:
    """Groups that begin in the middle of the file are compared with their part of it, and keep their numbers."""
    write_base(tmp_path / "base.kld", table, tokens)
    base, params = BaseReader(tmp_path / "base.kld"), KlParams(n_batch=64)
    other = (table + rng.normal(0, 0.3, table.shape)).astype(np.float32)

    def session() -> FakeSession:
        return FakeSession(other, n_ctx=64, n_seq_max=2, n_batch=64)

    wanted = run(session(), base, params)
    windows = windows_of(base, params, 1)
    found: list[fleet_windows.WindowValues] = []
    for _, (first, group) in fleet_windows._units(windows):
        values = fleet_windows._Values(first, group, base, 1)
        evaluate(session(), group, values)
        found += fleet_windows._read({"windows": values.windows}, first, group, 5)
    assert [one.chunk for one in found] == list(range(15))
    result = gather(found, base, windows, params)
    assert result.n_chunks == 15 and result.summary == wanted.summary and wanted.summary.kld[0] > 0.001
    for name in ("nll", "nll_base", "kld", "p_diff", "same_top"):
        assert np.array_equal(getattr(result.positions, name), getattr(wanted.positions, name)), name


def test_report_has_every_line(tmp_path: Path, table: np.ndarray, tokens: np.ndarray) -> None:
    path = tmp_path / "base.kld"
    write_base(path, table, tokens)
    other = FakeSession(table + np.float32(0.3) * table**2, n_ctx=32, n_batch=32)
    seen: list[KlChunk] = []
    result = run(other, BaseReader(path), KlParams(n_batch=32, chunks=8), on_chunk=seen.append)
    line = chunk_line(seen[2])
    assert line.startswith("   3    ") and line.count(" ± ") == 5 and line.endswith(" %\n")
    assert [len(part) for part in line.rstrip("\n").split("    ")][:1] == [4]
    assert CHUNK_HEADER.startswith("\nchunk ")
    text = statistics(result).split("\n")
    names = [line.split(":")[0] for line in text if ":" in line]
    assert len(text) == 40 and text[-1] == "" and len(names) == 34 and len(set(names)) == 34
    assert text[0] == "====== Perplexity statistics ======" and text[7] == "" and text[21] == ""
    kld = [float(line.split(":")[1]) for line in text[10:21]]
    assert kld == sorted(kld, reverse=True) and kld[0] > kld[-1]
    assert float(text[9].split(":")[1].split("±")[0]) == pytest.approx(result.summary.kld[0], abs=1e-6)
    with pytest.raises(FormatError, match=r"base\.kld .*vocabulary of 11"):
        run(FakeSession(table[:10, :10], n_ctx=32), BaseReader(path), KlParams())


def test_bad_chunk_is_named_or_left_out(tmp_path: Path, table: np.ndarray, tokens: np.ndarray) -> None:
    path = tmp_path / "base.kld"
    tokens[tokens == 10] = 9
    tokens[32 * 4 + 20] = 10
    write_base(path, table, tokens)
    bad = FakeSession(table, n_ctx=64, n_seq_max=2, n_batch=64, fail_on=10)
    with pytest.raises(NonFiniteError, match="chunk 5 "):
        run(bad, BaseReader(path), KlParams(n_batch=64))
    result = run(bad, BaseReader(path), KlParams(n_batch=64, fail_on_nan=False))
    assert result.n_chunks == 14 and abs(result.summary.kld[0]) < 2e-6


def test_damaged_files_are_refused(tmp_path: Path, table: np.ndarray, tokens: np.ndarray) -> None:
    path = tmp_path / "base.kld"
    write_base(path, table, tokens)
    good = path.read_bytes()
    token = struct.pack("<i", 11)
    damage = {
        "truncated": good[:-1],
        "is truncated": good[:100],
        "not a file of log-prob": b"GGUF" + good[4:],
        "not a file": b"",
        "promises": good + b"\0",
        "impossible": good[:8] + struct.pack("<iii", 32, -5, 15) + good[20:],
        "of \\d+ bytes": good[:8] + struct.pack("<iii", 2**31 - 1, 2**31 - 1, 2**31 - 1) + good[20:],
        "outside its vocabulary": good[:20] + token + good[24:],
    }
    for words, data in damage.items():
        path.write_bytes(data)
        with pytest.raises(FormatError, match=rf"base\.kld .*{words}"):
            BaseReader(path)
    rows_at = 20 + 480 * 4
    path.write_bytes(good[:rows_at] + struct.pack("<f", math.nan) + good[rows_at + 4 :])
    with pytest.raises(FormatError, match="chunk 1"):
        BaseReader(path).rows(0)
    with pytest.raises(IkError, match="missing"):
        BaseReader(tmp_path / "missing")
    with pytest.raises(IkError, match="cannot write"):
        BaseWriter(tmp_path / "no" / "folder", tokens[:32].reshape(1, 32), 11)


def test_incomplete_base_is_not_kept(tmp_path: Path, table: np.ndarray, tokens: np.ndarray) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(b"older")
    with (
        pytest.raises(IkError, match="rows are missing"),
        BaseWriter(path, tokens[:64].reshape(2, 32), 11) as writer,
    ):
        writer.add(0, 0, table[tokens[16:31]], tokens[17:32])
    assert path.read_bytes() == b"older" and [p.name for p in tmp_path.iterdir()] == ["base.kld"]


class StoredSession(FakeSession):
    """Returns the log-probabilities stored in a base file as logits; checks that it gets the same tokens."""

    def use(self, base: BaseReader) -> StoredSession:
        self.base = base
        self.next = 0
        return self

    def clear(self) -> None:
        self.start = self.next

    def decode(self, batch: Batch) -> np.ndarray:
        n_ctx = self.base.n_ctx
        chunks = self.start + batch.seq
        self.next = int(chunks.max()) + 1
        expected = self.base.tokens[chunks, batch.pos]
        assert (batch.tokens == expected)[batch.pos > 0].all()
        out = [
            decoded(self.base.rows(int(c), int(p) - n_ctx // 2, 1), self.base.n_vocab)[0]
            for c, p in zip(chunks[batch.logits], batch.pos[batch.logits], strict=True)
        ]
        return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("name", GOLDEN)
def test_files_written_by_llama_cpp(shared_dir: Path, name: str) -> None:
    golden = shared_dir / "golden"
    base = BaseReader(golden / "models" / f"{name}.kld")
    expected = json.loads((golden / "expected.json").read_text())["models"][f"{name}.gguf"]["default"]
    assert base.n_ctx == 512 and base.n_chunk == len(expected["chunks"])
    session = StoredSession(np.empty((base.n_vocab, 1), dtype=np.float32), tokenizer=FakeTokenizer()).use(base)
    result = run_perplexity(session, base.tokens.reshape(-1), PerplexityParams(n_ctx=512, n_batch=1024))
    assert result.ppl == pytest.approx(expected["ppl"], rel=1e-5, abs=6e-5)
    assert result.error == pytest.approx(expected["err"], rel=2e-5)
    assert [c.ppl for c in result.chunks] == pytest.approx(expected["chunks"], rel=1e-5, abs=6e-5)

    kl = run(session.use(base), base, KlParams(n_batch=512, chunks=2))
    assert abs(kl.summary.kld[0]) < 1e-6 and np.abs(kl.positions.kld).max() < 1e-4
    assert kl.summary.same_top[0] == 1 and kl.summary.count == 2 * rows_per_chunk(512)


@pytest.mark.parametrize("name", GOLDEN[:2])
def test_stored_rows_encode_to_the_same_bytes(shared_dir: Path, name: str) -> None:
    base = BaseReader(shared_dir / "golden" / "models" / f"{name}.kld")
    rows = base.rows(0)
    again = encode_rows(decoded(rows, base.n_vocab).astype(np.float32))
    steps = again[:, 4:].astype(int) - rows[:, 4:]
    assert np.abs(steps).max() <= 1 and (steps != 0).mean() < 1e-3
    assert decoded(again, base.n_vocab) == pytest.approx(decoded(rows, base.n_vocab), abs=1e-3)


@pytest.fixture
def opened(table: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """Sessions that the subcommand opens; their model is the table."""
    sessions: list[FakeSession] = []

    def open_session(
        config: RunConfig, *, n_ctx: int, n_seq_max: int, planner: object = None, media: None = None
    ) -> FakeSession:
        sessions.append(FakeSession(table, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=config.n_batch))
        return sessions[-1]

    monkeypatch.setattr("ikcli.engine.run.opening.open_session", open_session)
    return sessions


def config(path: Path | None, n_ctx: int = 0, chunks: int = -1) -> RunConfig:
    options = PerplexityConfig(kl_divergence=True, logits_file=path, chunks=chunks)
    return RunConfig(command="perplexity", n_ctx=n_ctx, n_batch=70, n_threads=1, n_threads_batch=1, perplexity=options)


def execute(config: RunConfig) -> int:
    return command.run(ModelRun(config, planner=None))  # type: ignore[arg-type]


def test_command(
    tmp_path: Path,
    table: np.ndarray,
    tokens: np.ndarray,
    opened: list[FakeSession],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "base.kld"
    write_base(path, table, tokens)
    assert execute(config(path)) == 0
    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert out.startswith(CHUNK_HEADER) and lines[2].startswith("   1    ") and lines[16].startswith("  15    ")
    assert lines[17] == "" and lines[18] == "====== Perplexity statistics ======"
    assert out.endswith("Same top p: 100.000 ± 0.000 %\n")
    assert "kl_divergence: " in err and "seconds per pass - ETA" in err
    assert (opened[0].n_ctx, opened[0].n_seq_max, opened[0].closed) == (64, 2, True)
    assert execute(config(path, n_ctx=64, chunks=2)) == 0
    out, err = capsys.readouterr()
    assert "statistics" not in out and "30 positions are too few" in err
    with pytest.raises(FormatError, match=r"base\.kld .*context of 32.*-c 32"):
        execute(config(path, n_ctx=16))
    with pytest.raises(UsageError, match="--kl-divergence-base"):
        execute(config(None))
