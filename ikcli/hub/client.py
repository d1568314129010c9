"""Send requests to a hub: list repositories, read pieces of files. Failures are IkErrors that suggest a remedy.

`huggingface_hub` provides endpoint, token, cache location and HTTP client, all by its own environment variables. It is
imported on first use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from ikcli import log
from ikcli.errors import IkError
from ikcli.hub.names import RemoteFile

TIMEOUT = 20.0
ATTEMPTS = 5
PAUSE = 0.5  # seconds before the second attempt, doubled after each
T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_AGAIN = (408, 429, 500, 502, 503, 504)


class HubError(IkError):
    """The hub cannot be reached, or refuses a request."""


class NetworkError(HubError):
    """The hub does not answer, so only the cache is left."""


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


def endpoint() -> str:
    """Return the address of the hub."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_offline(asked: bool) -> bool:
    """Return whether to use only the cache."""
    from huggingface_hub import constants

    return asked or bool(constants.HF_HUB_OFFLINE)


def headers(token: str, url: str) -> dict[str, str]:
    """Return request headers. The user's hub token goes to the hub only, a given token only to the named host."""
    from huggingface_hub.utils import build_hf_headers

    own = urlsplit(url).netloc == urlsplit(endpoint()).netloc
    made = build_hf_headers(token=token or (None if own else False), library_name="ik")
    return {**made, "Accept-Encoding": "identity"}


def file_url(repo: str, commit: str, path: str) -> str:
    """Return the URL of a file's content."""
    return f"{endpoint()}/{repo}/resolve/{commit}/{quote(path)}"


def repo_info(repo: str, token: str = "", attempts: int = ATTEMPTS, revision: str = "") -> RepoInfo:
    """List the files of a repository at the head of a branch, by default main."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint(), library_name="ik")

    def ask() -> Any:
        at = revision or None
        return api.model_info(repo, revision=at, files_metadata=True, token=token or None, timeout=TIMEOUT)

    info = call(ask, repo, token, attempts)
    files = []
    for sibling in info.siblings or []:
        digest = str((sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "")
        if not _DIGEST.fullmatch(digest) or _is_outside(sibling.rfilename):
            raise HubError(f"{endpoint()} says nothing usable about {sibling.rfilename!r} of {repo}: is it a hub?")
        files.append(RemoteFile(sibling.rfilename, int(sibling.size or 0), digest))
    if not _DIGEST.fullmatch(str(info.sha)):
        raise HubError(f"{endpoint()} does not name the commit of {repo}: is it a hub?")
    return RepoInfo(repo, str(info.sha), tuple(files))


def _is_outside(path: str) -> bool:
    """Return whether a path would leave the directory it is put in."""
    return path.startswith("/") or "\\" in path or ".." in path.split("/")


def read_range(url: str, start: int, stop: int, what: str, token: str = "") -> bytes:
    """Return bytes start..stop of a file, fewer at its end."""

    def ask() -> bytes:
        with stream(url, token, start, stop) as response:
            if response.status_code == 416:
                return b""
            if response.status_code != 206 and start:
                raise HubError(
                    f"{urlsplit(url).netloc} does not give pieces of files, so {what} has to be downloaded whole"
                )
            data = bytearray()
            for chunk in response.iter_raw():
                data += chunk
                if len(data) >= stop - start:
                    break
            return bytes(data[: stop - start])

    return call(ask, what, token)


def begin_of(url: str, token: str = "") -> tuple[bytes, int]:
    """Return the first four bytes of a file and its size (-1 if the server does not state it)."""

    def ask() -> tuple[bytes, int]:
        with stream(url, token, 0, 4) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code == 200:
                total = response.headers.get("Content-Length", "")
            return next(response.iter_raw(4), b"")[:4], int(total) if total.isdigit() else -1

    return call(ask, url, token)


@contextmanager
def stream(url: str, token: str, start: int = 0, stop: int = 0, tag: str = "") -> Iterator[Any]:
    """Return the response to a request for bytes start..stop (0: to the end); 416 is not an error.

    If the file no longer has the ETag `tag`, the server sends all of it.
    """
    from huggingface_hub.utils import get_session, hf_raise_for_status

    fields = headers(token, url)
    if start or stop:
        fields["Range"] = f"bytes={start}-{stop - 1 if stop else ''}"
        if tag:
            fields["If-Range"] = tag
    with get_session().stream("GET", url, headers=fields, timeout=TIMEOUT, follow_redirects=True) as response:
        if response.status_code != 416:
            hf_raise_for_status(response)
        yield response


def call(ask: Callable[[], T], what: str, token: str = "", attempts: int = ATTEMPTS) -> T:
    """Return the result of a request; repeat it if that may help. `what` names the repository or URL in messages."""
    for attempt in range(attempts):
        try:
            return ask()
        except Exception as problem:
            if not isinstance(problem, network_error() | ConnectionError):
                raise
            if attempt + 1 == attempts or not is_passing(problem):
                raise explained(problem, what, token) from problem
        pause(attempt)
    raise AssertionError("unreachable")


def network_error() -> type[Exception]:
    """Return the exceptions for a missing answer; they depend on the HTTP client of the huggingface_hub version."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__mro__[1]


def status_of(problem: BaseException) -> int:
    """Return the HTTP status of an error, or 0."""
    return int(getattr(getattr(problem, "response", None), "status_code", 0) or 0)


def is_passing(problem: BaseException) -> bool:
    """Return whether another attempt may help."""
    status = status_of(problem)
    return status in _AGAIN if status else isinstance(problem, network_error())


def pause(attempt: int) -> None:
    """Wait before the next attempt (the first is 0), and report it once."""
    log.notice_once("the server does not answer, or not to the end: trying again")
    time.sleep(PAUSE * 2**attempt)


def explained(problem: Exception, what: str, token: str) -> IkError:
    """Return an error of the hub or the network as one sentence."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    host, status = urlsplit(what).netloc or urlsplit(endpoint()).netloc, status_of(problem)
    if isinstance(problem, HFValidationError):
        return HubError(f'"{what}" is not a name of a repository: user/repo')
    if isinstance(problem, OfflineModeIsEnabled):
        return NetworkError(f"{what} is not asked for: HF_HUB_OFFLINE is set")
    has_token = bool(token or headers("", endpoint()).get("authorization"))
    if isinstance(problem, GatedRepoError):
        way = "with the account of this token" if has_token else "and give your token with -hft or HF_TOKEN"
        return HubError(f"{what} is gated: accept its conditions on {endpoint()}/{what} {way}")
    if status == 401 and has_token and not isinstance(problem, EntryNotFoundError):
        return HubError(
            f"{what} does not exist on {host}, or the token (-hft, HF_TOKEN, hf auth login) has no access to it"
        )
    if isinstance(problem, RepositoryNotFoundError) or status == 401:
        return HubError(
            f"{what} does not exist on {host}, or is private: check the name, or give a token with -hft or HF_TOKEN"
        )
    if status == 403:
        return HubError(
            f"{host} refuses {what} (403): the token given with -hft or HF_TOKEN needs the right to read it"
        )
    if status == 404:
        return HubError(f"{what} does not exist; check the name")
    if status:
        return NetworkError(f"{host} answers {status} for {what}; try again later, or use what is there with --offline")
    reason = str(problem).strip() or type(problem).__name__
    return NetworkError(
        f"no answer for {what} from {host} ({reason}); check the network, HF_ENDPOINT and proxy settings"
    )
