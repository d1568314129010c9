"""`ik repack in.gguf [out.gguf]`: short form of `ik quantize --repack`, and back with `--unrepack`."""

from __future__ import annotations

from dataclasses import replace

from ikcli.commands import quantize
from ikcli.settings.quantize import QuantizeConfig


def run(config: QuantizeConfig) -> int:
    """Regroup rows and nothing else."""
    return quantize.run(config if config.unrepack else replace(config, repack=True))
