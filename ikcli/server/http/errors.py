"""API errors: a status, a type and one sentence, as `{"error": {"code", "message", "type"}}`.

The types are llama-server's. Anthropic routes wrap the object with `"type": "error"`, as that API requires; Ollama
routes send the sentence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ikcli.server.http.jsontext import dump_bytes
from ikcli.server.slots.messages import Failure

Style = Literal["openai", "anthropic", "ollama"]
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """A request that cannot be served.

    `details` are further fields of the error object, `headers` those of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "",
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "server_error")
        self.details = dict(details or {})

    @classmethod
    def of(cls, failure: Failure) -> ApiError:
        """Return the error for a failed generation."""
        return cls(failure.status, failure.message, failure.type, failure.details)

    def body(self, style: Style = "openai") -> dict[str, Any]:
        """Return the JSON value of the response."""
        if style == "ollama":
            return {"error": self.message}
        error = {"code": self.status, "message": self.message, "type": self.type, **self.details}
        return {"type": "error", "error": error} if style == "anthropic" else {"error": error}

    def content(self, style: Style = "openai") -> bytes:
        """Return the JSON response as bytes."""
        return dump_bytes(self.body(style))


def style_of(path: str) -> Style:
    """Return the error style of the API that a path belongs to."""
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def bad_request(message: str) -> ApiError:
    """Return the error for a client's mistake (400)."""
    return ApiError(400, message)


def unsupported(message: str) -> ApiError:
    """Return the error for a valid request that this server or model cannot serve (501)."""
    return ApiError(501, message)
