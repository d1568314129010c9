"""Task files of HellaSwag, Winogrande and multiple-choice tests, in the formats of llama.cpp's `perplexity`.

HellaSwag: six lines per task (context, index of the right ending, four endings). Winogrande: CSV lines `index,sentence
with _,choice 1,choice 2,1 or 2`. Multiple choice: a binary file with the u32 number of tasks and the u32 position of
each; a task is its question and two lists of labelled answers, of which the first is used (the right answer has label
1). Subsets are drawn with llama.cpp's random numbers.
"""

from __future__ import annotations

import csv
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ikcli.errors import FormatError
from ikcli.measure.protocol import TokenIds

T = TypeVar("T")
Encode = Callable[[str], Sequence[int]]
MOST_ANSWERS = 100
MIN_TRAILING = 3  # Winogrande: with more tokens behind the choice, the choice itself is not scored


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """A text of which tokens first..stop-1 are scored."""

    tokens: TokenIds
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChoiceTask:
    """Texts to choose from; `right` holds the indices of the right ones."""

    choices: tuple[TaskChoice, ...]
    right: frozenset[int]


@dataclass(frozen=True, slots=True)
class Question:
    """A task before tokenization: common beginning, the choices, and a common end."""

    begin: str
    variants: tuple[str, ...]
    right: frozenset[int]
    end: str = ""


class _Random:
    """C++'s mt19937 with seed 1."""

    def __init__(self) -> None:
        self._numbers = np.random.RandomState(1)

    def _next(self) -> int:
        return int(self._numbers.randint(0, 2**32, dtype=np.uint32))

    def below(self, n: int) -> int:
        """Draw as libstdc++'s `uniform_int_distribution(0, n - 1)`: the upper half of a product, rejecting low ones."""
        while True:
            product = self._next() * n
            if product % 2**32 >= 2**32 % n:
                return product >> 32

    def scaled(self, n: int) -> int:
        """Return a float32 fraction of n."""
        fraction = np.float32(2.0**-32) * np.float32(self._next())
        return min(int(fraction * np.float32(n)), n - 1)


def read_hellaswag(text: str, source: str, n_tasks: int) -> list[Question]:
    """Return at most n_tasks tasks in random order."""
    lines = text.split("\n")
    if len(lines) % 6:
        raise FormatError(
            f"{source}: {len(lines)} lines are not six per task (context, index of the right ending, four endings)"
        )
    rest = list(range(len(lines) // 6))
    random, found = _Random(), []
    for _ in range(min(n_tasks, len(rest))):
        at = 6 * rest.pop(random.below(len(rest)))
        label = lines[at + 1].strip()
        if label not in ("0", "1", "2", "3"):
            raise FormatError(f'{source}: line {at + 2} is "{label[:40]}"; it should be the index of an ending, 0 to 3')
        endings = tuple(f" {line}" for line in lines[at + 2 : at + 6])
        found.append(Question(lines[at], endings, frozenset({int(label)})))
    return found


def read_winogrande(text: str, source: str, n_tasks: int) -> list[Question]:
    """Return all tasks in order, or n_tasks (if above 0) of them in random order."""
    found = [_winogrande(row, source, i + 1) for i, row in enumerate(csv.reader(text.split("\n"))) if row]
    return _subset(found, n_tasks)


def _winogrande(row: list[str], source: str, line: int) -> Question:
    if len(row) != 5 or "_" not in row[1] or row[4].strip() not in ("1", "2"):
        raise FormatError(
            f'{source}: line {line} is not "index,sentence with _,choice 1,choice 2,answer", the answer being 1 or 2'
        )
    begin, _, end = row[1].partition("_")
    return Question(begin, (row[2], row[3]), frozenset({int(row[4]) - 1}), end)


def _subset(found: list[T], n_tasks: int) -> list[T]:
    """Return n_tasks (if above 0) of the items in random order, or all as they are."""
    if not 0 < n_tasks < len(found):
        return found
    random, chosen = _Random(), []
    for _ in range(n_tasks):
        at = random.scaled(len(found))
        chosen.append(found[at])
        found[at] = found[-1]
        found.pop()
    return chosen


def read_multiple_choice(data: bytes, source: str, n_tasks: int) -> list[Question]:
    """Return all tasks in order, or n_tasks (if above 0) of them in random order."""
    reader = _Bytes(data, source)
    n = reader.number()
    if not n:
        raise FormatError(f"{source}: there are no tasks in this file")
    positions = [reader.number() for _ in range(min(n, len(data) // 4))]
    if len(positions) < n:
        raise FormatError(f"{source}: the file is truncated, or not a file of multiple-choice tasks")
    if 0 < n_tasks < n:
        return [_Bytes(data, source, at).task() for at in _subset(positions, n_tasks)]
    return [reader.task() for _ in range(n)]


class _Bytes:
    """A cursor over the binary file."""

    def __init__(self, data: bytes, source: str, at: int = 0) -> None:
        self.data, self.source, self.at = data, source, at

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise FormatError(f"{self.source}: the file is truncated, or not a file of multiple-choice tasks")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def text(self) -> str:
        return self.take(self.number()).decode("utf-8", errors="surrogateescape")

    def answers(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        n = self.number()
        if n > MOST_ANSWERS:
            raise FormatError(f"{self.source}: a task has {n} answers; at most {MOST_ANSWERS} are possible")
        texts = tuple(self.text() for _ in range(n))
        return texts, struct.unpack(f"<{n}i", self.take(4 * n))

    def task(self) -> Question:
        begin = self.at
        question, (texts, labels), _ = self.text(), self.answers(), self.answers()
        if not question or not texts or not all(texts):
            raise FormatError(f"{self.source}: the task at byte {begin} has an empty question or answer")
        right = frozenset(i for i, label in enumerate(labels) if label == 1)
        return Question(question, tuple(f" {text}" for text in texts), right)


def tokenized(question: Question, encode: Encode) -> ChoiceTask:
    """Tokenize the texts of a task. Tokens after the common prefix of all texts are scored.

    With a common end (Winogrande), the tokens after the choice are scored if there are enough of them, except the last.
    """
    texts = [question.begin + variant + question.end for variant in question.variants]
    tokens = [np.asarray(encode(text), np.int32) for text in texts]
    common = _common(tokens)
    firsts, stops = [min(common, len(t) - 1) for t in tokens], [len(t) for t in tokens]
    if question.end:
        if all(len(t) - common > MIN_TRAILING for t in tokens):
            firsts = [len(encode(question.begin + variant)) for variant in question.variants]
            firsts = [min(first, len(t) - 1) for first, t in zip(firsts, tokens, strict=True)]
        stops = [s - (s - first > 1) for s, first in zip(stops, firsts, strict=True)]
    choices = (TaskChoice(t, max(first, 1), s) for t, first, s in zip(tokens, firsts, stops, strict=True))
    return ChoiceTask(tuple(choices), question.right)


def _common(tokens: Sequence[TokenIds]) -> int:
    n = 0
    for column in zip(*(t.tolist() for t in tokens), strict=False):
        if len(set(column)) > 1:
            break
        n += 1
    return n
