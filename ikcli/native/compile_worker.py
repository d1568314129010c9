"""Moves here soon."""

from ikcli.backends.cpu.compile_worker import *  # noqa: F403
