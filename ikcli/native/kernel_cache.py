"""Moves here soon."""

from ikcli.backends.cpu.kernel_cache import *  # noqa: F403
