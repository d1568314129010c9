"""`ik inspect`: the contents of a GGUF file from its header alone: sizes, metadata, types, tensors.

`_inspect_tasks.py` has the tasks that read or change more.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ikcli.cli.columns import MAX_ITEMS, format_size, json_scalar, print_table, printable, short
from ikcli.cli.model import find_model
from ikcli.errors import UsageError
from ikcli.gguf.constants import GGUFValueType, file_type_label
from ikcli.gguf.heads import block_of, head_blocks
from ikcli.gguf.reader import GGUFFile, TensorInfo, open_gguf
from ikcli.gguf.type_counts import count_types
from ikcli.gguf.types import TYPES
from ikcli.settings.run import default_model
from ikcli.settings.tools import InspectConfig

_MIB = 2**20


def format_count(n: int) -> str:
    """Return `672.050 B` with the prefix that fits: T, B, M or K."""
    for limit, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= limit:
            return f"{n / limit:.3f} {prefix}"
    return f"{n / 1e3:.3f} K"


def run(config: InspectConfig) -> int:
    """Print a description of a model (for a split, of its first part), as text or as one JSON object."""
    task = _task(config)
    if task:
        return int(getattr(importlib.import_module("ikcli.commands._inspect_tasks"), task)(config, _paths(config)))
    file = open_gguf(_paths(config, header_only=True)[0], header_only=bool(config.hub.repo or config.hub.url))
    if config.json:
        print(json.dumps(describe(file, tensors=config.tensors), indent=2, allow_nan=False))
        return 0
    for key, value in summary(file).items():
        print(f"{key:<18} {value}")
    print_table("metadata", ("key", "type", "value"), metadata_rows(file), "lll")
    print_table("types", ("type", "tensors", "weights", "MiB", "bpw", "readers"), type_rows(file), "lrrrrl")
    if config.tensors:
        print_table("tensors", ("tensor", "type", "shape", "MiB", "part"), tensor_rows(file), "llrrr")
    return 0


def _paths(config: InspectConfig, *, header_only: bool = False) -> list[Path]:
    paths = [Path(text) for text in (*([config.model] if config.model else []), *config.args)]
    if len(paths) > (2 if config.diff else 1):
        raise UsageError(f"unexpected argument {paths[-1]}; usage: ik inspect [options] [FILE], or --diff FILE OTHER")
    if config.hub.repo or config.hub.url:
        found = find_model(paths[0] if paths else None, config.hub, header_only=header_only)
        paths = [*([found] if found else []), *paths[1:]]
    return paths or [Path(default_model())]


def _task(config: InspectConfig) -> str:
    """Return the one requested task besides a description.

    Raise UsageError for two tasks, or options without their task.
    """
    wanted = {
        "diff": config.diff,
        "match": bool(config.match),
        "digests": config.hash is not None or config.check is not None,
        "edit": bool(config.sets or config.set_files or config.deletes),
    }
    names = {"diff": "--diff", "match": "--match", "digests": "--hash", "edit": "--set, --set-file and --delete"}
    tasks = [name for name, there in wanted.items() if there]
    if len(tasks) > 1:
        raise UsageError(f"{names[tasks[0]]} and {names[tasks[1]]} exclude each other")
    task = tasks[0] if tasks else ""
    for option, given, needs in (
        ("--no-layer", config.no_layer, "digests"),
        ("-o", config.output is not None, "edit"),
        ("--force", config.force, "edit"),
    ):
        if given and task != needs:
            raise UsageError(f"{option} goes with {names[needs]}")
    return task


def summary(file: GGUFFile) -> dict[str, str]:
    """Return the headline figures as printable text."""
    tensors = list(file.tensors.values())
    parts = f" ({len(file.paths)} parts)" if len(file.paths) > 1 else ""
    out = {
        "file": f"{file.paths[0]}{parts}",
        "format": f"GGUF V{file.version}, alignment {file.alignment}",
        "contents": f"{len(file.metadata)} key-value pairs, {len(tensors)} tensors",
        "architecture": printable(str(file.get("general.architecture", "none"))),
    }
    if file.get("general.architecture") == "clip":
        out["projector"] = _projector(file)
    file_type = file.get("general.file_type")
    if isinstance(file_type, int):
        out["file type"] = file_type_label(file_type)
    out["parameters"] = format_count(file.n_elements)
    out["size"] = _size_and_bpw(file.n_bytes, file.n_elements)
    repeating = [t for t in tensors if t.name.startswith("blk.")]
    if repeating and len(repeating) < len(tensors):
        n = sum(t.n_elements for t in repeating)
        size = _size_and_bpw(sum(t.n_bytes for t in repeating), n)
        out["repeating layers"] = f"{size}, {format_count(n)} parameters"
    if heads := head_blocks(file.tensors, file.metadata):
        out["heads (MTP)"] = _heads(tensors, heads)
    ik_only = sorted({TYPES[t.type].name for t in tensors if not TYPES[t.type].standard})
    if ik_only:
        out["ik-only types"] = ", ".join(ik_only) + " (mainline tools cannot read this file)"
    elif tensors:
        out["ik-only types"] = "none (standard GGUF)"
    return out


def _heads(tensors: list[TensorInfo], heads: frozenset[int]) -> str:
    """Return number, blocks and size of the heads that predict further tokens, and which matrices they have."""
    mine = [t for t in tensors if block_of(t.name) in heads]
    names = {t.name.partition(".nextn.")[2] for t in mine}
    own = [what for name, what in (("embed_tokens.weight", "embeddings"), ("shared_head_head.weight", "output matrix"))
           if name in names]  # fmt: skip
    alone = "" if any(0 <= block_of(t.name) < min(heads) for t in tensors) else ", without the model"
    size = _size_and_bpw(sum(t.n_bytes for t in mine), sum(t.n_elements for t in mine))
    blocks = ", ".join(f"blk.{il}" for il in sorted(heads))
    return f"{len(heads)} ({blocks}), {size}{', own ' if own else ''}{' and '.join(own)}{alone}"


def _projector(file: GGUFFile) -> str:
    """Return type and sizes of a projector (mmproj file)."""
    kinds = [
        f"{file.get(f'clip.{kind}projector_type')} ({what})"
        for kind, what in (("", "images"), ("vision.", "images"), ("audio.", "sound"))
        if isinstance(file.get(f"clip.{kind}projector_type"), str)
    ]
    sizes = {"layers": "block_count", "columns": "embedding_length", "pixels in a patch": "patch_size"}
    found = [
        f"{file.get(f'clip.vision.{key}')} {name}"
        for name, key in sizes.items()
        if f"clip.vision.{key}" in file.metadata
    ]
    width = file.get("clip.vision.projection_dim")
    ending = [f"for models of {width} columns"] if width is not None else []
    return printable(", ".join([*(kinds or ["of no named type"]), *found, *ending]))


def describe(file: GGUFFile, *, tensors: bool) -> dict[str, Any]:
    """Return everything that `run` prints as plain JSON values; of long arrays only the first elements."""
    out: dict[str, Any] = {
        "paths": [str(p) for p in file.paths],
        "version": file.version,
        "alignment": file.alignment,
        "n_tensors": len(file.tensors),
        "n_elements": file.n_elements,
        "n_bytes": file.n_bytes,
        "metadata": {k: _json_value(file, k) for k in file.metadata},
        "types": [
            {
                "type": TYPES[c.type].name,
                "n_tensors": c.n_tensors,
                "n_elements": c.n_elements,
                "n_bytes": c.n_bytes,
                "standard": TYPES[c.type].standard,
            }
            for c in count_types(list(file.tensors.values()))
        ],
    }
    if heads := head_blocks(file.tensors, file.metadata):
        out["head_blocks"] = sorted(heads)
    file_type = file.get("general.file_type")
    if isinstance(file_type, int):
        out["file_type"] = file_type_label(file_type)
    if tensors:
        out["tensors"] = [
            {
                "name": t.name,
                "type": TYPES[t.type].name,
                "shape": list(t.shape),
                "n_bytes": t.n_bytes,
                "offset": t.offset,
                "part": t.file_index,
            }
            for t in file.tensors.values()
        ]
    return out


def metadata_rows(file: GGUFFile) -> list[tuple[str, ...]]:
    """Return (key, type, shortened value) of every key."""
    rows: list[tuple[str, ...]] = []
    for key, value in file.metadata.items():
        kind = file.value_types[key].name.lower()
        if file.value_types[key] == GGUFValueType.ARRAY:
            kind = f"{file.item_types[key].name.lower()}[{len(value)}]"
        rows.append((printable(key), kind, short(value)))
    return rows


def type_rows(file: GGUFFile) -> list[tuple[str, ...]]:
    """Return (type, tensors, weights, MiB, bits per weight, programs that read it)."""
    rows: list[tuple[str, ...]] = []
    for c in count_types(list(file.tensors.values())):
        readers = "standard" if TYPES[c.type].standard else "ik only"
        bpw = f"{c.n_bytes * 8 / c.n_elements:.4f}"
        name = TYPES[c.type].name
        rows.append((name, str(c.n_tensors), str(c.n_elements), f"{c.n_bytes / _MIB:.2f}", bpw, readers))
    return rows


def tensor_rows(file: GGUFFile) -> list[tuple[str, ...]]:
    """Return (name, type, shape, MiB, part) in file order."""
    return [
        (
            printable(t.name),
            TYPES[t.type].name,
            " x ".join(str(ne) for ne in t.shape),
            f"{t.n_bytes / _MIB:.2f}",
            str(t.file_index + 1),
        )
        for t in file.tensors.values()
    ]


def _size_and_bpw(n_bytes: int, n_elements: int) -> str:
    bpw = f" ({n_bytes * 8 / n_elements:.3f} BPW)" if n_elements else ""
    return format_size(n_bytes) + bpw


def _json_value(file: GGUFFile, key: str) -> Any:
    value = file.metadata[key]
    if file.value_types[key] != GGUFValueType.ARRAY:
        return json_scalar(value)
    return {
        "item_type": file.item_types[key].name.lower(),
        "length": len(value),
        "first": [json_scalar(v) for v in value[:MAX_ITEMS]],
    }
