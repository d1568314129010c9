"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side; must be set before NumPy is imported
# Without bytecode every program that a test starts compiles ikcli anew, and every worker rewrites all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from ikcli.native.compile_pool import keep_workers  # noqa: E402

keep_workers()
_SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with golden data beside the checkout; tests that need it are skipped where it is absent."""
    if not (_SHARED / "golden").is_dir():
        pytest.skip("golden data not present beside the checkout")
    return _SHARED
