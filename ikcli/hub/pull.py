"""Get a model by name, from the cache or by download; or only its header; or a checkpoint for conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ikcli.errors import FormatError, IkError, UsageError
from ikcli.files import written_whole
from ikcli.gguf.constants import GGUF_MAGIC
from ikcli.gguf.reader import GGUFFile
from ikcli.hub import cache, client
from ikcli.hub.download import Download, check_space, disk_errors, download, kept_bytes
from ikcli.hub.headers import fetch_header
from ikcli.hub.names import ModelRef, Quant, RemoteFile, choose, part_names, projector_of, quants_of

Progress = Callable[[str, float, float], AbstractContextManager[Callable[[float], None]]]
"""`progress(title, total bytes, present bytes)` is a context that yields `advance(bytes)`."""

_CHECKPOINT = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "preprocessor_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "params.json"),
)
_NOT_CHECKPOINT = ("consolidated*", "*.bin", "*.pt", "*.pth")


def no_progress(title: str, total: float, done: float) -> AbstractContextManager[Callable[[float], None]]:
    """Report no progress."""
    return nullcontext(lambda n: None)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model on this disk: `path` is its first file; `n_new` bytes were downloaded."""

    name: str
    path: Path
    files: tuple[Path, ...]
    n_bytes: int
    n_new: int = 0
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """How to use the hub: with which token, or only its cache."""

    token: str = ""
    offline: bool = False


def find(ref: ModelRef, access: Access) -> tuple[client.RepoInfo, Quant, str]:
    """Return the repository, the quant that is meant, and a notice if only the cache could be asked."""
    if client.is_offline(access.offline):
        return _in_cache(
            ref, f"{ref} is not in the cache ({cache.hub_dir()}); run once without --offline: ik pull {ref}"
        )
    try:
        # do not wait long for cached models: every run without network comes here
        info = client.repo_info(ref.repo, access.token, 2 if cache.newest_commit(ref.repo) else client.ATTEMPTS)
    except client.NetworkError as problem:
        info, quant, _ = _in_cache(ref, str(problem))
        return info, quant, f"{problem}: using what is in the cache"
    return info, choose(ref, quants_of(info.files)), ""


def _in_cache(ref: ModelRef, otherwise: str) -> tuple[client.RepoInfo, Quant, str]:
    commit = cache.newest_commit(ref.repo)
    info = client.RepoInfo(ref.repo, commit, tuple(cache.cached_files(ref.repo, commit)))
    try:
        return info, choose(ref, quants_of(info.files)), ""
    except IkError:
        raise client.NetworkError(otherwise) from None


def pull(ref: ModelRef, access: Access, progress: Progress = no_progress) -> Pulled:
    """Return all files of a quant; download missing ones."""
    info, quant, notice = find(ref, access)
    return pull_found(info, quant, access, progress, notice)


def pull_projector(
    ref: ModelRef, access: Access, progress: Progress = no_progress, *, header_only: bool = False
) -> Path | None:
    """Return the projector of a model's repository, or a file with its header; None if the repository has none."""
    info, quant, _ = find(ref, access)
    file = projector_of(info.files, quant.files[0].path)
    if file is None:
        return None
    if header_only and not is_there(info, file):
        folder = cache.headers_dir() / cache.repo_dir(ref.repo).name / info.commit
        return header_files(info, Quant("mmproj", (file,)), folder, access)[0]
    return _fetch(info, (file,), access, progress)[0][0]


def pull_found(
    info: client.RepoInfo, quant: Quant, access: Access, progress: Progress = no_progress, notice: str = ""
) -> Pulled:
    """Return all files of a quant found by `find`; download missing ones."""
    files, n_new = _fetch(info, quant.files, access, progress)
    return Pulled(f"{info.repo}:{quant.name}", files[0], files, quant.n_bytes, n_new, notice)


