"""Call compiled encoder kernels through one library for all encoders, loaded on first use by any thread.

Kernels are plain functions of int64 addresses and numbers, made by factories (see `ikcli.native.kernel_cache`).
"""

from __future__ import annotations

import threading

from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import native_function, shared_library

_LIBRARY = shared_library()
_LOCK = threading.Lock()
_ADDRESSES: dict[KernelKey, int] = {}


def address(key: KernelKey) -> int:
    """Return the address of a kernel, compiled and loaded if necessary."""
    found = _ADDRESSES.get(key)
    if found is None:
        with _LOCK:
            if key not in _ADDRESSES:
                _LIBRARY.require([key])
                _ADDRESSES[key] = _LIBRARY[key]
            found = _ADDRESSES[key]
    return found


def run(key: KernelKey, *args: int) -> int:
    """Run a kernel, without the GIL; return its int64 result (0 if it has none)."""
    return native_function(address(key), len(args))(*args)
