"""Open sessions for commands and servers."""

from __future__ import annotations

from typing import Any

from ikcli.engine.run.session import Session
from ikcli.log import log
from ikcli.settings.run import RunConfig


def open_session(config: RunConfig, **sizes: Any) -> Session:
    """Open a session as `Session.open` does; with `--self-test`, check its devices before anything is computed.

    Raise SelfTestError, with the session closed, if an op of the first layers is wrong.
    """
    session = Session.open(config, **sizes)
    if config.self_test:
        from ikcli.engine.run.self_test import check

        try:
            for family in check(session):
                log(f"self-test: {family}")
        except BaseException:
            session.close()
            raise
    return session