def pull_checkpoint(repo: str, access: Access, progress: Progress = no_progress) -> Pulled:
    """Download weights, config and tokenizer of a checkpoint; `path` of the result is their directory."""
    if client.is_offline(access.offline):
        commit = cache.newest_commit(repo)
        info = client.RepoInfo(repo, commit, tuple(cache.cached_files(repo, commit)))
    else:
        info = client.repo_info(repo, access.token)
    chosen = [f for f in info.files if _of_checkpoint(f.path)]
    if not any(f.path.endswith(".safetensors") for f in chosen):
        where = "in the cache" if client.is_offline(access.offline) else "in its main folder"
        raise IkError(f"{repo} has no safetensors {where}; ik pull {repo} --list shows its GGUF models")
    files, n_new = _fetch(info, chosen, access, progress)
    return Pulled(repo, files[0].parent, files, sum(f.size for f in chosen), n_new)


def _of_checkpoint(path: str) -> bool:
    return (
        "/" not in path
        and any(fnmatch(path, pattern) for pattern in _CHECKPOINT)
        and not any(fnmatch(path, pattern) for pattern in _NOT_CHECKPOINT)
    )


def _fetch(
    info: client.RepoInfo, files: Sequence[RemoteFile], access: Access, progress: Progress
) -> tuple[tuple[Path, ...], int]:
    """Download missing files and link all under their names; return the paths and the downloaded bytes."""
    missing = [f for f in files if not is_there(info, f)]
    kept = {f.path: min(kept_bytes(cache.blob_path(info.repo, f)), f.size) for f in missing}
    n_new = sum(f.size for f in missing) - sum(kept.values())
    if missing:
        check_space(cache.hub_dir(), n_new)
    for i, file in enumerate(missing):
        blob = cache.blob_path(info.repo, file)
        title = file.path.rpartition("/")[2] + (f" ({i + 1} of {len(missing)})" if len(missing) > 1 else "")
        lock = cache.hub_dir() / ".locks" / cache.repo_dir(info.repo).name / f"{file.digest}.lock"
        with _alone(lock, info.repo):
            if not blob.is_file():
                url = client.file_url(info.repo, info.commit, file.path)
                with progress(title, file.size, kept[file.path]) as advance:
                    download(Download(url, info.repo, file.size, file.digest, access.token), blob, advance)
        cache.link(info.repo, info.commit, file)
    return tuple(cache.link(info.repo, info.commit, f) for f in files), n_new


@contextmanager
def _alone(lock: Path, what: str) -> Iterator[None]:
    """Wait while another program downloads the same file."""
    from huggingface_hub.utils import WeakFileLock

    with disk_errors(lock, what):
        lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        yield


def is_there(info: client.RepoInfo, file: RemoteFile) -> bool:
    """Return whether a file of a repository is in the cache."""
    if cache.blob_path(info.repo, file).is_file():
        return True
    return cache.snapshot_path(info.repo, info.commit, file.path).is_file()


def is_cached(info: client.RepoInfo, quant: Quant) -> bool:
    """Return whether all parts of a quant are in the cache."""
    return all(is_there(info, file) for file in quant.files)


def ref_of_url(url: str) -> ModelRef | None:
    """Return the repository file of a URL, if it belongs to the hub in use."""
    own, parts = urlsplit(client.endpoint()), urlsplit(url)
    found = re.fullmatch(r"/([^/]+/[^/]+)/(?:resolve|blob)/main/(.+)", unquote(parts.path))
    return ModelRef(found[1], "", found[2]) if found and parts.netloc == own.netloc else None


