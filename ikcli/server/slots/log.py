"""Log events of the engine: level, function, message and fields; the server formats them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Logger = Callable[[str, str, str, Mapping[str, object]], None]  # level (INFO, WARN, ERR, VERB), function, message, ...


def silent(level: str, function: str, message: str, fields: Mapping[str, object]) -> None:
    """Logs nothing."""
