"""Moves here soon."""

from ikcli.backends.cpu.simd.math import *  # noqa: F403
