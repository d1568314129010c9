"""Check a quantize run before it begins, in seconds: will it succeed, and with weights for every tensor?

`preflight` opens everything, chooses the types and collects all problems instead of stopping at the first one. Nothing
is written and no weights are read. `Report.lines` formats the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ikcli.errors import IkError
from ikcli.gguf.heads import head_blocks
from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.types import TYPES
from ikcli.log import shown_size
from ikcli.quant.covariance_file import Covariance, open_covariance
from ikcli.quant.custom_rules import check_uses, rule_uses
from ikcli.quant.feedback import supports
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.imatrix_use import (
    FEW_ROWS,
    ExpertData,
    expert_data,
    name_patterns,
    weighted_choices,
    why_missing,
    with_borrowed,
)
from ikcli.quant.output_check import check_output, check_room, existing_folder, output_paths
from ikcli.quant.quantizer import check, check_requantize, output_parts, part_is_done
from ikcli.quant.recipes import RecipeOptions, TypeChoice, check_file_type, choose_types, refused_without_weights
from ikcli.quant.target import TargetOptions, budget_bytes
from ikcli.quant.tool import (
    ToolOptions,
    check_weight_rules,
    is_fixed,
    load_imatrix,
    make_job,
    plan_repack_of,
    read_weights,
)

OK, NOTE, FAIL = "ok", "note", "FAIL"
_BASE_RAM = 400 << 20  # interpreter, compiled kernels, tables of encoders
_RAM_PER_THREAD = 24 << 20  # pieces in work and what encoders hold beside them
_RAM_PER_MOMENT = 64  # bytes per entry of a matrix of second moments, with its factors in double precision
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `level` is OK, NOTE or FAIL."""

    check: str
    level: str
    text: str


