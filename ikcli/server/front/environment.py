"""What the processes behind a port are told by their front, and what they are not told: keys of clients above all."""

from __future__ import annotations

import os

from ikcli.settings.option import iter_options
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

GPUS = "CUDA_VISIBLE_DEVICES"
_OPTIONS = "LLAMA_ARG_"
OF_THE_FRONT = frozenset(
    "server." + name
    for name in ("host", "port", "api_key", "api_key_file", "keys", "timeout", "threads_http", "metrics", "path",
                 "log_format", "webui", "ui", "api_prefix", "ssl_key_file", "ssl_cert_file", "shutdown_timeout",
                 "cors_origins", "reuse_port", "cors_methods", "cors_headers", "cors_credentials", "ui_config",
                 "ui_config_file")
) | {"log_file"}  # fmt: skip
"""Fields that are about the port in front, not about the processes behind it."""


def options_behind(server: ServerConfig) -> list[str]:
    """Return options of every process: what the front does is switched off there."""
    return [
        f"--log-format={server.log_format}",
        "--no-webui",
        "--metrics",
        f"--timeout={server.timeout}",
        f"--shutdown-timeout={server.shutdown_timeout}",
    ]


def environment_behind(prefix: str) -> dict[str, str]:
    """This program's environment without variables of `OF_THE_FRONT`, and without those that begin with `prefix`."""
    ours = {name for bound in iter_options(RunConfig) if bound.path in OF_THE_FRONT for name in bound.option.variables}
    return {name: text for name, text in os.environ.items() if name not in ours and not name.startswith(prefix)}


def plain_environment() -> dict[str, str]:
    """Return that of this process without options, which replicas get as arguments, and without keys of clients."""
    return environment_behind(_OPTIONS)
