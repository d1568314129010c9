"""What the kernels are told."""

from __future__ import annotations

from ikcli.backends.cpu.params import Address, Params


class GluParams(Params):
    gate: Address
    up: Address
    out: Address
    cols: int


class DecaySumParams(Params):
    x: Address
    out: Address
    states: Address
    cols: int
