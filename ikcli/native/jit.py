"""Moves here soon."""

from ikcli.backends.cpu.jit import *  # noqa: F403
