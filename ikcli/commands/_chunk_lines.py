"""Lines about a text that is evaluated in chunks, shared by perplexity, KL divergence and imatrix."""

from __future__ import annotations

import sys

from ikcli.log import log
from ikcli.measure.chunks import WindowCounts
from ikcli.measure.perplexity import ChunkScore, PerplexityResult


def eta_text(pass_seconds: float, n_chunk: int, n_seq: int) -> str:
    """Return `14.92 seconds per pass - ETA 34.85 minutes`, with hours above one hour."""
    seconds = int(pass_seconds * n_chunk / n_seq)
    hours, rest = divmod(seconds, 3600)
    return f"{pass_seconds:.2f} seconds per pass - ETA {f'{hours} hours ' if hours else ''}{rest / 60.0:.2f} minutes"


def final_line(result: PerplexityResult) -> str:
    """Return the line that log readers look for."""
    if not result.error > 0:
        return "Unexpected negative standard deviation of log(prob)"
    return (
        f"Final estimate: PPL over {result.n_chunks} chunks for n_ctx={result.n_ctx} "
        f"= {result.ppl:.4f} +/- {result.error:.5f}"
    )


class ChunkPrinter:
    """Prints running values on stdout as they come; after the first pass the estimated total time on stderr."""

    def __init__(self, windows: WindowCounts, output_type: int, n_workers: int = 1) -> None:
        self._windows = windows
        self._n_workers = n_workers
        self._output_type = output_type
        self._first = True

    def __call__(self, score: ChunkScore) -> None:
        if self._first:
            n_seq = self._windows.n_seq * self._n_workers
            log(f"perplexity: {eta_text(score.pass_seconds, self._windows.n_chunk, n_seq)}")
            self._first = False
        if self._output_type == 0:
            text = f"[{score.index + 1}]{score.ppl:.4f},"
        else:
            text = f"{score.start:8d}  {score.ppl:.4f}  {score.mean_nll:4f}  {score.mean_nll_error:4f}\n"
        sys.stdout.write(text)
        sys.stdout.flush()
