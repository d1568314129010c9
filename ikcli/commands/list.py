"""`ik list`: the models that have been downloaded, by the names that `-hf` takes."""

from __future__ import annotations

import json
from datetime import datetime

from ikcli import log
from ikcli.hub.cache import CachedModel, hub_dir, list_models, url_dir
from ikcli.log import shown_size
from ikcli.settings.tools import ListConfig


def run(config: ListConfig) -> int:
    """Print a table, or a JSON array."""
    models = list_models()
    if config.json:
        print(json.dumps([_described(model) for model in models], indent=2))
        return 0
    if not models:
        log.log(f"no models in {hub_dir()} and {url_dir()}; ik pull USER/REPO downloads one")
        return 0
    rows = [("model", "size", "last used", "path"), *(_cells(model) for model in models)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}")
    return 0


def _day(model: CachedModel) -> str:
    return datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d")


def _cells(model: CachedModel) -> tuple[str, ...]:
    state = "" if model.complete else " (parts missing)"
    return model.name + state, shown_size(model.n_bytes), _day(model), str(model.path)


def _described(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "quant": model.quant,
        "n_bytes": model.n_bytes,
        "last_used": datetime.fromtimestamp(model.last_used).astimezone().isoformat(timespec="seconds"),
        "path": str(model.path),
        "files": [str(path) for path in model.files],
        "complete": model.complete,
    }
