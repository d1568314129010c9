"""The exception hierarchy: every message is a sentence for the user, and every class has an exit code."""

from __future__ import annotations


class IkError(Exception):
    """A failure that the user can understand and fix. Commands print `error: <message>` and exit with `exit_code`."""

    exit_code = 1


class UsageError(IkError):
    """Wrong options or rules (exit code 2)."""

    exit_code = 2


class FormatError(IkError):
    """A file does not have the claimed format: truncated, hostile, or of an unknown version or type. Names the file."""


class UnsupportedError(IkError):
    """A valid request that this build cannot serve; the message names a way out."""


class NonFiniteError(IkError):
    """NaN or Inf where a number is needed; names the tensor and layer, or the chunk."""
