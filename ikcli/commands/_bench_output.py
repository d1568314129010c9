"""The printed forms of bench results: Markdown, CSV, JSON, JSON lines, SQL. Field names are those of llama-bench.

Features of the C++ program that do not exist here (rpc, vulkan, ...) are written as 0, so that tools that read its
files find every field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TextIO

import ikcli
from ikcli.bench.environment import cpu_name
from ikcli.bench.tests import BenchResult, mean_and_deviation
from ikcli.log import shown_size
from ikcli.settings.drafts import stages
from ikcli.settings.run import RunConfig

# field of RunConfig -> (heading, width; negative: left-aligned), in the order of the columns
_SETTINGS: dict[str, tuple[str, int]] = {
    "n_batch": ("n_batch", 7), "n_ubatch": ("n_ubatch", 8), "type_k": ("type_k", 6), "type_v": ("type_v", 6),
    "split_mode": ("sm", 5), "main_gpu": ("mg", 10), "no_kv_offload": ("nkvo", 10), "flash_attn": ("fa", 2),
    "mla": ("mla", 3), "amb": ("amb", 5), "ser": ("ser", 10), "tensor_split": ("ts", -12), "mmap": ("mmap", 4),
    "run_time_repack": ("rtr", 3), "thp": ("thp", 3), "fmoe": ("fmoe", 4),
}  # fmt: skip
_ABSENT = ("embeddings", "mqkv", "muge", "defer_experts", "grouped_er", "no_fused_up_gate", "no_ooae", "rcache", "sas",
           "reuse", "cuda", "vulkan", "metal", "sycl", "rpc", "gpu_blas", "blas")  # fmt: skip
FIELDS = (
    "build_commit", "build_number", "cuda", "vulkan", "metal", "sycl", "rpc", "gpu_blas", "blas", "cpu_info",
    "gpu_info", "model_filename", "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads",
    "type_k", "type_v", "n_gpu_layers", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "mla_attn",
    "attn_max_batch", "ser", "reuse", "tensor_split", "use_mmap", "embeddings", "repack", "mqkv", "muge",
    "defer_experts", "fused_moe", "grouped_er", "no_fused_up_gate", "use_thp", "no_ooae", "rcache", "sas", "max_gpu",
    "cuda_params", "override_tensor", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns",
    "avg_ts", "stddev_ts", "test",
)  # fmt: skip

_DRAFT_FIELDS = ("drafts", "n_drafted", "n_accepted")


def build() -> tuple[str, int]:
    """Return the version as text and as a number that grows."""
    numbers = [int(part) for part in ikcli.__version__.split(".")[:3] if part.isdigit()]
    return f"ik-{ikcli.__version__}", sum(n * 100 ** (2 - i) for i, n in enumerate(numbers))


def _setting(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    if name == "ser":
        return f"{value[0]},{value[1]:g}" if value else "-1,0"
    if name == "tensor_split":
        return "/".join(f"{x:.2f}" for x in value or (0.0,))
    return str(int(value)) if isinstance(value, bool) else str(value)


def values(result: BenchResult) -> dict[str, Any]:
    """Return the fields of a result as numbers, bools and texts."""
    c, t, m = result.config, result.test, result.model
    commit, number = build()
    avg_ns, stddev_ns = mean_and_deviation(result.samples_ns)
    avg_ts, stddev_ts = mean_and_deviation(result.samples_ts)
    known: dict[str, Any] = {
        "build_commit": commit, "build_number": number, "cpu_info": result.cpu or cpu_name() or "",
        "gpu_info": ", ".join(m.gpus),
        "model_filename": m.filename, "model_type": m.name, "model_size": m.n_bytes, "model_n_params": m.n_params,
        "n_batch": c.n_batch, "n_ubatch": c.n_ubatch, "n_threads": c.n_threads if t.n_gen else c.n_threads_batch,
        "type_k": c.type_k, "type_v": c.type_v, "n_gpu_layers": c.n_gpu_layers or 0, "split_mode": c.split_mode,
        "main_gpu": c.main_gpu, "no_kv_offload": c.no_kv_offload, "flash_attn": c.flash_attn, "mla_attn": c.mla,
        "attn_max_batch": c.amb, "ser": _setting(c, "ser"), "tensor_split": _setting(c, "tensor_split"),
        "use_mmap": c.mmap, "repack": c.run_time_repack, "fused_moe": c.fmoe, "use_thp": bool(c.thp), "max_gpu": 0,
        "cuda_params": "", "override_tensor": ",".join(c.override_tensor), "n_prompt": t.n_prompt, "n_gen": t.n_gen,
        "n_depth": t.n_depth, "test_time": result.started, "avg_ns": round(avg_ns), "stddev_ns": round(stddev_ns),
        "avg_ts": avg_ts, "stddev_ts": stddev_ts, "test": t.label,
    }  # fmt: skip
    known |= dict.fromkeys(_ABSENT, False) | {"cuda": bool(m.gpus)}
    more: dict[str, Any] = {"node": result.node} if result.node else {}
    if drafts(c):
        more |= dict(zip(_DRAFT_FIELDS, (t.drafts, result.n_drafted, result.n_accepted), strict=True))
    return {name: known[name] for name in FIELDS} | more


def drafts(config: RunConfig) -> bool:
    """Return whether some tests generate with drafts, so that results have fields for them."""
    return bool(stages(config))


class Writer:
    """Writes header, results one at a time, and footer; flushed after each."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def header(self, config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]]) -> None:
        """Write what precedes the results."""

    def result(self, result: BenchResult) -> None:
        """Write one result."""
        raise NotImplementedError

    def footer(self) -> None:
        """Write what follows the results."""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class MarkdownWriter(Writer):
    """A table with columns for the settings that differ from the defaults."""

    def header(self, config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]]) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(config)}
        self._settings = [name for name in _SETTINGS if name in alternatives or getattr(config, name) != defaults[name]]
        self._nodes = bool(config.fleet.ray_node)
        self._columns = [("node", -12)] if self._nodes else []
        self._columns += [("model", -30), ("size", 10), ("params", 10), ("backend", -10), ("threads", 7)]
        self._columns += [*(_SETTINGS[name] for name in self._settings), ("test", 13), ("t/s", 16)]
        self._drafts = drafts(config)
        self._columns += [("accepted", 14)] * self._drafts
        self._row([name for name, _ in self._columns])
        rule = ["-" * -width if width < 0 else "-" * (width - 1) + ":" for _, width in self._columns]
        self._row(rule)

    def result(self, result: BenchResult) -> None:
        m, c = result.model, result.config
        size = shown_size(m.n_bytes, least=2**20)
        params = f"{m.n_params / 1e9:.2f} B" if m.n_params >= 1e9 else f"{m.n_params / 1e6:.2f} M"
        n_threads = c.n_threads if result.test.n_gen else c.n_threads_batch
        speed, deviation = mean_and_deviation(result.samples_ts)
        backend = "CUDA" if m.gpus else "CPU"
        cells = [result.node] if self._nodes else []
        cells += [m.name, size, params, backend, str(n_threads), *(_setting(c, name) for name in self._settings)]
        accepted = f"{result.n_accepted} of {result.n_drafted}" if result.test.drafts else ""
        self._row([*cells, result.test.label, f"{speed:.2f} ± {deviation:.2f}", *[accepted] * self._drafts])

    def footer(self) -> None:
        commit, number = build()
        self._write(f"\nbuild: {commit} ({number})\n")

    def _row(self, cells: list[str]) -> None:
        parts = [
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
            for cell, (_, width) in zip(cells, self._columns, strict=True)
        ]
        self._write("| " + " | ".join(parts) + " |\n")


