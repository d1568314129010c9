"""The script that loads the server: reading streams, its figures, and a run."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType

import pytest
from benchmark_scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("serve")


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def test_the_last_event_is_read_across_chunks(script: ModuleType) -> None:
    last = {"stop": True, "tokens_predicted": 3, "timings": {"prompt_ms": 2, "predicted_ms": 5.5}}
    text = b'data: {"content":"a"}\n\ndata: ' + json.dumps(last).encode() + b"\n\n"
    answer = script.Answer(0.0, [1.0, 1.5, 1.5])
    script.finish(answer, chunked(text[:40], text[40:]))
    assert (answer.n_tokens, answer.engine_ms, answer.events) == (3, 7.5, [1.0, 1.5])
    with pytest.raises(ValueError):
        script.finish(answer, chunked(text)[:-5])
    with pytest.raises(ValueError):
        script.finish(answer, chunked(text).replace(b"200", b"400", 1))


def test_figures(script: ModuleType) -> None:
    answers = [script.Answer(0.0, [0.010, 0.012, 0.016], 0.017, 3, 11.0), script.Answer(0.0, [0.020], 0.020, 1, 20.0)]
    r = script.summary(answers, 0.5, 0.001)
    assert r.tokens_per_second == 8 and r.client == pytest.approx(250)
    assert (r.ttft_p50, r.ttft_p95, r.itl_p50, r.itl_p95) == pytest.approx((10, 20, 2, 4))
    assert r.around == pytest.approx((2000 + 0) / 2)
    assert script.percentile(range(1, 101), 95) == 95
    other = script.Result(4, *[1.0] * 6)
    assert script.throughput_ratio([r, r, other], [other, r, other]) == 1
    row = script.table_row("ik", 1, 4, r, script.throughput_ratio([r], [other]))
    assert row.startswith("| ik | 1 | 4 | 8 | 2.00 |") and "|  | 250 |" in row


@pytest.mark.parametrize("n_broken", [1, 2])
def test_answers_that_break_off(script: ModuleType, capsys: pytest.CaptureFixture[str], n_broken: int) -> None:
    last = json.dumps({"tokens_predicted": 1, "timings": {"prompt_ms": 1, "predicted_ms": 1}}).encode()
    whole = chunked(b"data: " + last + b"\n\n")
    n = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n
        n += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole if n > n_broken else chunked(b'data: {"content":"a"}\n\n'))
        writer.close()

    async def run() -> list[object]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            answers, _ = await script.load(server.sockets[0].getsockname()[1], [b"GET / HTTP/1.1\r\n\r\n"] * 20, 1)
        return list(answers)

    if n_broken == 1:
        assert len(asyncio.run(run())) == 19
        assert (
            "1 of 20 answers broke off; the first: not a whole answer (KeyError('timings'))" in capsys.readouterr().err
        )
    else:
        with pytest.raises(SystemExit, match="2 of 20 answers broke off"):
            asyncio.run(run())


@pytest.mark.slow  # a whole measurement, with a server
def test_a_run(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ik = f"{sys.executable} -m ikcli"
    command = ["--ik", ik, "-np", "2", "--clients", "1,3", "-p", "8", "-n", "4", "-r", "1", "--requests", "3"]
    assert script.main([*command, "--", "--no-webui"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("| ik | 2 | 1 |") and lines[-1].startswith("| ik | 2 | 3 |")
    assert script.main([*command, "--before", ik]) == 0
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [row[1:4] for row in rows] == [[name, "2", n] for n in ("1", "3") for name in ("ik", "before")]
    assert [bool(row[5]) for row in rows] == [True, False] * 2
