"""Options of commands whose work can be divided between processes and machines."""

# ruff: noqa: E501  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from ikcli.settings.option import opt
from ikcli.settings.values import parse_split


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Who does the work."""

    workers: int = opt(1, "--workers", "int", "processes on this machine, which share the threads", topic="fleet", commands="PI", form="N", example="--workers 2", minimum=1, bench_list=False)
    ray: str | None = opt(None, "--ray", "str", "work on Ray: local starts it on this machine, auto or an address joins a cluster, where every worker has the threads of -t", topic="fleet", commands="PISCWBDL", form="local|auto|ADDRESS", example="--ray auto", bench_list=False)
    ray_workers: int = opt(2, "--ray-workers", "int", "workers on Ray", topic="fleet", commands="PIB", form="N", example="--ray-workers 4", minimum=1, bench_list=False)

    ray_node: str = opt("", "--ray-node", "str", "only nodes of Ray that offer this resource (ray start --resources '{\"TYPE\": 1}'); for bench several, which are compared", topic="fleet", commands="PISB", form="TYPE[,TYPE...]", example="--ray-node epyc", bench_list=False)

    @property
    def n_workers(self) -> int:
        """Workers, wherever they are."""
        return self.workers if self.ray is None else self.ray_workers


@dataclass(frozen=True, slots=True)
class BatchConfig(FleetConfig):
    """Who does the work, and where what is done is kept."""

    journal: str | None = opt(None, "--journal", "str", "keep what is done in FILE; a run that ended early goes on from there", topic="fleet", commands="PIB", form="FILE", example="--journal run.jsonl", bench_list=False)

    stages: int = opt(1, "--stages", "int", "divide the model between N processes of this machine, or with --ray between N machines: consecutive layers each, with their cache. For models larger than one machine", topic="fleet", form="N", example="--stages 2", minimum=1, bench_list=False)
    stage_split: tuple[float, ...] = opt((), "--stage-split", "custom", "share of the bytes each stage gets; default by the memory of the machines, or equal", topic="fleet", form="F,F,...", example="--stage-split 2,1", parse=parse_split, bench_list=False)

    @property
    def wanted(self) -> bool:
        """Whether the work is divided into units."""
        divided = self.n_workers > 1 or self.ray is not None or self.journal is not None
        return divided and self.stages == 1
