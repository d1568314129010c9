"""The kernels that the default tests need: a whole run compiles them beforehand, on all cores, like ones together.

`data/kernels.txt` names them, with the instruction set for which they are chosen; `pytest --write-kernels` writes it.
What it lacks is compiled when a test asks for it, as on machines of another instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

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


def asked() -> list[str]:
    """Lines of the kernels asked for in this process."""
    return sorted(_asked)


def listed() -> list[str]:
    """Lines of the list, none on a machine of another instruction set."""
    head, *lines = LIST.read_text().splitlines()
    return lines if head == isa.current().name else []


def write(lines: Iterable[str]) -> None:
    LIST.write_text("\n".join([isa.current().name, *sorted(lines)]) + "\n")


def compile_listed(say: Callable[[str], object]) -> None:
    """Compile what is missing; what is done, or cannot be, is said."""
    missing = [key for key in map(KernelKey.of_line, listed()) if not is_cached(key)]
    if not missing:
        return
    say(f"kernels that are compiled first: {len(missing)}")
    try:
        compile_kernels(missing)
    except IkError as e:
        say(f"not all kernels of {LIST.name} can be compiled; pytest --write-kernels makes it anew ({e})")
