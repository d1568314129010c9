"""Measure the KL divergence on a text that quantizing groups of tensors causes, for `ik quantize --calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.log import log, progress
from ikcli.quant.encoding import Encoding
from ikcli.study.resident import Resident, ResidentOptions


class Calibrator:
    """Measures trials on a resident model; `measure` is a `Measure` of `ikcli.quant.calibration`."""

    def __init__(self, options: ResidentOptions) -> None:
        self.options = options
        self._resident: Resident | None = None

    def measure(self, trials: Sequence[Mapping[str, GGMLType]], encoding: Encoding) -> list[float]:
        """Return the mean KL divergence of every trial (tensor -> type) from the unchanged model, in nats per token."""
        if self._resident is None:
            self._resident = Resident(self.options, "calibrate")
            self._announce(self._resident, len(trials))
        out = []
        with progress("calibrating", len(trials)) as advance:
            for trial in trials:
                out.append(mean_divergence(self._resident, trial, encoding))
                advance(1)
        return out

    def _announce(self, found: Resident, n_trials: int) -> None:
        windows, seconds = found.windows, found.pass_seconds
        log(
            f"calibrate: {n_trials} passes over {windows.n_chunk} chunks of {windows.n_ctx} tokens, at most "
            f"{seconds:.2f} seconds per pass - ETA {seconds * n_trials / 60:.1f} minutes, and the time to encode the "
            f"weights; {found.base_bytes / 2**20:.0f} MiB hold the predictions of the unchanged model, "
            f"{found.prefix_bytes / 2**20:.0f} MiB the outputs of its layers"
        )


def mean_divergence(resident: Resident, trial: Mapping[str, GGMLType], encoding: Encoding) -> float:
    """Return the mean over all scored positions, in nats."""
    return float(np.mean(np.concatenate(list(resident.trial(trial, encoding)))))
