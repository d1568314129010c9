"""Options of commands whose work can be divided between processes and machines."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt
from ikcli.settings.values import parse_split

# What the options of each topic share.
_fleet = partial(opt, topic="fleet", bench_list=False)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Who does the work."""

    workers: int = _fleet(1, "--workers", "int", commands="PI", form="N", example="--workers 2", minimum=1,
        help="processes on this machine, which share the threads")
    ray: str | None = _fleet(None, "--ray", "str", commands="PISCWBDL", form="local|auto|ADDRESS", example="--ray auto",
        help="work on Ray: local starts it on this machine, auto or an address joins a cluster, where every worker "
        "has the threads of -t")
    ray_workers: int = _fleet(2, "--ray-workers", "int", commands="PIB", form="N", example="--ray-workers 4", minimum=1,
        help="workers on Ray")

    ray_node: str = _fleet("", "--ray-node", "str", commands="PISB", form="TYPE[,TYPE...]", example="--ray-node epyc",
        help="only nodes of Ray that offer this resource (ray start --resources '{\"TYPE\": 1}'); for bench several, "
        "which are compared")

    @property
    def n_workers(self) -> int:
        """Workers, wherever they are."""
        return self.workers if self.ray is None else self.ray_workers


@dataclass(frozen=True, slots=True)
class BatchConfig(FleetConfig):
    """Who does the work, and where what is done is kept."""

    journal: str | None = _fleet(None, "--journal", "str", commands="PIB", form="FILE", example="--journal run.jsonl",
        help="keep what is done in FILE; a run that ended early goes on from there")

    stages: int = _fleet(1, "--stages", "int", form="N", example="--stages 2", minimum=1,
        help="divide the model between N processes of this machine, or with --ray between N machines: consecutive "
        "layers each, with their cache. For models larger than one machine")
    stage_split: tuple[float, ...] = _fleet((), "--stage-split", "custom", form="F,F,...", example="--stage-split 2,1",
        parse=parse_split, help="share of the bytes each stage gets; default by the memory of the machines, or equal")

    @property
    def wanted(self) -> bool:
        """Whether the work is divided into units."""
        divided = self.n_workers > 1 or self.ray is not None or self.journal is not None
        return divided and self.stages == 1
