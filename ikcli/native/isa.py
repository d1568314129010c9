"""Detect instruction sets, and choose the one that kernels are compiled for.

An instruction that the target lacks does not raise: LLVM aborts the process. So kernels ask here first. `IK_CPU_ISA`
forces a lower level, so that one machine can test the code of another: `avx512vnni` (AVX-512 without later extensions:
no VBMI, GFNI, BF16), `avx2`, `avxvnni`, `portable`. `IK_BUILD_ISA` names a level to compile for on a machine that may
lack its instructions: tools/build_kernels.py builds what a package brings along (`kernel_pack.py`).
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from ikcli.errors import UsageError

# LLVM CPU and features to compile for at each level (x86-64 only). avx512 is what Zen 4 and Sapphire Rapids share.
_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2"
_AVX512 = f"{_AVX2},+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"
LEVELS = {
    "avx512": (
        "x86-64-v4",
        f"{_AVX512},+avx512vbmi,+avx512vbmi2,+avx512bf16,+avx512ifma,+avx512bitalg,+avx512vpopcntdq,+gfni,"
        "+vpclmulqdq,-prefer-256-bit",
    ),
    "avx512vnni": ("cascadelake", _AVX512),
    "avxvnni": ("haswell", f"{_AVX2},+avxvnni"),
    "avx2": ("haswell", _AVX2),
    "portable": ("x86-64", ""),
}
PACKED = ("avx512", "avx512vnni", "avxvnni", "avx2")  # levels for which a package brings kernels
# The features that kernels, and what chooses them, ask for; the rest only helps LLVM. Those of the second line count
# with AVX-512 alone.
_DECISIVE = frozenset({"avx2", "fma", "f16c", "avxvnni"})
_DECISIVE_512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512vbmi", "avx512bf16", "gfni"})


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
    if built := os.environ.get("IK_BUILD_ISA"):
        return level(built)
    wanted = os.environ.get("IK_CPU_ISA", "")
    here = host()
    if not wanted or wanted == here.name:
        return here
    if wanted not in LEVELS or platform.machine() not in ("x86_64", "AMD64"):
        known = dict.fromkeys([*LEVELS, here.name])
        raise UsageError(f"IK_CPU_ISA={wanted} is not one of {', '.join(known)} (this machine has {here.name})")
    target = level(wanted)
    if not target.features <= here.features:
        raise UsageError(
            f"IK_CPU_ISA={wanted} needs {', '.join(sorted(target.features - here.features))}, which this CPU lacks"
        )
    return target


def level(name: str) -> ISA:
    """Return a level as a target, whatever this machine is."""
    cpu, feature_string = LEVELS[name]
    features = frozenset(f[1:] for f in feature_string.split(",") if f.startswith("+"))
    return ISA("avx512" if name == "avx512vnni" else name, cpu, feature_string, features)


def packed_level(target: ISA) -> str | None:
    """Return the packed level whose kernels compute on `target` what its own would, to the last bit; None without one.

    They have the same instructions to choose from, and what LLVM may use besides is there.
    """
    if not target.is_x86:
        return None
    alike = (n for n in PACKED if _decisive(level(n)) == _decisive(target) and level(n).features <= target.features)
    return next(alike, None)


def _decisive(target: ISA) -> frozenset[str]:
    if "avx512f" not in target.features:
        return target.features & _DECISIVE
    return target.features & (_DECISIVE | _DECISIVE_512) - ({"avxvnni"} if "avx512vnni" in target.features else set())
