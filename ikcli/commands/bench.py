"""`ik bench`: results on stdout as they are measured, a copy on stderr with -oe."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ikcli.bench import tests as bench
from ikcli.bench.tests import BenchResult
from ikcli.cli.parser import ModelRun
from ikcli.commands._bench_output import make_writer
from ikcli.engine.plan.bench_cases import bench_tests
from ikcli.errors import UsageError


def run(run: ModelRun) -> int:
    """Measure and print; return 130 after Ctrl-C."""
    options = run.config.bench
    if options.compare:
        if run.config.fleet.ray is not None:
            raise UsageError("--compare measures on this machine; leave out --ray")
        from ikcli.commands._bench_compare import run as compare

        return compare(run)
    for name in ("rounds", "precision"):
        if f"bench.{name}" in run.given:
            raise UsageError(f"--{name} goes with --compare")
    fleet = run.config.fleet
    if fleet.ray is None and (fleet.ray_node or fleet.journal):
        raise UsageError("--ray-node and --journal are for measuring on nodes of Ray; add --ray ADDRESS")
    if run.config.vision.images and (fleet.ray is not None or fleet.stages > 1):
        raise UsageError("--image measures this process; leave out --ray and --stages")
    if fleet.ray is not None and run.config.profile:
        raise UsageError("--profile measures this process; leave out --ray")
    bench_tests(run.config)  # raise errors before a header is printed
    writers = [make_writer(options.output, sys.stdout)]
    if options.output_err:
        writers.append(make_writer(options.output_err, sys.stderr))
    for writer in writers:
        writer.header(run.config, run.alternatives)
    code = 0
    try:
        for result in _results(run):
            for writer in writers:
                writer.result(result)
    except KeyboardInterrupt:
        code = 130
    for writer in writers:
        writer.footer()
    return code


def _results(run: ModelRun) -> Iterator[BenchResult]:
    """Yield results that are measured here, or on nodes of Ray."""
    if run.config.fleet.ray is None or run.config.fleet.stages > 1:
        return bench.run(run.config, run.alternatives, run.given, run.planner)
    from ikcli.bench import fleet as fleet_bench

    return fleet_bench.run(run.config, run.alternatives, run.given)
