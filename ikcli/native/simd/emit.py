"""Moves here soon."""

from ikcli.backends.cpu.simd.emit import *  # noqa: F403
