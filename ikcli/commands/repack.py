"""`ik repack in.gguf [out.gguf]`: short for `ik quantize --repack`, and with `--unrepack` the inverse."""

from __future__ import annotations

from dataclasses import replace

from ikcli.commands import quantize
from ikcli.settings.quantize import QuantizeConfig


def run(config: QuantizeConfig) -> int:
    """Regroup rows and change nothing else."""
    return quantize.run(config if config.unrepack else replace(config, repack=True))
