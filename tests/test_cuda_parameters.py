"""Names of the parameters of CUDA kernels: those of the sources, in their order; wrong ones are told."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from leaves import leaf

import ikcli
from ikcli.backends.cuda import parameters
from ikcli.backends.cuda.lower import GpuLaunch
from ikcli.graph import Graph

KERNELS = Path(ikcli.__file__).parent / "backends" / "cuda" / "kernels"


def names_of(parameters: str) -> list[str]:
    return re.findall(r"(\w+)(?:,|$)", parameters.replace("\\\n", " ").strip())


def sources(pattern: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob(pattern)))


@pytest.mark.parametrize("kernel", sorted(parameters.KERNELS))
def test_names_are_those_of_the_source(kernel: str) -> None:
    (found,) = re.findall(rf"^{kernel}\(([^)]*)\) {{", sources("*.cu"), re.M)
    assert names_of(found) == parameters.KERNELS[kernel].split()


def test_names_of_products_are_those_of_the_source() -> None:
    (found,) = re.findall(r"#define IK_MV_PARAMETERS(.*?)\n#define", sources("weights_gemm.cuh"), re.S)
    assert names_of(found) == parameters.MV.split()


def launch(kernel: str, n: int) -> GpuLaunch:
    return GpuLaunch(kernel, 1, 32, 0, tuple(range(n)), leaf(Graph(), "x", 16))


def test_arguments_are_found_by_name() -> None:
    op = launch("layer_add", 8)
    assert op.arg("y_cols") == 5 and op.named("x y") == (3, 4)
    changed = op.changed(y=np.int32(40), cols=70)
    assert changed.args == (0, 1, 2, 3, 40, 5, 6, 70) and op.arg("y") == 4


def test_wrong_names_and_numbers_are_told() -> None:
    op = launch("layer_add", 8)
    with pytest.raises(KeyError, match="layer_add has no parameter 'bias'; it has st, symbol, factor, x, y, y_cols"):
        op.arg("bias")
    with pytest.raises(KeyError, match="layer_add has no parameter 'z'"):
        op.changed(z=0)
    with pytest.raises(KeyError, match="the parameters of the kernel layer_rope_table have no names"):
        launch("layer_rope_table", 3).arg("x")
    with pytest.raises(TypeError, match="the kernel layer_add has 8 parameters, not 7"):
        launch("layer_add", 7)
