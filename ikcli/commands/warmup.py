"""`ik warmup`: compile the kernels of a model, so that its first run starts at once."""

from __future__ import annotations

from ikcli.cli.parser import ModelRun
from ikcli.engine.plan.sizes import session_of
from ikcli.engine.run.session import Session
from ikcli.sampling.short import draw_function


def run(run: ModelRun) -> int:
    """Compile the kernels for the model and settings."""
    config, sizes = session_of(run.config)
    outputs, planner = sizes.outputs, run.planner
    session = Session.plan(config, n_seq_max=sizes.n_seq, n_step=sizes.n_step, outputs=outputs, planner=planner)
    session.compile()
    draw_function()
    return 0
