"""`ik bench` on the nodes of a cluster: a unit is a combination of settings on a kind of node.

A worker takes one whole unit of the resource that names its kind, so a node that offers one runs one measurement at a
time. Measurements are kept in the journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import ikcli
from ikcli.bench.environment import cpu_name
from ikcli.bench.tests import BenchModel, BenchResult, combinations, measured
from ikcli.engine.plan.bench_cases import bench_tests
from ikcli.fleet.executor import ByKind
from ikcli.fleet.journal import Journal
from ikcli.fleet.ray_executor import RayExecutor
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import InputFile, UnitFunction, input_model
from ikcli.hostinfo import physical_cores
from ikcli.log import hushed
from ikcli.settings.run import RunConfig, default_model

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class BenchUnit:
    """Settings to measure with model number `model`; `own_threads`: use as many as the node has physical cores."""

    config: RunConfig
    model: int
    own_threads: bool


@contextmanager
def open_bench(models: tuple[InputFile, ...]) -> Iterator[Callable[[BenchUnit], dict[str, Any]]]:
    """Yield the function that measures all tests of a combination, in a new session for every unit."""

    def measure(unit: BenchUnit) -> dict[str, Any]:
        models[unit.model].check()
        config = replace(unit.config, model=models[unit.model].path)
        if unit.own_threads:
            config = replace(config, n_threads=physical_cores(), n_threads_batch=physical_cores())
        with hushed():
            results = list(measured(config, bench_tests(config), None))
        return {
            "model": asdict(results[0].model),
            "cpu": cpu_name() or "",
            "settings": _changed(config, results[0].config),
            "tests": [
                {
                    "started": r.started,
                    "samples_ns": list(r.samples_ns),
                    "n_drafted": r.n_drafted,
                    "n_accepted": r.n_accepted,
                }
                for r in results
            ],
        }

    yield measure


def _changed(asked: RunConfig, found: RunConfig) -> dict[str, Any]:
    """Return the settings that the session decided, as JSON values."""
    out = {}
    for f in fields(RunConfig):
        value = getattr(found, f.name)
        plain = isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
        if value != getattr(asked, f.name) and plain:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def run(
    config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]], given: Collection[str]
) -> Iterator[BenchResult]:
    """Yield every test of every combination on every kind of node, in this order."""
    fleet = config.fleet
    assert fleet.ray is not None
    kinds = [name.strip() for name in fleet.ray_node.split(",") if name.strip()] or [""]
    own_threads = not {"n_threads", "n_threads_batch"} & set(given) and not config.bench.threads_gen_batch
    chosen = [
        replace(c, model=(c.model or default_model()).absolute()) for c in combinations(config, alternatives, given)
    ]
    models = list(dict.fromkeys((c.model or default_model(), c.override_kv) for c in chosen))
    files = tuple(input_model(path, overrides) for path, overrides in models)
    order = [models.index((c.model or default_model(), c.override_kv)) for c in chosen]
    cpus = 1 if own_threads else max(max(c.n_threads, c.n_threads_batch) for c in chosen)
    works = {kind: RayExecutor(fleet.ray, fleet.ray_workers, cpus, kind, share=1) for kind in kinds}
    units = [(kind, BenchUnit(c, i, own_threads)) for kind in kinds for c, i in zip(chosen, order, strict=True)]
    head = {
        "kind": "ik bench",
        "version": ikcli.__version__,
        "tests": [test.label for test in bench_tests(config)],
        "repetitions": config.bench.repetitions,
        "warmup": config.bench.warmup,
    }
    named = [(_name(kind, unit, files[unit.model].digest), (kind, unit)) for kind, unit in units]
    worker = UnitFunction(open_bench, files, files)
    with Journal(fleet.journal, head) as journal, works[kinds[0]].connected():
        for (kind, unit), record in zip(units, map_units(worker, named, journal, ByKind(works)), strict=True):
            yield from _results(kind, unit.config, record)


def _name(kind: str, unit: BenchUnit, model_digest: str) -> str:
    """Name a unit by a digest of all its settings."""
    settings = hashlib.sha256(f"{unit.config!r} {model_digest} {unit.own_threads}".encode()).hexdigest()
    return f"{kind} {settings[:32]}"


def _results(kind: str, asked: RunConfig, record: Mapping[str, Any]) -> Iterator[BenchResult]:
    changed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"].items()}
    config = replace(asked, **changed)
    model = BenchModel(**{**record["model"], "gpus": tuple(record["model"]["gpus"])})
    for test, found in zip(bench_tests(asked), record["tests"], strict=True):
        samples = tuple(found["samples_ns"])
        yield BenchResult(test, config, model, found["started"], samples, kind, record["cpu"],
                          found.get("n_drafted", 0), found.get("n_accepted", 0))  # fmt: skip
