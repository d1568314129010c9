"""`ik report [LABEL=]FILE...`: put results and logs of many runs on one HTML page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ikcli import log
from ikcli.cli.columns import json_scalar, printable
from ikcli.cli.parser import usage
from ikcli.cli.values import labelled_file
from ikcli.errors import FormatError, UsageError
from ikcli.files import written_whole
from ikcli.report.page import page
from ikcli.report.read import read_results
from ikcli.report.results import Results
from ikcli.settings.tools import ReportConfig
from ikcli.settings.values import parse_size


def run(config: ReportConfig) -> int:
    """Read everything, name the files that cannot be read, write the page."""
    if not config.args:
        raise UsageError(f"name at least one file; usage: {usage('report')}")
    output = config.output
    if not config.json and not output.parent.is_dir():
        raise UsageError(f"-o {output}: the folder {output.parent} does not exist")
    sources = [labelled_file(text) for text in config.args]
    if not config.json and output.resolve() in {path.resolve() for _, path in sources}:
        raise UsageError(f"-o {output} is one of the files to read; name another output")
    results = read_results(sources, _sizes(config.size))
    for p in results.problems:
        log.warn(f"{p.source}:{p.line}: {p.reason}: {printable(p.text[:100])}")
    if results.problems and not results.all():
        raise FormatError("nothing that was read is a result; no page is written")
    if config.json:
        print(json.dumps(_plain(results), indent=2, allow_nan=False, ensure_ascii=False))
        return 0
    try:
        with written_whole(output) as temporary:
            temporary.write_text(page(results, config.title), encoding="utf-8")
    except OSError as problem:
        raise FormatError(f"{output}: cannot be written ({problem.strerror or problem})") from None
    print(f"{output}: {len(results.all())} results from {len(sources)} files")
    return 0


def _sizes(texts: tuple[str, ...]) -> dict[str, int]:
    out: dict[str, int] = {}
    for text in texts:
        label, _, value = text.rpartition("=")
        if label and Path(value).is_file():
            from ikcli.gguf.reader import open_gguf

            out[label] = open_gguf(value, header_only=True).n_bytes
            continue
        try:
            out[label] = parse_size(value)
        except ValueError:
            label = ""
        if not label:
            raise UsageError(f'--size: "{text}" is not LABEL=SIZE, for example: IQ4_K=3.8GiB, or LABEL=model.gguf')
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, Results):
        return {f.name: [_plain(item) for item in getattr(value, f.name)] for f in dataclasses.fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return json_scalar(value)
