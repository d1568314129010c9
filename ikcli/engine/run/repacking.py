"""`-rtr`: regroup weights into row-interleaved types while they are loaded; the file stays unchanged.

Every matrix with an interleaved twin takes part, except tables whose rows are looked up one by one and matrices that
are used in slices that would cut groups. `quant/repack.py` has layouts and rules. As in ik_llama.cpp, f16 becomes
bf16_r16 where the CPU multiplies bfloat16; here it is rounded, not truncated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.tile_modes import rounds_activations
from ikcli.engine.run.weight_memory import Pages, divided
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.types import TYPES
from ikcli.log import log
from ikcli.models import HParams
from ikcli.models.tensors import TensorLike
from ikcli.quant.formats import row_size, tensor_size
from ikcli.quant.repack import bf16_of_f16, can_repack, repack_into, repacked_type

Bytes = npt.NDArray[np.uint8]
_PIECE_BYTES = 8 << 20  # of one thread's work


@dataclass(frozen=True, slots=True)
class Repacked:
    """Type and shape of a weight after repacking."""

    type: GGMLType
    shape: tuple[int, ...]


def repacked_specs(tensors: Mapping[str, TensorLike], hp: HParams) -> dict[str, Repacked]:
    """Return the tensors that -rtr regroups, with their new types."""
    specs, lossy = {}, rounds_activations()
    for name, t in tensors.items():
        target = repacked_type(t.type, lossy=lossy)
        if target is None or not can_repack(t.type, t.shape, name, lossy=lossy):
            continue
        if _is_whole(name, hp, TYPES[target].rows):
            specs[name] = Repacked(target, t.shape)
    return specs


def _is_whole(name: str, hp: HParams, rows: int) -> bool:
    """Return whether a tensor is a matrix used in whole groups; kv_b is used by heads."""
    if name.endswith("attn_kv_b.weight"):
        return (hp.head_dim_k - hp.n_rot + hp.head_dim_v) % rows == 0
    return name.endswith(".weight")


def repack_tensors(
    file: GGUFFile, specs: Mapping[str, Repacked], pages: Pages, n_threads: int, advance: Callable[[float], None],
    cpus: Sequence[frozenset[int]] | None = None, experts: Mapping[str, int] | None = None,
) -> dict[str, Bytes]:  # fmt: skip
    """Return the bytes of the named tensors in their new types; log how many there are and how long it took."""
    start = time.perf_counter()
    sizes = {name: tensor_size(spec.type, spec.shape) for name, spec in specs.items()}
    made = divided(sizes, pages, cpus, experts)
    work, n_rounded = [], 0
    for name, spec in specs.items():
        ne0, old = spec.shape[0], file.tensors[name].type
        out = made[name]
        rows = np.asarray(file.data(name)).reshape(-1).view(np.uint8)
        source = rows.reshape(-1, row_size(old, ne0))
        n_rounded += old == GGMLType.F16
        target = out.reshape(-1, row_size(spec.type, ne0))
        height = TYPES[spec.type].rows
        step = max(1, _PIECE_BYTES // (height * source.shape[1])) * height
        work += [(target[i : i + step], source[i : i + step], spec.type, ne0, old) for i in range(0, len(source), step)]

    def run(item: tuple[Bytes, Bytes, GGMLType, int, GGMLType]) -> int:
        out, rows, type, ne0, old = item
        repack_into(out, bf16_of_f16(rows) if old == GGMLType.F16 else rows, type, ne0)
        return out.nbytes

    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        for n_bytes in pool.map(run, work):
            advance(n_bytes)
    seconds = time.perf_counter() - start
    total = sum(x.nbytes for x in made.values())
    log(
        f"============ Repacked {len(made)} tensors ({total / 2**20:.2f} MiB in {seconds:.2f} s, "
        f"{total / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
    )
    if n_rounded:
        log(f"{n_rounded} f16 tensors were rounded to bf16_r16: faster prompts, 8 significant bits instead of 11")
    return made
