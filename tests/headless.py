"""A headless browser for tests of pages; where there is none they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MS = 60_000
"""Milliseconds to wait for what is sure to come."""
_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium found: the page was not tested in a browser")
    with playwright.sync_playwright() as play:
        playwright.expect.set_options(timeout=MS)
        try:
            found = play.chromium.launch(executable_path=path, args=list(_ARGS), timeout=MS)
        except playwright.Error as problem:
            pytest.skip(f"{path} does not start, the page was not tested: {str(problem).splitlines()[0]}")
        yield found
        found.close()
