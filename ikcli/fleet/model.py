"""What commands share whose workers run a model: its header here, the same file and the same settings there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ikcli
from ikcli.engine.plan.planner import Planner
from ikcli.errors import IkError
from ikcli.fleet.choose import threads_each
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.quant.tool import ToolOptions
from ikcli.settings.option import iter_options
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

_OF_NO_EFFECT = ("hub.", "prompt.", "fleet.", "perplexity.", "imatrix.", "upstream.")
"""Groups of settings that change no value of a window, or what is compared by itself."""

_RUN_ONLY = frozenset(
    (
        *("model", "mmap", "mlock", "thp", "check_tensors", "dry_run", "self_test", "warmup", "n_ctx", "n_threads"),
        *("n_threads_batch", "numa", "seed", "verbose", "verbosity", "profile", "strict"),
    )
)
"""Other settings that change no value, or are compared by themselves."""


class HeaderSession:
    """What is known of a session without loading the model: sizes and the tokenizer."""

    def __init__(self, planner: Planner, n_ctx: int = 0) -> None:
        self.file, self.n_vocab, self.n_ctx = planner.file, planner.hp.n_vocab, n_ctx

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return Tokenizer.from_metadata(self.file.metadata, str(self.file.paths[0]))

    def close(self) -> None:
        """Nothing is held."""


def config_each(config: RunConfig, header: HeaderSession) -> RunConfig:
    """The settings of one worker."""
    return replace(
        config,
        model=(config.model or header.file.paths[0]).absolute(),
        n_threads=threads_each(config.n_threads, config.fleet),
        n_threads_batch=threads_each(config.n_threads_batch or config.n_threads, config.fleet),
    )


def of_model(header: HeaderSession, model_digest: str) -> dict[str, Any]:
    """For the head of a journal."""
    return {"version": ikcli.__version__, "model": header.file.paths[0].name, "model_digest": model_digest}


def check_model(config: RunConfig, model_digest: str) -> None:
    """IkError if the model here is another one than that of the command."""
    assert config.model is not None
    if digest.of_model(open_gguf(config.model, config.override_kv)) != model_digest:
        raise IkError(f"{config.model} on this node is another file than that of the command")


def digests(file: GGUFFile, data: Sequence[ToolOptions]) -> tuple[str, ...]:
    """Of the model, and the importance matrix and the second moments of every data."""
    out = [digest.of_model(file)]
    for o in data:
        out.append(digest.of_file(Path(o.imatrix)) if o.imatrix is not None else "")
        out.append(digest.of_model(open_gguf(o.covariance)) if o.covariance is not None else "")
    return tuple(out)


def files_of(model: Path, data: Sequence[ToolOptions], wanted: Sequence[str]) -> list[tuple[Path, str]]:
    """These files with their digests, each once."""
    paths = [str(model), *(p for o in data for p in (o.imatrix, o.covariance))]
    return list({Path(p): (Path(p), found) for p, found in zip(paths, wanted, strict=True) if p is not None}.values())


def absolute(options: ToolOptions) -> ToolOptions:
    """The same files for workers, which run in other folders."""
    imatrix, covariance = (str(Path(p).absolute()) if p else None for p in (options.imatrix, options.covariance))
    return replace(options, imatrix=imatrix, covariance=covariance)


def check_files(file: GGUFFile, data: Sequence[ToolOptions], wanted: tuple[str, ...]) -> None:
    """IkError if one of these files is another than that of the command."""
    found = digests(file, data)
    paths = [file.paths[0], *(p for o in data for p in (o.imatrix, o.covariance))]
    for path, mine, theirs in zip(paths, found, wanted, strict=True):
        if mine != theirs:
            raise IkError(f"{path} on this node is another file than that of the command")


def settings(config: RunConfig) -> dict[str, Any]:
    """Options that were changed and change values, by name."""
    out: dict[str, Any] = {}
    for bound in iter_options(RunConfig):
        at: Any = config
        for name in bound.path.split("."):
            at = getattr(at, name)
        told = bound.option.used_by(config.command) and bound.path not in _RUN_ONLY
        if told and not bound.path.startswith(_OF_NO_EFFECT) and at != bound.default:
            out[bound.option.primary] = str(at)
    return out
