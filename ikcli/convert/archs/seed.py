"""Seed-OSS."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

ARCHITECTURES = (b.Architecture("seed_oss", ("SeedOssForCausalLM",), k.plain, finish=k.tied),)
