"""Find the model of a command: a file, or a model from a hub or a URL, which is downloaded if necessary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ikcli import log
from ikcli.errors import IkError, UsageError
from ikcli.settings.hub import HubConfig

if TYPE_CHECKING:
    from ikcli.settings.run import RunConfig

T = TypeVar("T")


def find_model(model: str | Path | None, hub: HubConfig, *, header_only: bool = False) -> Path | None:
    """Return the path of the model that the options name, or None if they name none.

    `header_only`: its data may be missing.
    """
    if hub.file and not hub.repo:
        raise UsageError("--hf-file names a file of a repository; add --hf-repo USER/REPO")
    if not (hub.repo or hub.url):
        return Path(model) if model is not None else None
    if model is not None and Path(model).is_file():
        log.notice_once(f"{model} exists and is used, not {hub.repo or hub.url}")
        return Path(model)
    from ikcli.hub.names import parse_ref
    from ikcli.hub.pull import Access, pull, pull_header, pull_url, pull_url_header

    access = Access(hub.token, hub.offline)
    if not hub.repo:
        if header_only:
            return pull_url_header(hub.url, access)
        return finish(lambda: pull_url(hub.url, access, bar)).path
    file = hub.file or (Path(model).name if model is not None and ":" not in hub.repo else "")
    ref = parse_ref(hub.repo, file)
    if header_only:
        path, notice = pull_header(ref, access)
    else:
        pulled = finish(lambda: pull(ref, access, bar))
        path, notice = pulled.path, pulled.notice
    if notice:
        log.notice_once(notice)
    return path


def find_draft(config: RunConfig) -> RunConfig:
    """Return the settings with the file of the draft model that they name by repository."""
    server = config.server
    if not server.hf_repo_draft:
        return config
    path = find_model(server.model_draft, replace(config.hub, repo=server.hf_repo_draft, file="", url=""))
    return replace(config, server=replace(server, model_draft=path))


def find_projector(config: RunConfig) -> RunConfig:
    """Return the settings with the file of the projector, which an address or the repository of -hf may name."""
    vision, hub, header_only = config.vision, config.hub, config.only_plans
    path = vision.mmproj
    if path is None and vision.mmproj_url:
        from ikcli.hub.pull import Access, pull_url, pull_url_header

        access = Access(hub.token, hub.offline)
        get = pull_url_header if header_only else lambda url, access: finish(lambda: pull_url(url, access, bar)).path
        path = get(vision.mmproj_url, access)
    elif path is None and vision.mmproj_auto and hub.repo and config.command in ("serve", "chat", "plan"):
        from ikcli.hub.names import parse_ref
        from ikcli.hub.pull import Access, pull_projector

        ref, access = parse_ref(hub.repo, hub.file), Access(hub.token, hub.offline)
        try:
            path = finish(lambda: pull_projector(ref, access, bar, header_only=header_only))
        except IkError as e:
            log.warn(f"the projector of {hub.repo} cannot be had, so the model reads text only: {e}")
    return replace(config, vision=replace(vision, mmproj=path)) if path is not None else config


def bar(title: str, total: float, done: float) -> AbstractContextManager[Callable[[float], None]]:
    """Return a progress bar on stderr for a download."""
    size = log.shown_size(total) if total >= 0 else "unknown size"
    log.log(f"downloading {title}, {size}" + (f", of which {log.shown_size(done)} are there already" if done else ""))
    return log.progress(title, total, in_bytes=True, lines=True)


def finish(download: Callable[[], T]) -> T:
    """Return the result of a download; if the user interrupts it, report what is kept."""
    try:
        return download()
    except KeyboardInterrupt as stop:
        log.log(str(stop) or "interrupted")
        raise
