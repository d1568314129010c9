"""`ik convert DIR` for a directory with a PEFT low-rank adapter."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ikcli import log
from ikcli.errors import UsageError
from ikcli.settings.quantize import ConvertConfig

_OF_ADAPTERS = ("args", "outfile", "outtype", "model_name", "base", "dry_run", "n_threads", "json", "verbose")


def run_adapter(config: ConvertConfig, directory: Path) -> int:
    """Convert the adapter, and write it unless this is a dry run."""
    from ikcli.convert.adapter import FILE_TYPES, open_adapter, write_adapter
    from ikcli.convert.naming import fill_name

    for option in fields(config):
        if option.name not in _OF_ADAPTERS and getattr(config, option.name) != option.default:
            raise UsageError(f"--{option.name.replace('_', '-')} has no meaning for an adapter ({directory})")
    wanted = (config.outtype or "f16").lower()
    if wanted not in (*FILE_TYPES, "auto"):
        raise UsageError(f"--outtype {config.outtype}: an adapter can be auto, {', '.join(FILE_TYPES)}")
    adapter = open_adapter(directory, config.base)
    if config.model_name is not None:
        adapter.metadata["general.name"] = config.model_name
    if wanted == "auto":
        wanted = "bf16" if adapter.dtype == "BF16" else "f16"
    output = Path(config.outfile) if config.outfile is not None else directory
    if output.is_dir():
        output = output / f"{directory.resolve().name}-{wanted.upper()}.gguf"
    output = output.with_name(fill_name(output.name, wanted))
    names = list(adapter.tensors)
    architecture = adapter.metadata["general.architecture"]
    log.log(f"{directory}: an adapter of {len(names) // 2} matrices for {architecture}")
    for name in names if config.verbose or config.dry_run else ():
        log.log(f"{name}: {' x '.join(str(n) for n in reversed(adapter.tensors[name].shape))}")
    if not config.dry_run:
        write_adapter(adapter, output, wanted)
        log.log(f"wrote {output}")
    if config.json:
        print(json.dumps({"architecture": architecture, "type": wanted.upper(), "file": str(output), "tensors": names}))
    return 0
