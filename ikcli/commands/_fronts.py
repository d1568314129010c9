"""Options of `ik serve` that are about the port in front, not about the processes behind it."""

from __future__ import annotations

OF_THE_FRONT = frozenset(
    "server." + name
    for name in ("host", "port", "api_key", "api_key_file", "keys", "timeout", "threads_http", "metrics", "path",
                 "log_format", "webui", "ui", "api_prefix", "ssl_key_file", "ssl_cert_file", "shutdown_timeout",
                 "cors_origins")
)  # fmt: skip
