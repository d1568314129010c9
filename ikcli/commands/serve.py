"""`ik serve`: the HTTP server, until a signal comes."""

from __future__ import annotations

from pathlib import Path

from ikcli import log
from ikcli.cli.parser import ModelRun, Parsed
from ikcli.settings.rules import check_server, serves_replicas


def run(run: ModelRun) -> int:
    """Serve; return the exit code."""
    for notice in check_server(run.config, run.given):
        log.notice_once(notice)
    if serves_replicas(run.config):
        return _run_replicas(run)
    if run.config.server.sleep_idle_seconds > 0:
        return _run_sleeping(run)
    from ikcli.server.http.server import serve

    return serve(run.config, run.planner)


def _run_replicas(run: ModelRun) -> int:
    from ikcli.cli.front_options import PATHS, passed_on, paths_passed_on
    from ikcli.server.front.environment import OF_THE_FRONT
    from ikcli.server.front.launch import LaunchSpec
    from ikcli.server.front.replicas_server import serve_replicas

    config = run.config

    def without(path: str) -> bool:
        """Return whether the front handles a field; models are files by now."""
        ours = OF_THE_FRONT | PATHS | {"n_threads", "n_threads_batch", "server.hf_repo_draft"}
        return path in ours or path.startswith(("hub.", "fleet.", "server.replica"))

    paths, inputs = paths_passed_on("serve", config)
    argv = (*passed_on("serve", run.argv, without), *paths)
    return serve_replicas(LaunchSpec(config, argv, tuple(inputs), run.given))


def _run_sleeping(run: ModelRun) -> int:
    """Run one model in a process that ends when idle, behind a port that stays open."""
    from ikcli.cli.front_options import passed_on
    from ikcli.cli.model_entries import OF_ALL_MODELS, EntryMaker, ModelSpec
    from ikcli.server.front.models_entries import ModelsFile
    from ikcli.server.front.models_server import serve_models
    from ikcli.server.http.chat import check_options
    from ikcli.server.http.params import defaults_of
    from ikcli.server.http.server import check_folders
    from ikcli.server.http.state import names_of

    defaults_of(run.config)  # wrong options end the program before anything is loaded
    check_options(run.config)
    check_folders(run.config)

    def without(path: str) -> bool:
        """Return whether the front handles a field, or it names the model, which is a file by now."""
        return path in OF_ALL_MODELS or path == "model" or path.startswith("hub.")

    line = passed_on("serve", run.argv, without, environment=False)
    name, *aliases = names_of(run.config)
    spec = ModelSpec(name, name, path=run.config.model, aliases=tuple(aliases), preload=True)
    entry = EntryMaker(line, alone=True).entry(spec)
    return serve_models(run.config, ModelsFile(entry.config.model or Path(), {name: entry}), single=True)


def run_models(parsed: Parsed) -> int:
    """Serve the models of a file, a folder or the cache; return the exit code."""
    from ikcli.cli.model_list import Sources
    from ikcli.server.front.models_server import serve_models

    sources = Sources(parsed)
    return serve_models(parsed.config, sources.read(), sources.read)
