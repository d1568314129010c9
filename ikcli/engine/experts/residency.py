"""Where the experts of every layer are: in VRAM, in RAM or on disk, as planned and at this moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ikcli.engine.plan.cache_slots import CacheSlots
from ikcli.engine.plan.expert_slots import ExpertSlots
from ikcli.engine.plan.placement import CPU
from ikcli.engine.run.model import Model
from ikcli.engine.run.runner import Runner

RAM, DISK, COPIES = "RAM", "disk", " slots"
_MIB = 2**20
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.weight")


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Experts of a layer in one place: `CUDA0`, `RAM` or `disk`; `CUDA0 slots` are copies of some in RAM.

    A layer whose matrices are on several devices has all its experts in each, with the bytes that are there.
    """

    il: int
    place: str
    n_experts: int
    n_bytes: int


Count = Callable[[int], int]
"""Returns the experts of a layer that are in slots."""


def expert_places(
    model: Model,
    buffer_of: Mapping[str, str],
    slots: ExpertSlots | None = None,
    vram: CacheSlots | None = None,
    in_ram: Count | None = None,
    in_vram: Count | None = None,
) -> list[ExpertPlace]:
    """Return the places of all routed experts, layer by layer.

    `slots`, `vram`: slots in RAM for experts on disk, and on GPUs for experts in RAM. Without `in_ram` and `in_vram`
    all of them count as filled.
    """
    sizes: dict[int, dict[str, int]] = {}
    counts: dict[int, int] = {}
    for name, spec in model.specs.items():
        match = _EXPERTS.fullmatch(name)
        if match is None or len(spec.shape) != 3 or name not in buffer_of:
            continue
        il, place = int(match[1]), RAM if buffer_of[name] == CPU else buffer_of[name]
        counts[il] = spec.shape[2]
        sizes.setdefault(il, {}).setdefault(place, 0)
        sizes[il][place] += model.n_bytes([name])
    found = []
    on_disk = {layer.il: layer for layer in slots.layers} if slots is not None else {}
    copies = {layer.il: layer for layer in vram.layers} if vram is not None else {}
    for il in sorted(sizes):
        n = counts[il]
        for place, n_bytes in sizes[il].items():
            if place == RAM and il in on_disk and slots is not None:
                here = in_ram(il) if in_ram is not None else n * slots.n_slots // slots.n_experts
                found.append(ExpertPlace(il, RAM, here, n_bytes * here // n))
                if here < n:
                    found.append(ExpertPlace(il, DISK, n - here, n_bytes - n_bytes * here // n))
            else:
                found.append(ExpertPlace(il, place, n, n_bytes))
        if il in copies:
            layer = copies[il]
            here = in_vram(il) if in_vram is not None else layer.n_slots
            found.append(ExpertPlace(il, layer.device + COPIES, here, here * layer.slot_bytes))
    return found


def places_now(model: Model, buffer_of: Mapping[str, str], runner: Runner) -> list[ExpertPlace]:
    """Return the places of a session's experts at this moment."""
    steps, cache = runner.cpu.experts, runner.expert_cache
    store = steps.store if steps is not None else None
    return expert_places(
        model,
        buffer_of,
        steps.slots if steps is not None else None,
        cache.slots if cache is not None else None,
        (lambda il: int(store.resident(il).sum())) if store is not None else None,
        (lambda il: len(cache.resident(il))) if cache is not None else None,
    )


def uses_now(runner: Runner) -> dict[str, tuple[int, int]]:
    """Return (uses, hits) of experts by cache: `ram` for those on disk, `vram` for those in RAM."""
    steps, cache = runner.cpu.experts, runner.expert_cache
    found = {}
    if steps is not None and steps.store is not None:
        found["ram"] = steps.store.counts.uses, steps.store.counts.hits
    if cache is not None:
        found["vram"] = cache.counts.uses, cache.counts.hits
    return found


def place_lines(places: Iterable[ExpertPlace]) -> list[str]:
    """Return a line per run of layers whose experts are in the same places; none if all are in RAM."""
    layers: dict[int, list[str]] = {}
    for p in places:
        text = f"{p.n_experts} {'on' if p.place == DISK else 'in'} {p.place} ({p.n_bytes / _MIB:.2f} MiB)"
        layers.setdefault(p.il, []).append(text)
    if not any(" in " + RAM not in text for texts in layers.values() for text in texts):
        return []
    runs: list[tuple[int, int, str]] = []
    for il, texts in layers.items():
        text = ", ".join(texts)
        if runs and runs[-1][2] == text:
            runs[-1] = runs[-1][0], il, text
        else:
            runs.append((il, il, text))
    return [
        f"experts of layer {a}: {text}" if a == b else f"experts of each layer from {a} to {b}: {text}"
        for a, b, text in runs
    ]
