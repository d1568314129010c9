"""Detect instruction sets, and choose the one that kernels are compiled for.

An instruction that the target lacks does not raise: LLVM aborts the process. So kernels ask here first. `IK_CPU_ISA`
forces a lower level, so that one machine can test the code of another: `avx512vnni` (AVX-512 without later extensions:
no VBMI, GFNI, BF16), `avx2`, `avxvnni`, `portable`; on ARM64 `dotprod` and `neon`. `IK_BUILD_ISA` names a level to
compile for on a machine that may lack its instructions, of another architecture as well: tools/build_kernels.py builds
what a package brings along (`kernel_pack.py`). `IK_BUILD_SYSTEM` (`linux`, `darwin`) names the operating system.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from dataclasses import dataclass

from ikcli import hostinfo
from ikcli.errors import UsageError

X86, ARM64 = "x86_64", "aarch64"  # architectures, as LLVM names them
# LLVM CPU and features to compile for at each level. avx512 is what Zen 4 and Sapphire Rapids share.
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
    # Apple from M2, Graviton 3, Grace, Neoverse N2 and V1, Snapdragon X
    "i8mm": ("generic", "+neon,+v8.2a,+fullfp16,+dotprod,+i8mm,+bf16"),
    # Apple M1, Graviton 2, Ampere Altra, Cortex-A76 (Raspberry Pi 5)
    "dotprod": ("generic", "+neon,+v8.2a,+fullfp16,+dotprod"),
    "neon": ("generic", "+neon"),  # every other ARM64 processor
}
_ARM_LEVELS = ("i8mm", "dotprod", "neon")
PACKED = {X86: ("avx512", "avx512vnni", "avxvnni", "avx2"), ARM64: ("i8mm", "dotprod")}
"""Levels for which a package brings kernels, by architecture."""
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
    architecture: str = X86

    @property
    def is_x86(self) -> bool:
        return self.architecture == X86

    @property
    def is_arm64(self) -> bool:
        return self.architecture == ARM64

    @property
    def vnni(self) -> bool:
        """Return whether one instruction of x86 adds four products of bytes to a sum."""
        return not self.features.isdisjoint({"avxvnni", "avx512vnni"})

    @property
    def plain_avx2(self) -> bool:
        """Return whether bytes are multiplied in several instructions of AVX2."""
        return "avx2" in self.features and not self.vnni

    @property
    def short_vectors(self) -> bool:
        """Return whether vectors have 32 bytes: AVX2, with or without AVX-VNNI."""
        return "avx2" in self.features and "avx512vnni" not in self.features

    @property
    def signed_codes(self) -> bool:
        """Return whether products of signed bytes are preferred to those of unsigned codes and signed bytes."""
        return self.plain_avx2 or self.is_arm64


def machine() -> str:
    """Return the architecture of this machine."""
    name = platform.machine().lower()
    return {"amd64": X86, "arm64": ARM64}.get(name, name)


@functools.cache
def host() -> ISA:
    """Return the running machine."""
    if machine() == ARM64:  # compiled for a level: LLVM does not see all features there
        found = arm_features()
        return level(next(name for name in _ARM_LEVELS if level(name).features - _IMPLIED <= found))
    import llvmlite.binding as llvm

    flags = llvm.get_host_cpu_features()
    features = frozenset(f for f, on in flags.items() if on)
    name = "portable"
    for one, needed in (("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}), ("avxvnni", {"avxvnni"}),
                        ("avx2", {"avx2", "fma"})):  # fmt: skip
        if needed <= features:
            name = one
            break
    return ISA(name, llvm.get_host_cpu_name(), "", features, machine())


_IMPLIED = frozenset({"v8.2a", "neon"})  # by what levels have besides
# Where the kernel of Linux says what the CPU can do (bits of AT_HWCAP and AT_HWCAP2), and macOS (names of sysctl).
_HWCAP = {"fullfp16": 10, "dotprod": 20}
_HWCAP2 = {"i8mm": 13, "bf16": 14}
_SYSCTL = {"fullfp16": "FEAT_FP16", "dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
_PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE = 43  # of Windows


def arm_features() -> frozenset[str]:
    """Return which features of `LEVELS` this ARM64 machine has, by what its operating system says."""
    if sys.platform == "darwin":
        return frozenset(f for f, name in _SYSCTL.items() if hostinfo.sysctl(f"hw.optional.arm.{name}"))
    if sys.platform == "win32":
        # Windows reports no more; processors with these products have half floats as well.
        has = ctypes.windll.kernel32.IsProcessorFeaturePresent(_PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE)
        return frozenset({"fullfp16", "dotprod"}) if has else frozenset()
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    words = ((getauxval(16), _HWCAP), (getauxval(26), _HWCAP2))
    return frozenset(f for word, bits in words for f, bit in bits.items() if word >> bit & 1)


@functools.cache
def current() -> ISA:
    """Return the target kernels are compiled for: the host, or the level in IK_CPU_ISA."""
    if built := os.environ.get("IK_BUILD_ISA"):
        return level(built)
    wanted = os.environ.get("IK_CPU_ISA", "")
    here = host()
    if not wanted or wanted == here.name:
        return here
    if wanted not in levels_of(here.architecture):
        known = dict.fromkeys([*levels_of(here.architecture), here.name])
        raise UsageError(f"IK_CPU_ISA={wanted} is not one of {', '.join(known)} (this machine has {here.name})")
    target = level(wanted)
    if not target.features <= here.features:
        raise UsageError(
            f"IK_CPU_ISA={wanted} needs {', '.join(sorted(target.features - here.features))}, which this CPU lacks"
        )
    return target


def first_level_bytes() -> int:
    """Return the size of the first data cache of the machine that kernels are compiled for; 48 KiB if unknown."""
    if built := os.environ.get("IK_BUILD_ISA"):
        return (32 if built in ("avx2", "avx512vnni") else 48) << 10  # of most processors of that level
    return hostinfo.first_level_bytes() or 48 << 10


def levels_of(architecture: str) -> list[str]:
    """Return the levels of an architecture."""
    return [
        name for name in LEVELS if architecture in (X86, ARM64) and (name in _ARM_LEVELS) == (architecture == ARM64)
    ]


def level(name: str) -> ISA:
    """Return a level as a target, whatever this machine is."""
    cpu, feature_string = LEVELS[name]
    features = frozenset(f[1:] for f in feature_string.split(",") if f.startswith("+"))
    architecture = ARM64 if name in _ARM_LEVELS else X86
    return ISA("avx512" if name == "avx512vnni" else name, cpu, feature_string, features, architecture)


def system() -> str:
    """Return the operating system to compile for, as `sys.platform` has it."""
    return os.environ.get("IK_BUILD_SYSTEM") or sys.platform


def packed_level(target: ISA) -> str | None:
    """Return the packed level whose kernels compute on `target` what its own would, to the last bit; None without one.

    They have the same instructions to choose from, and what LLVM may use besides is there.
    """
    if target.is_arm64:
        return target.name if target.name in PACKED[ARM64] else None
    if not target.is_x86:
        return None
    alike = (
        n for n in PACKED[X86] if _decisive(level(n)) == _decisive(target) and level(n).features <= target.features
    )
    return next(alike, None)


def _decisive(target: ISA) -> frozenset[str]:
    if "avx512f" not in target.features:
        return target.features & _DECISIVE
    return target.features & (_DECISIVE | _DECISIVE_512) - ({"avxvnni"} if "avx512vnni" in target.features else set())
