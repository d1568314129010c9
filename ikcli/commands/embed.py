"""`ik embed`: vectors on stdout in the forms of llama.cpp's `embedding` tool, logs on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence

from ikcli.cli.parser import ModelRun
from ikcli.engine.run.pooling import Pooling, similarities
from ikcli.errors import UsageError
from ikcli.log import log
from ikcli.measure.embeddings import FloatRows, TextVectors, measure, split_texts
from ikcli.measure.text import load_text, unescape

_FEW, _ENDS = 16, 3  # numbers shown of one vector among several, and at both ends of a token's row


def run(run: ModelRun) -> int:
    """Embed and print; return 130 after Ctrl-C."""
    config = run.config
    if not config.prompt.prompt and config.prompt.file is None:
        raise UsageError("embed needs a text: -p TEXT or -f FILE")
    separator = unescape(config.embed.separator.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
    texts = split_texts(load_text(config), separator)
    try:
        found = measure(config, texts, run.planner)
    except KeyboardInterrupt:
        return 130
    speed = found.n_tokens / found.seconds if found.seconds > 0 else 0.0
    texts_, pooling = f"{len(texts)} text{'s' if len(texts) > 1 else ''}", found.pooling.name.lower()
    log(f"embed: {texts_}, {found.n_tokens} tokens, pooling {pooling}, {found.seconds:.2f} s, {speed:.2f} tokens/s")
    form = "json" if config.embed.json and config.embed.output_format == "default" else config.embed.output_format
    for text in written(found, texts, form, config.embed.normalize):
        sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def written(found: TextVectors, texts: Sequence[str], form: str, normalize: int) -> Iterator[str]:
    """Return the printed text."""
    rows = found.all_rows
    if form == "raw":
        yield from (" ".join(f"{x:.7g}" for x in row) + "\n" for row in rows)
    elif form == "array":
        yield "[" + ",".join(_json_row(row, normalize) for row in rows) + "]\n"
    elif form in ("json", "json+"):
        yield from _json(rows, normalize, similar=form == "json+" and len(rows) > 1)
    elif found.pooling is Pooling.RANK:
        yield from (f"rerank score {i}: {row[0]:8.3f}\n" for i, row in enumerate(rows))
    else:
        yield from _lines(found, texts, normalize)


def _lines(found: TextVectors, texts: Sequence[str], normalize: int) -> Iterator[str]:
    rows, by_token = found.all_rows, found.pooling is Pooling.NONE
    for i, row in enumerate(rows):
        yield f"embedding {i}: "
        if by_token:
            yield _numbers(row[:_ENDS], normalize) + " ... " + _numbers(row[-_ENDS:], normalize) + "\n"
        else:
            yield _numbers(row[: _FEW if len(texts) > 1 else None], normalize) + "\n"
    if len(texts) > 1 and not by_token:
        yield "\ncosine similarity matrix:\n\n"
        yield "".join(f"{text.splitlines()[0] if text.strip() else '':6.6} " for text in texts) + "\n"
        for text, line in zip(texts, similarities(rows), strict=True):
            yield "".join(f"{x:6.2f} " for x in line) + f"{text.splitlines()[0] if text.strip() else '':.10}\n"


def _numbers(row: Iterable[float], normalize: int) -> str:
    return "".join(f"{x:6.0f} " if normalize == 0 else f"{x:9.6f} " for x in row)


def _json_row(row: Iterable[float], normalize: int) -> str:
    return "[" + ",".join(f"{x:1.0f}" if normalize == 0 else f"{x:1.7f}" for x in row) + "]"


def _json(rows: FloatRows, normalize: int, *, similar: bool) -> Iterator[str]:
    yield '{\n  "object": "list",\n  "data": [\n'
    for i, row in enumerate(rows):
        end = ",\n" if i < len(rows) - 1 else "\n  ]"
        head = f'    {{\n      "object": "embedding",\n      "index": {i},\n      "embedding": '
        yield f"{head}{_json_row(row, normalize)}\n    }}{end}"
    if similar:
        lines = [[round(float(x), 2) for x in line] for line in similarities(rows)]
        yield ',\n  "cosineSimilarity": [\n' + ",\n".join(f"    {json.dumps(line)}" for line in lines) + "\n  ]"
    yield "\n}\n"