def check_url(url: str) -> str:
    """Return the URL without fragment; raise a UsageError unless it is that of a GGUF file."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or not parts.path.lower().endswith(".gguf"):
        raise UsageError(f'--model-url: "{url}" is not the http or https address of a .gguf file')
    return parts._replace(fragment="").geturl()


def pull_url(url: str, access: Access, progress: Progress = no_progress) -> Pulled:
    """Return the model of a URL with all its parts; use a cached one as it is."""
    url = check_url(url)
    if (ref := ref_of_url(url)) is not None:
        return pull(ref, access, progress)
    parts = urlsplit(url)
    urls = [parts._replace(path=path).geturl() for path in part_names(parts.path)]
    paths = tuple(cache.url_path(u) for u in urls)
    missing = [(u, path) for u, path in zip(urls, paths, strict=True) if not path.is_file()]
    if missing and client.is_offline(access.offline):
        raise client.NetworkError(f"{url} is not in the cache ({cache.url_dir()}); run once without --offline")
    sizes = [_checked_size(u, access) for u, _ in missing]
    if missing:
        check_space(cache.url_dir(), sum(sizes) - sum(kept_bytes(path) for _, path in missing))
    for (source, path), size in zip(missing, sizes, strict=True):
        lock = cache.url_dir() / ".locks" / f"{sha256(str(path).encode()).hexdigest()}.lock"
        with _alone(lock, source):
            if not path.is_file():
                with progress(path.name, size, kept_bytes(path)) as advance:
                    download(Download(source, source, size, "", access.token), path, advance)
    return Pulled(url, paths[0], paths, sum(p.stat().st_size for p in paths), sum(sizes))


def _checked_size(url: str, access: Access) -> int:
    """Return the size of the file of a URL; raise an IkError if it does not begin like a GGUF file."""
    magic, size = client.begin_of(url, access.token)
    if magic != GGUF_MAGIC:
        raise IkError(f"{url} is not a GGUF file (it starts with {magic!r})")
    return size


def pull_header(ref: ModelRef, access: Access) -> tuple[Path, str]:
    """Return a file with the header of a model for plans (the first part, with others beside it), and a notice.

    If the whole model is in the cache, return the model itself.
    """
    if client.is_offline(access.offline) and (kept := _kept_header(ref)) is not None:
        return kept, ""
    info, quant, notice = find(ref, access)
    if is_cached(info, quant):
        return _fetch(info, quant.files, access, no_progress)[0][0], notice
    folder = cache.headers_dir() / cache.repo_dir(ref.repo).name / info.commit
    return header_files(info, quant, folder, access)[0], notice


def _kept_header(ref: ModelRef) -> Path | None:
    """Return a header read by an earlier run, of a model that is not in the cache."""
    folder = cache.headers_dir() / cache.repo_dir(ref.repo).name
    commits = sorted(folder.iterdir(), key=lambda p: -p.stat().st_mtime) if folder.is_dir() else []
    for commit in commits:
        files = [RemoteFile(p.relative_to(commit).as_posix(), 0, "") for p in sorted(commit.rglob("*.gguf"))]
        try:
            return commit / choose(ref, quants_of(files)).files[0].path
        except IkError:
            continue
    return None


def header_files(
    info: client.RepoInfo, quant: Quant, folder: Path, access: Access, shared: dict[str, bytes] | None = None
) -> list[Path]:
    """Return the headers of all parts of a model in `folder`; read missing ones."""
    paths = []
    for file in quant.files:
        path = folder / file.path
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            url = client.file_url(info.repo, info.commit, file.path)
            _read_header(url, file.size, path, info.repo, access, shared)
        paths.append(path)
    return paths


def _read_header(
    url: str, size: int, path: Path, what: str, access: Access, shared: dict[str, bytes] | None = None
) -> GGUFFile:
    def read(start: int, stop: int) -> bytes:
        return client.read_range(url, start, stop, what, access.token)

    with written_whole(path) as part:
        try:
            return fetch_header(read, size, part, shared)
        except FormatError as problem:  # names the file on this disk
            raise FormatError(str(problem).replace(str(part), url)) from None


def pull_url_header(url: str, access: Access) -> Path:
    """Return a file with the header of the model of a URL, or the model itself if it is cached."""
    url = check_url(url)
    if (ref := ref_of_url(url)) is not None:
        return pull_header(ref, access)[0]
    parts = urlsplit(url)
    paths = [cache.url_path(parts._replace(path=path).geturl()) for path in part_names(parts.path)]
    if all(path.is_file() for path in paths):
        return paths[0]
    if client.is_offline(access.offline):
        raise client.NetworkError(f"{url} is not in the cache ({cache.url_dir()}); run once without --offline")
    headers: list[Path] = []
    for part, path in zip(part_names(parts.path), paths, strict=True):
        source = parts._replace(path=part).geturl()
        target = cache.headers_dir() / "urls" / path.relative_to(cache.url_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        _read_header(source, _checked_size(source, access), target, source, access)
        headers.append(target)
    return headers[0]
