"""Initial settings of the web page (`--ui-config`), under our page's names and llama-server's."""

from __future__ import annotations

import json
from typing import Any

from ikcli.errors import UsageError
from ikcli.server.http.params import option_text
from ikcli.settings.sampling import sampling_values
from ikcli.settings.server import ServerConfig

_NUMBERS = ("max_tokens", "reasoning_budget_tokens", "seed", *(f.name for f, about in sampling_values() if about.page))
_TEXTS = ("system", "reasoning", "samplers", "stop", "extra")
_SAME = {"systemMessage": "system", "typ_p": "typical_p", "custom": "extra", "customJson": "extra"}
FILE = "ui-config.json"
"""Path where the page reads them."""


def page_settings(server: ServerConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the settings by the page's names, and the unknown keys.

    Raise UsageError if the settings cannot be read.
    """
    option = "--ui-config" if server.ui_config_file is None else f"--ui-config-file {server.ui_config_file}"
    text = option_text(server.ui_config, server.ui_config_file, "settings of the web page")
    if not text.strip():
        return {}, []
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{option} is not JSON: {e}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{option} must be a JSON object")
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in given.items():
        name = _SAME.get(key, key)
        if name in (*_NUMBERS, *_TEXTS):
            found[name] = _setting(option, key, value)
        else:
            unknown.append(key)
    return found, unknown


def _setting(option: str, key: str, value: Any) -> str | float:
    """Return a value in the page's form; empty text means not set."""
    name = _SAME.get(key, key)
    if name in _NUMBERS:
        if value is None or value == "":
            return ""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{option}: {key} must be a number")
        return value
    if name == "samplers" and isinstance(value, list):
        value = ";".join(map(str, value))
    if name == "stop" and isinstance(value, list):
        value = "\n".join(map(str, value))
    if name == "extra" and isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise UsageError(f"{option}: {key} must be a text")
    return value
