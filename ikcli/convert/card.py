"""Read the description of a checkpoint: the front matter of README.md, and generation_config.json.

Both are decoration, written by people. A file or value that cannot be used is left out with a warning, and the
conversion goes on.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ikcli.convert.json_files import read_object
from ikcli.errors import FormatError, IkError
from ikcli.log import warn
from ikcli.text_files import read_text

_FIELDS = ("name", "author", "version", "organization", "description", "finetune", "basename", "size_label", "url",
           "doi", "uuid", "repo_url")  # fmt: skip
_TEXTS = (*_FIELDS, *(f"model_{name}" for name in _FIELDS), "model_creator", "model_type", "license_name",
          "license_link", "pipeline_tag")  # fmt: skip
_LISTS = ("license", "tags", "languages", "language")
_SOURCES = ("base_model", "base_models", "base_model_sources", "datasets", "dataset", "dataset_sources")
_SAMPLING: dict[str, tuple[str, type]] = {
    "sequence": ("sampling_sequence", str),
    "top_k": ("sampling_top_k", int),
    "top_p": ("sampling_top_p", float),
    "min_p": ("sampling_min_p", float),
    "xtc_probability": ("sampling_xtc_probability", float),
    "xtc_threshold": ("sampling_xtc_threshold", float),
    "temperature": ("sampling_temp", float),
    "penalty_last_n": ("sampling_penalty_last_n", int),
    "penalty_repeat": ("sampling_penalty_repeat", float),
    "mirostat": ("sampling_mirostat", int),
    "mirostat_tau": ("sampling_mirostat_tau", float),
    "mirostat_eta": ("sampling_mirostat_eta", float),
}
"""Key of generation_config.json -> field of gguf.Metadata and its type."""


def read_card(directory: Path) -> dict[str, Any]:
    """Read the keys at the head of the model card that a model file can have, each of the type that it should have."""
    path = directory / "README.md"
    if not path.exists():
        return {}
    try:
        found = _head(path, read_text(path, error=FormatError))
    except IkError as problem:
        warn(f"{problem}; the model card is left out")
        return {}
    return _cleaned(found, path)


def read_sampling(directory: Path) -> dict[str, str | int | float]:
    """Read what generation_config.json recommends to samplers, by the names that gguf.Metadata has for it."""
    path = directory / "generation_config.json"
    found: dict[str, str | int | float] = {}
    for key, value in optional_object(path).items():
        if key not in _SAMPLING or value is None:
            continue
        field, kind = _SAMPLING[key]
        if _is_of(value, kind):
            found[field] = kind(value)
        else:
            warn(f"{path}: {key} is {value!r:.60}, which is not {_KINDS[kind]}; it is left out")
    return found


def optional_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that a checkpoint can do without; one that cannot be read is left out with a warning."""
    try:
        return read_object(path) or {}
    except IkError as problem:
        warn(f"{problem}; it is left out")
        return {}


_KINDS = {str: "a text", int: "a whole number", float: "a number"}


def _is_of(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 31:
        return False
    return kind is float or float(value).is_integer()


def _head(path: Path, text: str) -> dict[str, Any]:
    """Parse the YAML between the first two lines of three dashes."""
    import yaml

    first, *lines = text.split("\n")
    if first.rstrip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines) if line.rstrip() == "---"), len(lines))
    source = "\n".join(lines[:end]).replace("- no\n", '- "no"\n').replace("\t", "  ") + "\n"
    try:
        found = yaml.safe_load(source)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f", line {mark.line + 2}" if mark is not None else ""
        reason = getattr(problem, "problem", None) or str(problem).split("\n")[0]
        raise FormatError(f"{path}{where}: the head is not YAML ({reason})") from None
    if found is not None and not isinstance(found, dict):
        raise FormatError(f"{path}: the head is not YAML with a key and a value in each line")
    return found or {}


def _cleaned(found: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    readers: dict[str, tuple[Callable[[Any], Any], str]] = {
        **dict.fromkeys(_TEXTS, (_text, "a text")),
        **dict.fromkeys(_LISTS, (_text_or_list, "a text or a list of texts")),
        **dict.fromkeys(_SOURCES, (_sources, "a name or a list of names")),
    }
    out: dict[str, Any] = {}
    for key, value in found.items():
        if key not in readers or value in (None, "", [], {}):
            continue
        read, kind = readers[key]
        try:
            out[key] = read(value)
        except ValueError:
            warn(f"{path}: {key} is {value!r:.60}, where {kind} is expected; it is left out")
    return out


def _text(value: object) -> str:
    """Return the text of a value that YAML may have parsed as a number or a date."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    text = str(value)
    text.encode("utf-8")  # a lone surrogate, written as an escape, has no bytes
    return text


def _text_or_list(value: object) -> str | list[str]:
    if value is False:  # `language: no`, which is Norwegian
        return "no"
    return [str(_text_or_list(item)) for item in value] if isinstance(value, list) else _text(value)


def _sources(value: object) -> str | list[str | dict[str, str]]:
    if not isinstance(value, list):
        return _text(value)
    return [
        {str(k): _text(v) for k, v in item.items() if v is not None} if isinstance(item, dict) else _text(item)
        for item in value
    ]
