"""`ik inspect FILE`: the options of the command; ikcli.commands.inspect does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ikcli.config import default_model


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("inspect")
    def inspect(
        file: Annotated[Path | None, typer.Argument(help="GGUF file; default the demo model")] = None,
        model: Annotated[Path | None, typer.Option("-m", "--model", help="same as FILE")] = None,
        tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
        json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    ) -> None:
        """Print metadata and tensors of a GGUF file."""
        from ikcli.commands.inspect import run

        raise typer.Exit(run(file or model or default_model(), tensors=tensors, json=json))
