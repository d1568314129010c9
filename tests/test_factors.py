"""Factors beside matrices (`<name>.scale`), which llama.cpp writes for NVFP4 and BitNet, in any architecture."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, tiny_deepseek2, tiny_model

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.errors import FormatError, UnsupportedError
from ikcli.models import GraphConfig

MATRICES = re.compile(r"(blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)|output)\.weight")
EXPERTS = {"expert_feed_forward_length": 64, "expert_count": 8, "expert_used_count": 3}
TOKENS = np.arange(5, dtype=np.int32)


def logits(model: MemoryModel, **config: Any) -> np.ndarray:
    return np.array(ReferenceSession(model, GraphConfig(n_ctx=16, **config)).decode(Batch.single(TOKENS, logits="all")))


def with_factors(model: MemoryModel, matrices: re.Pattern[str]) -> tuple[MemoryModel, int]:
    """Divide matrices by numbers, which go beside them."""
    rng, n = np.random.default_rng(4), 0
    for name in filter(matrices.fullmatch, list(model.tensors)):
        shape = model.tensors[name].shape
        factors = (0.25 + rng.random(shape[2] if len(shape) > 2 else 1)).astype(np.float32)
        values = model.values(name)
        model.set(name, values / factors.reshape(-1, *[1] * (values.ndim - 1)))
        model.set(name.replace(".weight", ".scale"), factors)
        n += 1
    return model, n


@pytest.mark.parametrize("fmoe", [True, False])
@pytest.mark.parametrize(
    ("arch", "keys"), [("llama", {}), ("qwen2", {}), ("qwen3moe", EXPERTS)], ids=lambda x: str(x)[:8]
)
def test_products_are_multiplied(arch: str, keys: dict[str, Any], fmoe: bool) -> None:
    optional = ("_q.bias", "_k.bias", "_v.bias")
    wanted = logits(tiny_model(arch, optional=optional, **keys), fmoe=fmoe)
    model, n = with_factors(tiny_model(arch, optional=optional, **keys), MATRICES)
    assert n == 15
    found = logits(model, fmoe=fmoe)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_a_factor_for_every_expert() -> None:
    model, _ = with_factors(tiny_model("qwen3moe", **EXPERTS), MATRICES)
    model.set("blk.1.ffn_up_exps.scale", np.ones(5, np.float32))
    with pytest.raises(FormatError, match=r"'blk\.1\.ffn_up_exps\.scale' has 5 factors, 'blk\.1.*weight' needs 8"):
        logits(model)


def test_where_no_product_is_a_factor_is_refused() -> None:
    model, _ = with_factors(tiny_model("llama"), re.compile(r"token_embd\.weight"))
    with pytest.raises(UnsupportedError, match=r"'token_embd\.weight' has a factor beside it, which embed does not"):
        logits(model)


def test_a_matrix_that_is_split_with_a_factor_is_refused() -> None:
    model, n = with_factors(tiny_deepseek2(), re.compile(r"blk\.\d+\.attn_kv_b\.weight"))
    assert n
    with pytest.raises(UnsupportedError, match=r"made of tensors of which 'blk\.0\.attn_kv_b\.weight' has a factor"):
        logits(model)
