"""Helpers for commands whose workers run a model: its header here, its files and settings on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ikcli
from ikcli.engine.plan.planner import Planner
from ikcli.fleet.choose import threads_each
from ikcli.fleet.worker import InputFile, input_file, input_model
from ikcli.gguf.reader import GGUFFile
from ikcli.quant.tool import ToolOptions
from ikcli.settings.option import iter_options
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

_OF_NO_EFFECT = ("hub.", "prompt.", "fleet.", "perplexity.", "imatrix.", "upstream.")
"""Groups of settings that change no value of a window, or that are compared separately."""

_RUN_ONLY = frozenset(
    (
        *("model", "mmap", "mlock", "thp", "check_tensors", "dry_run", "self_test", "warmup", "n_ctx", "n_threads"),
        *("n_threads_batch", "numa", "seed", "verbose", "verbosity", "profile", "strict"),
    )
)
"""Other settings that change no value, or that are compared separately."""


class HeaderSession:
    """A stand-in for a session whose model is not loaded: sizes and the tokenizer."""

    def __init__(self, planner: Planner, n_ctx: int = 0) -> None:
        self.file, self.n_vocab, self.n_ctx = planner.file, planner.hp.n_vocab, n_ctx

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return Tokenizer.from_metadata(self.file.metadata, str(self.file.paths[0]))

    def close(self) -> None:
        """Do nothing, as no resources are held."""


def config_each(config: RunConfig, header: HeaderSession) -> RunConfig:
    """Return the settings of one worker."""
    return replace(
        config,
        model=(config.model or header.file.paths[0]).absolute(),
        n_threads=threads_each(config.n_threads, config.fleet),
        n_threads_batch=threads_each(config.n_threads_batch or config.n_threads, config.fleet),
    )


def threads_of(config: RunConfig) -> int:
    """Return the threads that a worker with these settings keeps busy at most."""
    return max(config.n_threads, config.n_threads_batch)


def of_model(header: HeaderSession, model: InputFile) -> dict[str, Any]:
    """Return the part of a journal's head that identifies the model."""
    return {"version": ikcli.__version__, "model": header.file.paths[0].name, "model_digest": model.digest}


def model_inputs(model: Path, file: GGUFFile, data: Sequence[ToolOptions]) -> tuple[InputFile | None, ...]:
    """Describe the model, then the importance matrix and the input covariances of every data."""
    out: list[InputFile | None] = [input_model(model, data[0].overrides, file)]
    for o in data:
        out.append(input_file(Path(o.imatrix)) if o.imatrix is not None else None)
        out.append(input_model(Path(o.covariance)) if o.covariance is not None else None)
    return tuple(out)


def digests(inputs: Sequence[InputFile | None]) -> tuple[str, ...]:
    """Return the digests for the head of a journal; an input that is not given has an empty one."""
    return tuple(file.digest if file is not None else "" for file in inputs)


def absolute(options: ToolOptions) -> ToolOptions:
    """Return the options with absolute paths, since workers run in other directories."""
    imatrix, covariance = (str(Path(p).absolute()) if p else None for p in (options.imatrix, options.covariance))
    return replace(options, imatrix=imatrix, covariance=covariance)


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults and change values, by name."""
    out: dict[str, Any] = {}
    for bound in iter_options(RunConfig):
        at: Any = config
        for name in bound.path.split("."):
            at = getattr(at, name)
        told = bound.option.used_by(config.command) and bound.path not in _RUN_ONLY
        if told and not bound.path.startswith(_OF_NO_EFFECT) and at != bound.default:
            out[bound.option.primary] = str(at)
    return out
