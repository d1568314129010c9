"""Units of work on Ray: one machine that plays several nodes, and workers that die under way."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ikcli.errors import IkError
from ikcli.fleet.executor import executor

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,  # starts three nodes, 15 to 30 s, and two clusters at a time get in each other's way
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes beside the head, with a processor each."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # actors unpickle from here
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1)
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@dataclass(frozen=True)
class Places:
    """Workers that tell where they worked; the first that does the deadly unit dies."""

    room: Path
    deadly: int | None = None

    def __call__(self) -> Places:
        return self

    def do(self, unit: int) -> tuple[int, str]:
        (self.room / f"began-{unit}-{time.monotonic_ns()}").touch()
        other = {0: 1, 1: 0}.get(unit)  # these two are done at the same time, so by two workers
        while other is not None and not list(self.room.glob(f"began-{other}-*")):
            time.sleep(0.02)
        if unit == self.deadly and not (self.room / "died").exists():
            (self.room / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if unit < 0:
            raise IkError(f"{unit} is negative")
        return unit * unit, ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        """Nothing is held."""


def test_units_are_done_on_all_nodes_and_survive_a_worker(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(IkError, match="-1 is negative"):
        list(executor(2, "auto", 1).run(Places(tmp_path), [7, -1]))
    units = list(range(6))
    results = dict(executor(2, "auto", 1).run(Places(tmp_path, deadly=3), units))
    found = {i: value for i, (value, _) in results.items()}
    assert found == {u: u * u for u in units}
    assert len(list(tmp_path.glob("began-3-*"))) == 2
    assert len({node for _, node in results.values()}) == 2


def test_no_cluster_at_the_address() -> None:
    if ray.is_initialized():
        pytest.skip("connected already")
    with pytest.raises(IkError, match="no cluster answers there"):
        list(executor(1, "127.0.0.1:1", 1).run(Places(Path()), [1]))
