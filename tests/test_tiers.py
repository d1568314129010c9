"""Which tests are slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers

from ikcli.gguf.constants import GGMLType as T


def test_listed_tests_are_there() -> None:
    """Their functions are."""
    for name in tiers.listed():
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}(" in (Path(__file__).parent / file).read_text(), name


def test_listed_tests_are_slow(request: pytest.FixtureRequest) -> None:
    """By name, and with any parameters; and encoders that are like another one."""
    marked: list[str] = []

    class Item:
        def __init__(self, nodeid: str, **params: object) -> None:
            self.nodeid, self.callspec = nodeid, SimpleNamespace(params=params)

        def add_marker(self, mark: object) -> None:
            assert mark == pytest.mark.slow
            marked.append(self.nodeid)

    one = min(n for n in tiers.listed() if "[" in n)
    whole = min(n for n in tiers.listed() if "[" not in n)
    names = [f"tests/{n}" for n in (one, whole, f"{whole}[1-2]", one.partition("[")[0], "test_tiers.py::test_x")]
    tiers.mark_listed([Item(n) for n in names])  # type: ignore[misc]
    assert marked == names[:3]
    marked.clear()
    for file, type in (("encode_x", T.IQ6_K), ("encode_x", T.IQ4_KS), ("quant_decode", T.IQ6_K)):
        tiers.mark_listed([Item(f"tests/test_{file}.py::test_x[{type}]", type=type)])  # type: ignore[list-item]
    assert marked == [f"tests/test_encode_x.py::test_x[{T.IQ6_K}]"]
    assert request.node.get_closest_marker("slow") is None
