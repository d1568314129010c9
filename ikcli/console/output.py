"""Write text and flush at once."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from ikcli.errors import IkError


def put(text: str, stream: TextIO | None = None) -> None:
    """Write to stdout or another stream; IkError if that fails, for example on a full disk."""
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        with contextlib.suppress(OSError, ValueError):  # the rest of its buffer must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise IkError(f"cannot write the text: {e.strerror or e}") from None
