"""Where stages of a model go on a cluster; stages as Ray actors, one of which dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikcli.engine.pipeline.driver import PipelineRunner, StageLostError
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.fleet.ray_stages import RAY_PIPELINE, RayNode, place, slots
from ikcli.settings.run import RunConfig, default_text

HERE = RayNode("a", "10.0.0.1", 64, True)
BIG, SMALL = RayNode("b", "10.0.0.2", 100, False), RayNode("c", "10.0.0.3", 30, False)


def test_stages_go_where_memory_is() -> None:
    nodes = [HERE, BIG, SMALL]
    assert slots(nodes, 2) == [(100, BIG), (64, HERE)]
    assert slots(nodes, 4) == [(64, HERE), (50, BIG), (50, BIG), (30, SMALL)]
    assert place([90, 50, 20], nodes) == [BIG, HERE, SMALL]
    assert place([20, 50, 50, 60], nodes) == [SMALL, BIG, BIG, HERE]
    assert place([50, 40, 10], [BIG]) == [BIG, BIG, BIG]


def test_the_last_stage_is_with_the_command_if_it_fits() -> None:
    assert place([60, 50], [HERE, BIG]) == [BIG, HERE]
    assert place([50, 60], [HERE, BIG]) == [BIG, HERE]
    assert place([50, 90], [HERE, BIG]) == [HERE, BIG]


@pytest.mark.slow  # starts Ray, twice
@pytest.mark.filterwarnings("ignore")
def test_actors_give_the_same_bits_and_come_back() -> None:
    pytest.importorskip("ray")
    config = RunConfig(command="bench", n_ctx=512, n_threads=2, n_threads_batch=2, n_ubatch=32, warmup=False)
    ids = Planner.of_file(config).hp.n_vocab - 1 - np.arange(100, dtype=np.int32)
    with Session.open(replace(config, n_threads=1, n_threads_batch=1)) as session:
        wanted = np.array(session.decode(Batch.single(ids, logits="all")))
    staged = replace(config, fleet=replace(config.fleet, stages=2, ray="local"))
    with Session.open(staged, planner=Planner.of_file(staged, pipeline=RAY_PIPELINE)) as session:
        np.testing.assert_array_equal(session.decode(Batch.single(ids, logits="all")), wanted)
        runner = session.runner
        assert isinstance(runner, PipelineRunner)
        os.kill(runner.pids[0], signal.SIGKILL)
        with pytest.raises(StageLostError, match=r"stage 1 \(layers \d-\d\) was lost: its process ended: .*die"):
            for _ in range(100):
                session.clear()
                session.decode(Batch.single(ids))
        session.restart()
        np.testing.assert_array_equal(session.decode(Batch.single(ids, logits="all")), wanted)


@pytest.mark.slow  # starts Ray
def test_a_command_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    text = tmp_path / "text.txt"
    text.write_text(default_text().read_text("utf-8")[:3000], "utf-8")
    words = [sys.executable, "-m", "ikcli", "perplexity", "-f", str(text), "-c", "128", "-t", "2"]
    found = [
        subprocess.run([*words, *more], capture_output=True, text=True, timeout=300, check=True)
        for more in ([], ["--stages", "2", "--ray", "local"])
    ]
    assert found[0].stdout == found[1].stdout and "Final estimate" in found[0].stdout
    assert "stages: layers 0-" in found[1].stderr
