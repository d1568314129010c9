"""What is known of one tensor type, in one record: numbers, and names of the functions that know its bytes.

Functions and classes are named by text (`module:attribute`) and imported by the layer that calls them, so a record
costs nothing, and the reader of a file needs no encoder. `types.py` is the table of the records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ikcli.gguf.constants import GGMLType

Kind = Literal["float", "double", "integer", "codes", "ternary", "activation"]
Tile = Literal["", "s32", "m32", "s16", "m16"]
KeepsLength = Literal["", "weighted", "always"]  # "weighted": with importance weights only
Candidate = Literal["", "all", "gpu"]


@dataclass(frozen=True, slots=True)
class TensorType:
    """One tensor type. A part that is left empty is not there: no decoder, no CPU kernels, ...

    An interleaved type regroups the bytes of `rows` rows. With a `base` it has the base's values, and decoder, encoder,
    codes and CUDA kernels are those of the base; what is given here of its blocks is the share of one row.
    """

    type: GGMLType
    name: str  # exact upstream spelling
    block_size: int  # elements
    type_size: int  # bytes per block
    row_meta_size: int = 0  # bytes at the start of every row: a scale, f16 if 2 bytes and f32 if more
    tensor_meta_size: int = 0  # bytes once per tensor; such a type has no rows
    kind: Kind = "codes"
    standard: bool = False  # mainline tools read it as well

    # row interleaving: bit layout (quant/interleave.py), height of a group
    base: GGMLType | None = None
    rows: int = 1
    layout: str = ""

    # values: quant/decode.py, quant/encoders, quant/encode.py, quant/code_fields.py, quant/encoders/unbiased.py
    decode: str = ""
    encode: str = ""
    encode_numpy: str = ""  # for use without compiled code
    codes: str = ""
    scales: tuple[int, ...] = ()  # where the f16 scales (d, then m or dmin) of a block are
    keeps_length: KeepsLength = "always"  # when encoded rows get scales with which they are as long as they were
    grid: str = ""  # name of the table of points: `tables.grid`
    matmul_scale: float = 1.0  # a factor of products that the reference leaves out of decoded rows

    # kernels: format in backends/cpu/kernels, tile that it unpacks into (backends/cpu/tile_modes.py); fields of a block
    # (offset, bytes) in the order of `load` in backends/cuda/kernels/weights_*.cuh, and its name there
    cpu: str = ""
    tile: Tile = ""
    cuda: tuple[tuple[int, int], ...] = ()
    cuda_name: str = ""

    # choice of types: quant/recipes.py, quant/target.py
    fallback: GGMLType | None = None  # for rows that are no multiple of 256
    stand_in: GGMLType | None = None  # for rows that cannot be grouped, if there is no base
    needs_imatrix: bool = False
    candidate: Candidate = ""  # of --target-size: for all tensors, or for those known to be on a GPU

    @property
    def bpw(self) -> float:
        """Nominal bits per weight, row header excluded."""
        return 8 * self.type_size / self.block_size

    @property
    def is_interleaved(self) -> bool:
        return self.rows > 1

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    @property
    def storage(self) -> bool:
        """Whether it belongs in files; others are formats of activation buffers that have a number."""
        return self.kind != "activation"

    @property
    def plain(self) -> GGMLType:
        """The type with the same values and no interleaving; itself if there is none."""
        return self.type if self.base is None else self.base


@dataclass(frozen=True, slots=True)
class TypeFamily:
    """Types whose functions are together: those of one type have its name, in lower case, classes as it is spelled.

    `decode`: a module of `quant`; `encode`: a function of quant/encoders; `cpu`, `groups`: modules of
    backends/cpu/kernels for rows that stand alone and for groups. `facts` hold for all of them.
    """

    decode: str = ""
    encode: str = ""
    cpu: str = ""
    groups: str = ""
    codes: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    def type(self, type: GGMLType, name: str, block_size: int, type_size: int, **facts: Any) -> TensorType:
        """A type that stands alone."""
        own, module = type.name.lower(), "ikcli.backends.cpu.kernels"
        known: dict[str, Any] = {
            "decode": f"ikcli.quant.{self.decode}:{own}" if self.decode else "",
            "encode": f"ikcli.quant.encoders.{self.encode}" if self.encode else "",
            "codes": f"ikcli.quant.code_fields:{own}" if self.codes else "",
            "cpu": f"{module}.{self.cpu}:{type.name}" if self.cpu else "",
        }
        return TensorType(type, name, block_size, type_size, **(known | self.facts | facts))

    def pair(
        self, type: GGMLType, twin: GGMLType, name: str, block_size: int, type_size: int, **facts: Any
    ) -> tuple[TensorType, TensorType]:
        """A type and its interleaved twin, the name of which ends in the height of a group."""
        plain = self.type(type, name, block_size, type_size, **facts)
        return plain, interleaved(plain, twin, f"ikcli.backends.cpu.kernels.{self.groups}:{type.name}")


def interleaved(plain: TensorType, twin: GGMLType, cpu: str, **facts: Any) -> TensorType:
    """The type that regroups rows of `plain`."""
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
