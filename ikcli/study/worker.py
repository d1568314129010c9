"""The worker of a study: a resident model, one unit after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.errors import IkError
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.quant.encoding import Encoding
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.study.resident import Resident, ResidentOptions
from ikcli.study.units import StudyUnit

_LEAST_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class StudyWorkerOptions:
    """`precision`: a unit ends when the standard error is this share of the divergence (0: all chunks are used).

    `digests` of the model, the text and the importance matrix are compared where the worker runs.
    """

    resident: ResidentOptions
    imatrix: Path | None
    precision: float
    digests: tuple[str, str, str]

    @property
    def files(self) -> list[tuple[Path, str]]:
        """What a node must have."""
        paths = (self.resident.model, self.resident.text, self.imatrix)
        return [(path, found) for path, found in zip(paths, self.digests, strict=True) if path is not None]

    def __call__(self) -> StudyWorker:
        """Make the worker."""
        return StudyWorker(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean KL divergence in nats per token with its standard error, and what it was measured on."""

    kld: float
    error: float
    n_tokens: int
    n_chunks: int

    def record(self) -> dict[str, Any]:
        """For the journal."""
        return {"kld": self.kld, "error": self.error, "n_tokens": self.n_tokens, "n_chunks": self.n_chunks}


class StudyWorker:
    """See the module."""

    def __init__(self, options: StudyWorkerOptions) -> None:
        """Load the model; IkError if a file here is not that of the study."""
        self._options, files = options, options.resident
        found = digests(open_gguf(files.model, files.overrides), files.text, options.imatrix)
        for mine, wanted, path in zip(found, options.digests, (files.model, files.text, options.imatrix), strict=True):
            if mine != wanted:
                raise IkError(f"{path} on this node is another file than that of the study")
        self.resident = Resident(files)
        self._encoding = Encoding(read_imatrix(options.imatrix) if options.imatrix else None)

    def do(self, unit: StudyUnit) -> Measured:
        """Measure a unit on as many chunks as its precision wants."""
        values: list[np.ndarray] = []
        trial = self.resident.trial(dict.fromkeys(unit.tensors, unit.type), self._encoding)
        for found in trial:
            values.append(found)
            kld = np.concatenate(values)
            mean, error = float(kld.mean()), float(kld.std(ddof=1)) / math.sqrt(len(kld))
            if len(values) >= _LEAST_CHUNKS and error <= self._options.precision * mean:
                break
        return Measured(mean, error, len(kld), len(values))

    def close(self) -> None:
        """Release the model."""
        self.resident.close()


def digests(file: GGUFFile, text: Path, imatrix: Path | None) -> tuple[str, str, str]:
    """Of the model, the text and the importance matrix."""
    return digest.of_model(file), digest.of_file(text), digest.of_file(imatrix) if imatrix else ""
