"""List the quants of a repository with their headers, read over the network piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ikcli.errors import IkError
from ikcli.hub import client
from ikcli.hub.headers import shared_arrays
from ikcli.hub.names import ModelRef, Quant, choose, quants_of
from ikcli.hub.pull import Access, header_files, is_cached


@dataclass(frozen=True, slots=True)
class Offer:
    """A quant: `header` is a file with its header for plans, or None with a `reason`."""

    quant: Quant
    header: Path | None
    is_default: bool
    is_cached: bool
    reason: str = ""


def offers(repo: str, access: Access, folder: Path) -> Iterator[Offer]:
    """Yield the quants of a repository, smallest first; store headers in `folder`."""
    if client.is_offline(access.offline):
        raise client.NetworkError(f"what {repo} has can only be asked online; ik list shows what is in the cache")
    info = client.repo_info(repo, access.token)
    quants = quants_of(info.files)
    default = choose(ModelRef(repo), quants)
    shared: dict[str, bytes] = {}
    for quant in sorted(quants, key=lambda quant: quant.n_bytes):
        there, mine = is_cached(info, quant), quant is default
        try:
            headers = header_files(info, quant, folder, access, shared)
        except client.HubError:
            raise
        except IkError as problem:
            yield Offer(quant, None, mine, there, str(problem))
            continue
        shared = shared or shared_arrays(headers[0])
        yield Offer(quant, headers[0], mine, there)
