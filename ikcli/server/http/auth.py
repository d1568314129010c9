"""API keys: which paths require one, and constant-time comparison."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers

from ikcli.errors import UsageError
from ikcli.server.http.users import offered_keys
from ikcli.settings.server import ServerConfig
from ikcli.text_files import read_text

PUBLIC = frozenset({"/", "/health", "/v1/health", "/models", "/v1/models", "/api/tags", "/index.html", "/favicon.ico"})
"""Paths that require no key."""


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """Read the keys of --api-key (comma-separated) and --api-key-file (one per line, # comments)."""
    keys = [key.strip() for key in config.api_key.split(",")]
    if config.api_key_file is not None:
        lines = read_text(config.api_key_file, "--api-key-file").splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"{config.api_key_file} holds no API key; it needs one per line")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def allowed(keys: tuple[str, ...], headers: Headers) -> bool:
    """Return whether no key is required or the request carries a valid one."""
    if not keys:
        return True
    found = False
    for key in keys:
        for text in offered_keys(headers):
            found |= hmac.compare_digest(key.encode(), text.encode("utf-8", "surrogateescape"))
    return found


def is_public(path: str, static: frozenset[str]) -> bool:
    """Return whether a path is open to everybody; `static` holds the paths of the web page's files."""
    return path in PUBLIC or path in static


def key_summary(keys: tuple[str, ...]) -> str:
    """Return the keys as the log shows them."""
    if len(keys) == 1:
        return "api_key: ****" + (keys[0][-4:] if len(keys[0]) > 8 else "")
    return f"api_key: {len(keys)} keys loaded"


def private_file(path: Path | None, option: str) -> str | None:
    """Return the path of a file that an option names after checking that it exists."""
    if path is None:
        return None
    if not path.is_file():
        raise UsageError(f"{option} {path}: the file does not exist")
    return str(path)