def _text(value: Any) -> str:
    """Format a value for CSV and SQL."""
    return f"{value:f}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)


class CsvWriter(Writer):
    """A line of names, then quoted values."""

    def header(self, config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]]) -> None:
        more = [*(["node"] if config.fleet.ray_node else []), *(_DRAFT_FIELDS if drafts(config) else ())]
        self._write(",".join([*FIELDS, *more]) + "\n")

    def result(self, result: BenchResult) -> None:
        quoted = ('"' + _text(v).replace('"', '""') + '"' for v in values(result).values())
        self._write(",".join(quoted) + "\n")


class JsonWriter(Writer):
    """One array of objects."""

    _first = True

    def header(self, config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]]) -> None:
        self._write("[\n")

    def result(self, result: BenchResult) -> None:
        lines = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in _with_samples(result).items()]
        self._write(("" if self._first else ",\n") + "  {\n" + ",\n".join(lines) + "\n  }")
        self._first = False

    def footer(self) -> None:
        self._write("\n]\n")


class JsonLinesWriter(Writer):
    """One object per line."""

    def result(self, result: BenchResult) -> None:
        self._write(json.dumps(_with_samples(result)) + "\n")


def _with_samples(result: BenchResult) -> dict[str, Any]:
    return {**values(result), "samples_ns": list(result.samples_ns), "samples_ts": list(result.samples_ts)}


class SqlWriter(Writer):
    """Statements that create a table `test` and fill it."""

    def header(self, config: RunConfig, alternatives: Mapping[str, tuple[Any, ...]]) -> None:
        self._pending = True

    def result(self, result: BenchResult) -> None:
        found = values(result)
        if self._pending:
            self._pending = False
            types = {int: "INTEGER", bool: "INTEGER", float: "REAL"}
            columns = ",\n".join(f"  {k} {types.get(type(v), 'TEXT')}" for k, v in found.items())
            self._write(f"CREATE TABLE IF NOT EXISTS test (\n{columns}\n);\n\n")
        quoted = ", ".join("'" + _text(v).replace("'", "''") + "'" for v in found.values())
        self._write(f"INSERT INTO test ({', '.join(found)}) VALUES ({quoted});\n")


_WRITERS = {"md": MarkdownWriter, "csv": CsvWriter, "json": JsonWriter, "jsonl": JsonLinesWriter, "sql": SqlWriter}


def make_writer(form: str, out: TextIO) -> Writer:
    """Return the writer of an output format (`-o`)."""
    return _WRITERS[form](out)
