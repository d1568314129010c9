"""Options of commands that can divide their work among processes and machines."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt
from ikcli.settings.values import parse_split

# One partial per topic, with the values that its options share.
_fleet = partial(opt, topic="fleet", bench_list=False)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Processes and machines that do the work."""

    workers: int = _fleet(1, "--workers", "int", commands="PI", form="N", example="--workers 2", minimum=1,
        help="processes on this machine, which share the threads")
    ray: str | None = _fleet(None, "--ray", "str", commands="PISCWBDL", form="local|auto|ADDRESS", example="--ray auto",
        help="use Ray: local starts it on this machine, auto or an address joins a cluster, where every worker "
        "gets the threads of -t")
    ray_workers: int = _fleet(2, "--ray-workers", "int", commands="PIB", form="N", example="--ray-workers 4", minimum=1,
        help="workers on Ray")

    ray_node: str = _fleet("", "--ray-node", "str", commands="PISB", form="TYPE[,TYPE...]", example="--ray-node epyc",
        help="use only Ray nodes with this resource (ray start --resources '{\"TYPE\": 1}'); bench takes several "
        "and compares them")

    @property
    def n_workers(self) -> int:
        """Number of workers, local or on Ray."""
        return self.workers if self.ray is None else self.ray_workers


@dataclass(frozen=True, slots=True)
class BatchConfig(FleetConfig):
    """Processes and machines that do the work, and the journal of results."""

    journal: str | None = _fleet(None, "--journal", "str", commands="PIB", form="FILE", example="--journal run.jsonl",
        help="keep results in FILE; a run that ended early continues from there")

    stages: int = _fleet(1, "--stages", "int", form="N", example="--stages 2", minimum=1,
        help="split the model into N pipeline stages of consecutive layers with their cache: processes of this "
        "machine, or with --ray one machine each. For models larger than one machine")
    stage_split: tuple[float, ...] = _fleet((), "--stage-split", "custom", form="F,F,...", example="--stage-split 2,1",
        parse=parse_split, help="share of the bytes of each stage; default: by the memory of the machines, or equal")

    @property
    def wanted(self) -> bool:
        """Whether the work is divided into units."""
        divided = self.n_workers > 1 or self.ray is not None or self.journal is not None
        return divided and self.stages == 1
