"""`ik repack in.gguf [out.gguf]`: short form of `ik quantize --repack`, and back with `--unrepack`."""

from __future__ import annotations

import typer

from ikcli.commands.quantize import add


def register(app: typer.Typer) -> None:
    """Add the command `repack` to `app`."""
    add(app, "repack")
