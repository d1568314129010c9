"""Moves here soon."""

from ikcli.backends.cpu.simd.dot import *  # noqa: F403
