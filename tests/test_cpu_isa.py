"""Weight types in the code for lesser machines than this one: every level that `IK_CPU_ISA` can force here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from weight_bytes import QUANTIZED

from ikcli.native import isa
from ikcli.quant.formats import get_format

TESTS = Path(__file__).parent
# Each way of multiplying bytes: weights of full range, tables of signed bytes, codes with bias or minimum, signs apart.
SOME = ["q8_0", "iq4_xs", "q6_K", "q4_K", "q2_K", "iq3_ks", "iq4_ks_r4", "iq3_k_r4", "iq2_xs", "iq2_xs_r4"]
FLOATS = ["f16", "bf16", "bf16_r16"]
FEW = ["q8_0", "q4_K"]  # by default: every type is compiled anew for another level
LOWER = [level for level in isa.levels_of(isa.X86) if level != "avx512"]  # IK_CPU_ISA means the machine itself by that
ALL = [get_format(t).name for t in QUANTIZED]


def _case(level: str, names: list[str]) -> object:
    marks = () if (level, names) == ("avx2", FEW) else pytest.mark.slow
    return pytest.param(level, names, id=f"{level}-{len(names)}-from-{names[0]}", marks=marks)


@pytest.mark.parametrize(
    ("level", "names"),
    [
        _case("avx2", FEW),
        *(_case(level, SOME) for level in LOWER),
        *(_case(level, ALL[first : first + 8]) for level in LOWER for first in range(0, len(ALL), 8)),
    ],
)
def test_types_at_level(level: str, names: list[str]) -> None:
    needed = {f[1:] for f in isa.LEVELS[level][1].split(",") if f}
    if not needed <= isa.host().features:
        pytest.skip(f"this CPU lacks {', '.join(sorted(needed - isa.host().features))}")
    tests = [f"test_cpu_formats.py::test_exact_activations[{name}]" for name in names]
    if names == SOME:
        tests += [f"test_cpu_matmul.py::test_mul_mat[{name}]" for name in FLOATS]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "", *tests]
    env = dict(os.environ, IK_CPU_ISA=level, PYTHONPATH=str(TESTS.parent))
    run = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0 and f"{len(tests)} passed" in run.stdout, run.stdout[-3000:]
