"""Log events of the engine: level, function, message and fields; the server formats them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ikcli.engine.run.session_log import rate, rate_text
from ikcli.server.slots.messages import RequestTimings

Logger = Callable[[str, str, str, Mapping[str, object]], None]  # level (INFO, WARN, ERR, VERB), function, message, ...


def silent(level: str, function: str, message: str, fields: Mapping[str, object]) -> None:
    """Log nothing."""


def log_timings(log: Logger, ids: Mapping[str, object], t: RequestTimings, **more: object) -> None:
    """Log the end of a request: the total with `more`, then prompt and generation with their rates.

    Texts and fields are those of llama-server, which users quote and programs parse. The total comes first, so that the
    two lines with the rates stand together at the end.
    """
    total = t.prompt_ms + t.predicted_ms
    log("INFO", "print_timings", f"          total time = {total:10.2f} ms", {
        **ids, "t_prompt_processing": round(t.prompt_ms, 3), "t_token_generation": round(t.predicted_ms, 3),
        "t_total": round(total, 3), "n_cached": t.cache_n, **more,
    })  # fmt: skip
    log_prompt_time(log, ids, t.prompt_n, t.prompt_ms)
    log("INFO", "print_timings", f"generation eval time = {rate_text(t.predicted_ms, t.predicted_n, 'runs  ')}", {
        **ids, "t_token_generation": round(t.predicted_ms, 3), "n_decoded": t.predicted_n,
        **_rates(t.predicted_ms, t.predicted_n),
    })  # fmt: skip


def log_prompt_time(log: Logger, ids: Mapping[str, object], n: int, ms: float, **more: object) -> None:
    """Log the time that `n` tokens of a prompt took."""
    log("INFO", "print_timings", f"prompt eval time     = {rate_text(ms, n, 'tokens')}", {
        **ids, "t_prompt_processing": round(ms, 3), "n_prompt_tokens_processed": n, **_rates(ms, n), **more,
    })  # fmt: skip


def _rates(ms: float, n: int) -> dict[str, float]:
    per_token, per_second = rate(ms, n)
    return {"t_token": round(per_token, 3), "n_tokens_second": round(per_second, 3)}
