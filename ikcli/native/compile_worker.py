"""Compile kernels to object files: `python -m ikcli.native.compile_worker FOLDER`, one kernel per input line.

Numba compiles the code without its Python wrappers, so that the object file needs nothing of Numba at run time:
int32 status = f(retptr, excptr, int64 ...). Each finished kernel is announced by a line on stdout.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from ikcli.native import jit
from ikcli.native.kernel_cache import KernelKey, pack_entry

_COLLECT_EVERY = 16  # kernels; each leaves about 20 MB of garbage


def compile_one(key: KernelKey) -> bytes:
    """Return the contents of the cache file of one kernel."""
    module = importlib.import_module(key.full_module)
    symbol, code = jit.compile_to_object(*described(getattr(module, key.factory)(*key.args)))
    return pack_entry(symbol, code)


def described(made: Any) -> tuple[Any, Any, bool]:
    """Normalize a factory's result: a function of three int64 or (function, arguments, whether it returns int64)."""
    return made if isinstance(made, tuple) else (made, 3, False)


def main() -> None:
    directory = Path(sys.argv[1])
    gc.disable()  # a tenth of the time would go into looking for garbage among what Numba keeps
    for count, line in enumerate(sys.stdin, 1):
        key = KernelKey.of_line(line)
        data = compile_one(key)
        temporary = directory / f".{key.file_name}.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.replace(directory / key.file_name)
        print(key.text, flush=True)
        if count % _COLLECT_EVERY == 0:
            gc.collect()
    os._exit(0)  # the end of the interpreter, which frees all that Numba made, takes a second or two


if __name__ == "__main__":
    main()
