"""Functions and classes named by text, `module:attribute`, and imported when they are first used.

Tables that all layers read (tensor types) name things of later layers, and of other packages, in this way.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def load(reference: str) -> Any:
    """What `module:attribute` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
