"""Detect instruction sets, and choose the one that kernels are compiled for.

An instruction that the target lacks does not raise: LLVM aborts the process. So kernels ask here first. `IK_CPU_ISA`
forces a lower level, so that one machine can test the code of another: `avx512vnni` (AVX-512 without later extensions:
no VBMI, GFNI, BF16), `avx2`, `avxvnni`, `portable`.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from ikcli.errors import UsageError

# LLVM CPU and features to compile for at each forced level (x86-64 only).
_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2"
_FORCED = {
    "avx512vnni": ("cascadelake", f"{_AVX2},+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"),
    "avx2": ("haswell", _AVX2),
    "avxvnni": ("haswell", f"{_AVX2},+avxvnni"),
    "portable": ("x86-64", ""),
}


@dataclass(frozen=True, slots=True)
class ISA:
    """A compilation target: LLVM CPU name, LLVM feature string ("" = host), and the features as a set."""

    name: str
    cpu: str
    feature_string: str
    features: frozenset[str]

    @property
    def is_x86(self) -> bool:
        return platform.machine() in ("x86_64", "AMD64")

    @property
    def plain_avx2(self) -> bool:
        """Return whether bytes are multiplied in several instructions of AVX2."""
        return "avx2" in self.features and not {"avxvnni", "avx512vnni"} & self.features


@functools.cache
def host() -> ISA:
    """Return the running machine."""
    import llvmlite.binding as llvm

    flags = llvm.get_host_cpu_features()
    features = frozenset(f for f, on in flags.items() if on)
    name = "portable"
    for level, needed in (("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}), ("avxvnni", {"avxvnni"}),
                          ("avx2", {"avx2", "fma"}), ("neon", {"neon"})):  # fmt: skip
        if needed <= features:
            name = level
            break
    return ISA(name, llvm.get_host_cpu_name(), "", features)


@functools.cache
def current() -> ISA:
    """Return the target kernels are compiled for: the host, or the level in IK_CPU_ISA."""
    wanted = os.environ.get("IK_CPU_ISA", "")
    here = host()
    if not wanted or wanted == here.name:
        return here
    if wanted not in _FORCED or platform.machine() not in ("x86_64", "AMD64"):
        raise UsageError(f"IK_CPU_ISA={wanted} is not one of {', '.join([*_FORCED, here.name])} (this machine's)")
    cpu, feature_string = _FORCED[wanted]
    features = frozenset(f[1:] for f in feature_string.split(",") if f)
    if not features <= here.features:
        raise UsageError(
            f"IK_CPU_ISA={wanted} needs {', '.join(sorted(features - here.features))}, which this CPU lacks"
        )
    return ISA("avx512" if wanted == "avx512vnni" else wanted, cpu, feature_string, features)
