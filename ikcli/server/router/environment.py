"""What the processes behind a port are not told: options that are about the port itself, keys of clients above all."""

from __future__ import annotations

import os

from ikcli.settings.option import iter_options
from ikcli.settings.run import RunConfig

OF_THE_FRONT = frozenset(
    "server." + name
    for name in ("host", "port", "api_key", "api_key_file", "keys", "timeout", "threads_http", "metrics", "path",
                 "log_format", "webui", "ui", "api_prefix", "ssl_key_file", "ssl_cert_file", "shutdown_timeout",
                 "cors_origins", "reuse_port", "cors_methods", "cors_headers", "cors_credentials", "ui_config",
                 "ui_config_file")
) | {"log_file"}  # fmt: skip
"""Fields that are about the port in front, not about the processes behind it."""


def environment_behind(prefix: str) -> dict[str, str]:
    """This program's environment without variables of `OF_THE_FRONT`, and without those that begin with `prefix`."""
    ours = {name for bound in iter_options(RunConfig) if bound.path in OF_THE_FRONT for name in bound.option.variables}
    return {name: text for name, text in os.environ.items() if name not in ours and not name.startswith(prefix)}
