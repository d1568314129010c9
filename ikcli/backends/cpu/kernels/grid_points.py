"""Build the grids of IQ1, IQ2 and IQ3 types for kernels of plain rows and of interleaved ones (`_r4`)."""

from ikcli.backends.cpu.kernels import grid_shuffle
from ikcli.native import isa
from ikcli.quant.tables import grid


def _rows(name):
    return grid(name.removesuffix("_r4").upper())


def points(name, factor=1):
    """Return grid points as integers of one byte per coordinate, first coordinate lowest."""
    return [sum((int(x) & 255) << 8 * i for i, x in enumerate(row)) for row in (_rows(name) * factor).astype(int)]


def packed(name):
    """Return (points as 16-bit words, levels, bits of a level)."""
    rows = _rows(name).astype(int)
    levels = sorted({int(x) for x in rows.flat})
    bits = 2 if rows.shape[1] == 8 else 3
    return grid_shuffle.packed(rows, levels, bits), levels, bits


def most_magnitude(name):
    """Return the largest coordinate where signs are kept apart from magnitudes (with AVX2), otherwise 0."""
    return int(_rows(name).max()) if isa.current().short_vectors else 0
