"""`ik pull`: download a model from a hub or a URL into the cache, or list the quants of a repository."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ikcli import log
from ikcli.cli.model import bar, finish
from ikcli.engine.plan.verdict import Verdict, judge
from ikcli.errors import UsageError
from ikcli.hub.choices import Offer, offers
from ikcli.hub.names import ModelRef, parse_ref
from ikcli.hub.pull import Access, Pulled, pull, pull_checkpoint, pull_url
from ikcli.log import shown_size
from ikcli.settings.tools import PullConfig


def run(config: PullConfig) -> int:
    """Download, and print the path of the (first) file; with `--list` print a table."""
    if not config.args:
        raise UsageError("pull: name a model: ik pull user/repo:quant, or its URL")
    name, access = config.args[0], Access(config.token, config.offline)
    is_url = name.lower().startswith(("http://", "https://"))
    if is_url and (config.list or config.checkpoint or config.file):
        raise UsageError("--list, --checkpoint and --hf-file need a repository, user/repo, not a URL")
    ref = ModelRef("") if is_url else parse_ref(name, config.file)
    if config.list:
        return _list(ref, access, config)
    if config.checkpoint:
        found = finish(lambda: pull_checkpoint(ref.repo, access, bar))
    else:
        found = finish(lambda: pull_url(name, access, bar) if is_url else pull(ref, access, bar))
    if found.notice:
        log.log(found.notice)
    if config.json:
        print(json.dumps(_described(found), indent=2))
    else:
        was = f"downloaded {shown_size(found.n_new)}" if found.n_new else "all there already"
        log.log(f"{found.name}: {shown_size(found.n_bytes)}, {was}")
        print(found.path)
    return 0


def _described(found: Pulled) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": str(found.path),
        "files": [str(path) for path in found.files],
        "n_bytes": found.n_bytes,
        "n_downloaded": found.n_new,
    }


def _list(ref: ModelRef, access: Access, config: PullConfig) -> int:
    """List the quants of a repository as plain columns, or as one JSON object."""
    rows = []
    waiting = log.progress(f"planning {ref.repo}", -1)
    with tempfile.TemporaryDirectory(prefix="ik-headers-") as folder, waiting as advance:
        for offer in offers(ref.repo, access, Path(folder)):
            if not ref.quant or offer.quant.name.lower() == ref.quant.lower():
                rows.append((offer, judge(offer.header, config.n_ctx) if offer.header else None))
            advance(1)
    if config.json:
        print(json.dumps({"repo": ref.repo, "quants": [_offered(*row) for row in rows]}, indent=2))
        return 0
    table = [("quant", "size", "bpw", "parts", "this machine"), *(_cells(*row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    for row in table:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}")
    sys.stdout.flush()
    if any(offer.is_default for offer, _ in rows):
        log.log("* is taken when no quant is named; ik pull USER/REPO:QUANT downloads another one")
    return 0


def _cells(offer: Offer, verdict: Verdict | None) -> tuple[str, ...]:
    bpw = verdict.bpw if verdict else 0.0
    name = offer.quant.name + (" *" if offer.is_default else "")
    text = offer.reason if verdict is None else verdict_text(verdict)
    size = shown_size(offer.quant.n_bytes)
    there = " (downloaded)" if offer.is_cached else ""
    return name, size, f"{bpw:.2f}" if bpw else "?", str(len(offer.quant.files)), text + there


def verdict_text(verdict: Verdict) -> str:
    """Return `fits`, `fits with --fit`, what is lacking, or why the result is unknown."""
    if verdict.fits is None:
        return verdict.reason
    needs = ", ".join(
        f"{device} {shown_size(n)} of {shown_size(verdict.free[device])}"
        if device in verdict.free
        else f"{device} {shown_size(n)}"
        for device, n in verdict.needed.items()
    )
    word = "fits" if verdict.fits else "does not fit"
    return f"{word}{' with ' + verdict.options if verdict.options else ''}: {needs}"


def _offered(offer: Offer, verdict: Verdict | None) -> dict[str, Any]:
    return {
        "quant": offer.quant.name,
        "files": [file.path for file in offer.quant.files],
        "n_bytes": offer.quant.n_bytes,
        "bpw": verdict.bpw if verdict and verdict.bpw else None,
        "default": offer.is_default,
        "downloaded": offer.is_cached,
        "fits": verdict.fits if verdict else None,
        "options": verdict.options if verdict else "",
        "n_ctx": verdict.n_ctx if verdict else None,
        "needed": verdict.needed if verdict else {},
        "free": verdict.free if verdict else {},
        "reason": offer.reason or (verdict.reason if verdict else ""),
    }
