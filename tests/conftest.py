"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side; must be set before NumPy is imported
# No client of a test reads the authorities of the world, which takes longer than what it asks for.
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
os.environ.pop("SSL_CERT_FILE", None)
# Without bytecode every program that a test starts compiles ikcli anew, and every worker rewrites all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import needed_kernels  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tiers  # noqa: E402

from ikcli.native.compile_pool import keep_workers  # noqa: E402

_SHARED = Path(__file__).resolve().parents[2] / "shared"
_LONGEST = 1800  # seconds
_asked: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-kernels", action="store_true", help=f"write {needed_kernels.LIST.name} after a whole run")


def _is_whole(config: pytest.Config) -> bool:
    """Whether all default tests run, not some of them."""
    option = config.option
    some = option.keyword or option.collectonly or option.markexpr != "not slow"
    return config.args_source is not pytest.Config.ArgsSource.ARGS and not some


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark_listed(items)


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: searching it for garbage again and again took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any test, and before xdist starts its processes."""
    needed_kernels.watch()
    if not hasattr(session.config, "workerinput") and _is_whole(session.config):
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        say = reporter.write_line if reporter else print
        needed_kernels.compile_listed(say)
    keep_workers(1 if "PYTEST_XDIST_WORKER" in os.environ else None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of xdist has ended."""
    _asked.update(getattr(node, "workeroutput", {}).get("kernels", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["kernels"] = sorted(needed_kernels.asked())
    elif config.option.write_kernels and _is_whole(config):
        needed_kernels.write(_asked | needed_kernels.asked())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A list that has grown old is said, for it costs only time."""
    new = needed_kernels.lacking(_asked | needed_kernels.asked())
    if new and _is_whole(config):
        name = needed_kernels.LIST.name
        terminalreporter.write_line(
            f"kernels that tests waited for, since {name} lacks them: {len(new)}; pytest --write-kernels"
        )


@pytest.fixture(autouse=True)
def _ends(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that waits for what never comes fails by its name; kernels may have to be compiled for it before."""

    def fail(*_: object) -> None:
        pytest.fail(f"{request.node.name} did not end within {_LONGEST} seconds")

    if threading.current_thread() is not threading.main_thread():  # where signals cannot be taken
        yield
        return
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with golden data beside the checkout; tests that need it are skipped where it is absent."""
    if not (_SHARED / "golden").is_dir():
        pytest.skip("golden data not present beside the checkout")
    return _SHARED
