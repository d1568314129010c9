"""Suggest changes of a machine or flags of ik, each with its reason. Pure functions over the facts found."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.doctor.machine import KernelCache, MachineMemory, Processor
from ikcli.doctor.model import ModelReport
from ikcli.doctor.roofline import Peaks
from ikcli.engine.run.huge_weights import SHARE
from ikcli.log import shown_size

_GIB = 2**30
_PLAIN_CPU = {"performance", "schedutil", "ondemand"}
_HARDWARE_DRIVERS = ("intel_pstate", "amd-pstate", "amd-pstate-epp", "amd_pstate", "amd_pstate_epp")


@dataclass(frozen=True, slots=True)
class Advice:
    """An action (flags of ik, or a system command) and its reason."""

    what: str
    why: str


def machine_advice(cpu: Processor, memory: MachineMemory, cache: KernelCache, peaks: Peaks | None) -> list[Advice]:
    """Return advice about the machine alone."""
    out: list[Advice] = []
    if cpu.quota is not None and cpu.quota < cpu.physical:
        out.append(
            Advice(
                f"-t {cpu.threads}", f"a cgroup allows {cpu.quota} of {cpu.physical} cores; this is the default already"
            )
        )
    elif cpu.smt:
        out.append(
            Advice(
                f"-t {cpu.threads}",
                f"{cpu.visible} logical CPUs share {cpu.physical} cores; a second thread per core adds nothing to "
                "compute or memory throughput. This is the default already",
            )
        )
    bad = [g for g in cpu.governors if g not in _PLAIN_CPU]
    if bad and cpu.driver not in _HARDWARE_DRIVERS:
        out.append(Advice("cpupower frequency-set -g performance", f"the governor {bad[0]} keeps the clock low"))
    nodes = [n for n in memory.nodes if n.cpus]
    if len(nodes) > 1:
        out.append(
            Advice(
                "--numa distribute --no-mmap",
                f"{len(nodes)} NUMA nodes: threads, cache and weights spread over all of them; mapped weights stay "
                "where the page cache has them. --numa mirror keeps a copy of the weights on every node, if they fit",
            )
        )
        if memory.balancing:
            out.append(
                Advice(
                    "echo 0 > /proc/sys/kernel/numa_balancing",
                    "the kernel moves memory between nodes while a model runs",
                )
            )
    if memory.huge_pages == "never":
        out.append(
            Advice(
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
                "huge pages are off: reading weights and cache through small ones costs bandwidth",
            )
        )
    if memory.swap_used and memory.total and memory.swap_used > memory.total // 100:
        out.append(Advice("free memory before a run", f"{_size(memory.swap_used)} are in swap"))
    if not cache.writable:
        out.append(
            Advice("IK_CACHE_DIR=FOLDER", f"{cache.path} cannot be written: every run compiles its kernels again")
        )
    elif cache.stale_bytes > _GIB // 4:
        out.append(
            Advice("make clean-cache", f"{_size(cache.stale_bytes)} of kernels are of other versions or processors")
        )
    if peaks is not None and peaks.threads > 1 and peaks.read_all < 1.15 * peaks.read_one and peaks.threads > 4:
        out.append(
            Advice(
                "check the memory modules and other programs",
                f"{peaks.threads} threads read hardly faster than one ({peaks.read_all / 1e9:.0f} GB/s): "
                "there are few memory channels, or other programs use them",
            )
        )
    return out


def model_advice(model: ModelReport, memory: MachineMemory, n_repackable: int, mapped: bool) -> list[Advice]:
    """Return advice about a model.

    `n_repackable`: bytes of weights that -rtr would interleave; `mapped`: weights are mapped from the file.
    """
    out: list[Advice] = []
    limit = min(x for x in (memory.available, memory.limit, 1 << 60) if x is not None)
    short = [d for d, free in model.free.items() if model.needs.get(d, 0) > free]
    if not model.fits and model.n_experts and any(d.startswith("CUDA") for d in short):
        out.append(
            Advice("-ngl 99 -ot exps=CPU", "experts in RAM, everything else on the GPU, which lacks memory for all")
        )
    elif not model.fits:
        where = ", ".join(short) or "memory"
        out.append(Advice("ik plan -m MODEL", f"the run does not fit into {where}; ik plan proposes what would"))
    elif model.n_bytes > limit:
        out.append(
            Advice(
                "ik quantize --target-size", "weights are larger than the memory that is free and would come from disk"
            )
        )
    gpu = any(device.startswith("CUDA") for device in model.needs)
    if n_repackable and n_repackable > model.n_bytes // 10 and n_repackable < limit:
        out.append(
            Advice(
                "-rtr",
                f"{_size(n_repackable)} of weights have an interleaved form, which is faster in prompts; it "
                "costs loading time and that much memory (ik repack does it once, on disk)"
                + ("; beside a GPU it keeps the prompt work of weights in RAM on the CPU" if gpu else ""),
            )
        )
    if mapped and memory.huge_pages in ("always", "madvise") and max(_GIB, limit / SHARE) < model.n_bytes < limit * 0.9:
        out.append(
            Advice(
                "--no-mmap",
                f"huge pages save TLB misses; weights of more than 1/{SHARE} of the memory are not copied into them "
                "beside a mapped file, but are read into them without one",
            )
        )
    cache = sum(model.cost.cache.values()) * model.n_ctx
    weights = sum(model.cost.weights.values())
    if cache > weights / 2:
        out.append(
            Advice(
                "-ctk q8_0 (and -ctv q8_0)",
                f"with a full cache a token reads {_size(cache)} of it beside {_size(weights)} of weights",
            )
        )
    prompt = next((s for s in model.speeds if s.limit.startswith("memory bandwidth: a larger -ub")), None)
    if prompt is not None:
        out.append(
            Advice(
                f"-ub {2 * model.n_ubatch} or more",
                "prompts wait for weights: more tokens share one pass over them",
            )
        )
    return out


def _size(n_bytes: float) -> str:
    return shown_size(n_bytes, 1, least=2**20)
