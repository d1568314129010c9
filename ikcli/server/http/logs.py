"""The server's log on standard output, in llama-server's format: text or one JSON object per line.

A text line is `LEVEL [function] message | key=value ...`. Strings are written as JSON, so a client's text cannot forge
a line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import TextIO

from ikcli.log import copy
from ikcli.server.http.jsontext import dump


class ServerLog:
    """Log writer; it writes VERB lines only if `verbose`."""

    def __init__(self, *, json: bool = False, verbose: bool = False, out: TextIO | None = None) -> None:
        self._json = json
        self.verbose = verbose
        self._out = out

    def __call__(self, level: str, function: str, message: str, fields: Mapping[str, object]) -> None:
        """Write one line."""
        if level == "VERB" and not self.verbose:
            return
        head = {"tid": str(threading.get_ident()), "timestamp": int(time.time())}
        if self._json:
            line = dump({**head, "level": level, "function": function, "line": 0, "msg": message, **fields})
        else:
            values = " ".join(f"{key}={dump(value)}" for key, value in {**head, **fields}.items())
            line = f"{level:>4} [{function:>24}] {message} | {values}"
        out = self._out or sys.stdout
        out.write(line + "\n")
        out.flush()
        copy(line)

    def info(self, function: str, message: str, **fields: object) -> None:
        """Write an INFO line."""
        self("INFO", function, message, fields)

    def warn(self, function: str, message: str, **fields: object) -> None:
        """Write a WARN line."""
        self("WARN", function, message, fields)

    def error(self, function: str, message: str, **fields: object) -> None:
        """Write an ERR line."""
        self("ERR", function, message, fields)
