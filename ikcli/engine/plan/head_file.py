"""Heads that predict further tokens (MTP) in a file of their own, as `ik convert --mtp` writes them.

Their blocks are numbered as in a whole model, so joining two files means adding tensors and counting the blocks.
"""

from __future__ import annotations

from pathlib import Path

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGUFValueType
from ikcli.gguf.heads import FURTHER, block_of
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.models.heads import external
from ikcli.settings.drafts import kind_of_heads
from ikcli.settings.run import RunConfig, default_model


def head_file(config: RunConfig, file: GGUFFile) -> Path | None:
    """Return the file of the heads, or None if they are in the model's: `-md`, or `mtp-NAME` beside a model without."""
    server = config.server
    if server.model_draft is not None and not any(stage.type == "draft" for stage in server.spec_type):
        return server.model_draft
    model = Path(config.model or default_model())
    beside = model.with_name(f"mtp-{model.name}")
    return beside if not _count(file, FURTHER) and beside.is_file() else None


def holds_heads_alone(file: GGUFFile) -> bool:
    """Return whether a file has heads and no layer of a model."""
    blocks = {block_of(name) for name in file.tensors} - {-1}
    n_layer = _count(file, "block_count") - _count(file, FURTHER)
    return bool(blocks) and _count(file, FURTHER) > 0 and min(blocks) >= n_layer


def join_heads(file: GGUFFile, path: Path, config: RunConfig, *, header_only: bool = False) -> None:
    """Add the heads of a file to an opened model, in place of its own; raise an error if they are of another model."""
    heads = open_gguf(path, header_only=header_only)
    source, arch = file.paths[0], file.arch
    found, kind = heads.get("general.architecture"), kind_of_heads(config)
    wanted = external.spec_type(found, heads.tensors) if found in external.MODULES else "mtp"
    if kind not in (None, "mtp") and found not in external.MODULES:
        known = ", ".join(
            arch
            for arch in external.MODULES
            if kind in (external.spec_type(arch), external.spec_type(arch, (external.MARKOV,)))
        )
        raise UsageError(f"--spec-type {kind} -md {path}: a file of architecture {found}; those of {known} are read")
    if kind is not None and kind != wanted:
        raise UsageError(f"--spec-type {kind} -md {path}: this file is for --spec-type {wanted}")
    if found in external.MODULES and config.command == "imatrix":
        raise UsageError(f"-md {path}: importance matrices cover heads of the model's own architecture, not {found}")
    if found in external.MODULES:
        _join_external(file, heads)
        return
    if not holds_heads_alone(heads):
        raise UsageError(
            f"-md {path}: a whole model, but --spec-type mtp wants a file of heads alone (ik convert --mtp); "
            "add --spec-type draft to draft with this model"
        )
    n_layer = _count(file, "block_count") - _count(file, FURTHER)
    n_heads = _count(heads, FURTHER)
    for what, ours, theirs in (
        ("architecture", arch, heads.arch),
        ("number of layers", n_layer, _count(heads, "block_count") - n_heads),
        ("embedding_length", file.get(f"{arch}.embedding_length"), heads.get(f"{heads.arch}.embedding_length")),
    ):
        if ours != theirs:
            raise FormatError(f"{path}: these heads are of another model: {what} {theirs}, but {source} has {ours}")
    for name in [name for name in file.tensors if block_of(name) >= n_layer]:
        del file.tensors[name]
    file.adopt(heads, [name for name in heads.tensors if block_of(name) >= 0])
    for key, n in (("block_count", n_layer + n_heads), (FURTHER, n_heads)):
        file.metadata[f"{arch}.{key}"] = n
        file.value_types[f"{arch}.{key}"] = GGUFValueType.UINT32


def _join_external(file: GGUFFile, heads: GGUFFile) -> None:
    """Add a head of another architecture, in place of the file's own heads."""
    n_layer = _count(file, "block_count") - _count(file, FURTHER)
    for name in [name for name in file.tensors if block_of(name) >= n_layer]:
        del file.tensors[name]
    file.adopt(heads, list(heads.tensors), external.prefix_of(n_layer))
    for key in [key for key in heads.metadata if key.startswith(f"{heads.arch}.")]:
        file.metadata[key], file.value_types[key] = heads.metadata[key], heads.value_types[key]


def _count(file: GGUFFile, key: str) -> int:
    value = file.get(f"{file.get('general.architecture')}.{key}", 0)
    return value if isinstance(value, int) else 0
