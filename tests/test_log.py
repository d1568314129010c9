"""Log lines: when they are printed."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ikcli.log import hushed, log, warn


def test_hushes_that_overlap_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """As of threads: the first one to begin is the first one to end."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(hushed())
    second.enter_context(hushed())
    first.close()
    log("still hushed")
    warn("heard")
    with hushed(False):
        log("hushed all the same")
    second.close()
    log("said")
    assert capsys.readouterr().err == "warning: heard\nsaid\n"
