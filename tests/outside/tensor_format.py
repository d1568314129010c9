"""The rows of the tensor type as the CPU's kernels read them."""

from ikcli.backends.cpu.kernels.rowformat import RowFormat
from ikcli.native.simd.vec import i8x32


class ToyFormat(RowFormat):
    """32 codes, then a half-float scale."""

    def scales(self, e, w, row):
        return e.halves_at(e.offset(w, 32), self.block_bytes)

    def dot_codes(self, e, w, j):
        lo, hi = (e.load(i8x32, e.offset(w, self.block_bytes * b)) for b in (2 * j, 2 * j + 1))
        return e.with_bias(e.join(lo, hi), self.bias)
