"""Decode the float types."""

from __future__ import annotations

import numpy as np

from ikcli.quant.decode import Bytes, Floats, block_decoder


@block_decoder
def f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


@block_decoder
def f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


@block_decoder
def bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)
