"""Upload a directory to a repository: send files one after the other, skip those it has, publish all with one commit.

The content of large files is sent before anything refers to it. So a run that ends early leaves the repository
unchanged, and the next one continues after the files (with hf_xet, the pieces of files) that arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ikcli import log
from ikcli.errors import IkError, UsageError
from ikcli.hub.client import (
    ATTEMPTS,
    HubError,
    call,
    endpoint,
    headers,
    is_offline,
    repo_info,
    status_of,
)
from ikcli.hub.download import file_digest
from ikcli.hub.names import parse_ref

_SMALL = 16 << 20  # larger files are always in large file storage, identified by their SHA-256


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """The target: `revision` is a branch, created if missing, or refs/pr/N; `create_pr` opens a pull request."""

    repo: str
    token: str = ""
    private: bool = False
    revision: str = ""
    create_pr: bool = False
    message: str = ""
    offline: bool = False


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The result: sent and skipped files, and the addresses of the commit and the pull request."""

    repo: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    commit_url: str
    pull_request: str


def check_upload(options: UploadOptions) -> str:
    """Return the account of the token; raise an IkError for anything that would make every upload fail."""
    if options.create_pr and options.revision:
        raise UsageError("--create-pr opens a pull request to the main branch; drop it or --revision")
    ref = parse_ref(options.repo)
    if ref.quant:
        raise UsageError(f'--upload "{options.repo}" names a quant; give the repository alone: {ref.repo}')
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise IkError("--upload needs huggingface_hub: pip install huggingface_hub") from None
    if is_offline(options.offline):
        raise UsageError("--upload needs the network: drop --offline and HF_HUB_OFFLINE")
    if not headers(options.token, endpoint()).get("authorization"):
        raise UsageError("--upload needs a token that may write: --token, HF_TOKEN, or hf auth login")
    api = HfApi(endpoint=endpoint(), library_name="ik")
    return str(_ask(lambda: api.whoami(token=options.token or None), options)["name"])


def upload(
    folder: Path,
    digests: Mapping[str, str],
    options: UploadOptions,
    on_file: Callable[[str, int], None] = lambda name, n_bytes: None,
) -> Uploaded:
    """Send the files of `digests` (name in the directory -> SHA-256) that the repository lacks.

    `on_file` is called for each file whose content has arrived. Files only in the repository are left alone.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    api, token = HfApi(endpoint=endpoint(), library_name="ik"), options.token or None
    revision = options.revision or None
    if not sys.stderr.isatty():
        disable_progress_bars()
    _prepare(api, options)
    remote = {f.path: f.digest for f in _remote(options, options.revision)}
    kept = tuple(name for name in digests if _is_there(folder / name, digests[name], remote.get(name, "")))
    additions = [CommitOperationAdd(name, str(folder / name)) for name in digests if name not in kept]
    where: dict[str, Any] = {"token": token, "revision": revision, "create_pr": options.create_pr}
    for added in additions:
        name = added.path_in_repo
        send = partial(api.preupload_lfs_files, options.repo, [added], free_memory=False, num_threads=1, **where)
        _ask(send, options, name)
        on_file(name, (folder / name).stat().st_size)
    sent = tuple(added.path_in_repo for added in additions)
    if not additions:
        return Uploaded(options.repo, (), kept, f"{endpoint()}/{options.repo}", "")
    message = options.message or f"Upload {folder.absolute().name}"
    # Never repeated automatically: if the answer was lost, a second commit would open a second pull request.
    made = _ask(
        lambda: api.create_commit(options.repo, additions, commit_message=message, **where), options, attempts=1
    )
    shown = _remote(options, options.revision if not options.create_pr else str(made.pr_revision))
    arrived = {f.path: f.digest for f in shown}
    for name in digests:
        if not _is_there(folder / name, digests[name], arrived.get(name, "")):
            raise HubError(f"{options.repo} does not show {name} as it is here after the commit; run the command again")
    return Uploaded(options.repo, sent, kept, str(made.commit_url), str(made.pr_url or ""))


def _prepare(api: Any, options: UploadOptions) -> None:
    """Create the repository and the branch if they do not exist."""
    token = options.token or None
    if not _ask(lambda: api.repo_exists(options.repo, token=token), options):
        private = options.private or None
        _ask(lambda: api.create_repo(options.repo, token=token, private=private, exist_ok=True), options)
    elif options.private and not _ask(lambda: api.model_info(options.repo, token=token), options).private:
        log.warn(f"{options.repo} exists and is public; --private counts for a new repository only")
    if options.revision and not options.revision.startswith("refs/"):
        _ask(lambda: api.create_branch(options.repo, branch=options.revision, token=token, exist_ok=True), options)


def _remote(options: UploadOptions, revision: str) -> Any:
    return _explained(lambda: repo_info(options.repo, options.token, revision=revision).files, options, options.repo)


def _is_there(path: Path, sha256: str, remote: str) -> bool:
    """Return whether the repository's digest is that of a file: SHA-256, or its git blob id."""
    if len(remote) == len(sha256):
        return remote == sha256
    return bool(remote) and path.stat().st_size <= _SMALL and file_digest(path, remote) == remote


def _ask(ask: Callable[[], Any], options: UploadOptions, what: str = "", attempts: int = ATTEMPTS) -> Any:
    """Return the result of a request; repeat it if that may help. `what` names the file in messages."""
    return _explained(
        lambda: call(lambda: _bare(ask), options.repo, options.token, attempts),
        options,
        what or options.repo,
    )


def _bare(ask: Callable[[], Any]) -> Any:
    """Make a request and raise its error without the library's wrapper."""
    try:
        return ask()
    except RuntimeError as problem:
        if problem.__cause__ is not None:
            raise problem.__cause__ from None
        raise


def _explained(ask: Callable[[], Any], options: UploadOptions, what: str) -> Any:
    """Describe errors of uploads in terms of uploads."""
    host = endpoint()
    try:
        return ask()
    except IkError as problem:
        status = status_of(problem.__cause__) if problem.__cause__ is not None else 0
        if status in (401, 403):
            raise HubError(
                f"{host} does not let this token write to {options.repo} ({status}); "
                "give one with the right to write with --token or HF_TOKEN"
            ) from problem
        if status:
            reason = _said(problem.__cause__)
            raise HubError(f"{host} answers {status} for {what}{reason}; the same command goes on from here") from None
        raise HubError(f"{problem}; the same command goes on from here") from problem
    except (RuntimeError, ValueError, OSError) as problem:
        raise HubError(f"{what}: {problem}; the same command goes on from here") from problem


def _said(problem: Any) -> str:
    message = str(getattr(problem, "server_message", "") or "").strip()
    return f" ({message})" if message else ""
