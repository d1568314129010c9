"""Which layers have windows, rotate and have experts, for keys that files of an architecture have or lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import base_metadata

from ikcli.models import HParams

EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 48, "leading_dense_block_count": 1}
LAGUNA = EXPERTS | {"block_count": 5, "attention.key_length": 16, "attention.value_length": 16}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}


def read(arch: str, tensors: Any = None, **keys: Any) -> HParams:
    return HParams.from_gguf(base_metadata(arch, **keys), tensors or {}, "file.gguf")


def windows(hp: HParams) -> list[int]:
    return [hp.at(il).window for il in range(hp.n_layer)]


def rotated(hp: HParams) -> list[int]:
    return [hp.at(il).n_rot for il in range(hp.n_layer)]


@pytest.mark.parametrize("pattern", [{}, {"attention.sliding_window_pattern": 4}])
def test_laguna_with_as_many_heads_everywhere_begins_periods_with_a_full_layer(pattern: dict[str, int]) -> None:
    hp = read("laguna", **LAGUNA | YARN | {"attention.sliding_window": 8, "rope.dimension_count": 8} | pattern)
    assert windows(hp) == [0, 8, 8, 8, 0]
    assert rotated(hp) == [8, 16, 16, 16, 8], "window layers rotate whole heads where the file does not say"
    assert [hp.at(il).rope.scaling for il in range(3)] == ["yarn", "none", "none"]
    hp = read("laguna", **LAGUNA | {"attention.sliding_window": 8, "rope.dimension_count_swa": 4})
    assert rotated(hp) == [8, 4, 4, 4, 8], "and others half of them"


def test_laguna_tells_windows_by_heads() -> None:
    heads = {"attention.head_count": np.array([4, 6, 6, 4, 6], np.int32), "attention.sliding_window": 8}
    assert windows(read("laguna", **LAGUNA | heads)) == [0, 8, 8, 0, 8]


@pytest.mark.parametrize("window", [None, 0])
def test_laguna_without_windows(window: int | None) -> None:
    hp = read("laguna", **LAGUNA | {"attention.sliding_window": window})
    assert windows(hp) == [0] * 5 and rotated(hp) == [16] * 5


def test_cohere2_moe_with_a_period() -> None:
    keys = {"block_count": 5, "attention.sliding_window": 8, "attention.sliding_window_pattern": 3, "logit_scale": 1.0}
    hp = read("cohere2_moe", **EXPERTS | keys)
    assert windows(hp) == [0, 8, 8, 0, 8]
    assert rotated(hp) == [16, 16, 16, 0, 16], "dense layers at the beginning rotate"


def test_olmo_3_has_windows_whose_rotation_is_not_scaled() -> None:
    assert windows(read("olmo2", block_count=5)) == [0] * 5
    hp = read("olmo2", block_count=5, **YARN | {"attention.sliding_window": 8})
    assert windows(hp) == [8, 8, 8, 0, 8]
    assert [hp.at(il).rope.scaling for il in range(5)] == ["none", "none", "none", "yarn", "none"]
    listed = {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([1, 0, 1, 0, 1], np.int32)}
    assert windows(read("olmo2", block_count=5, **listed)) == [8, 0, 8, 0, 8]
