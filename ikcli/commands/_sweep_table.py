"""The printed forms of sweep-bench rows: Markdown table, jsonl, and jsonl with every setting in the first line."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.bench.sweep import SweepRow

_COLUMNS = (("PP", 6), ("TG", 6), ("N_KV", 6), ("T_PP s", 8), ("S_PP t/s", 8), ("T_TG s", 8), ("S_TG t/s", 8))
_HEAD_COLUMNS = (("T_MTP s", 8), ("S_MTP t/s", 9))
_MEMORY_COLUMNS = (("RSS HWM", 10), ("VRAM delta", 10))


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The actual sizes of the session."""

    n_kv_max: int
    n_batch: int
    n_ubatch: int


class SweepPrinter:
    """Writes header and rows to stdout, flushed line by line."""

    def __init__(self, config: RunConfig, info: RunInfo) -> None:
        self._config = config
        self._format = config.sweep.output_format
        self._memory, self._mtp = config.sweep.memory, config.sweep.mtp
        self._settings: dict[str, int] = {
            "n_kv_max": info.n_kv_max,
            "n_batch": info.n_batch,
            "n_ubatch": info.n_ubatch,
            "flash_attn": int(config.flash_attn),
            "n_gpu_layers": -1 if config.n_gpu_layers is None else config.n_gpu_layers,
            "n_threads": config.n_threads,
            "n_threads_batch": config.n_threads_batch,
        }

    def header(self, config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Print what precedes the rows; `config` replaces the settings that jsonl-full records."""
        if self._format == "jsonl-full":
            recorded = config() if config is not None else settings_dict(self._config)
            write_line(json.dumps({"config": {**recorded, **self._settings}}))
        if self._format.startswith("jsonl"):
            return
        heads = _HEAD_COLUMNS if self._mtp else ()
        write_head(self._settings, _COLUMNS + heads + (_MEMORY_COLUMNS if self._memory else ()))

    def row(self, row: SweepRow) -> None:
        """Print one measured depth."""
        write_line(self._json(row) if self._format.startswith("jsonl") else self._table(row))

    def _table(self, row: SweepRow) -> str:
        line = (
            f"|{row.pp:6d} | {row.tg:6d} | {row.n_kv:6d} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} "
            f"| {row.t_tg:8.3f} | {row.speed_tg:8.2f} |"
        )
        if self._mtp:
            line += f" {row.t_mtp or 0:8.3f} | {row.speed_mtp:9.2f} |"
        if self._memory:
            line += f" {_mib(row.rss_hwm_mib, 1, '-'):>10} | {_mib(row.vram_delta_mib, 1, '-'):>10} |"
        return line

    def _json(self, row: SweepRow) -> str:
        fields = [f'"{name}": {value}' for name, value in self._settings.items()]
        fields += [f'"pp": {row.pp}', f'"tg": {row.tg}', f'"n_kv": {row.n_kv}']
        fields += [f'"t_pp": {row.t_pp:f}', f'"speed_pp": {row.speed_pp:f}']
        fields += [f'"t_tg": {row.t_tg:f}', f'"speed_tg": {row.speed_tg:f}']
        if self._mtp:
            fields += [f'"t_mtp": {row.t_mtp or 0:f}', f'"speed_mtp": {row.speed_mtp:f}']
        if self._memory:
            fields.append(f'"rss_hwm_mib": {_mib(row.rss_hwm_mib, 3, "null")}')
            fields.append(f'"vram_delta_mib": {_mib(row.vram_delta_mib, 3, "null")}')
        return "{" + ", ".join(fields) + " }"


def write_head(settings: Mapping[str, Any], columns: Sequence[tuple[str, int]]) -> None:
    """Write settings, and names of columns with their widths."""
    write_line("")
    write_line("main: " + ", ".join(f"{name} = {value}" for name, value in settings.items()))
    write_line("")
    write_line("|" + " | ".join(f"{name:>{width}}" for name, width in columns) + " |")
    write_line("|" + "-|-".join("-" * width for _, width in columns) + "-|")


def write_line(line: str) -> None:
    """Write a line at once, as the reader of stdout may be waiting."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _mib(value: float | None, digits: int, missing: str) -> str:
    return missing if value is None else f"{value:.{digits}f}"


def settings_dict(config: RunConfig) -> dict[str, Any]:
    """Return every setting as JSON values, groups nested."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    """Return a setting as a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
