"""Flags of the C++ programs without a counterpart here; they are accepted with a notice."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt

_TUNING = "tuning flag of the C++ programs, not supported"
_NO_EFFECT = "accepted for old command lines"
_accepted = partial(opt, topic="accepted, no effect", noop=_TUNING)


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Flags that are accepted without effect; `noop` is the reason, shown once."""

    grouped_experts: bool = _accepted(False, "-ger --grouped-expert-routing", "switch",
        help="route experts by groups")
    only_active_experts: bool = _accepted(False, "-ooae --offload-only-active-experts", "switch",
        negative="-no-ooae --no-offload-only-active-experts",
        help="upload the selected experts only (done where it pays)")
    merge_up_gate: bool = _accepted(False, "-muge --merge-up-gate-experts", "switch",
        help="store up and gate experts together")
    merge_qkv: bool = _accepted(False, "-mqkv --merge-qkv", "switch", help="store Q, K and V together")
    graph_reuse: bool = _accepted(False, "-gr --graph-reuse", "switch", negative="-no-gr --no-graph-reuse",
        help="reuse compute graphs (always done here)")
    scheduler_async: bool = _accepted(False, "-sas --scheduler-async", "switch",
        help="asynchronous scheduling")
    graph_scheduling: bool = _accepted(False, "-smgs --split-mode-graph-scheduling", "switch",
        help="scheduling of split mode graph")
    rope_cache: bool = _accepted(False, "-rcache --rope-cache", "switch", help="keep rotation tables")
    no_fused_up_gate: bool = _accepted(False, "-no-fug --no-fused-up-gate", "switch",
        help="keep dense up and gate apart")
    no_fused_mul_add: bool = _accepted(False, "-no-mmad --no-fused-mul-multiadd", "switch",
        help="keep multiply and add apart")
    repack: bool = _accepted(False, "--repack", "optswitch", negative="-nr --no-repack", noop=_NO_EFFECT,
        help="let a program repack weights (here -rtr does)")
    no_host: bool = _accepted(False, "--no-host", "optswitch", noop=_NO_EFFECT,
        help="kinds of buffers in host memory")
    prio: int = _accepted(0, "--prio", "int", form="N", noop=_NO_EFFECT, help="process priority")
    poll: int = _accepted(50, "--poll", "int", form="N", noop=_NO_EFFECT, help="polling level")
    log_colors: bool = _accepted(False, "--log-colors", "optswitch", noop=_NO_EFFECT, help="coloured log")
