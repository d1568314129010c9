"""The caches of downloaded models: that of huggingface_hub, shared with its other users, and one for URLs.

The hub's layout: `models--user--repo/` with `blobs/DIGEST`, `snapshots/COMMIT/PATH` (links to blobs) and `refs/main`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ikcli.errors import IkError
from ikcli.files import written_whole
from ikcli.hub.names import Quant, RemoteFile, is_model, parse_ref, part_names, quants_of
from ikcli.native.kernel_cache import cache_root


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A cached model: `name` is the argument of -hf or --model-url, `path` its (first) file."""

    name: str
    quant: str
    path: Path
    files: tuple[Path, ...]
    n_bytes: int
    last_used: float
    complete: bool


def hub_dir() -> Path:
    """Return the directory of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def url_dir() -> Path:
    """Return the directory of models downloaded from URLs."""
    own = os.environ.get("LLAMA_CACHE")
    return Path(own) if own else cache_root().parent / "models"


def headers_dir() -> Path:
    """Return the directory of headers of models that have not been downloaded."""
    return cache_root().parent / "headers"


def url_path(url: str) -> Path:
    """Return the path for the file of a URL: by host and path, so that parts are next to each other."""
    parts = urlsplit(url)
    steps = [step for step in parts.path.split("/") if step not in ("", ".", "..")]
    return url_dir().joinpath(parts.netloc.rpartition("@")[2].replace(":", "_"), *steps)


def repo_dir(repo: str) -> Path:
    """Return the directory of a repository in the hub's cache."""
    return hub_dir() / f"models--{repo.replace('/', '--')}"


def blob_path(repo: str, file: RemoteFile) -> Path:
    """Return the path of a file's content."""
    return repo_dir(repo) / "blobs" / file.digest


def snapshot_path(repo: str, commit: str, path: str) -> Path:
    """Return the path of a file under its own name."""
    return repo_dir(repo) / "snapshots" / commit / path


def link(repo: str, commit: str, file: RemoteFile) -> Path:
    """Link a downloaded file under its name, and record the commit as main."""
    blob, named = blob_path(repo, file), snapshot_path(repo, commit, file.path)
    if not named.exists():
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)  # a dangling link
        try:
            named.symlink_to(os.path.relpath(blob, named.parent))
        except OSError:  # Windows without permission to create links
            blob.replace(named)
    ref = repo_dir(repo) / "refs" / "main"
    if newest_commit(repo) != commit:
        with suppress(OSError):  # a read-only cache may hold all that is needed
            ref.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(ref) as temporary:
                temporary.write_text(commit, encoding="utf-8")
    return named


