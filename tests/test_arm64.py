"""ARM64: which level a machine has, and what the kernels are compiled to, on machines of any architecture.

`tools/arm64_tests.py` runs the tests of the kernels themselves, in emulation.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import count_instructions
import pytest
from weight_bytes import QUANTIZED

from ikcli.errors import UsageError
from ikcli.gguf.types import TYPES
from ikcli.native import isa, kernel_cache, kernel_pack
from ikcli.quant.formats import get_format

ROOT = Path(__file__).resolve().parents[1]
NAMES = [get_format(t).name for t in QUANTIZED if TYPES[t].cpu]
AT_ONCE = 8
# Types whose points or values come from memory or from many instructions: more of them per product than others.
_GENERATED = ("iq1", "iq2_x", "iq2_s", "iq3_x", "iq3_s", "kt")
LEVELS = ("i8mm", "dotprod", "neon")


# --- which level ------------------------------------------------------------------------------------------------------
def of_arm64(monkeypatch: pytest.MonkeyPatch, features: set[str]) -> isa.ISA:
    """The level of an ARM64 machine with these features."""
    monkeypatch.setattr(isa.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(isa, "arm_features", lambda: frozenset(features))
    return isa.host.__wrapped__()


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (set(), "neon"),
        ({"fullfp16"}, "neon"),
        ({"dotprod"}, "neon"),
        ({"fullfp16", "dotprod"}, "dotprod"),
        ({"fullfp16", "dotprod", "i8mm"}, "dotprod"),
        ({"fullfp16", "dotprod", "i8mm", "bf16"}, "i8mm"),
    ],
)
def test_level_of_a_machine(features: set[str], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_arm64(monkeypatch, features)
    assert found == isa.level(level) and found.is_arm64 and not found.is_x86 and not found.plain_avx2
    assert isa.packed_level(found) == (None if level == "neon" else level)


def test_lower_levels_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    host = of_arm64(monkeypatch, {"fullfp16", "dotprod"})
    monkeypatch.setattr(isa, "host", lambda: host)
    monkeypatch.delenv("IK_BUILD_ISA", raising=False)
    cases = {"neon": "", "i8mm": "which this CPU lacks", "avx2": "is not one of i8mm, dotprod, neon"}
    for wanted, message in cases.items():
        monkeypatch.setenv("IK_CPU_ISA", wanted)
        if not message:
            assert isa.current.__wrapped__() == isa.level(wanted)
            continue
        with pytest.raises(UsageError, match=message):
            isa.current.__wrapped__()


def test_what_linux_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.sys, "platform", "linux")
    words = {16: 1 << 20 | 1 << 10, 26: 1 << 13}

    class Auxiliary:
        def __call__(self, kind: int) -> int:
            return words[kind]

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=Auxiliary()))
    assert isa.arm_features() == {"dotprod", "fullfp16", "i8mm"}


def test_what_macos_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.sys, "platform", "darwin")
    reported = {"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_FP16": 1, "hw.optional.arm.FEAT_I8MM": 0}
    monkeypatch.setattr(isa.hostinfo, "sysctl", reported.get)
    assert isa.arm_features() == {"dotprod", "fullfp16"}


def test_name_of_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IK_BUILD_SYSTEM", "darwin")
    assert kernel_pack.pack_name("i8mm") == "darwin-aarch64-i8mm.pack"


def test_kernels_of_another_system_have_a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel_cache._folder_name.__wrapped__()
    monkeypatch.setenv("IK_BUILD_SYSTEM", "darwin" if sys.platform != "darwin" else "linux")
    assert kernel_cache._folder_name.__wrapped__() != own


# --- counts of instructions -------------------------------------------------------------------------------------------
LOOP = """
f:
	movi	v0.2d, #0
.LBB0_1:
	mov	x9, x1
.LBB0_2:
	ldp	q1, q2, [x9], #32
	ldr	q3, [sp, #16]
	sdot	v0.4s, v1.16b, v3.4b[1]
	sdot	v4.4s, v2.16b, v3.4b[1]
	umov	w3, v0.b[1]
	subs	x2, x2, #1
	b.ne	.LBB0_2
	cbnz	x4, .LBB0_1
	ret
g:
	smmla	v0.4s, v1.16b, v2.16b
	ret
"""


def test_loops_are_counted() -> None:
    found = count_instructions.main_loop(LOOP)
    assert (found["products"], found["instructions"], found["per_lane"], found["stack"]) == (32, 7, 1, 1)
    assert count_instructions.main_loop(LOOP, floats=True)["products"] == 0


# --- what kernels are compiled to -------------------------------------------------------------------------------------
def counts(level: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Counts by the tool in a process of its own: a target is chosen once per process.

    LLVM would end it where an instruction of another architecture is asked for.
    """
    command = [sys.executable, str(ROOT / "tools" / "count_instructions.py"), "--json", *arguments[:1], level]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("IK_BUILD", "IK_CPU"))}
    run = subprocess.run(
        [*command, *arguments[1:]], env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1200
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(run.stdout))


@pytest.mark.slow("compiles kernels for another architecture")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("names", [NAMES[i : i + AT_ONCE] for i in range(0, len(NAMES), AT_ONCE)], ids=lambda n: n[0])
def test_products_of_bytes(level: str, names: list[str]) -> None:
    """Every type: the loops multiply vectors of bytes, call nothing and take few instructions per product."""
    found = counts(level, "--pieces", *names)
    assert len(found) == 4 * len(names)
    instruction = {"i8mm": "smmla", "dotprod": "sdot", "neon": "smull"}
    for name in names:
        few, some, many, to_tile = (found[f"{name} {piece}"] for piece in ("few", "some", "many", "to_tile"))
        assert instruction[level] in many["by_name"] and many["products"] >= 2048, name
        assert {"neon": "smull"}.get(level, "sdot") in few["by_name"] and few["products"] >= 128, name
        assert few["calls"] == some["calls"] == many["calls"] == 0 and to_tile["calls"] <= 2, (
            name,
            to_tile,
        )  # memset of the last step
        generated = any(part in name for part in _GENERATED)
        slower = 3 if level == "neon" else 1
        assert many["per_product"] <= 0.2 * slower, (name, many)
        assert few["per_product"] <= (3.0 if generated else 1.0) * slower, (name, few)
        # Weights are decoded once for four activation rows, and sums find registers. Without `sdot`, rows are taken one
        # by one.
        if not generated and level != "neon":
            assert some["products"] == 4 * few["products"], name
            assert some["per_product"] <= 0.95 * few["per_product"], (name, few, some)
            assert some["stack"] <= 0.2 * some["instructions"], (name, some)
        assert many["per_lane"] == 0 and (generated or few["per_lane"] <= 2), name


@pytest.mark.slow("compiles kernels for another architecture")
def test_products_of_floats() -> None:
    found = counts("i8mm", "--attention", "f32", "f16", "bf16", "q8_0")
    assert all("fmla" in row["by_name"] and row["calls"] == row["per_lane"] == 0 for row in found.values())
    assert "fcvtl" in found["generation K f16"]["by_name"]
    assert max(row["per_product"] for name, row in found.items() if "q8_0" not in name) <= 0.6
