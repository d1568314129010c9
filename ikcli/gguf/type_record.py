"""The record of a tensor type: its sizes, and the names of the functions that handle its bytes.

Functions and classes are named by text (`module:attribute`) and imported by the layer that calls them. So records are
cheap to import, and reading a file does not import encoders. `types.py` is the table of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ikcli.gguf.constants import GGMLType

Kind = Literal["float", "double", "integer", "codes", "ternary", "activation"]
Tile = Literal["", "s32", "m32", "s16", "m16"]
KeepsLength = Literal["", "weighted", "always"]  # "weighted": only with importance weights
Candidate = Literal["", "all", "gpu"]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type. An empty field means that the type lacks it: no decoder, no CPU kernels, ...

    An interleaved type regroups the bytes of `rows` rows. With a `base` it has the values of the base and uses its
    decoder, encoder, codes and CUDA kernels; sizes are then the share of one row.
    """

    type: GGMLType
    name: str  # exact upstream spelling
    block_size: int  # elements
    type_size: int  # bytes per block
    row_meta_size: int = 0  # bytes at the start of every row: a scale, f16 if 2 bytes and f32 if more
    tensor_meta_size: int = 0  # bytes once per tensor; such a type has no row structure
    kind: Kind = "codes"
    standard: bool = False  # mainline tools read it, too

    # row interleaving: bit layout (quant/interleave.py), height of a group
    base: GGMLType | None = None
    rows: int = 1
    layout: str = ""

    # values: quant/decode.py, quant/encoders, quant/encode.py, quant/code_fields.py, quant/encoders/unbiased.py
    decode: str = ""
    encode: str = ""
    encode_numpy: str = ""  # for use without compiled kernels
    codes: str = ""
    scales: tuple[int, ...] = ()  # offsets of the f16 scales (d, then m or dmin) in a block
    keeps_length: KeepsLength = "always"  # when encoders make rows unbiased (quant/encoders/unbiased.py)
    grid: str = ""  # name of the table of points: `tables.grid`
    matmul_scale: float = 1.0  # a factor of products that the reference omits from decoded rows

    # kernels: format in backends/cpu/kernels, tile it unpacks into (backends/cpu/tile_modes.py); fields of a block
    # (offset, bytes) in the order of `load` in backends/cuda/kernels/weights_*.cuh, and the type's name there
    cpu: str = ""
    tile: Tile = ""
    cuda: tuple[tuple[int, int], ...] = ()
    cuda_name: str = ""

    # choice of types: quant/recipes.py, quant/target.py
    fallback: GGMLType | None = None  # for rows that are not a multiple of 256
    stand_in: GGMLType | None = None  # for rows that cannot be grouped, for types without a base
    needs_imatrix: bool = False
    candidate: Candidate = ""  # candidates of --target-size: for all tensors, or for tensors on a GPU

    @property
    def bpw(self) -> float:
        """Return the nominal bits per weight, without row headers."""
        return 8 * self.type_size / self.block_size

    @property
    def is_interleaved(self) -> bool:
        return self.rows > 1

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    @property
    def storage(self) -> bool:
        """Return whether files may contain it; other types are numbered formats of activation buffers."""
        return self.kind != "activation"

    @property
    def plain(self) -> GGMLType:
        """Return the type with the same values and no interleaving, or itself."""
        return self.type if self.base is None else self.base


@dataclass(frozen=True, slots=True)
class TypeFamily:
    """Types whose functions share modules. Functions of a type have its name in lower case, classes its exact spelling.

    `decode` is a module of `quant`, `encode` a function of quant/encoders; `cpu` and `groups` are modules of
    backends/cpu/kernels for single rows and for groups. `facts` apply to all types of the family.
    """

    decode: str = ""
    encode: str = ""
    cpu: str = ""
    groups: str = ""
    codes: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    def type(self, type: GGMLType, name: str, block_size: int, type_size: int, **facts: Any) -> TensorType:
        """Return the record of a type without an interleaved twin."""
        own, module = type.name.lower(), "ikcli.backends.cpu.kernels"
        known: dict[str, Any] = {
            "decode": f"ikcli.quant.decoders.{self.decode}:{own}" if self.decode else "",
            "encode": f"ikcli.quant.encoders.{self.encode}" if self.encode else "",
            "codes": f"ikcli.quant.code_fields:{own}" if self.codes else "",
            "cpu": f"{module}.{self.cpu}:{type.name}" if self.cpu else "",
        }
        return TensorType(type, name, block_size, type_size, **(known | self.facts | facts))

    def pair(
        self, type: GGMLType, twin: GGMLType, name: str, block_size: int, type_size: int, **facts: Any
    ) -> tuple[TensorType, TensorType]:
        """Return the records of a type and its interleaved twin, whose name ends in the height of a group."""
        plain = self.type(type, name, block_size, type_size, **facts)
        return plain, interleaved(plain, twin, f"ikcli.backends.cpu.kernels.{self.groups}:{type.name}")


def interleaved(plain: TensorType, twin: GGMLType, cpu: str, **facts: Any) -> TensorType:
    """Return the record of the type that regroups rows of `plain`."""
    own = twin.name.lower()
    known: dict[str, Any] = {
        "type": twin,
        "name": own,
        "base": plain.type,
        "rows": int(own.rpartition("_r")[2]),
        "layout": f"ikcli.quant.interleave:{own}",
        "standard": False,
        "cpu": cpu,
    }
    of_the_base: dict[str, Any] = {"decode": "", "encode": "", "encode_numpy": "", "codes": "", "scales": ()}
    of_the_base |= {"cuda": (), "candidate": ""}
    return replace(plain, **(known | of_the_base | facts))
