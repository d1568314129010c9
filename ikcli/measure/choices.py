"""HellaSwag, Winogrande, multiple choice: how often the right text has the highest log-probability per token.

The algorithm corresponds to llama.cpp's `perplexity` tool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ikcli.engine.plan.sizes import choices_session
from ikcli.engine.run.batch import Batch
from ikcli.errors import IkError, NonFiniteError
from ikcli.measure.choice_tasks import ChoiceTask, TaskChoice
from ikcli.measure.protocol import SessionLike
from ikcli.measure.stats import token_nll
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The mean log-probability per scored token of every choice, and the index of the best choice."""

    log_probs: tuple[float, ...]
    best: int
    correct: bool


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The share of tasks whose best choice is right, its standard error, and the share expected from guessing."""

    tasks: tuple[TaskScore, ...]
    n_correct: int
    accuracy: float
    error: float
    chance: float


def run(
    session: SessionLike,
    tasks: Sequence[ChoiceTask],
    *,
    last_wins: bool = False,
    n_threads: int = 1,
    on_task: Callable[[int, TaskScore], None] | None = None,
) -> ChoiceResult:
    """Score all tasks and report each to on_task in order. `last_wins`: among equally likely choices take the last.

    IkError names a task that does not fit the context, NonFiniteError one whose logits are not finite.
    """
    for i, task in enumerate(tasks):
        longest = max(len(choice.tokens) for choice in task.choices)
        if longest > session.n_ctx_seq:
            raise IkError(f"task {i + 1} has {longest} tokens, more than the context of {session.n_ctx_seq}; raise -c")
    scores: list[TaskScore] = []
    found: list[float] = []
    for value in _log_probs(session, [choice for task in tasks for choice in task.choices], n_threads):
        found.append(value)
        task = tasks[len(scores)]
        if len(found) < len(task.choices):
            continue
        if not all(math.isfinite(v) for v in found):
            raise NonFiniteError(
                f"task {len(scores) + 1} gives logits that are not finite; run again with --check-tensors"
            )
        order = range(len(found) - 1, -1, -1) if last_wins else range(len(found))
        best = max(order, key=found.__getitem__)
        scores.append(TaskScore(tuple(found), best, best in task.right))
        found = []
        if on_task is not None:
            on_task(len(scores) - 1, scores[-1])
    n, n_correct = len(scores), sum(score.correct for score in scores)
    accuracy, chance = n_correct / n, n / sum(len(task.choices) for task in tasks)
    return ChoiceResult(tuple(scores), n_correct, accuracy, share_error(accuracy, n), chance)


def share_error(p: float, n: int) -> float:
    """Return the standard error of a share p of n."""
    return math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan


def _log_probs(session: SessionLike, choices: Sequence[TaskChoice], n_threads: int) -> Iterator[float]:
    """Return the mean log-probability of each choice, decoding as many side by side as sequences and batch allow."""
    group: list[TaskChoice] = []
    for choice in choices:
        n_tokens = sum(len(c.tokens) for c in group) + len(choice.tokens)
        if group and (len(group) == session.n_seq_max or n_tokens > session.n_batch):
            yield from _score(session, group, n_threads)
            group = []
        group.append(choice)
    if group:
        yield from _score(session, group, n_threads)


def _score(session: SessionLike, group: Sequence[TaskChoice], n_threads: int) -> list[float]:
    lengths = [len(c.tokens) - 1 for c in group]  # the last token predicts nothing
    pos = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    seq = np.repeat(np.arange(len(group), dtype=np.int32), lengths)
    wanted = np.concatenate([(np.arange(n) >= c.first - 1) & (np.arange(n) < c.stop - 1) for n, c in zip(
        lengths, group, strict=True)])  # fmt: skip
    targets = np.concatenate([c.tokens[c.first : c.stop] for c in group])
    session.clear()
    logits = session.decode(Batch(np.concatenate([c.tokens[:-1] for c in group]), pos, seq, wanted))
    nll = token_nll(logits, targets, n_threads)
    ends = np.cumsum([c.stop - c.first for c in group])[:-1]
    return [-float(part.mean()) for part in np.split(nll, ends)]


def open_choice_session(config: RunConfig, planner: Planner | None = None) -> SessionLike:
    """Open a session for texts of at most -c tokens."""
    from ikcli.engine.run.opening import open_session

    settings, sizes = choices_session(config)
    session: SessionLike = open_session(settings, n_ctx=sizes.n_ctx, n_seq_max=sizes.n_seq, planner=planner)
    return session
