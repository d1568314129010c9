"""The tensor type: blocks of 32 bytes of codes, then their scale, f16."""

from __future__ import annotations

import numpy as np

from ikcli.gguf.types import GGMLType, TensorType, add_type, new_type_id
from ikcli.quant.decode import Bytes, Floats, block_decoder
from ikcli.quant.encoders import EncodeOptions

Q8_TOY = new_type_id(1001, "Q8_TOY")
RECORD = TensorType(
    Q8_TOY,
    "q8_toy",
    block_size=32,
    type_size=34,
    decode="outside.tensor_type:decode",
    encode="outside.tensor_type:encode",
    scales=(32,),
    cpu="outside.tensor_format:ToyFormat",
    tile="s32",
)


def register() -> TensorType:
    """Make the type known to ik."""
    return add_type(RECORD)


@block_decoder
def decode(blocks: Bytes) -> Floats:
    """Blocks (n, 34) -> (n, 32)."""
    scales = np.ascontiguousarray(blocks[:, 32:]).view("<f2").astype(np.float32)
    return scales * blocks[:, :32].view(np.int8).astype(np.float32)


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Rows (n_rows, ne0) as bytes."""
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
    codes = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)).clip(-127, 127)
    return np.concatenate((codes.astype(np.int8).view(np.uint8), scales.view(np.uint8)), axis=1).reshape(-1)
