"""Functions and classes named by text, `module:attribute`, and imported on first use.

Tables that all layers read (tensor types) refer in this way to definitions in later layers and in other packages.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def load(reference: str) -> Any:
    """Import what `module:attribute` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
