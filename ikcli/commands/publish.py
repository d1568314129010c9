"""`ik publish [LABEL=]MODEL... --out DIR [--upload USER/REPO]`: put quants of a model into a folder, and on a hub."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli import log
from ikcli.cli.parser import usage
from ikcli.cli.values import labelled_file
from ikcli.errors import UsageError
from ikcli.settings.tools import PublishConfig

if TYPE_CHECKING:
    from ikcli.hub.upload import Uploaded, UploadOptions
    from ikcli.publish.records import Published

_WORTH_A_LINE = 10 << 20  # bytes; smaller files are sent with the commit


def run(config: PublishConfig) -> int:
    """Check everything, print the files, then make and upload the folder unless this is a dry run."""
    if not config.args and not config.upload:
        raise UsageError(f"name at least one model; usage: {usage('publish')}")
    if config.out is None:
        raise UsageError("--out DIR is missing: the folder to make")
    target = _target(config)
    made = _make(config) if config.args else None
    sent = _send(config.out, target) if target is not None and not config.dry_run else None
    if config.json:
        found = dataclasses.asdict(made) if made is not None else {"out": config.out}
        found |= {"upload": dataclasses.asdict(sent)} if sent is not None else {}
        print(json.dumps(found, indent=2, default=str, ensure_ascii=False))
        return 0
    for q in made.quants if made is not None else ():
        for path in q.paths:
            print(f"{config.out / path}")
        print(f"  {q.type}, {q.n_bytes} bytes = {q.n_bytes / 2**30:.3f} GiB, {q.bpw:.3f} BPW")
    if sent is not None:
        print(sent.pull_request or sent.commit_url)
    return 0


def _make(config: PublishConfig) -> Published:
    """Make the folder, or find it if it is already there."""
    from ikcli.publish.folder import plan_publish, publish
    from ikcli.publish.records import PublishOptions

    assert config.out is not None
    plan = plan_publish(
        PublishOptions(
            [labelled_file(text) for text in config.args],
            config.out,
            config.name,
            config.base_model,
            config.license,
            config.split_max_size,
            config.imatrix,
            [labelled_file(text) for text in config.results],
            config.note,
            [Path(text) for text in config.source],
            config.link,
            reuse=bool(config.upload),
        )
    )
    made = plan.made
    if not made.base_model:
        log.warn("no base model is known; name it with --base-model USER/REPO, hubs list quants under it")
    if not made.license:
        log.warn("the license is not known; name it with --license, for example apache-2.0")
    if plan.is_made:
        log.log(f"publish: {config.out} exists and is complete")
    elif not config.dry_run:
        with log.progress("publish", sum(q.n_bytes for q in made.quants), in_bytes=True) as advance:
            made = publish(plan, advance)
    return made


def _target(config: PublishConfig) -> UploadOptions | None:
    """Return the upload target, checked with the hub; None without --upload."""
    if not config.upload:
        for given, name in (
            (config.private, "--private"),
            (config.create_pr, "--create-pr"),
            (config.revision, "--revision"),
        ):
            if given:
                raise UsageError(f"{name} needs --upload USER/REPO, which is missing")
        return None
    from ikcli.hub.upload import UploadOptions, check_upload

    target = UploadOptions(
        config.upload, config.token, config.private, config.revision, config.create_pr, offline=config.offline
    )
    log.log(f"publish: as {check_upload(target)} to {config.upload}")
    return target


def _send(folder: Path, target: UploadOptions) -> Uploaded:
    from ikcli.hub.upload import upload
    from ikcli.publish.checksums import current_sums

    digests = current_sums(folder)
    with log.progress("upload", sum((folder / name).stat().st_size for name in digests), in_bytes=True) as advance:

        def arrived(name: str, n_bytes: int) -> None:
            if n_bytes >= _WORTH_A_LINE:
                log.log(f"publish: {name} is sent, {log.shown_size(n_bytes)}")
            advance(n_bytes)

        sent = upload(folder, digests, target, arrived)
    there = f", {len(sent.kept)} were there" if sent.kept else ""
    log.log(f"publish: {len(sent.sent)} files sent{there}")
    return sent
