"""`--covariance self`: second moments that `ik quantize` makes itself, for the time of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.config_fleet import BatchConfig
from ikcli.errors import IkError, UsageError

if TYPE_CHECKING:
    from ikcli.quant.imatrix_file import Imatrix

SELF = "self"


def check_fleet(fleet: BatchConfig) -> None:
    """UsageError for workers that would not see the file."""
    if fleet.ray not in (None, "local"):
        raise UsageError(
            "--covariance self makes its file on this machine only; for workers on others make it with ik imatrix "
            "--random-tokens 16384 --covariance FILE, and copy it to all of them"
        )


@contextmanager
def covariance_file(
    given: str | None, source: str, output: str, n_tokens: int, n_threads: int, overrides: tuple[str, ...]
) -> Iterator[str | None]:
    """The file that --covariance stands for; with `self` one is made beside `output`, and is gone afterwards.

    UnsupportedError with the way out if the model at `source` does not run here.
    """
    if given != SELF:
        yield given
        return
    from ikcli.eval.random_tokens import write_self_covariance

    folder = Path(output).absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=".ik-moments-", dir=folder if folder.is_dir() else None) as temporary:
            path = Path(temporary) / "self.gguf"
            with _way_out():
                write_self_covariance(Path(source), path, n_tokens, n_threads, overrides)
            yield str(path)
    except OSError as problem:
        raise IkError(f"--covariance self: {problem}") from None


@contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except IkError as problem:
        raise type(problem)(f"--covariance self: the model must run for it: {problem}") from None


def planned_data(source: str, n_tokens: int, overrides: tuple[str, ...]) -> tuple[str, Imatrix]:
    """For --preflight and --dry-run: that the model can be run, and the data there will be; reads no weights."""
    from ikcli.eval.random_tokens import planned

    with _way_out():
        n_bytes, imatrix = planned(Path(source), overrides)
    return f"self: the model is run on {n_tokens} random tokens first, with {n_bytes / 2**30:.2f} GiB of RAM", imatrix
