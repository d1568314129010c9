"""Options and environment of the processes behind a front. Client keys and options of the port stay out."""

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
"""Options of the port in front, which do not concern the processes behind it."""


def options_behind(server: ServerConfig) -> list[str]:
    """Return the options common to all processes; they switch off what the front does itself."""
    return [
        f"--log-format={server.log_format}",
        "--no-webui",
        "--metrics",
        f"--timeout={server.timeout}",
        f"--shutdown-timeout={server.shutdown_timeout}",
    ]


def environment_behind(prefix: str) -> dict[str, str]:
    """Return the environment without the variables of `OF_THE_FRONT` and without those starting with `prefix`."""
    ours = {name for bound in iter_options(RunConfig) if bound.path in OF_THE_FRONT for name in bound.option.variables}
    return {name: text for name, text in os.environ.items() if name not in ours and not name.startswith(prefix)}


def plain_environment() -> dict[str, str]:
    """Return the environment without options (replicas get them as arguments) and without client keys."""
    return environment_behind(_OPTIONS)
