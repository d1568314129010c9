"""`--covariance self`: second moments that `ik quantize` makes itself, for the time of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.errors import IkError, UsageError
from ikcli.settings.fleet import BatchConfig

if TYPE_CHECKING:
    from ikcli.quant.imatrix_file import Imatrix
    from ikcli.quant.tool import ToolOptions

SELF = "self"


@contextmanager
def with_moments(
    options: Sequence[ToolOptions], source: str, output: str, n_tokens: int, fleet: BatchConfig, *, dry_run: bool
) -> Iterator[list[ToolOptions]]:
    """Yield the options with a temporary file, made once beside `output`, in place of `self`.

    A dry run assumes the data instead. Raises UnsupportedError, with the way out, if the model at `source` does not
    run here, UsageError for workers that would not see the file.
    """

    def filled(**data: Any) -> list[ToolOptions]:
        return [replace(o, **data) if o.covariance == SELF else o for o in options]

    if all(o.covariance != SELF for o in options):
        yield list(options)
        return
    n_threads, overrides = options[0].n_threads, options[0].overrides
    if dry_run:
        yield filled(covariance=None, assumed=planned_data(source, n_tokens, overrides)[1])
        return
    if fleet.ray not in (None, "local"):
        raise UsageError(
            "--covariance self makes its file on this machine only; for workers on others make it with ik imatrix "
            "--random-tokens 16384 --covariance FILE, and copy it to all of them"
        )
    from ikcli.imatrix.random_tokens import write_self_covariance

    folder = Path(output).absolute().parent
    with ExitStack() as stack:
        try:
            found = tempfile.TemporaryDirectory(prefix=".ik-moments-", dir=folder if folder.is_dir() else None)
            path = Path(stack.enter_context(found)) / "self.gguf"
            with _way_out():
                write_self_covariance(Path(source), path, n_tokens, n_threads, overrides)
        except OSError as problem:
            raise IkError(f"--covariance self: {problem}") from None
        yield filled(covariance=str(path))


@contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except IkError as problem:
        raise type(problem)(f"--covariance self: the model must run for it: {problem}") from None


def planned_data(source: str, n_tokens: int, overrides: tuple[str, ...]) -> tuple[str, Imatrix]:
    """Check that the model can be run, and describe the data it will give, without reading weights."""
    from ikcli.imatrix.random_tokens import planned

    with _way_out():
        n_bytes, imatrix = planned(Path(source), overrides)
    return f"self: the model is run on {n_tokens} random tokens first, with {n_bytes / 2**30:.2f} GiB of RAM", imatrix
