"""Which members of a matrix run by default; the others are slow, which .ci/run adds.

The default run says within minutes whether something is broken. So it takes one member per way through the code: a kind
of attention, of layer, of scale or of code. The others repeat a check with other numbers, and cost seconds each of
computing or of compiling kernels. So do the tests of `data/slow.txt`, some of them the only ones of their kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_architectures import TINY, WINDOWED

from ikcli.gguf.constants import GGMLType as T

# One per kind of attention, norm, positions and layer; all others have the same parts in another order.
ARCHITECTURES = {
    "bloom",  # slopes
    "gpt2",  # embedded positions, layer norms
    "gptneox",  # attention and feed forward side by side
    "olmo2",  # norms behind layers
    "glm4moe",  # shared experts, layers of prediction
    "deepseek32",  # latent attention
    "mamba", "qwen35moe", "kimi-linear",  # recurrent
    "gemma2",  # windows and soft caps
    "gemma4",  # layers that share caches
    "gpt-oss",  # sinks
    "laguna",  # a number of heads per layer
}  # fmt: skip
assert {*TINY, *WINDOWED} >= ARCHITECTURES
# The cache types of most runs. f32, bf16 and mixed pairs have the same kernels with other loads.
CACHES = [T.F16, T.Q8_0]
SAME_CACHES = [(T.F16, T.F16), (T.Q8_0, T.Q8_0)]

# One encoder per way of searching runs by default: Q4_0, Q8_0, Q4_K, IQ2_XXS, IQ4_KS, ternary ones. The search of
# every other type is compiled for it alone.
OTHER_ENCODERS = {T.Q4_1, T.Q5_0, T.Q5_1, T.Q6_0, T.IQ4_NL, T.IQ4_NL_R4, T.MXFP4, T.Q8_KV, T.Q8_KV_R8,
                  T.Q2_K, T.Q2_K_R4, T.Q3_K, T.Q5_K, T.Q6_K, T.IQ4_XS, T.IQ4_XS_R8,
                  T.IQ1_S, T.IQ1_S_R4, T.IQ1_M, T.IQ1_M_R4, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S,
                  T.IQ2_K, T.IQ3_K, T.IQ4_K, T.IQ5_K, T.IQ6_K, T.IQ2_KS, T.IQ3_KS, T.IQ4_KSS, T.IQ5_KS, T.IQ2_KL,
                  T.IQ1_KT, T.IQ2_KT, T.IQ3_KT, T.IQ4_KT}  # fmt: skip


LIST = Path(__file__).parent / "data" / "slow.txt"


def listed() -> set[str]:
    """Names of the list: file::function, with or without parameters."""
    return {line for line in LIST.read_text().splitlines() if not line.startswith("#")}


def mark_listed(items: Iterable[pytest.Item]) -> None:
    """Mark tests of the list as slow, and those of how rows are encoded to the other types."""
    names = listed()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        encodes = name.startswith(("test_encode_", "test_feedback")) and hasattr(item, "callspec")
        other = encodes and item.callspec.params.get("type") in OTHER_ENCODERS
        if other or name in names or name.partition("[")[0] in names:
            item.add_marker(pytest.mark.slow)


def some(values: Iterable[Any], default: Collection[Any], unpack: bool = False) -> list[Any]:
    """Parameters of a test; those not in `default` are slow. `unpack`: a value is a tuple for several names."""
    values = list(values)
    assert all(value in values for value in default), "a member that is not there would leave no default test"
    return [
        pytest.param(*(value if unpack else (value,)), marks=() if value in default else pytest.mark.slow)
        for value in values
    ]


def some_architectures(names: Iterable[str] = (*TINY, *WINDOWED)) -> list[Any]:
    """Of architectures."""
    names = list(names)
    return some(names, [name for name in names if name in ARCHITECTURES])
