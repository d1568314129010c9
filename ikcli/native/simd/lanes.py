"""Moves here soon."""

from ikcli.backends.cpu.simd.lanes import *  # noqa: F403
