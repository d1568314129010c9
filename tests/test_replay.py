"""Passes with a changed weight: computed from its layer on, they are the same bits as whole passes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.replay import ReplayRunner
from ikcli.engine.run.session import Session
from ikcli.settings.run import RunConfig

N = 12
CASES = [
    ("minimax-m2", "blk.1.attn_output.weight"),
    ("mistral4", "blk.1.attn_output.weight"),
    ("qwen35", "blk.3.ffn_down.weight"),
    ("gemma4", "blk.1.ffn_down.weight"),  # its last layers read the caches of earlier ones
    ("gemma4", "output_norm.weight"),
]


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_replays_are_the_same_bits(arch: str, name: str, tmp_path: Path) -> None:
    path = write_model(tiny(arch), tmp_path / "m.gguf")
    config = RunConfig(model=path, n_ctx=2 * N, n_ubatch=N, n_threads=2, n_threads_batch=2, warmup=False)
    tokens = np.arange(2 * N, dtype=np.int32) % 13
    batch = Batch(tokens, np.arange(2 * N, dtype=np.int32), np.zeros(2 * N, np.int32), np.ones(2 * N, bool))

    def run(session: Session) -> np.ndarray:
        session.clear()
        return session.decode(batch).copy()

    with closing(Session.open(config)) as first:
        plain = run(first)
        runners = [ReplayRunner(2, limit) for limit in (1 << 30, 0)]
        sessions = [first.again(runner) for runner in runners]
        for session, runner in zip(sessions, runners, strict=True):
            session.load()
            runner.record(2)
            np.testing.assert_array_equal(run(session), plain)
        values = np.frombuffer(first.model.bytes_of(name).tobytes(), np.float32) * np.float32(1.5)
        results = []
        for session, runner in zip(sessions, runners, strict=True):
            runner.change({name: int(values.ctypes.data)})
            results.append(run(session))
            runner.change({})
            np.testing.assert_array_equal(run(session), plain)
            session.close()
        np.testing.assert_array_equal(*results)
        assert not np.array_equal(results[0], plain)
        assert runners[0].n_bytes > 0 == runners[1].n_bytes
        done, whole = runners[0].n_ops
        assert done < whole / 2 if name.startswith("output") else done < whole