def newest_commit(repo: str) -> str:
    """Return the commit of main at the last download, or an empty text."""
    try:
        return (repo_dir(repo) / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def cached_files(repo: str, commit: str) -> Iterator[RemoteFile]:
    """Return the cached files of a repository."""
    root = repo_dir(repo) / "snapshots" / commit
    for path in sorted(root.rglob("*")) if commit else ():
        if path.is_file():
            yield RemoteFile(path.relative_to(root).as_posix(), path.stat().st_size, path.resolve().name)


def list_models() -> list[CachedModel]:
    """Return all cached models, those of the hub first."""
    return [*hub_models(), *_url_models()]


def hub_models() -> Iterator[CachedModel]:
    """Return the models in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(hub_dir())
    except CacheNotFound:
        return
    for repo in sorted(found.repos, key=lambda repo: repo.repo_id.lower()):
        seen: set[str] = set()
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda r: (not r.refs, -r.last_modified)):
            root = revision.snapshot_path
            used = {f.file_path: f.blob_last_accessed for f in revision.files}
            files = [RemoteFile(p.relative_to(root).as_posix(), p.stat().st_size, "") for p in sorted(used)]
            for quant in quants_of(files):
                if quant.name not in seen:
                    seen.add(quant.name)
                    yield _cached(repo.repo_id, quant, root, max(used[root / f.path] for f in quant.files))


def _cached(repo: str, quant: Quant, root: Path, last_used: float) -> CachedModel:
    paths = tuple(root / file.path for file in quant.files)
    complete = len(paths) == len(part_names(quant.files[0].path))
    return CachedModel(f"{repo}:{quant.name}", quant.name, paths[0], paths, quant.n_bytes, last_used, complete)


def _url_models() -> Iterator[CachedModel]:
    root = url_dir()
    files = [
        RemoteFile(p.relative_to(root).as_posix(), p.stat().st_size, "")
        for p in (sorted(root.rglob("*.gguf")) if root.is_dir() else ())
        if is_model(p.name)
    ]
    for quant in quants_of(files):
        paths = tuple(root / file.path for file in quant.files)
        used = max(path.stat().st_atime for path in paths)
        complete = len(paths) == len(part_names(quant.files[0].path))
        name = quant.files[0].path
        yield CachedModel(name, quants_of([quant.files[0]])[0].name, paths[0], paths, quant.n_bytes, used, complete)


@dataclass(frozen=True, slots=True)
class Removal:
    """The files and directories that `remove` would delete."""

    names: tuple[str, ...]
    n_bytes: int
    paths: tuple[Path, ...]
    revisions: tuple[str, ...] = ()


def plan_removal(name: str) -> Removal:
    """Return the files of `user/repo:quant`, a whole `user/repo`, or a URL; raise an IkError if there are none."""
    models = list_models()
    repo = parse_ref(name).repo if _looks_like_repo(name) else ""
    whole = bool(repo) and name == repo
    if whole and (revisions := _revisions(repo)):
        names = [m.name for m in models if m.name.startswith(f"{repo}:")]
        return Removal(tuple(names) or (repo,), _size([repo_dir(repo)]), (repo_dir(repo), *_headers(repo)), revisions)
    chosen = [m for m in models if name in (m.name, str(m.path)) or m.name.lower() == name.lower()]
    chosen = chosen or [m for m in models if urlsplit(name).netloc and m.path == url_path(name)]
    partial = [p for p in _partial(name, repo) if p.exists()]
    if not chosen and not partial:
        there = ", ".join(m.name for m in models) or "nothing"
        raise IkError(f"{name} is not in the cache; there is {there}")
    paths = [path for m in chosen for path in m.files] + partial
    return Removal(
        tuple(m.name for m in chosen) or (name,), sum(m.n_bytes for m in chosen) + _size(partial), tuple(paths)
    )


def _looks_like_repo(name: str) -> bool:
    try:
        return bool(parse_ref(name))
    except IkError:
        return False


def _revisions(repo: str) -> tuple[str, ...]:
    root = repo_dir(repo) / "snapshots"
    return tuple(path.name for path in sorted(root.iterdir())) if root.is_dir() else ()


def _headers(repo: str) -> list[Path]:
    folder = headers_dir() / repo_dir(repo).name
    return [folder] if folder.is_dir() else []


def _partial(name: str, repo: str) -> list[Path]:
    """Return interrupted downloads of a repository or a URL."""
    if repo and name == repo:
        return [p for p in (repo_dir(repo),) if p.is_dir()]
    target = url_path(name)
    return [target.with_name(target.name + ".incomplete")] if urlsplit(name).netloc else []


def _size(paths: Iterable[Path]) -> int:
    files = [f for p in paths for f in (p.rglob("*") if p.is_dir() else (p,)) if f.is_file() and not f.is_symlink()]
    return sum(f.stat().st_size for f in files)


def remove(removal: Removal) -> None:
    """Delete the files; delete a content together with its last name."""
    if removal.revisions:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(hub_dir()).delete_revisions(*removal.revisions).execute()
    for path in removal.paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            continue
        blob = path.resolve()
        path.unlink(missing_ok=True)
        if blob != path and not _is_named(blob):
            blob.unlink(missing_ok=True)
        _drop_empty(path.parent)


def _is_named(blob: Path) -> bool:
    """Return whether a snapshot still links to this content."""
    snapshots = blob.parent.parent / "snapshots"
    return any(link.is_symlink() and link.resolve() == blob for link in snapshots.rglob("*"))


def _drop_empty(folder: Path) -> None:
    """Remove empty directories, up to the caches themselves."""
    stop = {hub_dir(), url_dir()}
    while folder not in stop and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
