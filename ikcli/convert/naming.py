"""Derive descriptive keys (`general.name`, `general.size_label`, ...) and the default file name with gguf-py."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ikcli.convert.card import read_card, read_sampling
from ikcli.convert.json_files import read_json
from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGUFValueType
from ikcli.gguf.values import Typed
from ikcli.log import warn

SizedTensors = Iterable[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Description:
    """Descriptive keys of a model, and the default name of its file."""

    keys: dict[str, Typed]
    stem: str

    def file_name(self, type_name: str) -> str:
        """Return a name such as `Name-7B-Instruct-Q4_K_M.gguf`."""
        return f"{self.stem}-{type_name.upper()}.gguf" if type_name else f"{self.stem}-vocab.gguf"


def describe(
    directory: Path, tensors: SizedTensors, model_name: str | None = None, metadata: Path | None = None
) -> Description:
    """Describe a model by its directory name, model card and tensor sizes; a JSON file of keys overrides them."""
    import gguf

    overrides = read_json(metadata) if metadata is not None else {}
    unknown = sorted(k for k in overrides if not k.startswith("general."))
    if unknown:
        raise UsageError(f"--metadata {metadata}: {unknown[0]} is not a key of general.*")
    total, shared, per_expert, n_expert = _parameters(tensors)
    directory = directory.resolve()
    found = _described(directory, total)
    known = {f.name for f in fields(found)}
    for key, value in overrides.items():
        name = key.removeprefix("general.").replace(".", "_")
        if name in known:
            setattr(found, name, value)
    found.name = model_name or found.name or directory.name
    if found.size_label is None and total > 0:
        found.size_label = gguf.size_label(total, shared, per_expert, n_expert)
    writer = gguf.GGUFWriter(None, "")
    try:
        stem = gguf.naming_convention(
            found.name, found.basename, found.finetune, found.version, found.size_label if total else None, None
        )
        found.set_gguf_meta_model(writer)
    except (TypeError, ValueError, AttributeError) as problem:  # only values of --metadata are not checked yet
        raise FormatError(f"{metadata}: a metadata value cannot be used: {problem}") from None
    stem = re.sub(r"[/\\\0-\x1f]", "-", stem)
    keys = {k: _typed(v) for k, v in writer.kv_data[0].items() if k != "general.architecture"}
    return Description(keys, stem)


def _described(directory: Path, total: int) -> Any:
    """Read names, model card and generation_config.json; leave out values that cannot be used."""
    import gguf

    card = read_card(directory)
    names = {k: v for k, v in read_json(directory / "config.json").items() if k == "_name_or_path" and type(v) is str}
    try:
        found = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, names, directory, total)
    except Exception as problem:  # what the library makes of a card can fail in any way
        warn(f"{directory / 'README.md'}: {problem}; the model card is left out")
        found = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), {}, names, directory, total)
    for field, value in read_sampling(directory).items():
        if hasattr(found, field):
            setattr(found, field, value)
    return found


def _typed(value: Any) -> Typed:
    item = None if value.sub_type is None else GGUFValueType(int(value.sub_type))
    type = GGUFValueType(int(value.type))
    if type == GGUFValueType.ARRAY and item is None and all(isinstance(v, str) for v in value.value):
        item = GGUFValueType.STRING
    return Typed(value.value, type, item)


def _parameters(tensors: SizedTensors) -> tuple[int, int, int, int]:
    """Return the numbers of all parameters, of those outside experts, of those of one expert, and of experts."""
    total = shared = per_expert = 0
    counts: list[int] = []
    for name, shape in tensors:
        size = math.prod(shape)
        total += size
        if "_exps." in name and len(shape) > 2:
            counts.append(shape[-1])
            per_expert += size // shape[-1]
        else:
            shared += size
    return total, shared, per_expert, sum(counts) // len(counts) if counts else 0


def fill_name(name: str, type_name: str) -> str:
    """Fill in `{ftype}` and `{FTYPE}` (or outtype) in a file name."""
    for key in ("ftype", "outtype"):
        name = name.replace(f"{{{key}}}", type_name.lower()).replace(f"{{{key.upper()}}}", type_name.upper())
    return name
