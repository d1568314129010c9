"""`ik doctor [-m MODEL]`: one report about this machine, to read and to paste into a question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from json import dumps
from textwrap import wrap

from ikcli import log
from ikcli.bench.tests import params_label
from ikcli.cli.model import find_model
from ikcli.doctor.examination import Examination, examine
from ikcli.doctor.model import ModelReport
from ikcli.errors import UsageError
from ikcli.log import shown_size
from ikcli.settings.thread_curve import best_threads, remember
from ikcli.settings.tools import DoctorConfig

_MIB = 2.0**20
_WIDTH = 100  # of reasons


def run(config: DoctorConfig) -> int:
    """Examine and print; return exit code 1 if a model does not fit."""
    model = find_model(config.model, config.hub, header_only=True)
    if model is not None and not model.is_file():
        raise UsageError(f"-m {model}: {'is a folder; name a file in it' if model.is_dir() else 'no such file'}")
    found = examine(
        model,
        n_ctx=config.n_ctx,
        n_ubatch=config.n_ubatch,
        n_threads=config.n_threads,
        quick=config.quick,
        tell=log.log,
    )
    if found.roofs is not None and not config.n_threads and not found.roofs.disturbed:
        remember(found.roofs.by_threads)  # the default of -t follows it
    print(dumps(asdict(found), indent=2) if config.json else "\n".join(lines(found)))
    return int(found.model is not None and not found.model.fits)


def lines(found: Examination) -> Iterator[str]:
    """Return the report: `name  value` lines in blocks."""
    versions = ", ".join(f"{name} {version}" for name, version in found.software.items() if name != "os" and version)
    yield _line("software", versions)
    yield _line("system", found.software.get("os") or "unknown")
    yield ""
    yield from _processor(found)
    yield ""
    yield from _memory(found)
    yield ""
    yield from _gpus(found)
    yield ""
    yield from _cache(found)
    if found.roofs is not None:
        yield ""
        yield from _roofs(found)
    if found.model is not None:
        yield ""
        yield from _model(found.model, measured=found.roofs is not None)
    for notice in found.notices:
        yield _line("note", notice)
    yield ""
    if not found.advice:
        yield _line("advice", "nothing to change")
    for i, advice in enumerate(found.advice):
        yield _line("advice" if i == 0 else "", "\n".join([advice.what, *wrap(advice.why, _WIDTH)]))


def _line(name: str, text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([f"{name:<16} {first}".rstrip(), *(f"{'':<20} {more}" for more in rest)])


def _processor(found: Examination) -> Iterator[str]:
    cpu = found.processor
    yield _line("processor", cpu.name or "unknown")
    kinds = f" ({cpu.physical - cpu.efficiency} fast, {cpu.efficiency} efficient)" if cpu.efficiency else ""
    yield _line("cores", f"{cpu.physical} physical cores{kinds} and {cpu.visible} logical CPUs usable of "
                         + str(cpu.installed)
                         + ("" if cpu.quota is None else f", a cgroup allows {cpu.quota}")
                         + f"; default -t {cpu.threads}")  # fmt: skip
    yield _line("instructions", f"{cpu.target}: {' '.join(cpu.features)}")
    for i, (what, how) in enumerate(cpu.kernels):
        yield _line("kernels" if i == 0 else "", f"{what}: {how}")
    governors = ", ".join(cpu.governors) or "not reported by this system"
    yield _line("governor", governors + (f" ({cpu.driver})" if cpu.driver else ""))


def _memory(found: Examination) -> Iterator[str]:
    m = found.memory
    limits = [f"cgroup limit {_size(m.limit)}"] if m.limit is not None else []
    limits.append("no limit of locked memory" if m.locked < 0 else f"{_size(m.locked)} may be locked (--mlock)")
    if m.swap_used:
        limits.append(f"{_size(m.swap_used)} in swap")
    yield _line("memory", f"{_size(m.total)}, {_size(m.available)} available; {', '.join(limits)}")
    yield _line("huge pages", m.huge_pages or "none on this system")
    if len(m.nodes) > 1:
        nodes = "; ".join(f"node {n.number}: {n.cpus} CPUs, {_size(n.memory)}" for n in m.nodes)
        balancing = {True: "on", False: "off", None: "unknown"}[m.balancing]
        yield _line("NUMA", f"{nodes}; balancing {balancing}")
    else:
        yield _line("NUMA", "one node")


def _gpus(found: Examination) -> Iterator[str]:
    if not found.gpus:
        yield _line("GPU", f"none: {found.no_gpu}")
    for gpu in found.gpus:
        yield _line(gpu.name, f"{gpu.model}: {_size(gpu.memory)}, {_size(gpu.free)} free, compute capability "
                              f"{gpu.compute_capability}, driver CUDA {gpu.driver_cuda}"
                              + (f"\ncannot be used: {gpu.problem}" if gpu.problem else ""))  # fmt: skip


def _cache(found: Examination) -> Iterator[str]:
    c = found.cache
    state = "" if c.writable else ", NOT WRITABLE"
    text = f"{c.path}{state}: {c.n_files} kernels, {c.n_bytes / _MIB:.0f} MiB; {_size(c.free)} free on disk"
    if c.stale_folders:
        folders = "1 folder" if c.stale_folders == 1 else f"{c.stale_folders} folders"
        text += f"\n{folders} of other versions or processors, {c.stale_bytes / _MIB:.0f} MiB"
    yield _line("kernel cache", text)


def _roofs(found: Examination) -> Iterator[str]:
    roofs = found.roofs
    assert roofs is not None
    products = ", ".join(
        f"{kind} {_rate(n)}" if n else f"{kind}: not by this processor" for kind, n in roofs.products.items()
    )
    yield _line("products", f"{products} (multiplications and additions per second, {roofs.threads} threads)")
    yield _line("bandwidth", f"{roofs.read_one / 1e9:.1f} GB/s by one thread, {roofs.read_all / 1e9:.1f} GB/s by "
                             f"{roofs.threads} (medians of seconds of reading)")  # fmt: skip
    for name, rates in roofs.pages.items():
        yield _line("", f"{name}: {rates.one / 1e9:.1f} GB/s by one thread, {rates.all / 1e9:.1f} GB/s by "
                        f"{roofs.threads}, {rates.fastest / 1e9:.1f} GB/s in the fastest pass")  # fmt: skip
    if len(roofs.by_threads) > 2:
        curve = ", ".join(f"{n}: {rate / 1e9:.1f}" for n, rate in sorted(roofs.by_threads.items()))
        yield _line("", f"GB/s by threads: {curve}")
    best = best_threads(roofs.by_threads) if roofs.by_threads else roofs.threads
    if best < roofs.threads:
        text = "measure again on an idle machine" if roofs.disturbed else "this becomes the default of generation"
        yield _line("", f"{best} threads read faster than {roofs.threads}, so try -t {best}: {text}")
    for node, rate in roofs.read_nodes.items():
        yield _line("", f"node {node}: {rate / 1e9:.1f} GB/s")
    for gpu in roofs.gpus:
        yield _line(gpu.name, f"memory {gpu.memory / 1e9:.0f} GB/s (copy), PCIe {gpu.pcie / 1e9:.1f} GB/s")
    for problem in roofs.problems:
        yield _line("", problem)


def _model(m: ModelReport, measured: bool) -> Iterator[str]:
    types = ", ".join(f"{name} {100 * n / max(m.n_bytes, 1):.0f} %" for name, n in m.types[:4])
    yield _line("model", f"{m.path}: {m.arch}, {params_label(m.n_params)} parameters, {_size(m.n_bytes)} ({types})")
    for device, n in m.needs.items():
        free = f" of {_size(m.free[device])} free" if device in m.free else ""
        yield _line(f"needs on {device}", f"{_size(n)}{free} with {m.n_ctx} tokens of context")
    if not m.fits:
        yield _line("", "DOES NOT FIT")
    c = m.cost
    n_bytes = sum(c.weights.values())
    work = sum(n for kinds in c.products.values() for n in kinds.values())
    yield _line("per token", f"{n_bytes / _MIB:.1f} MiB of weights, {work / 1e9:.3g} GFLOP, "
                             f"{sum(c.cache.values()) / 1024:.1f} KiB of cache per token before it")  # fmt: skip
    for speed in m.speeds:
        rate = "?" if speed.tokens_per_s is None else f"at most {speed.tokens_per_s:.4g} tokens/s"
        yield _line("", f"{speed.name}: {rate}; limit: {speed.limit}")
    if not measured:
        yield _line("", "no speeds: nothing was measured (--quick)")


def _rate(n: float) -> str:
    return f"{n / 1e12:.2f} T" if n >= 1e12 else f"{n / 1e9:.0f} G"


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "? GiB"
    return shown_size(n_bytes, 1, least=2**20)
