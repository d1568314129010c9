"""Moves here soon."""

from ikcli.backends.cpu.isa import *  # noqa: F403
