"""`ik gguf-split [--split|--merge] IN OUT`: split a model into parts, or merge parts into one file."""

from __future__ import annotations

from ikcli import log
from ikcli.cli.parser import usage
from ikcli.errors import UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.split import merge, split
from ikcli.settings.tools import GgufSplitConfig

_MAX_TENSORS = 128


def run(config: GgufSplitConfig) -> int:
    """Split or merge as the options ask, and print the parts."""
    if config.split and config.merge:
        raise UsageError("--split and --merge exclude each other")
    if len(config.args) != 2:
        raise UsageError(f"expected IN and OUT; usage: {usage('gguf-split')}")
    if config.max_size and config.max_tensors is not None:
        raise UsageError("--split-max-tensors and --split-max-size exclude each other")
    source, out = config.args
    max_tensors = 0 if config.max_size else config.max_tensors or _MAX_TENSORS
    with log.progress("copying", open_gguf(source).n_bytes, in_bytes=True) as advance:
        if config.merge:
            parts = merge(source, out, config.dry_run, advance)
        else:
            parts = split(source, out, max_tensors, config.max_size, config.no_tensor_first, config.dry_run, advance)
    for part in parts:
        print(f"{part.path}: {part.n_tensors} tensors, {part.n_bytes / 1e6:.1f} MB")
    return 0
