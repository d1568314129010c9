"""`ik perplexity --hellaswag`, `--winogrande`, `--multiple-choice`: the lines of llama.cpp's `perplexity` tool."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from ikcli.cli.parser import ModelRun
from ikcli.errors import IkError, UsageError
from ikcli.log import log
from ikcli.measure import choices
from ikcli.measure.choice_tasks import (
    ChoiceTask,
    Question,
    read_hellaswag,
    read_multiple_choice,
    read_winogrande,
    tokenized,
)
from ikcli.measure.choices import TaskScore
from ikcli.measure.protocol import SessionLike
from ikcli.measure.text import load_text, raw_text, text_name
from ikcli.settings.run import RunConfig

MIN_COUNT_FOR_FINAL = 100  # tasks from which Winogrande has a final line


def run(run: ModelRun) -> int:
    """Score and print; return 130 after Ctrl-C."""
    config = run.config
    kind = kind_of(config)
    questions = _read(config, kind)
    log(f"{kind}: {len(questions)} tasks of {text_name(config)}")
    try:
        with closing(choices.open_choice_session(config, run.planner)) as session:
            tasks = [tokenized(question, session.tokenizer.encode) for question in questions]
            _run_and_print(session, tasks, kind, max(1, config.n_threads_batch or config.n_threads))
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


def kind_of(config: RunConfig) -> str:
    """Return the kind of test; raise UsageError if there are several, or no tasks to read."""
    p = config.perplexity
    given = {"--hellaswag": p.hellaswag, "--winogrande": p.winogrande, "--multiple-choice": p.multiple_choice}
    given["--kl-divergence"] = p.kl_divergence
    kinds = [name for name, wanted in given.items() if wanted]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join(kinds)} exclude each other; give one of them")
    if config.prompt.file is None and config.prompt.binary_file is None:
        raise UsageError(f"{kinds[0]} needs a file with tasks; give it with -f FILE")
    return kinds[0].removeprefix("--")


def _read(config: RunConfig, kind: str) -> list[Question]:
    p, source = config.perplexity, text_name(config)
    if kind == "multiple-choice":
        return read_multiple_choice(raw_text(config), source, p.multiple_choice_tasks)
    if kind == "winogrande":
        questions = read_winogrande(load_text(config), source, p.winogrande_tasks)
    else:
        questions = read_hellaswag(load_text(config), source, p.hellaswag_tasks)
    if not questions:
        raise IkError(f"{source}: the file has no tasks to score")
    return questions


def _run_and_print(session: SessionLike, tasks: Sequence[ChoiceTask], kind: str, n_threads: int) -> None:
    n_correct = 0

    def show(i: int, score: TaskScore) -> None:
        nonlocal n_correct
        n_correct += score.correct
        percent = 100 * n_correct / (i + 1)
        if kind == "winogrande":
            first, second = score.log_probs
            answer = score.best if score.correct else 1 - score.best
            print(f"{i + 1}\t{percent:.4f}\t{first:10.6f}  {second:10.6f}  {score.best + 1}  {answer + 1}", flush=True)
        else:
            print(f"{i + 1}\t{percent:.8f}", flush=True)

    if kind != "winogrande":
        print("\ntask\tacc_norm", flush=True)
    result = choices.run(session, tasks, last_wins=kind == "winogrande", n_threads=n_threads, on_task=show)
    print(end="\n" if kind != "multiple-choice" else "")
    n, mean, error = len(result.tasks), 100 * result.accuracy, 100 * result.error
    if kind == "winogrande" and n >= MIN_COUNT_FOR_FINAL:
        print(f"Final Winogrande score({n} tasks): {mean:.4f} +/- {error:.4f}")
    if kind == "multiple-choice":
        print(f"\n Final result: {mean:.4f} +/- {error:.4f}")
        print(f"Random chance: {100 * result.chance:.4f} +/- {100 * choices.share_error(result.chance, n):.4f}\n")
    sys.stdout.flush()
