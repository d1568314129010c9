"""Run a study, units through an executor into a journal, and read results from its journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import ikcli
from ikcli.errors import FormatError
from ikcli.fleet.executor import Executor
from ikcli.fleet.journal import Journal, read
from ikcli.fleet.model import digests
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction, input_file, input_model
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.log import warn
from ikcli.quant.formats import format_by_name
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.rules import pattern_notes
from ikcli.study.resident import ResidentOptions, used_tensors
from ikcli.study.units import Left, StudyUnit, Work, is_matrix, make_units, work_of
from ikcli.study.worker import Measured, StudySetup, open_study

KIND = "ik study"


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The model and text of a study (`resident`) and its units; see `make_units` and `measure`."""

    resident: ResidentOptions
    types: tuple[GGMLType, ...]
    by: str = "tensor"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    imatrix: Path | None = None
    precision: float = 0.05
    journal: Path | None = None


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """Units, what is left out, how many units the journal holds, and the work of the others."""

    units: list[StudyUnit]
    left: list[Left]
    n_known: int
    work: Work


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """A measured unit, its number among those to do, and the seconds since the study began."""

    unit: StudyUnit
    found: Measured
    done: int
    total: int
    seconds: float


@dataclass(slots=True)
class Study:
    """Results by unit, in the order of the model; `left` could not be measured."""

    units: list[StudyUnit]
    found: dict[str, Measured]
    left: list[Left] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)

    def titles(self) -> list[str]:
        """Return the groups of tensors, in order."""
        return list(dict.fromkeys(u.title for u in self.units))

    def types(self) -> list[GGMLType]:
        """Return the types, smallest first."""
        return sorted({u.type for u in self.units}, key=lambda t: (TYPES[t].bpw, t))

    def get(self, title: str, type: GGMLType) -> Measured | None:
        """Return one result."""
        return self.found.get(StudyUnit(title, (), type).key)


def run_study(
    options: StudyOptions,
    executor: Executor,
    on_plan: Callable[[StudyPlan], None] = lambda plan: None,
    on_unit: Callable[[StudyProgress], None] = lambda progress: None,
) -> Study:
    """Measure all units that the journal lacks; errors of the model, the text and the journal are raised first.

    `on_plan` is called before the model is loaded, `on_unit` as each unit ends.
    """
    resident = options.resident
    file = open_gguf(resident.model, resident.overrides)
    imatrix = read_imatrix(options.imatrix) if options.imatrix else None
    for option, patterns in (("--tensors", options.include), ("--exclude", options.exclude)):
        for note in pattern_notes(patterns, option, list(file.tensors)):
            warn(note)
    used = used_tensors(resident)
    units, left = make_units(
        file,
        used,
        options.types,
        by=options.by,
        include=options.include,
        exclude=options.exclude,
        imatrix=imatrix,
    )
    inputs = (
        input_model(resident.model, resident.overrides, file),
        input_file(resident.text),
        input_file(options.imatrix) if options.imatrix else None,
    )
    model_digest, text_digest, imatrix_digest = digests(inputs)
    head = {
        "kind": KIND,
        "version": ikcli.__version__,
        "model": resident.model.name,
        "model_digest": model_digest,
        "text_digest": text_digest,
        "imatrix_digest": imatrix_digest,
        "n_ctx": resident.n_ctx,
        "chunks": resident.chunks,
        "precision": options.precision,
        "override_kv": list(resident.overrides),
        "unused": [name for name in file.tensors if is_matrix(file, name) and name not in used],
    }
    there = replace(resident, model=resident.model.absolute(), text=resident.text.absolute())
    weights = options.imatrix.absolute() if options.imatrix else None
    worker = UnitFunction(open_study, StudySetup(there, weights, options.precision), inputs)
    with Journal(options.journal, head) as journal:
        todo = {u.key for u in units if u.key not in journal}
        on_plan(StudyPlan(units, left, len(units) - len(todo), work_of([u for u in units if u.key in todo], file)))
        started, n_done = time.perf_counter(), count(1)

        def keep(i: int, found: Measured) -> dict[str, Any]:
            on_unit(StudyProgress(units[i], found, next(n_done), len(todo), time.perf_counter() - started))
            return _record(units[i], found)

        records = map_units(worker, [(u.key, u) for u in units], journal, executor, keep=keep)
        return Study(units, {u.key: _measured(r) for u, r in zip(units, records, strict=True)}, left, head)


def _record(unit: StudyUnit, found: Measured) -> dict[str, Any]:
    return {"title": unit.title, "tensors": list(unit.tensors), "type": TYPES[unit.type].name, **found.record()}


def _measured(record: dict[str, Any]) -> Measured:
    return Measured(record["kld"], record["error"], record["n_tokens"], record["n_chunks"])


def read_study(path: Path) -> Study:
    """Read the study in a journal; FormatError if it is not one of ik study."""
    journal, _ = read(path)
    if journal.head.get("kind") != KIND:
        raise FormatError(f"{path}: is not a journal of ik study; name the file that `ik study -o` wrote")
    units, found = [], {}
    for key, record in journal.records.items():
        try:
            unit = StudyUnit(record["title"], tuple(record["tensors"]), format_by_name(record["type"]).type)
            found[unit.key] = _measured(record)
        except (KeyError, TypeError):
            raise FormatError(f"{path}: the record of {key} is incomplete") from None
        units.append(unit)
    if not units:
        raise FormatError(f"{path}: holds no measurement yet")
    return Study(units, found, head=journal.head)


def table_lines(study: Study) -> list[str]:
    """Return a Markdown table: a row per group of tensors, a column per type, KL divergence ± standard error."""
    types = study.types()
    names = [TYPES[t].name for t in types]
    rows = [["tensors", *names]]
    for title in study.titles():
        rows.append([title, *(_cell(study.get(title, t)) for t in types)])
    sums = [_sum(study, t) for t in types]
    rows.append(["all of them, summed", *sums])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    lines = [
        "| " + " | ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(row, widths, strict=True))) + " |"
        for row in rows
    ]
    return [lines[0], rule, *lines[1:]]


def _pad(text: str, width: int, column: int) -> str:
    return text.rjust(width) if column else text.ljust(width)


def _cell(found: Measured | None) -> str:
    return "-" if found is None else f"{found.kld:.6f} ± {found.error:.6f}"


def _sum(study: Study, type: GGMLType) -> str:
    found = [study.get(title, type) for title in study.titles()]
    known = [f for f in found if f is not None]
    error = sum(f.error**2 for f in known) ** 0.5
    return _cell(Measured(sum(f.kld for f in known), error, 0, 0)) if len(known) == len(found) else "-"


def json_text(study: Study) -> str:
    """Return the whole study as one JSON object."""
    results = [_record(u, study.found[u.key]) for u in study.units if u.key in study.found]
    return json.dumps({"study": study.head, "results": results}, ensure_ascii=False, indent=2)


def types_named(texts: Sequence[str]) -> tuple[GGMLType, ...]:
    """Parse comma-separated names of types."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return tuple(dict.fromkeys(format_by_name(name).type for name in names))
