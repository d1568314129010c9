"""`ik devices`: the processors, RAM and GPUs a run can use, and the reason if no GPU can be used."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps

from ikcli.cli.model import find_model
from ikcli.doctor.inventory import Inventory, take_inventory
from ikcli.log import shown_size
from ikcli.settings.run import RunConfig
from ikcli.settings.tools import DevicesConfig

_CELLS = 256  # of the session of a self-test


def run(config: DevicesConfig) -> int:
    """Print the devices of this machine and their free memory, or the result of a self-test."""
    if config.self_test:
        return _self_test(config)
    found = take_inventory()
    print(dumps(asdict(found), indent=2) if config.json else "\n".join(lines(found)))
    return 0


def _self_test(config: DevicesConfig) -> int:
    from ikcli.engine.run.self_test import check
    from ikcli.engine.run.session import Session

    model = find_model(config.model, config.hub)
    with Session.open(RunConfig(command="bench", model=model, n_ctx=_CELLS, warmup=False)) as session:
        families = check(session)
    if config.json:
        print(dumps([asdict(family) for family in families], indent=2))
    else:
        print(*families, f"all right on {', '.join(dict.fromkeys(f.device for f in families))}", sep="\n")
    return 0


def lines(found: Inventory) -> list[str]:
    """Return the text output: one or two lines per device."""
    cpu, ram = found.cpu, found.ram
    nodes = "" if cpu.numa_nodes == 1 else f", {cpu.numa_nodes} NUMA nodes"
    text = [
        f"CPU    {cpu.name or 'unknown processor'}: {cpu.physical_cores} physical cores, "
        f"{cpu.logical_cpus} logical CPUs{nodes}"
    ]
    if cpu.instruction_sets:
        text.append(f"       {' '.join(cpu.instruction_sets)}")
    if ram.total is not None:
        text.append(f"RAM    {_size(ram.total)}, {_size(ram.available)} available")
    for gpu in found.gpus:
        text.append(
            f"{gpu.name:6} {gpu.model}: {_size(gpu.memory)}, {_size(gpu.free)} free, compute capability "
            f"{gpu.compute_capability}, {gpu.multiprocessors} SMs, driver CUDA {gpu.driver_cuda}"
        )
        if gpu.problem:
            text.append(f"       cannot be used: {gpu.problem}")
    if found.no_gpu:
        text.append(f"no GPU: {found.no_gpu}")
    return text


def _size(n_bytes: int | None) -> str:
    return "? GiB" if n_bytes is None else shown_size(n_bytes, 1, least=2**30)
