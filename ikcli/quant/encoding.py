"""Encode the rows of a tensor with its importance weights, and with error feedback where there are second moments.

`ik quantize`, the trials of `--target-size` and calibration all encode here, so they see the same rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.quant.covariance_file import Covariance, with_squares
from ikcli.quant.encoders import EncodeOptions, check_finite, quantize_rows
from ikcli.quant.feedback import encode_with_feedback, supports
from ikcli.quant.feedback_metric import Metric
from ikcli.quant.imatrix_file import Imatrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The known statistics of the inputs of a model's matrices, and the options of the encoders."""

    imatrix: Imatrix | None = None
    covariance: Covariance | None = None
    options: EncodeOptions = field(default_factory=EncodeOptions)

    def of(self, name: str, shape: tuple[int, ...]) -> TensorEncoding:
        """Return the encoding of one tensor; raise FormatError if the files belong to another model."""
        return TensorEncoding(self, name, shape)


class TensorEncoding:
    """Encodes rows of one tensor; safe to use from any number of threads at a time."""

    def __init__(self, encoding: Encoding, name: str, shape: tuple[int, ...]) -> None:
        imatrix = encoding.imatrix
        self.weights = imatrix.weights(name, shape) if imatrix is not None else None  # (n_mat, ne0)
        self._options, self._name, self._shape = encoding.options, name, shape
        found = encoding.covariance is not None and encoding.covariance.find(name) is not None
        self._covariance = encoding.covariance if found else None
        self._lock = threading.Lock()
        self._matrix = -1  # rows come matrix by matrix: only the last one is kept
        self._metric: Metric | None = None

    def weights_of(self, matrix: int) -> Floats | None:
        """Return the importance weights (ne0,) of one matrix."""
        if self.weights is None:
            return None
        return np.ascontiguousarray(self.weights[matrix % len(self.weights)], np.float32)

    def metric(self, matrix: int) -> Metric | None:
        """Return the second moments of the inputs of one matrix, or None without any."""
        if self._covariance is None:
            return None
        with self._lock:
            if matrix != self._matrix:
                moments = self._covariance.moments(self._name, self._shape, matrix)
                if moments is not None and self._covariance.of_random_tokens and self.weights is not None:
                    moments = with_squares(moments, self.weights[matrix % len(self.weights)])
                self._matrix, self._metric = matrix, Metric(moments) if moments is not None else None
            return self._metric

    def feeds_back(self, type: GGMLType) -> bool:
        """Return whether rows of this type are written with error feedback."""
        return self._covariance is not None and supports(type)

    def encode(self, values: Floats, type: GGMLType, matrix: int) -> Bytes:
        """Encode adjacent rows (n_rows, ne0) of one matrix into n_rows * row size bytes.

        Raises NonFiniteError as `quantize_rows` does.
        """
        metric = self.metric(matrix) if self.feeds_back(type) else None
        if metric is None:
            return quantize_rows(values, type, self.weights_of(matrix), options=self._options)
        check_finite(values)
        return encode_with_feedback(values, type, metric)
