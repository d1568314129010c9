"""HellaSwag, Winogrande and multiple choice: task files, scores against a direct computation, printed lines."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_session import FakeSession, FakeTokenizer

from ikcli.cli.parser import ModelRun
from ikcli.commands import perplexity
from ikcli.errors import FormatError, IkError, NonFiniteError, UsageError
from ikcli.measure import choices
from ikcli.measure.choice_tasks import (
    Question,
    _Random,
    read_hellaswag,
    read_multiple_choice,
    read_winogrande,
    tokenized,
)
from ikcli.settings.measure import PerplexityConfig
from ikcli.settings.prompt import PromptConfig
from ikcli.settings.run import RunConfig, default_model

N_VOCAB = 8


def encode(text: str) -> list[int]:
    return FakeTokenizer().encode(text)


def packed(tasks: Sequence[tuple[str, Sequence[str], Sequence[int]]]) -> bytes:
    """The binary file of multiple-choice tasks."""

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    found = []
    for question, answers, labels in tasks:
        mc1 = struct.pack("<I", len(answers)) + b"".join(map(text, answers)) + struct.pack(f"<{len(labels)}i", *labels)
        found.append(text(question) + mc1 + struct.pack("<I", 0))
    at = 4 + 4 * len(found) + np.cumsum([0, *map(len, found)])[:-1]
    return struct.pack("<I", len(found)) + at.astype("<u4").tobytes() + b"".join(found)


def test_random_numbers_are_those_of_cpp() -> None:
    random = _Random()  # made with std::mt19937 rng(1) and libstdc++
    assert [random.below(n) for n in (7, 6, 5, 100, 10042, 1000000, 3000000000)] == [2, 5, 3, 93, 1, 128124, 440267677]
    assert [random.scaled(n) for n in (7, 1267, 817)] == [1, 116, 324]


def test_hellaswag_file() -> None:
    text = "\n".join(f"context {i}\n{i % 4}\na{i}\nb{i}\nc{i}\nd{i}" for i in range(7))
    found = read_hellaswag(text, "tasks.txt", 3)
    assert [q.begin for q in found] == ["context 2", "context 6", "context 4"]
    assert found[0] == Question("context 2", (" a2", " b2", " c2", " d2"), frozenset({2}))
    assert len(read_hellaswag(text, "tasks.txt", 400)) == 7
    with pytest.raises(FormatError, match=r"tasks\.txt: 43 lines are not six per task"):
        read_hellaswag(text + "\n", "tasks.txt", 3)
    with pytest.raises(FormatError, match='line 2 is "four"'):
        read_hellaswag("c\nfour\na\nb\nc\nd", "tasks.txt", 3)


def test_winogrande_file() -> None:
    text = '0,Sarah saw _ there.,Tom,Max,2\n\n1,"Well, _ left",a cat,a dog,1\n'
    first, second = read_winogrande(text, "w.csv", 0)
    assert first == Question("Sarah saw ", ("Tom", "Max"), frozenset({1}), " there.")
    assert second == Question("Well, ", ("a cat", "a dog"), frozenset({0}), " left")
    many = "\n".join(f"{i},{i} _ b,x,y,1" for i in range(7))
    assert [q.begin for q in read_winogrande(many, "w.csv", 2)] == ["2 ", "5 "]
    for bad in ("0,no gap,a,b,1", "0,a _ b,x,y,3", "0,a _ b,x,1"):
        with pytest.raises(FormatError, match=r"w\.csv: line 1 is not"):
            read_winogrande(bad, "w.csv", 0)


def test_multiple_choice_file() -> None:
    data = packed([("q0", ["a", "bé"], [0, 1]), ("q1", ["c", "d", "e"], [1, 0, 1]), ("q2", ["f"], [1])])
    found = read_multiple_choice(data, "mc.bin", 0)
    assert found[0] == Question("q0", (" a", " bé"), frozenset({1}))
    assert found[1].right == frozenset({0, 2}) and found[2].variants == (" f",)
    assert read_multiple_choice(data, "mc.bin", 2) == [found[1], found[2]]
    for bad in (b"", data[:-9], b"text that is no such file at all", struct.pack("<I", 2**31) + data):
        with pytest.raises(FormatError, match=r"mc\.bin: the file is truncated"):
            read_multiple_choice(bad, "mc.bin", 0)
    for tasks, message in ([], "there are no tasks"), ([("q", ["a", ""], [1, 0])], "byte 8 has an empty"):
        with pytest.raises(FormatError, match=message):
            read_multiple_choice(packed(tasks), "mc.bin", 0)


def test_what_is_scored() -> None:
    task = tokenized(Question("ab", (" c", " dcd"), frozenset({0})), encode)
    assert [(c.first, c.stop) for c in task.choices] == [(4, 5), (4, 7)]  # bos, a, b and the blank are common
    one_inside_the_other = tokenized(Question("ab", (" c", " ccc"), frozenset({0})), encode)
    assert [(c.first, c.stop) for c in one_inside_the_other.choices] == [(4, 5), (5, 7)]
    # What follows the choice, without the last token; or the choice too, where little follows it.
    long = tokenized(Question("ab ", ("c", "dd"), frozenset({0}), " fgh."), encode)
    assert [(c.first, c.stop) for c in long.choices] == [(5, 9), (6, 10)]
    short = tokenized(Question("ab ", ("c", "dd"), frozenset({0}), "."), encode)
    assert [(c.first, c.stop) for c in short.choices] == [(4, 5), (4, 6)]


@pytest.mark.parametrize("n_seq", [1, 3, 4, 16])
def test_scores_are_means_of_log_probabilities(rng: np.random.Generator, n_seq: int) -> None:
    table = rng.normal(0, 2, (N_VOCAB, N_VOCAB)).astype(np.float32)
    log_p = table.astype(np.float64) - np.log(np.exp(table.astype(np.float64)).sum(1, keepdims=True))
    questions = [
        Question("abc", (" d", " efg", " aa", " b"), frozenset({1})),
        Question("f", (" eeee", " dacb"), frozenset({0})),
        Question("gg ", ("a", "bc"), frozenset({1}), " defg."),
    ]
    tasks = [tokenized(q, encode) for q in questions]
    session = FakeSession(table, n_ctx=64 * n_seq, n_seq_max=n_seq, n_batch=64)
    seen: list[int] = []
    result = choices.run(session, tasks, on_task=lambda i, score: seen.append(i))
    for task, score in zip(tasks, result.tasks, strict=True):
        for choice, value in zip(task.choices, score.log_probs, strict=True):
            steps = range(choice.first, choice.stop)
            expected = np.mean([log_p[choice.tokens[i - 1], choice.tokens[i]] for i in steps])
            assert value == pytest.approx(expected, abs=1e-5)
        assert score.best == np.argmax(score.log_probs) and score.correct == (score.best in task.right)
    assert seen == [0, 1, 2]
    assert result.n_correct == sum(score.correct for score in result.tasks)
    assert result.accuracy == result.n_correct / 3 and result.chance == 3 / 8


def test_equal_choices() -> None:
    task = tokenized(Question("ab", (" c", " c"), frozenset({0})), encode)
    session = FakeSession(np.zeros((N_VOCAB, N_VOCAB), np.float32), n_seq_max=2)
    assert choices.run(session, [task]).tasks[0].best == 0
    assert choices.run(session, [task], last_wins=True).tasks[0].best == 1


def test_tasks_that_cannot_be_scored() -> None:
    task = tokenized(Question("ab", (" c", " d" * 20), frozenset({0})), encode)
    table = np.zeros((N_VOCAB, N_VOCAB), np.float32)
    with pytest.raises(IkError, match="task 1 has 43 tokens, more than the context of 16; raise -c"):
        choices.run(FakeSession(table, n_ctx=32, n_seq_max=2), [task])
    with pytest.raises(NonFiniteError, match="task 1 gives logits that are not finite"):
        choices.run(FakeSession(table * np.nan, n_seq_max=2), [task])


def config_for(path: Path, **options: object) -> RunConfig:
    return RunConfig(
        command="perplexity", model=default_model(), n_ctx=64, n_batch=256, n_threads=2, warmup=False,
        prompt=PromptConfig(file=path), perplexity=PerplexityConfig(**options),  # type: ignore[arg-type]
    )  # fmt: skip


def test_command_prints_hellaswag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hs.txt"
    path.write_text("def add(a, b):\n1\nzebra quantum\nreturn a + b\nxyzzy plugh\n& % ( )\n" * 2)
    assert perplexity.run(ModelRun(config_for(path, hellaswag=True), planner=None)) == 0
    assert capsys.readouterr().out == "\ntask\tacc_norm\n1\t100.00000000\n2\t100.00000000\n\n"


def test_command_prints_winogrande(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.csv"
    path.write_text("0,The list _ was sorted by the function.,items,zq,1\n" * 100)
    assert perplexity.run(ModelRun(config_for(path, winogrande=True), planner=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    number, percent, rest = lines[99].split("\t")
    first, second, best, answer = rest.split()
    assert (number, answer) == ("100", "1") and best == ("1" if float(first) > float(second) else "2")
    assert percent == ("100.0000" if best == "1" else "0.0000")
    assert lines[100:] == ["", f"Final Winogrande score(100 tasks): {percent} +/- 0.0000"]


def test_command_prints_multiple_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mc.bin"
    path.write_bytes(packed([("def add(a, b):", ["return a + b", "zebra quantum"], [1, 0])] * 2))
    assert perplexity.run(ModelRun(config_for(path, multiple_choice=True), planner=None)) == 0
    assert capsys.readouterr().out == (
        "\ntask\tacc_norm\n1\t100.00000000\n2\t100.00000000\n\n Final result: 100.0000 +/- 0.0000\n"
        "Random chance: 50.0000 +/- 50.0000\n\n"
    )


def test_command_line_that_makes_no_sense(tmp_path: Path) -> None:
    config = config_for(tmp_path / "no.txt", hellaswag=True, winogrande=True)
    with pytest.raises(UsageError, match="--hellaswag and --winogrande exclude each other"):
        perplexity.run(ModelRun(config, planner=None))
    config = RunConfig(command="perplexity", perplexity=PerplexityConfig(multiple_choice=True))
    with pytest.raises(UsageError, match="--multiple-choice needs a file with tasks"):
        perplexity.run(ModelRun(config, planner=None))
    with pytest.raises(IkError, match=r"no\.txt"):
        perplexity.run(ModelRun(config_for(tmp_path / "no.txt", hellaswag=True), planner=None))


def test_winogrande_scores_of_the_reference(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean log-probabilities of ik_llama.cpp's llama-perplexity --winogrande, on a CPU without flash attention."""
    path = tmp_path / "w.csv"
    path.write_text(
        "0,Lily gave the ball to Tom because _ wanted to play with it.,Lily,Tom,2\n"
        '1,"The dog ran after the cat, but _ was too fast for him.",the dog,the cat,2\n'
        "2,Mom told Max that _ had to go to bed.,Mom,Max,2\n"
    )
    model = shared_dir / "golden" / "models" / "stories260K-d256.f32.gguf"
    config = replace(config_for(path, winogrande=True), model=model, flash_attn=False)
    assert perplexity.run(ModelRun(config, planner=None)) == 0  # type: ignore[arg-type]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[:3]]
    expected = [(-1.040155, -1.122410, "1"), (-1.258982, -1.297807, "1"), (-1.882591, -1.820134, "2")]
    for row, (first, second, best) in zip(rows, expected, strict=True):
        assert float(row[2]) == pytest.approx(first, abs=1e-3) and float(row[3]) == pytest.approx(second, abs=1e-3)
        assert row[4] == best
