"""The list of kernels that a whole run of the tests compiles beforehand."""

from __future__ import annotations

from pathlib import Path

import emulated_kernels
import needed_kernels
import pytest

from ikcli.backends.cpu.threads import LAUNCH
from ikcli.errors import IkError
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey

FORMAT = "q8_0,ikcli.backends.cpu.kernels.formats_legacy:Q8_0,s32,32,34,0,1,1"


@pytest.mark.parametrize("key", [LAUNCH, KernelKey("matmul", "make_mul_mat", (FORMAT,)), KernelKey("m", "f", (1, "1"))])
def test_a_line_is_a_key(key: KernelKey) -> None:
    assert KernelKey.of_line(key.line) == key and "\n" not in key.line


def test_every_line_names_what_is_there() -> None:
    """Also on machines where the list is not used."""
    _, *lines = needed_kernels.LIST.read_text().splitlines()
    files = [line for line in lines if line.endswith(".cu")]
    kernels = lines[: -len(files)]
    assert lines == [*sorted(set(kernels)), *sorted(set(files))] and len(kernels) > 100
    root = Path(needed_kernels.__file__).parents[1]
    for key in map(KernelKey.of_line, kernels):
        source = root.joinpath(*key.full_module.split(".")).with_suffix(".py").read_text()
        assert f"def {key.factory}(" in source, key.line
    assert {*files} < {path.name for path in emulated_kernels.KERNELS.iterdir()}


def test_lists_of_other_machines_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for files of GPU kernels, which are the same."""
    monkeypatch.setattr(needed_kernels, "LIST", tmp_path / "kernels.txt")
    needed_kernels.write(["b c", "d.cu", "a c"])
    assert needed_kernels.LIST.read_text().splitlines()[1:] == ["a c", "b c", "d.cu"]
    assert needed_kernels.listed() == {"a c", "b c", "d.cu"}
    assert needed_kernels.lacking({"b c", "e.cu"}) == {"e.cu"}
    lesser = isa.ISA("lesser", "generic", "", frozenset())
    monkeypatch.setattr(isa, "current", lambda: lesser)
    assert needed_kernels.listed() == {"d.cu"} and needed_kernels.lacking({"e.cu"}) == set()
    said: list[str] = []
    needed_kernels.compile_listed(said.append)
    assert said == []


def test_what_cannot_be_compiled_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that has grown old must not keep the tests from running."""
    monkeypatch.setattr(needed_kernels, "LIST", tmp_path / "kernels.txt")
    needed_kernels.write([KernelKey("executor", "make_nothing").line])

    def fail(keys: list[KernelKey]) -> None:
        raise IkError(f"compiling kernels failed: {keys[0].factory}")

    monkeypatch.setattr(needed_kernels, "compile_kernels", fail)
    said: list[str] = []
    needed_kernels.compile_listed(said.append)
    assert said[0] == "kernels that are compiled first: 1"
    assert "--write-kernels" in said[1] and "make_nothing" in said[1]
