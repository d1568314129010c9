"""`ik devices`: the processors, RAM and GPUs a run can use, and why there is no GPU where there is none."""

from __future__ import annotations

from json import dumps
from typing import Any

from ikcli.config_tools import DevicesConfig

_GIB = 2.0**30


def run(config: DevicesConfig) -> int:
    """Print the devices of this machine and their free memory."""
    found = find()
    print(dumps(found, indent=2) if config.json else "\n".join(lines(found)))
    return 0


def find() -> dict[str, Any]:
    """The devices as the JSON output has them; sizes in bytes, None for what the system does not say."""
    from ikcli.commands.version import cpu_flags
    from ikcli.engine.devices import available_memory
    from ikcli.engine.numa import read_nodes
    from ikcli.eval.environment import cpu_name, memory_bytes
    from ikcli.hostinfo import physical_cores, visible_cpus

    gpus, reason = _gpus()
    return {
        "cpu": {
            "name": cpu_name(),
            "physical_cores": physical_cores(),
            "logical_cpus": len(visible_cpus()),
            "numa_nodes": max(len(read_nodes()), 1),
            "instruction_sets": cpu_flags(),
        },
        "ram": {"total": memory_bytes(), "available": available_memory()},
        "gpus": gpus,
        "no_gpu": reason,
    }


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Records of all GPUs, or why there are none."""
    from ikcli.backends.cuda import driver
    from ikcli.backends.cuda.device import CudaError

    try:
        found = driver.devices()
    except CudaError as e:
        return [], str(e)
    records = []
    for info in found:
        free, problem = None, None
        try:
            device = driver.open_device(info.index)
            free, _ = device.memory()
            device.close()
        except CudaError as e:
            problem = str(e)
        records.append(
            {
                "name": f"CUDA{info.index}",
                "model": info.name,
                "compute_capability": f"{info.cc[0]}.{info.cc[1]}",
                "multiprocessors": info.n_sm,
                "memory": info.total_bytes,
                "free": free,
                "l2": info.l2_bytes,
                "shared_per_block": info.shared_limit,
                "driver_cuda": f"{info.driver[0]}.{info.driver[1]}",
                "problem": problem,
            }
        )
    return records, None


def lines(found: dict[str, Any]) -> list[str]:
    """The text output: one or two lines per device."""
    cpu, ram = found["cpu"], found["ram"]
    nodes = "" if cpu["numa_nodes"] == 1 else f", {cpu['numa_nodes']} NUMA nodes"
    text = [
        f"CPU    {cpu['name'] or 'unknown processor'}: {cpu['physical_cores']} physical cores, "
        f"{cpu['logical_cpus']} logical CPUs{nodes}"
    ]
    if cpu["instruction_sets"]:
        text.append(f"       {' '.join(cpu['instruction_sets'])}")
    if ram["total"] is not None:
        text.append(f"RAM    {_size(ram['total'])}, {_size(ram['available'])} available")
    for gpu in found["gpus"]:
        text.append(
            f"{gpu['name']:6} {gpu['model']}: {_size(gpu['memory'])}, {_size(gpu['free'])} free, compute capability "
            f"{gpu['compute_capability']}, {gpu['multiprocessors']} SMs, driver CUDA {gpu['driver_cuda']}"
        )
        if gpu["problem"]:
            text.append(f"       cannot be used: {gpu['problem']}")
    if found["no_gpu"]:
        text.append(f"no GPU: {found['no_gpu']}")
    return text


def _size(n_bytes: int | None) -> str:
    return "? GiB" if n_bytes is None else f"{n_bytes / _GIB:.1f} GiB"
