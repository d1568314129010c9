"""Parameters of the kernels of `peaks.py` (see `params.py`)."""

from __future__ import annotations

from ikcli.backends.cpu.params import Address, Params

SCRATCH_BYTES = 256  # of a thread


class ProductsParams(Params):
    n: int  # iterations
    scratch: Address


class ReadParams(Params):
    data: Address
    n_bytes: int
    scratch: Address
