"""The model that `ik quantize` reads: a file, one of a hub, or for plans what of it tells its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ikcli.cli.model import find_model
from ikcli.errors import IkError
from ikcli.settings.tools import QuantizeConfig

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile

_HEADER_SHARE = 16  # a file with less of its data than one part in so many is a header, not a download that broke off


def with_model(config: QuantizeConfig) -> QuantizeConfig:
    """Put the model that -hf or -mu names before the arguments; a plan downloads its header alone."""
    path = find_model(None, config.hub, header_only=config.dry_run or config.preflight)
    return config if path is None else replace(config, args=(str(path), *config.args))


def open_planned(path: str, overrides: Sequence[str]) -> tuple[GGUFFile, list[str]]:
    """Open a model of which the header is enough, with what to tell about parts and data that are not there."""
    from ikcli.engine.plan.missing_parts import assume_missing, missing_data
    from ikcli.gguf.reader import open_gguf
    from ikcli.models import HParams

    file = open_gguf(path, overrides, header_only=True)
    notes: list[str] = []
    if file.missing_parts:
        notes += assume_missing(file, HParams.from_gguf(file.metadata, file.tensors, path))
    return file, notes + missing_data(file)


def open_checked(path: str, overrides: Sequence[str]) -> tuple[GGUFFile, list[str]]:
    """Open a model that must be whole, or a header or first part alone; IkError for a download that broke off."""
    from ikcli.gguf.reader import open_gguf

    try:
        return open_gguf(path, overrides), []
    except IkError:
        file = open_gguf(path, overrides, header_only=True)
        there = sum(t.n_bytes for t in file.tensors.values() if file.has_data(t.name))
        alone = len(file.paths) == 1 and file.missing_parts
        if not alone and (file.missing_parts or _HEADER_SHARE * there >= file.n_bytes):
            raise
    return open_planned(path, overrides)
