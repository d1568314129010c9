"""Measure one unit of a study on a resident model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.quant.encoding import Encoding
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.study.resident import Resident, ResidentOptions
from ikcli.study.units import StudyUnit

_LEAST_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean KL divergence in nats per token with its standard error, and the tokens and chunks it was measured on."""

    kld: float
    error: float
    n_tokens: int
    n_chunks: int

    def record(self) -> dict[str, Any]:
        """Return the record for the journal."""
        return {"kld": self.kld, "error": self.error, "n_tokens": self.n_tokens, "n_chunks": self.n_chunks}


@dataclass(frozen=True, slots=True)
class StudySetup:
    """The model that stays resident, and the precision of `measure`."""

    resident: ResidentOptions
    imatrix: Path | None
    precision: float


@contextmanager
def open_study(setup: StudySetup) -> Iterator[Callable[[StudyUnit], Measured]]:
    """Load the model and yield the function that measures a unit."""
    with closing(Resident(setup.resident)) as resident:
        encoding = Encoding(read_imatrix(setup.imatrix) if setup.imatrix else None)
        yield partial(measure, resident, encoding, setup.precision)


def measure(resident: Resident, encoding: Encoding, precision: float, unit: StudyUnit) -> Measured:
    """Measure a unit chunk by chunk until the standard error is `precision` times the divergence (0: all chunks)."""
    values: list[np.ndarray] = []
    for found in resident.trial(dict.fromkeys(unit.tensors, unit.type), encoding):
        values.append(found)
        kld = np.concatenate(values)
        mean, error = float(kld.mean()), float(kld.std(ddof=1)) / math.sqrt(len(kld))
        if len(values) >= _LEAST_CHUNKS and error <= precision * mean:
            break
    return Measured(mean, error, len(kld), len(values))
