"""What clients are told of errors, and logits that are none."""

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
    """The failure that an exception means."""
    if isinstance(error, NoTokenError | UsageError):
        return invalid(str(error))
    if isinstance(error, IkError):
        return Failure(500, "server_error", str(error))
    return Failure(500, "server_error", f"internal error: {type(error).__name__}: {error}")


def engine_error(error: Exception) -> EngineError:
    f = failure_of(error)
    return EngineError(f.status, f.type, f.message)


def check_finite(row: npt.NDArray[np.float32]) -> None:
    """The sum of a row may overflow by itself, so this looks at every logit."""
    if not np.isfinite(row).all():
        raise NonFiniteError(
            "the model's output is not finite (NaN or Inf among the logits); --check-tensors tells whether the file "
            "holds such values"
        )
