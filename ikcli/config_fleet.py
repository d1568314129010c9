"""Options of commands whose work can be divided between processes and machines."""

# ruff: noqa: E501  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from ikcli.options import opt


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Who does the work."""

    workers: int = opt(1, "--workers", "int", "processes on this machine, which share the threads", topic="fleet", commands="PI", form="N", example="--workers 2", minimum=1, bench_list=False)
    ray: str | None = opt(None, "--ray", "str", "work on Ray: local starts it on this machine, auto or an address joins a cluster, where every worker has the threads of -t", topic="fleet", commands="PIBS", form="local|auto|ADDRESS", example="--ray auto", bench_list=False)
    ray_workers: int = opt(2, "--ray-workers", "int", "workers on Ray", topic="fleet", commands="PIB", form="N", example="--ray-workers 4", minimum=1, bench_list=False)

    ray_node: str = opt("", "--ray-node", "str", "only nodes of Ray that offer this resource (ray start --resources '{\"TYPE\": 1}'); for bench several, which are compared", topic="fleet", commands="PIB", form="TYPE[,TYPE...]", example="--ray-node epyc", bench_list=False)

    @property
    def n_workers(self) -> int:
        """Workers, wherever they are."""
        return self.workers if self.ray is None else self.ray_workers


@dataclass(frozen=True, slots=True)
class BatchConfig(FleetConfig):
    """Who does the work, and where what is done is kept."""

    journal: str | None = opt(None, "--journal", "str", "keep what is done in FILE; a run that ended early goes on from there", topic="fleet", commands="PIB", form="FILE", example="--journal run.jsonl", bench_list=False)

    @property
    def wanted(self) -> bool:
        """Whether the work is divided into units."""
        return self.n_workers > 1 or self.ray is not None or self.journal is not None
