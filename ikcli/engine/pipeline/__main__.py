"""Run the process of a stage.

Its options come through stdin. When stdin closes, the process that wrote them has ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

from ikcli.engine.pipeline.process import work


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Run a stage."""
    # Ctrl-C reaches all processes of a terminal, and the first one reports it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(options)
    os._exit(0)  # the thread above waits in a read that cannot be interrupted


if __name__ == "__main__":
    main()
