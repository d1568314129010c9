"""Open what the settings of a run name: the projector of a model, and images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.engine.plan.device_plan import planning_device
from ikcli.engine.plan.devices import Machine
from ikcli.engine.run import gpus
from ikcli.engine.run.run_device import Beside
from ikcli.errors import IkError, UsageError
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.vision.decode import MAX_BYTES, Picture, decode_image

if TYPE_CHECKING:
    from ikcli.engine.run.runner import Runner
    from ikcli.vision.projector import Projector


def open_projector(config: RunConfig, hp: HParams) -> Projector | None:
    """Open the projector of the settings for a model, on the GPU that computes it if there is one; None without one."""
    if config.vision.mmproj is None:
        return None
    from ikcli.vision.encoder import tower_runner

    devices = gpus.open_devices(config) if _offloads(config) else {}
    name = _chosen(config, list(devices))
    runner = tower_runner(_n_threads(config), (name, gpus.run_device(devices[name])) if name else None)
    gpus.hand_over(runner, devices)
    try:
        return _opened(config, hp, runner)
    except IkError:
        runner.close()
        raise


def planned_projector(config: RunConfig, hp: HParams, machine: Machine) -> Projector | None:
    """Open the projector to plan it on a machine, not to use it; None without one."""
    if config.vision.mmproj is None:
        return None
    from ikcli.vision.encoder import tower_runner

    found = {gpu.name: gpu for gpu in machine.gpus} if _offloads(config) else {}
    name = _chosen(config, list(found))
    return _opened(config, hp, tower_runner(_n_threads(config), (name, planning_device(found[name])) if name else None))


def projector_memory(config: RunConfig, hp: HParams, machine: Machine) -> Beside:
    """Return what the projector of a run needs on a machine; a run on the CPU takes it as it goes."""
    if not (config.only_plans or (machine.gpus and _offloads(config))):
        return {}
    found = planned_projector(config, hp, machine)
    return {} if found is None else found.memory()


def _offloads(config: RunConfig) -> bool:
    return config.vision.mmproj_offload and gpus.wanted(config)


def _chosen(config: RunConfig, names: Sequence[str]) -> str:
    """Return the GPU of the projector: that of -mg, otherwise the first; empty without one."""
    return names[config.main_gpu if config.main_gpu < len(names) else 0] if names else ""


def _n_threads(config: RunConfig) -> int:
    return max(config.n_threads, config.n_threads_batch)


def _opened(config: RunConfig, hp: HParams, runner: Runner) -> Projector:
    if config.fleet.stages > 1:
        raise UsageError("--mmproj cannot be combined with --stages: a model in stages reads text only")
    from ikcli.vision.projector import Projector

    vision = config.vision
    assert vision.mmproj is not None
    return Projector.open(vision.mmproj, hp, min_tokens=vision.image_min_tokens, max_tokens=vision.image_max_tokens,
                          runner=runner)  # fmt: skip


def needed_projector(config: RunConfig, hp: HParams) -> Projector:
    """Open the projector of a run with images; raise UsageError if none is named."""
    found = open_projector(config, hp)
    if found is None:
        raise UsageError("--image needs the projector of the model: --mmproj FILE")
    return found


def read_picture(path: Path) -> Picture:
    """Read an image of the command line; raise IkError with one sentence if that fails."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise IkError(f"--image {path}: {e.strerror or e}") from None
    return decode_image(data, f"--image {path}")
