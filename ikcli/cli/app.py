"""The Typer application: it holds the commands of the table, their completion and their help.

Options are read by ikcli.cli.parser, because names with one dash and several letters must never be read as
clusters of short flags. A command's module is imported when it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ikcli import log
from ikcli.cli.argv import canonical_name
from ikcli.cli.help import command_help, main_help
from ikcli.cli.parser import ModelRun, Parsed, all_options, names_of, parse
from ikcli.cli.table import BY_NAME, CommandInfo
from ikcli.errors import UsageError
from ikcli.suggest import nearest

if TYPE_CHECKING:
    from ikcli.engine.pipeline.place import Pipeline
    from ikcli.engine.plan.startup import Startup
    from ikcli.settings.run import RunConfig


class Commands(TyperGroup):
    """The commands by name, with the nearest name for an unknown one."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            near = nearest(cmd_name, BY_NAME)
            hint = f"; did you mean {near}?" if near else "; see ik --help"
            raise UsageError(f"unknown command {cmd_name}{hint}")
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(main_help() + "\n")


class DeclaredCommand(TyperCommand):
    """A command whose options are fields of a config; parser, help and completion all use these fields."""

    @property
    def info(self) -> CommandInfo:
        return BY_NAME[str(self.name)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        if ctx.resilient_parsing:  # completion asks for the words that follow these
            return []
        parsed = parse(self.info.name, args)
        if parsed.info == "help":
            print(ctx.get_help())
            raise typer.Exit
        if parsed.info == "version":
            from ikcli.commands.version import print_version

            print_version(getattr(parsed.config, "verbose", False))
            raise typer.Exit
        if parsed.info:
            raise typer.Exit(run([parsed.info]))
        log.copy_to(getattr(parsed.config, "log_file", None))
        report(parsed)
        ctx.obj = parsed
        return []

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(command_help(self.info) + "\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return list(completions(self.info.name, ctx.obj or [], incomplete))


@dataclass(frozen=True, slots=True)
class Completion:
    """A word that the shell may offer."""

    value: str
    help: str = ""
    type: str = "plain"


def completions(command: str, words: list[str], incomplete: str) -> Iterator[Completion]:
    """Return what can follow `words`: the choices of the preceding option, or options.

    If there are none, the shell offers files.
    """
    known = names_of(command).get(canonical_name(words[-1])) if words else None
    if known is not None and known[0].option.takes_value:
        yield from (Completion(c) for c in known[0].option.choices if c.startswith(incomplete))
    elif incomplete.startswith("-"):
        for bound in all_options(command):
            if bound.option.used_by(command):
                for name in (*bound.option.names, *bound.option.negative):
                    if name.startswith(incomplete):  # Typer would wrap longer help, and shells take lines for words
                        yield Completion(name, shorten(bound.option.help, 66, placeholder="..."))
    elif command == "help" and not words:
        from ikcli.manual import pages

        yield from (Completion(name) for name in sorted({*pages(), *BY_NAME}) if name.startswith(incomplete))


def report(parsed: Parsed) -> None:
    """Print the messages of the parser."""
    for warning in parsed.warnings:
        log.warn(warning)
    if parsed.ignored:
        log.log(f"ignored here: {' '.join(parsed.ignored)}")
    if parsed.unsupported:
        log.log(f"not supported, ignored: {' '.join(parsed.unsupported)}")
    for name, enabled in getattr(parsed.config, "offload_policy", ()):
        log.log(f"offload policy: {name} {'on' if enabled else 'off'}")


def checked(parsed: Parsed) -> Startup:
    """Check a run against its model file (the demo model without one); print notices and warnings."""
    from ikcli.cli.model import find_draft, find_model, find_projector
    from ikcli.engine.plan.startup import prepare
    from ikcli.settings.run import default_model
    from ikcli.vision.opening import projector_memory

    config = parsed.config
    model = find_model(config.model, config.hub, header_only=config.only_plans)
    config = find_projector(find_draft(config))
    # the token has been used, and settings are printed with results
    config = replace(config, model=model or default_model(), hub=replace(config.hub, token=""))
    startup = prepare(config, parsed.given, _pipeline(config), projector_memory)
    for notice in startup.notices:
        log.notice_once(notice)
    for warning in startup.warnings:
        log.warn(warning)
    return startup


def _pipeline(config: RunConfig) -> Pipeline:
    """Return what starts the stages of a run: Ray on a cluster, otherwise processes of this machine."""
    if config.fleet.stages > 1 and config.fleet.ray is not None:
        from ikcli.fleet.ray_stages import RAY_PIPELINE

        return RAY_PIPELINE
    from ikcli.engine.pipeline.place import LOCAL

    return LOCAL


def run_tool(ctx: typer.Context) -> int:
    """Run a command that gets its config."""
    return int(_module(ctx).run(ctx.obj.config))


def run_model(ctx: typer.Context) -> int:
    """Run a command that gets a checked run of a model, or print the plan of that run."""
    parsed: Parsed = ctx.obj
    if parsed.config.command == "serve" and parsed.config.server.several_models:
        return int(_module(ctx).run_models(parsed))
    if parsed.config.chat.url:  # the model is somewhere else
        return int(_module(ctx).run_remote(parsed))
    if not parsed.config.only_plans:
        from ikcli.native.compile_pool import start_early

        start_early()
    startup = checked(parsed)
    module = importlib.import_module("ikcli.commands.plan") if startup.config.dry_run else _module(ctx)
    return int(module.run(ModelRun(startup.config, startup.planner, parsed.alternatives, parsed.given, parsed.argv)))


def _module(ctx: typer.Context) -> Any:
    name = BY_NAME[str(ctx.command.name)].name.replace("-", "_")
    return importlib.import_module(f"ikcli.commands.{name}")


def make_app(names: Iterable[str] = BY_NAME, *, completion: bool = False) -> typer.Typer:
    """Make the application with these commands, with or without the options that install shell completion.

    A command takes a millisecond, and any option 40 ms of imports. So it has no help option either; `main` handles it.
    """
    app = typer.Typer(cls=Commands, add_completion=completion, pretty_exceptions_enable=False, add_help_option=False)
    app.callback(invoke_without_command=True)(_root)
    for name in names:
        info = BY_NAME[name]
        entry = run_model if info.runs_model else run_tool
        alias = name != info.name
        app.command(name, cls=DeclaredCommand, help=info.summary, hidden=alias, add_help_option=False)(entry)
    return app


def _root() -> None:
    """Run and measure large language models from GGUF files."""


def run(argv: list[str], *, completion: bool = False) -> int:
    """Run one command line and return its exit code; errors are raised."""
    app = make_app(BY_NAME if completion else BY_NAME.keys() & argv[:1], completion=completion)
    result = typer.main.get_command(app).main(args=argv, prog_name="ik", standalone_mode=False)
    return int(result) if isinstance(result, int) else 0
