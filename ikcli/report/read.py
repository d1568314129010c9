"""Read results from files and logs, ours and ik_llama.cpp's: speed, quality, errors of types, and environments.

Tables of sweep-bench and batched-bench are found by `sweep_read`; other lines are parsed here. A line that looks like a
result and cannot be parsed is a `Problem`; text between results is skipped. Logs name the model that they loaded;
jsonl-full and the records of bench describe what they ran on.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikcli.bench.sweep_read import SpeedTable, clean_lines, file_lines, read_lines
from ikcli.engine.plan.bench_cases import BenchTest
from ikcli.errors import FormatError
from ikcli.report.results import (
    BenchRow,
    Compared,
    Problem,
    Quality,
    Results,
    RunEnvironment,
    SpeedRun,
    TypeErrors,
)
from ikcli.settings.values import parse_size

_NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?|-?nan|-?inf)"
_FINAL = re.compile(rf"Final estimate: PPL(?: over (\d+) chunks for n_ctx=(\d+))? = {_NUMBER} \+/- {_NUMBER}", re.I)
_STATISTIC = re.compile(
    rf"([\w%. ]+?(?:\(.*?\))?[\w/()\- ]*?(?:KLD|Δp)?)\s*:\s*{_NUMBER}(?:\s*±\s*{_NUMBER})?\s*%?", re.I
)
_STATS_HEAD, _STATS_END = "====== Perplexity statistics", "Same top p"
_TYPE_LINE = re.compile(rf"(\w+)(?:::(\S+))?\s*: rmse {_NUMBER}, {_NUMBER}\s+maxerr {_NUMBER}")
_LOADED = re.compile(r"loaded meta data with .* from (.+?) \(version")
_SIZE = re.compile(r"model size\s*= *([\d.]+ [KMGT]iB)")
_FACTS = (
    ("parameters", re.compile(r"model params\s*= *([\d.]+ \w)")),
    ("program", re.compile(r"(?:main|log_start): build = (.+)")),
    ("threads", re.compile(r"system_info: n_threads = (\d+)")),
    ("context", re.compile(r"calculating perplexity over \d+ chunks, (n_ctx=\d+)")),
)
_SETTINGS = ("n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "mla", "mla_attn", "fmoe", "fused_moe", "thp",
             "run_time_repack", "repack", "n_gpu_layers", "override_tensor", "ser", "is_pp_shared")  # fmt: skip
_USUAL: tuple[Any, ...] = (None, "", 0, "0", False, [], "-1,0", "f16")


def read_results(sources: list[tuple[str, Path]], sizes: Mapping[str, int] | None = None) -> Results:
    """Return the results of files, each with a label ("": its model, or the name of the file).

    `sizes` are the bytes of models, by label, for logs that do not state them. Raises FormatError if a file cannot be
    opened or holds no result.
    """
    out = Results()
    for label, path in sources:
        try:
            lines = file_lines(path)
        except OSError as problem:
            raise FormatError(f"{path}: cannot be read ({problem.strerror or problem})") from None
        if any("\0" in line for line in lines):
            raise FormatError(f"{path}: is not a text file; name a log, a table or jsonl")
        before = len(out.all()) + len(out.problems)
        _Source(out, label, path, lines, sizes or {}).read()
        if len(out.all()) + len(out.problems) == before:
            raise FormatError(
                f"{path}: no results in {len(lines)} lines; expected tables, jsonl or logs of sweep-bench, bench, "
                "batched-bench, perplexity or quantize-stats"
            )
    return out


def read_output(text: str, name: str) -> Results:
    """Return the results in a text that is not a file; `name` stands for it."""
    out = Results()
    _Source(out, "", Path(name), clean_lines(text), {}).read()
    return out


class _Source:
    """Walks over the lines of one file that do not belong to a table of speeds."""

    def __init__(self, out: Results, label: str, path: Path, lines: list[str], sizes: Mapping[str, int]) -> None:
        self._out, self._label, self._path, self._lines, self._sizes = out, label, path, lines, sizes
        self._facts: dict[str, str] = {}
        self._bytes: int | None = None
        self._columns: list[str] = []
        self._csv: list[str] = []
        self._statistics: dict[str, tuple[float, float | None]] | None = None
        self._statistics_line = 0
        self._since_build = len(out.bench)
        self._in_speeds = False

    def read(self) -> None:
        tables, used = read_lines(self._lines)
        starts = {t.line: t for t in tables}
        skip_until = -1
        for at, line in enumerate(self._lines):
            if at + 1 in starts:
                self._speeds(starts[at + 1], at)
            if at in used or at <= skip_until or not line:
                if at in used:
                    self._columns, self._csv, self._in_speeds = [], [], True
                continue
            skip_until = max(skip_until, self._line(at, line))
        if self._statistics is not None:
            self._finish_statistics()

    def _line(self, at: int, line: str) -> int:
        """Read one line and return the index of the last line that belongs to it."""
        for take in (self._log, self._quality, self._bench_table, self._csv_line, self._type_line):
            if take(at, line):
                return at
        if line.startswith(("{", "[")):
            return self._json(at, line)
        if line.startswith("INSERT INTO test"):
            self._problem(at, "SQL is not read; write the results with -o jsonl")
        return at

    # -- what a run is

    def _environment(self, facts: Mapping[str, str] | None = None, n_bytes: int | None = None) -> RunEnvironment:
        merged = {**self._facts, **{k: v for k, v in (facts or {}).items() if v}}
        return RunEnvironment(merged, n_bytes or self._bytes)

    def _common(self, at: int, environment: RunEnvironment) -> tuple[str, str, int, RunEnvironment, bool]:
        model = environment.facts.get("model", "")
        label = self._label or (Path(model).name.removesuffix(".gguf") if model else self._path.stem)
        size = self._sizes.get(label)
        if size is not None:
            environment = RunEnvironment(environment.facts, size)
        return label, str(self._path), at + 1, environment, bool(self._label)

    def _problem(self, at: int, reason: str) -> None:
        self._out.problems.append(Problem(str(self._path), at + 1, self._lines[at][:200], reason))

    def _log(self, at: int, line: str) -> bool:
        if (found := _LOADED.search(line)) is not None:
            self._facts, self._bytes = {"model": found[1]}, None
            return True
        if (found := _SIZE.search(line)) is not None:
            self._bytes = _n_bytes(found[1])
            return True
        for name, pattern in _FACTS:
            if (found := pattern.search(line)) is not None:
                self._facts[name] = found[1]
                return True
        if line.startswith("build: "):
            program = line.removeprefix("build: ")
            rows = self._out.bench
            for i in range(self._since_build, len(rows)):
                facts = {"program": program, **rows[i].environment.facts}
                rows[i] = replace(rows[i], environment=RunEnvironment(facts, rows[i].environment.model_bytes))
            self._since_build = len(rows)
            self._columns = []
            return True
        return False

    # -- speeds

    def _speeds(self, table: SpeedTable, at: int) -> None:
        facts, n_bytes = _config_facts(table.config) if table.config is not None else ({}, None)
        if table.config is None:
            facts = {"settings": _settings_text(table.settings),
                     "threads": str(table.settings.get("n_threads", ""))}  # fmt: skip
        environment = self._environment(facts, n_bytes)
        common = self._common(at, environment)
        self._out.speeds.append(SpeedRun(*common, table))

    def _bench_table(self, at: int, line: str) -> bool:
        if not line.startswith("|"):
            self._columns = []
            return False
        cells = [c.strip() for c in line.strip("|").split("|")]
        if "test" in cells and "t/s" in cells:
            self._columns, self._in_speeds = cells, False
            return True
        if "RMSE" in cells and "type" in cells:
            self._columns, self._in_speeds = cells, False
            return True
        if set(line) <= set("|-: "):
            return True
        if not self._columns:
            if self._in_speeds and re.search(r"\d", line):
                self._problem(at, "a row that does not fit the table of speeds before it")
            return True
        if len(cells) != len(self._columns):
            self._problem(at, f"{len(cells)} cells under {len(self._columns)} columns")
            return True
        row = dict(zip(self._columns, cells, strict=True))
        try:
            self._type_row(at, row) if "RMSE" in row else self._bench_row(at, row)
        except (ValueError, KeyError):
            self._problem(at, "a cell is not the number that its column needs")
        return True

    def _bench_row(self, at: int, row: Mapping[str, str]) -> None:
        speed, _, deviation = row["t/s"].partition("±")
        fixed = ("model", "size", "params", "backend", "threads", "test", "t/s")
        settings = ", ".join(f"{k} {v}" for k, v in row.items() if k not in fixed)
        facts = {"model": row.get("model", ""), "parameters": row.get("params", ""), "settings": settings,
                 "threads": row.get("threads", ""), "backend": row.get("backend", "")}  # fmt: skip
        common = self._common(at, self._environment(facts, _n_bytes(row.get("size", ""))))
        self._out.bench.append(
            BenchRow(*common, row["test"], _finite(speed), float(deviation) if deviation.strip() else 0.0, settings)
        )

    def _bench_record(self, at: int, record: Mapping[str, Any]) -> None:
        """Take a result of bench as it stands in json, jsonl or CSV."""
        speed, deviation = _finite(record["avg_ts"]), float(record.get("stddev_ts") or 0)
        n_prompt, n_gen, n_depth = (int(record.get(key) or 0) for key in ("n_prompt", "n_gen", "n_depth"))
        test = str(record.get("test") or BenchTest(n_prompt, n_gen, n_depth=n_depth).label)
        settings = _settings_text(record)
        facts = {
            "model": str(record.get("model_type") or record.get("model_filename") or ""),
            "file": str(record.get("model_filename") or ""),
            "machine": ", ".join(str(record[k]) for k in ("cpu_info", "gpu_info") if record.get(k)),
            "program": f"{record.get('build_commit', '')} ({record.get('build_number', '')})",
            "threads": str(record.get("n_threads") or ""),
            "date": str(record.get("test_time") or ""),
            "settings": settings,
        }
        environment = self._environment(facts, int(record.get("model_size") or 0) or None)
        label, source, line, environment, named = self._common(at, environment)
        if not named and facts["file"]:
            label = Path(facts["file"]).name.removesuffix(".gguf")
        self._out.bench.append(BenchRow(label, source, line, environment, named, test, speed, deviation, settings))

    def _compared(self, at: int, record: Mapping[str, Any]) -> None:
        facts = {
            "model": str(record.get("model_filename") or ""),
            "machine": str(record.get("cpu_info") or ""),
            "program": f"{record.get('build_commit', '')} ({record.get('build_number', '')})",
            "date": str(record.get("test_time") or ""),
        }
        high = None if record["high"] is None else _finite(record["high"])
        self._out.compared.append(
            Compared(
                *self._common(at, self._environment(facts)), str(record["compare"]), str(record["side"]),
                str(record["base"]), _finite(record["ratio"]), _finite(record["low"]), high, int(record["rounds"]),
                (str(record.get("side_command", "")), str(record.get("base_command", ""))),
                "; ".join(map(str, record.get("warnings") or ())),
            )
        )  # fmt: skip

    def _csv_line(self, at: int, line: str) -> bool:
        if "build_commit," in line and "avg_ts" in line:
            self._csv = next(csv.reader([line]))
            return True
        if not self._csv or not line.startswith('"'):
            return False
        cells = next(csv.reader([line]))
        if len(cells) != len(self._csv):
            self._problem(at, f"{len(cells)} values under {len(self._csv)} names")
            return True
        self._record(at, dict(zip(self._csv, cells, strict=True)), self._bench_record)
        return True

    def _json(self, at: int, line: str) -> int:
        """Return the JSON value that begins here, over as many lines as it needs."""
        text, last = line, at
        try:
            value = json.loads(text)
        except ValueError:
            nested = at + 1 < len(self._lines) and self._lines[at + 1].startswith(("{", '"'))
            if not nested or line not in ("{", "["):
                if line.startswith("{"):
                    self._problem(at, "no valid JSON")
                return at
            try:
                text = "\n".join(self._lines[at:])
                value, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as problem:
                self._problem(at, f"no valid JSON ({problem})")
                return len(self._lines)
            last = at + text[:end].count("\n")
        for record in value if isinstance(value, list) else [value]:
            if isinstance(record, dict):
                self._json_record(at, record)
        return last

    def _json_record(self, at: int, record: Mapping[str, Any]) -> None:
        if "avg_ts" in record:
            self._record(at, record, self._bench_record)
        elif "compare" in record and "ratio" in record:
            self._record(at, record, self._compared)
        elif "rmse" in record and "type" in record:
            self._record(at, record, self._type_record)
        elif "config" not in record:  # without rows
            self._problem(at, "JSON of no known kind of result")

    def _record(self, at: int, record: Mapping[str, Any], add: Callable[[int, Mapping[str, Any]], None]) -> None:
        try:
            add(at, record)
        except (ValueError, TypeError, KeyError) as problem:
            self._problem(at, f"a value is missing or no number ({problem})")

    # -- quality

    def _quality(self, at: int, line: str) -> bool:
        if (found := _FINAL.search(line)) is not None:
            ppl, error = float(found[3]), float(found[4])
            if not (math.isfinite(ppl) and math.isfinite(error)):
                self._problem(at, "the perplexity is not finite")
                return True
            chunks, n_ctx = (int(found[i]) if found[i] else None for i in (1, 2))
            common = self._common(at, self._environment())
            self._out.qualities.append(Quality(*common, {"PPL": (ppl, error)}, chunks, n_ctx))
            return True
        if "Final estimate: PPL" in line or line.startswith("Unexpected negative standard deviation"):
            self._problem(at, "a perplexity without its numbers")
            return True
        if line.startswith(_STATS_HEAD):
            if self._statistics is not None:
                self._finish_statistics()
            self._statistics, self._statistics_line = {}, at
            return True
        if self._statistics is None:
            return False
        if (found := _STATISTIC.fullmatch(line)) is not None:
            name = " ".join(found[1].split())
            self._statistics[name] = (float(found[2]), float(found[3]) if found[3] else None)
            if name == _STATS_END:
                self._finish_statistics()
            return True
        return False

    def _finish_statistics(self) -> None:
        values, at = self._statistics or {}, self._statistics_line
        self._statistics = None
        known = {"PPL": "Mean PPL(Q)", "PPL of the base": "Mean PPL(base)", "PPL ratio": "Mean PPL(Q)/PPL(base)"}
        out = {new: values[old] for new, old in known.items() if old in values}
        out |= {k: v for k, v in values.items() if "KLD" in k or k in ("RMS Δp", _STATS_END)}
        if "Mean KLD" not in out or "PPL" not in out:
            self._problem(at, "statistics of a KL divergence without Mean PPL(Q) or Mean KLD")
            return
        self._out.qualities.append(Quality(*self._common(at, self._environment()), out))

    # -- types

    def _type_row(self, at: int, row: Mapping[str, str]) -> None:
        relative = float(row["relative"].rstrip("%")) / 100
        tensor = "" if row["tensor"].strip("* ").lower() in ("", "all", "all tensors") else row["tensor"]
        common = self._common(at, self._environment())
        largest = float(row["max error"]) if row.get("max error") else None
        self._out.types.append(
            TypeErrors(*common, row["type"], tensor, float(row["bpw"]), _finite(row["RMSE"]), relative, largest)
        )

    def _type_record(self, at: int, record: Mapping[str, Any]) -> None:
        common = self._common(at, self._environment())
        self._out.types.append(
            TypeErrors(
                *common, str(record["type"]), str(record.get("tensor") or ""), float(record["bpw"]),
                _finite(record["rmse"]), float(record["relative"]), float(record["max_error"]),
            )
        )  # fmt: skip

    def _type_line(self, at: int, line: str) -> bool:
        """Take a line of llama.cpp's quantize-stats, which does not give bits per weight."""
        found = _TYPE_LINE.match(line)
        if found is None:
            return False
        from ikcli.gguf.types import TYPES

        bpw = {t.name.lower(): t.bpw for t in TYPES.values()}.get(found[1].lower())
        common = self._common(at, self._environment())
        numbers = [float(found[i]) for i in (3, 4, 5)]
        self._out.types.append(TypeErrors(*common, found[1], found[2] or "", bpw, *numbers))
        return True


def _n_bytes(text: str) -> int | None:
    """Bytes of a size as logs print it; None if it was rounded to nothing, or is not a size."""
    try:
        return parse_size(text)
    except ValueError:
        return None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _settings_text(record: Mapping[str, Any]) -> str:
    """Describe the notable settings in a few words, leaving out their usual values."""
    found = {k: record[k] for k in _SETTINGS if k in record and record[k] not in _USUAL}
    return ", ".join(f"{k} {int(v) if isinstance(v, bool) else v}" for k, v in found.items())


def _config_facts(config: Mapping[str, Any]) -> tuple[dict[str, str], int | None]:
    """Return facts from the first line of jsonl-full."""
    hardware, software, file = (config.get(k) or {} for k in ("hardware", "software", "model_file"))
    facts = {
        "model": str(config.get("model") or file.get("file") or ""),
        "machine": ", ".join(str(hardware[k]) for k in ("cpu", "isa") if hardware.get(k)),
        "program": f"ik {software['ik']}" if software.get("ik") else "",
        "threads": str(config.get("n_threads") or ""),
        "settings": _settings_text(config),
    }
    n_bytes = file.get("tensor_bytes")
    return facts, n_bytes if isinstance(n_bytes, int) else None
