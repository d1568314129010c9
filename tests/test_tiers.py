"""Which tests are slow."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiers


def test_listed_tests_are_there() -> None:
    """Their functions are."""
    for name in tiers.listed():
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}(" in (Path(__file__).parent / file).read_text(), name


def test_listed_tests_are_slow(request: pytest.FixtureRequest) -> None:
    """By name, and with any parameters."""
    marked: list[str] = []

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

        def add_marker(self, mark: object) -> None:
            assert mark == pytest.mark.slow
            marked.append(self.nodeid)

    one = min(n for n in tiers.listed() if "[" in n)
    whole = min(n for n in tiers.listed() if "[" not in n)
    names = [f"tests/{n}" for n in (one, whole, f"{whole}[1-2]", one.partition("[")[0], "test_tiers.py::test_x")]
    tiers.mark_listed([Item(n) for n in names])  # type: ignore[misc]
    assert marked == names[:3]
    assert request.node.get_closest_marker("slow") is None
