"""Translate errors into failures for clients, and check that logits are finite."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.sampling.candidates import NoTokenError
from ikcli.server.slots.messages import Failure
from ikcli.server.slots.states import EngineError


def invalid(message: str) -> Failure:
    return Failure(400, "invalid_request_error", message)


def failure_of(error: Exception) -> Failure:
    """Return the failure that corresponds to an exception."""
    if isinstance(error, NoTokenError | UsageError):
        return invalid(str(error))
    if isinstance(error, IkError):
        return Failure(500, "server_error", str(error))
    return Failure(500, "server_error", f"internal error: {type(error).__name__}: {error}")


def engine_error(error: Exception) -> EngineError:
    f = failure_of(error)
    return EngineError(f.status, f.type, f.message)


def check_finite(row: npt.NDArray[np.float32]) -> None:
    """Raise NonFiniteError unless every logit is finite; their sum alone may overflow."""
    if not np.isfinite(row).all():
        raise NonFiniteError(
            "the model's output is not finite (NaN or Inf among the logits); --check-tensors tells whether the file "
            "holds such values"
        )
