"""Answers in progress by id, and the requests that a client may make about one while it runs."""

from __future__ import annotations

from collections.abc import Callable

from ikcli.server.http.budget import ReasoningControl


class Running:
    """The running answers by id, each with the control that ends its thinking.

    The control is None if the request did not set `reasoning_control`.
    """

    def __init__(self) -> None:
        self._controls: dict[str, ReasoningControl | None] = {}

    def enter(self, id: str, control: ReasoningControl | None) -> Callable[[], None]:
        """Register an answer that begins; return the function that removes it at its end."""
        self._controls[id] = control

        def leave() -> None:
            self._controls.pop(id, None)

        return leave

    def end_thinking(self, id: str) -> str:
        """End the thinking of answer `id`; return why that is impossible, or an empty text."""
        if id not in self._controls:
            return "no answer with this id is being written"
        control = self._controls[id]
        if control is None:
            return "the request did not set reasoning_control, or the chat template does not support thinking"
        control.end()
        return ""
