"""Moves here soon."""

from ikcli.backends.cpu.simd.gemm import *  # noqa: F403
