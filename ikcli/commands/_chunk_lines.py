"""Lines about a text that is evaluated in chunks, shared by perplexity, KL divergence and imatrix."""

from __future__ import annotations

from ikcli.measure.perplexity import PerplexityResult


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
