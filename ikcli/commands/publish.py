"""`ik publish [LABEL=]MODEL... --out DIR`: quants of a model as a folder for a hub."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ikcli import log
from ikcli.commands._options import usage
from ikcli.commands._values import labelled_file
from ikcli.config_tools import PublishConfig
from ikcli.errors import UsageError


def run(config: PublishConfig) -> int:
    """Check everything, print what there will be, make it unless it is a dry run."""
    from ikcli.eval.publish import PublishOptions, plan_publish, publish
    from ikcli.gguf.split import parse_size

    if not config.args:
        raise UsageError(f"name at least one model; usage: {usage('publish')}")
    if config.out is None:
        raise UsageError("--out DIR is missing: the folder to make")
    plan = plan_publish(
        PublishOptions(
            [labelled_file(text) for text in config.args],
            config.out,
            config.name,
            config.base_model,
            config.license,
            parse_size(config.split_max_size) if config.split_max_size is not None else 0,
            config.imatrix,
            [labelled_file(text) for text in config.results],
            config.note,
            [Path(text) for text in config.source],
            config.link,
        )
    )
    made = plan.made
    if not made.base_model:
        log.warn("no base model is known; name it with --base-model USER/REPO, hubs list quants under it")
    if not made.license:
        log.warn("the license is not known; name it with --license, for example apache-2.0")
    if not config.dry_run:
        with log.progress("publish", sum(q.n_bytes for q in made.quants), in_bytes=True) as advance:
            made = publish(plan, advance)
    if config.json:
        print(json.dumps(dataclasses.asdict(made), indent=2, default=str, ensure_ascii=False))
        return 0
    for q in made.quants:
        for path in q.paths:
            print(f"{made.out / path}")
        print(f"  {q.type}, {q.n_bytes} bytes = {q.n_bytes / 2**30:.3f} GiB, {q.bpw:.3f} BPW")
    return 0
