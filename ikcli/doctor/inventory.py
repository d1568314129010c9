"""The resources of this machine that a run can use: processors, RAM, GPUs with their free memory."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import CudaError, DeviceInfo
from ikcli.bench.environment import cpu_name, memory_bytes
from ikcli.engine.run.numa import read_nodes
from ikcli.hostinfo import available_memory, cpu_flags, physical_cores, visible_cpus


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processors that this process may use; the name is empty where the system does not tell."""

    name: str | None
    physical_cores: int
    logical_cpus: int
    numa_nodes: int
    instruction_sets: list[str]


@dataclass(frozen=True, slots=True)
class Ram:
    """Bytes, None where the system does not tell."""

    total: int | None
    available: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; sizes in bytes. `problem` says why it cannot be used; its free memory is then unknown."""

    name: str
    model: str
    compute_capability: str
    multiprocessors: int
    memory: int
    free: int | None
    l2: int
    shared_per_block: int
    driver_cuda: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """All resources; `no_gpu` is the reason why there is no GPU."""

    cpu: Cpu
    ram: Ram
    gpus: list[Gpu]
    no_gpu: str | None


def take_inventory() -> Inventory:
    """Query the system and the driver."""
    nodes = max(len(read_nodes()), 1)
    cpu = Cpu(cpu_name(), physical_cores(), len(visible_cpus()), nodes, cpu_flags())
    try:
        gpus, reason = [_gpu(info) for info in driver.devices()], None
    except CudaError as e:
        gpus, reason = [], str(e)
    return Inventory(cpu, Ram(memory_bytes(), available_memory()), gpus, reason)


def _gpu(info: DeviceInfo) -> Gpu:
    free, problem = None, None
    try:
        device = driver.open_device(info.index)
        free, _ = device.memory()
        device.close()
    except CudaError as e:
        problem = str(e)
    return Gpu(
        name=f"CUDA{info.index}",
        model=info.name,
        compute_capability=f"{info.cc[0]}.{info.cc[1]}",
        multiprocessors=info.n_sm,
        memory=info.total_bytes,
        free=free,
        l2=info.l2_bytes,
        shared_per_block=info.shared_limit,
        driver_cuda=f"{info.driver[0]}.{info.driver[1]}",
        problem=problem,
    )
