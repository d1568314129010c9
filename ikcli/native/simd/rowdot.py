"""Moves here soon."""

from ikcli.backends.cpu.simd.rowdot import *  # noqa: F403
