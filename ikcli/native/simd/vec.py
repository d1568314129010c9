"""Moves here soon."""

from ikcli.backends.cpu.simd.vec import *  # noqa: F403
