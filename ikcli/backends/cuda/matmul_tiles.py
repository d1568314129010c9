"""Choose the tiles of `mm_*`, the products of many activation rows, and how many blocks share a tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ikcli.backends.cuda.lower import DeviceLimits
from ikcli.backends.cuda.upload import DeviceRowFormat

PART_COLUMNS, PART_BYTES = 256, 16 << 20  # fewest columns of a part of a product, most memory for the sums of parts
START_STEPS = 3  # steps of a tile that its first loads and its results take as long as
ADD_STEPS = 1  # the same of the launch that adds parts
STEP_BYTES = 64 << 10  # of sums that an SM writes and reads again in the time of a step


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's tile: weight rows by activation rows, columns per step.

    Also threads and shared memory bytes of a block, and the blocks that an SM holds.
    """

    kernel: str
    rows: int
    tokens: int
    step: int
    threads: int
    shared: int
    on_sm: int

    def count(self, n_rows: int, n_tokens: int) -> int:
        """Return the tiles of a product."""
        return -(-n_rows // self.rows) * -(-n_tokens // self.tokens)

    def divisible(self, n_sm: int, k: int, tiles: int) -> bool:
        """Return whether `parts_of` may return more than 1 for that many tiles or more."""
        return k >= 2 * PART_COLUMNS and tiles < 4 * self.on_sm * n_sm


@cache  # all layers of a model ask the same, several times for every new bucket
def parts_of(tile: Tile, n_sm: int, k: int, tiles: int, sum_bytes: int) -> int:
    """Return into how many parts of the k columns `tiles` tiles are divided, so that blocks come in few and full waves.

    `sum_bytes`: the bytes of the results of one part. 1: undivided.
    """
    steps, slots = -(-k // tile.step), tile.on_sm * n_sm

    def time(n: int) -> float:
        waves = -(-tiles * n // slots)
        adding = ADD_STEPS + 2 * n * sum_bytes / (STEP_BYTES * n_sm) if n > 1 else 0
        return waves * (-(-steps // n) + START_STEPS) + adding

    most = max(1, min(k // PART_COLUMNS, PART_BYTES // max(sum_bytes, 1)))
    return min(range(1, most + 1), key=time)


def tiles_of(device: DeviceLimits, fmt: DeviceRowFormat) -> tuple[Tile, Tile | None]:
    """Return the tile of 64 activation rows, and a wider one where it exists (weights_gemm.cuh, weights_half.cuh)."""
    name = f"mm_{fmt.name}"
    if name == "mm_f32":
        return Tile(name, 64, 64, 32, 128, 4 * 4 * 64 * 36, 3), None
    if fmt.columns == 1:  # two to four stages in 96 KiB
        on_sm = min(2, device.shared_per_sm // ((96 << 10) + 1024))
        return Tile(name, 128, 64, 64, 256, 96 << 10, on_sm), Tile(f"{name}_n128", 128, 128, 64, 256, 96 << 10, on_sm)
    halves, minima = fmt.tile.endswith("16"), fmt.tile.startswith("m")
    kinds = (2 if halves else 1) * (2 if minima else 1)

    def tile(kernel: str, tokens: int, most: int) -> Tile:
        codes, scales = 128 * (128 + tokens), 4 * 4 * (kinds * (128 + 8) + (1 + minima) * tokens)
        shared = 2 * (codes + scales)
        return Tile(kernel, 128, tokens, 128, 256, shared, min(most, device.shared_per_sm // (shared + 1024)))

    return tile(name, 64, 2), tile(f"{name}_n128", 128, 1)