@dataclass(slots=True)
class Report:
    """Findings in the order of the checks, and tables below them (title, header, rows)."""

    findings: list[Finding] = field(default_factory=list)
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Return whether something would fail or be refused."""
        return any(f.level == FAIL for f in self.findings)

    def add(self, check: str, level: str, text: str) -> None:
        self.findings.append(Finding(check, level, text))

    def attempt(self, check: str, action: Callable[[], str | None]) -> bool:
        """Add the text that `action` returns, unless it is empty, or the IkError that it raises as FAIL."""
        try:
            text = action()
        except IkError as problem:
            self.add(check, FAIL, str(problem))
            return False
        if text:
            self.add(check, OK, text)
        return True

    def lines(self) -> list[str]:
        """Format the report as Markdown."""
        out = _table(("check", "result", "what"), [(f.check, f.level, f.text) for f in self.findings])
        for title, header, rows in self.tables:
            out += ["", f"{title}:", "", *_table(header, rows)]
        n = sum(f.level == FAIL for f in self.findings)
        verdict = f"{n} problem{'s' if n > 1 else ''}, this run would fail or be refused" if n else "this run can start"
        return [*out, "", f"preflight: {verdict}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(header), f"|{'|'.join(':---' for _ in header)}|", *map(line, rows)]


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """The run to check; `mode` is quantize, repack or unrepack, `patterns` choose tensors to repack.

    `opened` returns the model, and notes about absent parts of it. `runs` describes what running the model first takes
    and which data that yields; it raises if the model cannot run.
    """

    mode: str
    opened: Callable[[], tuple[GGUFFile, list[str]]]
    output: str
    recipe: RecipeOptions
    options: ToolOptions
    patterns: tuple[str, ...] = ()
    target: TargetOptions | None = None
    runs: Callable[[], tuple[str, Imatrix]] | None = None


def preflight(task: PlannedJob, available: int | None = None) -> Report:
    """Report on a run; `available` is the number of free bytes of RAM (None: unknown)."""
    report = Report()
    found: list[GGUFFile] = []
    report.attempt("input", lambda: _open(report, task, found))
    imatrix, covariance, complete = _data(report, task.options, task.runs)
    if not found:
        return report
    file = found[0]
    _output_paths(report, task, file)
    if imatrix is not None:
        imatrix = with_borrowed(imatrix, file.tensors, file.metadata)
    choices = _choices(report, task, file, imatrix)
    if task.mode == "quantize" and choices:
        _sizes(report, imatrix, covariance, choices)
        if complete:
            _missing(report, task, file, imatrix, choices)
        if imatrix is not None:
            _experts(report, expert_data(imatrix, choices))
    _room(report, task, file, choices)
    _memory(report, task, imatrix, covariance, choices, available)
    return report


def _open(report: Report, task: PlannedJob, found: list[GGUFFile]) -> str:
    file, notes = task.opened()
    found.append(file)
    for note in notes:
        report.add("input", NOTE, note)
    n = len(file.paths)
    if notes:
        return f"{len(file.tensors)} tensors, {file.n_bytes / 2**30:.2f} GiB"
    parts = "1 file" if n == 1 else f"{n} files"
    return f"{len(file.tensors)} tensors in {parts} of full length, {file.n_bytes / 2**30:.2f} GiB"


def _data(
    report: Report, options: ToolOptions, runs: Callable[[], tuple[str, Imatrix]] | None
) -> tuple[Imatrix | None, Covariance | None, bool]:
    """Load the importance data; the last value says whether all requested files could be read."""
    covariances: list[Covariance] = []
    matrices: list[Imatrix] = []
    ok = True

    def moments() -> str:
        found = open_covariance(options.covariance or "")
        covariances.append(found)
        return f"{options.covariance}: {found.n_chunks} chunks from {', '.join(found.datasets) or 'unknown data'}"

    def matrix() -> str:
        given = read_weights(options, covariances[0] if covariances else None)
        for note in check_weight_rules(given, options):
            report.add("imatrix", NOTE, note)
        found = load_imatrix(options, covariances[0] if covariances else None)
        if found is None:
            return "" if options.imatrix is None else f"{options.imatrix}: no entry is left to use"
        matrices.append(found)
        sets = ", ".join(found.datasets) or "unknown data"
        return f"{found.path}: {len(found.entries)} entries, {found.n_chunks} chunks from {sets}"

    def run() -> str:
        assert runs is not None
        text, found = runs()
        if options.imatrix is None:
            matrices.append(found.filtered(options.include_weights, options.exclude_weights))
        return text

    if runs is not None:
        ok = report.attempt("covariance", run)
    if options.covariance is not None:
        ok = report.attempt("covariance", moments) and ok
    if options.imatrix is not None or covariances:
        ok = report.attempt("imatrix", matrix) and ok
    return matrices[0] if matrices else None, covariances[0] if covariances else None, ok


def _output_paths(report: Report, task: PlannedJob, file: GGUFFile) -> None:
    paths = output_paths(Path(task.output), len(file.paths), task.options.keep_split)

    def writable() -> str:
        check_output(paths, file.paths)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"{paths[0]}{more} can be written"

    if report.attempt("output", writable):
        there = [p for p in paths if p.exists()]
        if there and not task.options.partial_requant:
            report.add("output", NOTE, f"{there[0]} exists and would be replaced")


def _choices(report: Report, task: PlannedJob, file: GGUFFile, imatrix: Imatrix | None) -> list[TypeChoice]:
    """Choose the types of all tensors, refused ones included; empty if they cannot be chosen."""
    tensors, recipe = list(file.tensors.values()), task.recipe
    made: list[TypeChoice] = []
    if task.mode != "quantize":

        def repack() -> str:
            plan = plan_repack_of(file, task.output, task.patterns, task.mode == "unrepack", task.options)
            made.extend(plan.job.choices)
            for note in plan.notes:
                report.add("types", NOTE, note)
            return f"{sum(c.changes for c in made)} of {len(made)} tensors change"

        report.attempt("types", repack)
    else:

        def choose() -> str:
            made.extend(choose_types(tensors, file.metadata, replace(recipe, ignore_imatrix_rules=True), imatrix))
            n = len({c.new for c in made})
            return f"{sum(c.changes for c in made)} of {len(made)} tensors change, {n} types" + (
                "; a target chooses those that no rule decides about" if task.target is not None else ""
            )

        report.attempt("types", choose)
        if task.target is None:
            report.attempt("types", partial(check_file_type, recipe, imatrix))
        _rules(report, task, made, list(file.tensors))
    if not made:
        return made
    fallbacks = [c.name for c in made if c.fallback]
    if fallbacks:
        text = f"rows do not fit, so a fallback type is taken: {_some(fallbacks)}"
        report.add("types", NOTE, text)
    fixed = made if task.target is None else [c for c in made if is_fixed(c)]
    report.attempt("types", partial(check, make_job(file, task.output, fixed, {}, task.options)))
    if task.target is not None:
        free = [c for c in made if not is_fixed(c)]
        report.attempt("types", partial(check_requantize, free, task.options.allow_requantize))
    return made


def _rules(report: Report, task: PlannedJob, choices: Sequence[TypeChoice], names: Sequence[str]) -> None:
    """List the custom rules one by one and name those that match nothing, which `strict` makes problems."""
    recipe = task.recipe
    if not recipe.custom or not choices:
        return
    if not recipe.uses_rules:
        report.add("rules", NOTE, "--custom-q has no effect with this TYPE or with --pure")
        return
    uses = rule_uses(recipe.custom, choices)
    for use in (use for use in uses if not use.matched):
        (text,) = check_uses([use], names)
        report.add("rules", FAIL if task.options.strict else NOTE, text)
    if all(use.matched for use in uses):
        report.add("rules", OK, f"rules that match a tensor: all {len(uses)}")
    for note in check_uses([use for use in uses if use.matched], names):
        report.add("rules", NOTE, note)


def _sizes(
    report: Report, imatrix: Imatrix | None, covariance: Covariance | None, choices: Sequence[TypeChoice]
) -> None:
    """Check entry sizes; all entries of another size than their tensor count as one problem, told by the first."""
    problems: dict[str, list[str]] = {}
    for c in choices:
        name = c.source or c.name
        if not c.changes:
            continue
        try:
            if imatrix is not None:
                imatrix.fits(name, c.shape)
        except IkError as problem:
            problems.setdefault("imatrix", []).append(str(problem))
        try:
            if covariance is not None and supports(c.new):
                covariance.check_size(name, c.shape)
        except IkError as problem:
            problems.setdefault("covariance", []).append(str(problem))
    for what, texts in problems.items():
        report.add(what, FAIL, texts[0] + (f" (and so on for {len(texts) - 1} more)" if len(texts) > 1 else ""))
    for what, data in (("imatrix", imatrix), ("covariance", covariance)):
        if data is not None and what not in problems:
            report.add(what, OK, "all entries have the sizes of this model")


# --- tensors and experts without data ---------------------------------------------------------------------------------
def _missing(
    report: Report, task: PlannedJob, file: GGUFFile, imatrix: Imatrix | None, choices: Sequence[TypeChoice]
) -> None:
    """List tensors to be quantized without importance data of their own, grouped by type and consequence."""
    blocks = head_blocks(file.tensors, file.metadata)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for c in weighted_choices(choices):
        free = task.target is not None and not is_fixed(c)
        refused = not free and refused_without_weights(c, task.recipe, imatrix)
        if imatrix is None and not refused:
            continue
        has = imatrix is not None and imatrix.find(c.source or c.name, c.shape) is not None
        if has and imatrix is not None and c.name not in imatrix.borrowed:
            continue
        what = "refused: this type needs data" if refused else "equal weights"
        if imatrix is not None and c.name in imatrix.borrowed:
            what = f"weights of block {imatrix.borrowed[c.name].split('.')[1]}"
        kind = why_missing(c.name, file.tensors, blocks)
        groups.setdefault((kind, "by the target" if free else TYPES[c.new].name, what), []).append(c.name)
    rows: list[tuple[str, ...]] = [
        (p, t, kind, what) for (kind, t, what), names in groups.items() for p in name_patterns(names)
    ]
    n_refused = sum(len(names) for (_, _, what), names in groups.items() if what.startswith("refused"))
    if n_refused:
        way = "give --imatrix FILE" if imatrix is None else "choose other types for them with --custom-q"
        report.add("data", FAIL, f"{n_refused} tensors would get a type that needs importance data; {way}")
    if imatrix is None:
        report.add("data", NOTE, "no importance matrix: the columns of all tensors count the same")
    else:
        n, total = sum(map(len, groups.values())), len(weighted_choices(choices))
        text = f"{total - n} of {total} tensors to be quantized have importance data"
        report.add("data", NOTE if n else OK, text + (", the others are listed below" if n else ""))
    if rows:
        report.tables.append(("tensors without importance data", ("tensors", "type", "why", "result"), rows))


def _experts(report: Report, data: Sequence[ExpertData]) -> None:
    """List experts with few or no rows, one table row per kind of tensor."""
    if not data:
        return
    kinds: dict[str, list[ExpertData]] = {}
    for d in data:
        kinds.setdefault(d.name.rpartition(".weight")[0].rpartition(".")[2], []).append(d)
    rows: list[tuple[str, ...]] = []
    for found in kinds.values():
        scarce = [d for d in found if d.n_empty or d.n_few]
        if not scarce:
            continue
        known = [d for d in scarce if d.least is not None and d.median is not None]
        least = f"{min(d.least for d in known if d.least is not None):.0f}" if known else "unknown"
        median = f"{min(d.median for d in known if d.median is not None):.0f}" if known else "unknown"
        total, empty, few = (sum(getattr(d, f) for d in scarce) for f in ("n_experts", "n_empty", "n_few"))
        patterns = ", ".join(name_patterns(d.name for d in scarce))
        rows.append((patterns, str(total), str(empty), str(few) if known else "unknown", least, median))
    if not rows:
        report.add("experts", OK, f"all experts of {len(data)} tensors have data")
        return
    total, empty, few = (sum(getattr(d, f) for d in data) for f in ("n_experts", "n_empty", "n_few"))
    text = f"of {total} experts {empty} have no data and {few} fewer than {FEW_ROWS} rows (listed below)"
    report.add("experts", NOTE, text)
    header = ("tensors", "experts", "no data", "few rows", "least rows", "least median")
    report.tables.append(("experts that are drawn towards the mean of their layer", header, rows))


# --- resources --------------------------------------------------------------------------------------------------------
def _room(report: Report, task: PlannedJob, file: GGUFFile, choices: Sequence[TypeChoice]) -> None:
    """Check the free disk space for the result, less parts that are there already."""

    def room() -> str:
        if not choices:
            return ""
        job = make_job(file, task.output, choices, {}, task.options)
        parts = [p for p in output_parts(job) if not (job.skip_existing and part_is_done(p))]
        need = sum(p.n_bytes for p in parts)
        if task.target is not None:
            need = budget_bytes(task.target, choices)
        folder = existing_folder(Path(task.output))
        free = check_room(folder, need)
        return f"{shown_size(need)} to write, {shown_size(free)} are free"

    report.attempt("disk", room)


def _memory(
    report: Report,
    task: PlannedJob,
    imatrix: Imatrix | None,
    covariance: Covariance | None,
    choices: Sequence[TypeChoice],
    available: int | None,
) -> None:
    """Compare a rough upper bound of the RAM of the run with what is free."""
    need = _BASE_RAM + max(1, task.options.n_threads) * _RAM_PER_THREAD
    if imatrix is not None:
        sizes = {id(e): e.sums.nbytes for e in imatrix.entries.values()}
        need += sum(sizes.values()) + 6 * max(sizes.values(), default=0)  # all of it, and weights of a tensor in work
    if covariance is not None:
        widths = [c.shape[0] for c in choices if c.changes and supports(c.new) and covariance.find(c.name) is not None]
        need += _RAM_PER_MOMENT * max(widths, default=0) ** 2
    text = f"about {need / 2**30:.2f} GiB needed"
    if available is None:
        report.add("memory", NOTE, f"{text}, the system does not say how much is free")
        return
    text += f", {available / 2**30:.2f} GiB are available"
    report.add("memory", OK if need <= available else FAIL, text if need <= available else f"{text}; use fewer threads")


def _some(names: Sequence[str]) -> str:
    patterns = name_patterns(names)
    return ", ".join(patterns[:_MOST_NAMED]) + (", ..." if len(patterns) > _MOST_NAMED else "")
