"""`ik serve`: the HTTP server, until a signal comes."""

from __future__ import annotations

from ikcli.commands._options import ModelRun, Parsed
from ikcli.errors import UsageError


def run(run: ModelRun) -> int:
    """Serve; returns the exit code."""
    server = run.config.server
    fleet = run.config.fleet
    if fleet.ray_node and fleet.ray is None:
        raise UsageError("--ray-node names nodes of Ray; add --ray ADDRESS")
    if server.replicas > 1 or (fleet.ray is not None and fleet.stages == 1):
        return _run_replicas(run)
    if server.replica_gpus:
        raise UsageError("--replica-gpus is for --replicas; a single server uses what CUDA_VISIBLE_DEVICES names")
    from ikcli.server.http.server import serve

    return serve(run.config, run.planner)


def _run_replicas(run: ModelRun) -> int:
    from ikcli.commands._fronts import OF_THE_FRONT, PATHS, passed_on, paths_passed_on
    from ikcli.server.replicas.places import Recipe
    from ikcli.server.replicas.server import serve_replicas

    config = run.config
    if "," in config.fleet.ray_node:
        raise UsageError(f"--ray-node {config.fleet.ray_node}: only ik bench takes several; name one")
    if config.server.first_slot:
        raise UsageError("--first-slot cannot be used with --replicas, which number their slots themselves")

    def without(path: str) -> bool:
        """What the front does, and models, which are files by now."""
        ours = OF_THE_FRONT | PATHS | {"n_threads", "n_threads_batch", "server.hf_repo_draft"}
        return path in ours or path.startswith(("hub.", "fleet.", "server.replica"))

    paths, inputs = paths_passed_on("serve", config)
    argv = (*passed_on("serve", run.argv, without), *paths)
    return serve_replicas(Recipe(config, argv, tuple(inputs), run.given))


def run_models(parsed: Parsed) -> int:
    """Serve the models of a file; returns the exit code."""
    from ikcli.commands._models_file import check_front, read_models
    from ikcli.server.router.server import serve_models

    check_front(parsed)
    return serve_models(parsed.config, read_models(parsed.config.server.models))
