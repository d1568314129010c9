"""Conversations that are being answered, by the id of their answer: what a client may ask of one while it runs."""

from __future__ import annotations

from collections.abc import Callable

from ikcli.server.http.budget import ReasoningControl


class Running:
    """Ids with what ends their thinking; None if the request did not ask for that (`reasoning_control`)."""

    def __init__(self) -> None:
        self._controls: dict[str, ReasoningControl | None] = {}

    def enter(self, id: str, control: ReasoningControl | None) -> Callable[[], None]:
        """Note an answer that begins; the result notes its end."""
        self._controls[id] = control

        def leave() -> None:
            self._controls.pop(id, None)

        return leave

    def end_thinking(self, id: str) -> str:
        """Let the answer `id` begin; returns why that cannot be, or nothing."""
        if id not in self._controls:
            return "no answer with this id is being written"
        control = self._controls[id]
        if control is None:
            return "the request did not set reasoning_control, or its template knows no thinking"
        control.end()
        return ""
