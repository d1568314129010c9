"""Decide where nodes are computed: by tensor placement, and by `-op` for products with weights in RAM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ikcli.backends.cuda import upload
from ikcli.engine.plan.expert_slots import ExpertSlots
from ikcli.engine.plan.placement import CPU, OFFLOAD_MIN_BATCH, Placement, offload_threshold
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.expert_steps import ExpertSteps
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import RunDevice
from ikcli.engine.run.runner import Offload, Runner
from ikcli.engine.run.stream_trial import StreamTrial
from ikcli.graph import Node, Rows, Weight
from ikcli.graph.ops_experts import MoeUpGate, MulMatId
from ikcli.graph.ops_rows import MulMat, MulMatHeads
from ikcli.graph.split import NodePlaces
from ikcli.settings.run import RunConfig

_POLICIES = {op.policy: op.by_expert for op in (MulMat, MulMatHeads, MulMatId, MoeUpGate)}
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"


def offload_of(
    config: RunConfig, model: Model, placement: Placement, slots: ExpertSlots | None = None
) -> Offload | None:
    """Return the token counts from which a GPU computes products with block weights in RAM (`-op`).

    `slots`: of experts that are only partly in RAM.
    """
    on_disk = slots.names if slots is not None else frozenset()
    hp, allowed = model.hp, dict.fromkeys(_POLICIES, True)
    for name, on in config.offload_policy:
        allowed |= dict.fromkeys(allowed, on) if name == "ALL" else {name: on}
    dense = config.offload_min_batch or OFFLOAD_MIN_BATCH
    by_expert = math.ceil(offload_threshold(dense, hp.n_expert, hp.n_expert_used))
    least = {name: by_expert if experts else dense for name, experts in _POLICIES.items() if allowed[name]}
    used = {*placement.buffer_of.values(), *placement.cache}
    first = next((name for name in placement.devices if name in used), None)

    def device(node: Node, w: Weight, n_tokens: int) -> str | None:
        if n_tokens < least.get(node.op.policy, n_tokens + 1) or node.rows.symbol is Rows.OUTPUTS:
            return None
        if w.name in on_disk or not upload.has_kernels(w.type):
            return None
        home = placement.home[node.il] if node.il >= 0 else CPU
        return home if home != CPU and home in used else first

    trial = StreamTrial(by_expert) if config.offload_min_batch is None and hp.n_expert else None
    return Offload(tuple(sorted({*least.values()} - {0, 1})), device, trial) if least else None


def places_of(placement: Placement) -> NodePlaces:
    """Return the devices of nodes.

    A model without an output matrix multiplies with its embeddings on the device of the output.
    """
    places = placement.places()
    output = placement.split.output

    def weight(node: Node, w: Weight) -> str:
        if w.name == EMBEDDING and isinstance(node.op, MulMat):
            return CPU if output < 0 else placement.devices[output]
        return places.weight(node, w)

    return replace(places, weight=weight)


def make_runner(
    n_threads: int,
    gpus: Mapping[str, RunDevice],
    placement: Placement,
    offload: Offload | None,
    experts: ExpertSteps | None = None,
) -> Runner:
    """Make a runner of the CPU and the GPUs that hold anything."""
    cpu = CpuDevice(n_threads, experts)
    return Runner(cpu, gpus, places_of(placement), offload) if gpus else Runner(cpu)
