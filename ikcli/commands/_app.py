"""The Typer application: commands are imported when they are called, model commands share one option parser.

Commands that run a model hand their raw arguments to ikcli.commands._options, because option names with one dash and
several letters must never be read as clusters of short flags.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ikcli import log
from ikcli.commands._suggest import nearest
from ikcli.commands._table import BY_NAME, COMMANDS, CommandInfo
from ikcli.errors import UsageError

if TYPE_CHECKING:
    from ikcli.commands._options import Parsed
    from ikcli.config import RunConfig
    from ikcli.engine.planner import Planner
    from ikcli.engine.startup import Startup


class LazyGroup(TyperGroup):
    """Finds commands by name in the command table and imports only the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [info.name for info in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        info = BY_NAME.get(cmd_name)
        if info is None:
            near = nearest(cmd_name, BY_NAME)
            hint = f"; did you mean {near}?" if near else "; see ik --help"
            raise UsageError(f"unknown command {cmd_name}{hint}")
        sub = typer.Typer(add_completion=False)
        if info.module:
            importlib.import_module(info.module).register(sub)
        else:
            register_planned(sub, info)
        command = typer.main.get_command(sub)
        command.name = info.name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ikcli.commands._help import main_help

        formatter.write(main_help() + "\n")


class RunCommand(TyperCommand):
    """A command that runs a model: takes its arguments as they are; the Typer options serve shell completion."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return []


def typer_parameters(command: str) -> list[inspect.Parameter]:
    """The declared options of a command as parameters of a Typer function (for shell completion and introspection)."""
    from ikcli.commands._options import all_options

    parameters: list[inspect.Parameter] = []
    for bound in all_options():
        option = bound.option
        if option.used_by(command):
            kind: Any = bool if not option.takes_value else list[str] if option.repeat else str
            names = (*option.names, *option.negative)
            info = typer.Option(*names, help=option.help, metavar=option.form or None, rich_help_panel=option.topic)
            parameters.append(
                inspect.Parameter(
                    bound.path.replace(".", "_"),
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[kind | None, info],
                )
            )
    return parameters


def register_run(app: typer.Typer, command: str, run: Callable[[RunConfig, Planner], int]) -> None:
    """Register a model-running command: `run(config)` gets the checked settings and returns the exit code."""

    def entry(startup: Startup) -> int:
        if startup.config.dry_run:
            from ikcli.commands.plan import run as run_plan

            return run_plan(startup)
        return run(startup.config, startup.planner)

    register_checked(app, command, entry)


def register_checked(app: typer.Typer, command: str, run: Callable[[Startup], int]) -> None:
    """Register a command that gets the whole result of the checks against the model file."""

    def entry(ctx: typer.Context, **options: Any) -> None:
        parsed = settings(command, ctx.obj)
        if parsed is not None:
            raise typer.Exit(run(checked(parsed)))

    add_run_command(app, command, entry)


def add_run_command(app: typer.Typer, command: str, entry: Callable[..., None]) -> None:
    """Give `entry` the declared options as its signature and register it; the values come from our own parser."""
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *typer_parameters(command)]
    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    entry.__annotations__ = {item.name: item.annotation for item in parameters}
    app.command(command, cls=RunCommand, add_help_option=False)(entry)


def settings(command: str, argv: list[str]) -> Parsed | None:
    """Parse, print notices, and fill in the demo model; None if help or the version was asked for and printed."""
    from ikcli.commands._help import command_help
    from ikcli.commands._options import parse
    from ikcli.config import default_model

    parsed = parse(command, argv)
    if parsed.info == "help":
        print(command_help(command))
        return None
    if parsed.info == "version":
        from ikcli.commands.version import print_version

        print_version(verbose=parsed.config.verbose)
        return None
    for warning in parsed.warnings:
        log.warn(warning)
    if parsed.ignored:
        log.log(f"ignored here: {' '.join(parsed.ignored)}")
    if parsed.unsupported:
        log.log(f"not supported, ignored: {' '.join(parsed.unsupported)}")
    _echo_policy(parsed.config)
    if parsed.config.model is not None:
        return parsed
    return replace(parsed, config=replace(parsed.config, model=default_model()))


def checked(parsed: Parsed) -> Startup:
    """The run after the checks against the model file; prints their notices and warnings."""
    from ikcli.engine.startup import prepare

    startup = prepare(parsed.config, parsed.given)
    for notice in startup.notices:
        log.notice_once(notice)
    for warning in startup.warnings:
        log.warn(warning)
    return startup


def _echo_policy(config: RunConfig) -> None:
    for name, enabled in config.offload_policy:
        log.log(f"offload policy: {name} {'on' if enabled else 'off'}")


def register_planned(app: typer.Typer, info: CommandInfo) -> None:
    """A command of a later version: its options are parsed where they are declared, running it is a usage error."""

    def entry(ctx: typer.Context, **options: Any) -> None:
        from ikcli.commands import _help
        from ikcli.commands._options import HELP_NAMES, parse

        if info.runs_model:
            parsed = parse(info.name, ctx.obj)
            if parsed.info:
                print(_help.command_help(info.name) if parsed.info == "help" else _help.version_line())
                return
        elif set(ctx.obj) & HELP_NAMES:
            print(_help.planned_help(info))
            return
        raise UsageError(f"{info.name} is not part of this version yet; ik --help lists the commands that are")

    add_run_command(app, info.name, entry)


def make_app(*, completion: bool) -> typer.Typer:
    """The application, with the options that install shell completion or without: any option costs 40 ms of imports.

    For that reason it has no help option either; `main` answers it.
    """
    app = typer.Typer(cls=LazyGroup, add_completion=completion, pretty_exceptions_enable=False, add_help_option=False)
    app.callback(invoke_without_command=True)(_root)
    return app


def _root() -> None:
    """Run and measure large language models from GGUF files."""


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code; errors are raised."""
    app = make_app(completion="_IK_COMPLETE" in os.environ or argv[0].endswith("-completion"))
    result = typer.main.get_command(app).main(args=argv, prog_name="ik", standalone_mode=False)
    return int(result) if isinstance(result, int) else 0
