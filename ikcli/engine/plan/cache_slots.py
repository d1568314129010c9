"""Divide the memory of `--expert-cache` into slots: how many experts of each layer in RAM a GPU can hold beside them.

A slot holds the matrices of one expert, rearranged as all weights of a GPU are. The layers of a GPU share its memory
evenly, so each has the same number of slots, the first ones perhaps one more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ikcli.backends.cuda import upload
from ikcli.backends.cuda.transfer import Transfer
from ikcli.engine.plan.expert_plan import disk_options
from ikcli.engine.plan.placement import CPU, Placement
from ikcli.engine.run.model import Model
from ikcli.errors import UsageError
from ikcli.graph import Weight
from ikcli.graph.ops_experts import in_slots, slot_table, slot_uses
from ikcli.settings.run import RunConfig

MIB = 2**20
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.(\w+)")


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """A layer with slots: its GPU, the weights of its experts, and the number of slots."""

    il: int
    device: str
    weights: tuple[Weight, ...]
    n_slots: int

    @property
    def n_expert(self) -> int:
        """Return the experts of the layer."""
        return self.weights[0].ne2

    @property
    def tables(self) -> tuple[Weight, Weight]:
        """Return the slots of all experts and the counters of their uses."""
        return slot_table(self.il, self.n_expert), slot_uses(self.il, self.n_expert)

    @property
    def ones(self) -> tuple[Weight, ...]:
        """Return the weights of one expert, under the names of the whole ones."""
        return tuple(Weight(w.name, w.type, (*w.shape[:2], 1)) for w in self.weights)

    @property
    def in_slots(self) -> tuple[Weight, ...]:
        """Return the weights of all slots."""
        return tuple(in_slots(w, self.n_slots) for w in self.weights)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot on the GPU."""
        return sum(map(upload.device_bytes, self.ones))


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """The layers that have slots."""

    layers: tuple[SlotLayer, ...]

    def by_layer(self, n_layer: int) -> tuple[int, ...]:
        """Return the number of slots of every layer of the model."""
        found = {layer.il: layer.n_slots for layer in self.layers}
        return tuple(found.get(il, 0) for il in range(n_layer))

    def of(self, device: str) -> tuple[SlotLayer, ...]:
        """Return the layers of a GPU."""
        return tuple(layer for layer in self.layers if layer.device == device)

    def slot_bytes(self, device: str) -> int:
        """Return the bytes of all slots of a GPU, each weight aligned."""
        return sum(_aligned(upload.device_bytes(w)) for layer in self.of(device) for w in layer.in_slots)

    def sent(self, device: str) -> frozenset[Weight]:
        """Return the weights that are sent to a GPU between steps: one expert each."""
        return frozenset(w for layer in self.of(device) for w in layer.ones)

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the GPUs with slots."""
        return tuple(dict.fromkeys(layer.device for layer in self.layers))

    @property
    def home(self) -> Mapping[str, str]:
        """Return the devices of the tables and slots by name."""
        slots = {w.name: layer.device for layer in self.layers for w in layer.in_slots}
        return slots | {w.name: CPU for layer in self.layers for w in layer.tables}

    def line(self) -> str:
        """Return the sentence for logs and plans."""
        n_slots, n = sum(x.n_slots for x in self.layers), sum(x.n_expert for x in self.layers)
        where = ", ".join(f"{self.slot_bytes(d) / MIB:.2f} MiB of {d}" for d in self.devices)
        return (
            f"expert cache: {n_slots} of {n} experts of {len(self.layers)} layers in RAM have slots in {where}; steps "
            "of few tokens compute these there"
        )


def cache_slots(config: RunConfig, model: Model, placement: Placement) -> tuple[CacheSlots | None, list[str]]:
    """Return the slots that `--expert-cache` pays for, and a warning if there are none."""
    if not config.expert_cache:
        return None, []
    if disk_options(config):
        other = disk_options(config)[0]
        raise UsageError(f"--expert-cache takes experts from RAM, but with {other} some are on disk; use one of them")
    if model.adapters.specs():
        raise UsageError("--expert-cache does not know what --lora adds to experts; leave one of them out")
    found, without = cached_layers(model, placement)
    if not found:
        return None, [f"--expert-cache has no effect: {without}"]
    layers: list[SlotLayer] = []
    for device in dict.fromkeys(layer.device for layer in found):
        layers += _divided([x for x in found if x.device == device], config.expert_cache * MIB)
    if not layers:
        least = max(x.slot_bytes for x in found) / MIB
        return None, [f"--expert-cache {config.expert_cache} has no effect: a slot takes {least:.2f} MiB"]
    return CacheSlots(tuple(sorted(layers, key=lambda x: x.il))), []


def largest_cache(layers: Collection[SlotLayer]) -> int:
    """Return the bytes with which all experts of these layers of a GPU have slots."""
    return _sending(layers) + sum(layer.n_expert * layer.slot_bytes for layer in layers)


def _sending(layers: Iterable[SlotLayer]) -> int:
    return Transfer.device_bytes(frozenset(w for layer in layers for w in layer.ones))


def cached_layers(model: Model, placement: Placement) -> tuple[list[SlotLayer], str]:
    """Return the layers whose experts can be cached, without slots, or the reason why there are none."""
    names: dict[int, list[str]] = {}
    extra: set[int] = set()
    for name in model.specs:
        match = _EXPERTS.fullmatch(name)
        if match is not None:
            names.setdefault(int(match[1]), []).append(name)
            if match[2] != "weight":
                extra.add(int(match[1]))
    found, reasons = [], dict.fromkeys(["the model has no routed experts"])
    for il, own in sorted(names.items()):
        if any(placement.buffer_of[name] != CPU for name in own) or il >= model.hp.n_layer:
            reasons["no routed experts stay in RAM"] = None
        elif placement.home[il] == CPU:
            reasons["no layer with experts in RAM has its other weights on a GPU (-ngl)"] = None
        elif il in extra:
            reasons["experts with biases or scales are not cached"] = None
        elif not all(upload.has_kernels(model.specs[name].type) for name in own):
            reasons["GPUs have no kernels for the types of the experts"] = None
        else:
            weights = tuple(Weight(name, model.specs[name].type, tuple(model.specs[name].shape)) for name in own)
            found.append(SlotLayer(il, placement.home[il], weights, 0))
    return found, list(reasons)[-1]


def _divided(layers: list[SlotLayer], n_bytes: int) -> list[SlotLayer]:
    """Return the layers of one GPU that get slots."""
    left = n_bytes - _sending(layers)
    each = max(left, 0) // sum(layer.slot_bytes for layer in layers)
    left -= each * sum(layer.slot_bytes for layer in layers)
    found = []
    for layer in layers:
        more = each < layer.n_expert and left >= layer.slot_bytes
        left -= layer.slot_bytes if more else 0
        n = min(each + more, layer.n_expert)
        if n:
            found.append(SlotLayer(layer.il, layer.device, layer.weights, n))
    return found


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // 256) * 256
