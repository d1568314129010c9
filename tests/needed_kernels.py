"""The kernels that the default tests need: a whole run compiles them beforehand, on all cores, like ones together.

`data/kernels.txt` names them, with the instruction set for which they are chosen, and then files of GPU kernels, which
are emulated; `pytest --write-kernels` writes it. What it lacks is compiled when a test asks for it, as kernels are on
machines of another instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulated_kernels

from ikcli.errors import IkError
from ikcli.native import isa
from ikcli.native.compile_pool import compile_kernels
from ikcli.native.kernel_cache import KernelKey, is_cached
from ikcli.native.kernel_library import KernelLibrary

LIST = Path(__file__).parent / "data" / "kernels.txt"
_asked: set[str] = set()


def watch() -> None:
    """From now on remember what is asked of every library in this process."""
    require = KernelLibrary.require

    def watched(self: KernelLibrary, keys: Iterable[KernelKey], *args: object) -> None:
        keys = list(keys)
        _asked.update(key.line for key in keys if _is_ours(key))
        require(self, keys, *args)  # type: ignore[arg-type]

    KernelLibrary.require = watched  # type: ignore[method-assign]


def _is_ours(key: KernelKey) -> bool:
    """Whether nothing of it comes from a package that a test makes."""
    named = [a.partition(":")[0].split(",")[-1] for a in key.args if isinstance(a, str) and ":" in a]
    return all(module.startswith("ikcli.") for module in (key.full_module, *named))


def asked() -> set[str]:
    """Lines of what was asked for in this process."""
    return _asked | emulated_kernels.used


def _read() -> tuple[bool, set[str]]:
    """Whether the list is one for machines like this, and its lines."""
    head, *lines = LIST.read_text().splitlines()
    return head == isa.current().name, set(lines)


def lacking(asked: set[str]) -> set[str]:
    """What was asked for and is not in the list, if that is of use on this machine."""
    is_ours, lines = _read()
    return asked - lines if is_ours else set()


def listed() -> set[str]:
    """Lines of the list that are of use on this machine."""
    is_ours, lines = _read()
    return {line for line in lines if is_ours or _is_file(line)}


def _is_file(line: str) -> bool:
    return line.endswith(".cu")


def write(lines: Iterable[str]) -> None:
    LIST.write_text("\n".join([isa.current().name, *sorted(lines, key=lambda line: (_is_file(line), line))]) + "\n")


def compile_listed(say: Callable[[str], object]) -> None:
    """Compile what is missing; what is done, or cannot be, is said."""
    lines = listed()
    files = {line for line in lines if _is_file(line)} if emulated_kernels.compiler_missing() is None else set[str]()
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(emulated_kernels.compile_files, files, say)
        _compile_kernels([KernelKey.of_line(line) for line in sorted(lines) if not _is_file(line)], say)
        done.result()


def _compile_kernels(keys: Iterable[KernelKey], say: Callable[[str], object]) -> None:
    missing = [key for key in keys if not is_cached(key)]
    if not missing:
        return
    say(f"kernels that are compiled first: {len(missing)}")
    try:
        compile_kernels(missing)
    except IkError as e:
        say(f"not all kernels of {LIST.name} can be compiled; pytest --write-kernels makes it anew ({e})")
