"""Prepare the jobs of `ik quantize` and `ik repack`: open the model, choose types, check them, build the job.

Everything here happens before a weight is read; `quantizer.run` does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.gguf.constants import FILE_TYPE_GUESSED, FILE_TYPES, GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo, open_gguf
from ikcli.gguf.types import TYPES
from ikcli.gguf.values import Typed
from ikcli.quant.covariance_file import Covariance, open_covariance
from ikcli.quant.custom_rules import CustomRuleUse, check_uses, parse_custom_rules, rule_uses
from ikcli.quant.encoders import EncodeOptions
from ikcli.quant.encoding import Encoding
from ikcli.quant.feedback import supports
from ikcli.quant.imatrix_file import Imatrix, read_imatrix
from ikcli.quant.imatrix_use import ExpertData, borrowed_lines, check_sizes, expert_data, with_borrowed
from ikcli.quant.job import QuantizeJob
from ikcli.quant.quantizer import check_requantize, output_metadata
from ikcli.quant.recipes import EXTRA_OUTPUT, RecipeOptions, TypeChoice, check_file_type, choose_types
from ikcli.rules import compile_pattern, no_match, pattern_notes, pattern_warnings, unmatched

if TYPE_CHECKING:
    from ikcli.quant.target import TargetOptions, TargetPlan


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Settings that do not choose types."""

    imatrix: str | None = None
    covariance: str | None = None
    assumed: Imatrix | None = None  # in place of data that a dry run does not make
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    hide_imatrix: bool = False
    overrides: tuple[str, ...] = ()
    n_threads: int = 1
    keep_split: bool = False
    partial_requant: bool = False
    allow_requantize: bool = False
    force: bool = False
    strict: bool = False  # rules that match nothing are errors
    encode: EncodeOptions = field(default_factory=EncodeOptions)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A job ready to run, and the notes that the user gets before it does."""

    job: QuantizeJob
    notes: tuple[str, ...] = ()
    uses: tuple[CustomRuleUse, ...] = ()
    target: TargetPlan | None = None
    experts: tuple[ExpertData, ...] = ()

    @property
    def old_bytes(self) -> int:
        return self.job.file.n_bytes

    @property
    def new_bytes(self) -> int:
        return sum(c.n_bytes for c in self.job.choices)

    @property
    def bpw(self) -> float:
        """Return the bits per weight of the result, all tensors included."""
        return 8 * self.new_bytes / self.job.file.n_elements

    @property
    def n_fallback(self) -> int:
        return sum(c.fallback for c in self.job.choices)


def parse_file_type(text: str) -> tuple[int, str] | None:
    """Return number and name of a TYPE given by name in any case or by number; None if it is unknown. COPY is 0."""
    name = text.strip().upper()
    if name == "COPY":
        return 0, name
    for f in FILE_TYPES.values():
        if name in f.names or (f.names and name == str(f.number)):
            return f.number, name if name in f.names else f.names[0]
    return None


def file_type_names() -> list[str]:
    """Return all names of file types in the order of their numbers, then COPY."""
    return [name for f in FILE_TYPES.values() for name in f.names] + ["COPY"]


def plan_quantize(
    path: str,
    output: str,
    recipe: RecipeOptions,
    options: ToolOptions,
    target: TargetOptions | None = None,
    advance: Callable[[float], None] = lambda n_bytes: None,
) -> ToolPlan:
    """Choose the types of all tensors of the model at `path` and prepare the job that writes `output`.

    With a `target`, types that nothing else decides are chosen for its size; `advance` gets the bytes measured.
    """
    return plan_of(lambda: open_gguf(path, options.overrides), output, recipe, options, target, advance)


def plan_of(
    opened: Callable[[], GGUFFile],
    output: str,
    recipe: RecipeOptions,
    options: ToolOptions,
    target: TargetOptions | None = None,
    advance: Callable[[float], None] = lambda n_bytes: None,
) -> ToolPlan:
    """Do `plan_quantize` for a model that `opened` returns."""
    covariance = open_covariance(options.covariance) if options.covariance is not None else None
    given = read_weights(options, covariance)
    weight_notes = check_weight_rules(given, options)
    imatrix = _chosen(given, options)
    check_file_type(recipe, imatrix)
    file = opened()
    if imatrix is not None:
        imatrix = with_borrowed(imatrix, file.tensors, file.metadata)
    choices = choose_types(list(file.tensors.values()), file.metadata, recipe, imatrix)
    found = None
    _check_data(imatrix, covariance, choices)
    if target is not None:
        _check_before_measuring(recipe, choices, list(file.tensors), options)
        encoding = Encoding(imatrix, covariance, options.encode)
        recipe, choices, found = _choose_for_target(file, recipe, choices, target, options, encoding, advance)
    uses = rule_uses(recipe.custom, choices) if recipe.uses_rules else []
    notes = weight_notes + check_uses(uses, list(file.tensors), options.strict)
    if recipe.custom and not recipe.uses_rules:
        because = "--pure" if recipe.pure else FILE_TYPES[recipe.file_type].names[0] if not recipe.copy else "COPY"
        notes.append(f"--custom-q has no effect together with {because}")
    if recipe.extra_output_type is not None and not any(c.name == EXTRA_OUTPUT for c in choices):
        notes.append("--extra-output-tensor: no copy is written, it would not be smaller than the original")
    notes += _imatrix_notes(choices)
    if imatrix is not None:
        notes += borrowed_lines(imatrix, choices, file.metadata)
    file_type = _input_file_type(file) if recipe.copy else recipe.file_type
    metadata = output_metadata(file, file_type, imatrix, options.hide_imatrix)
    experts = expert_data(imatrix, choices) if imatrix is not None else []
    job = make_job(file, output, choices, metadata, options, imatrix, covariance)
    return ToolPlan(job, tuple(notes), tuple(uses), found, tuple(experts))


def _check_data(imatrix: Imatrix | None, covariance: Covariance | None, choices: Sequence[TypeChoice]) -> None:
    """Raise FormatError, before anything is read or measured, if importance files belong to another model."""
    if imatrix is not None:
        check_sizes(imatrix, choices)
    for c in choices if covariance is not None else ():
        if c.changes and covariance is not None and supports(c.new):
            covariance.check_size(c.source or c.name, c.shape)


def _check_before_measuring(
    recipe: RecipeOptions, choices: Sequence[TypeChoice], names: Sequence[str], options: ToolOptions
) -> None:
    """Raise UsageError for anything that the run would refuse after its types were measured."""
    if recipe.uses_rules:
        check_uses(rule_uses(recipe.custom, choices), names, options.strict)
    free = [c for c in choices if not is_fixed(c)]
    check_requantize(free, options.allow_requantize)


def is_fixed(c: TypeChoice) -> bool:
    """Return whether a rule or an option decided, so that no type is chosen for a target size."""
    return c.rule is not None or bool(c.source) or c.reason.startswith(("kept", "--"))


def _choose_for_target(
    file: GGUFFile,
    recipe: RecipeOptions,
    choices: Sequence[TypeChoice],
    target: TargetOptions,
    options: ToolOptions,
    encoding: Encoding,
    advance: Callable[[float], None],
) -> tuple[RecipeOptions, list[TypeChoice], TargetPlan]:
    """Choose types for the size of `target`; without a TYPE the file type is the one with the most bytes."""
    from ikcli.quant.target import plan_target
    from ikcli.quant.target_report import nearest_file_type, recipe_rules

    found = plan_target(file, choices, is_fixed, target, encoding, n_threads=options.n_threads, advance=advance)
    if not target.keeps_file_type:
        sizes = {c.name: file.tensors[c.name].n_elements for c in choices if c.name in found.types}
        recipe = replace(recipe, file_type=nearest_file_type(found.types, sizes))
    rules = (*recipe.custom, *parse_custom_rules(recipe_rules(found.types)))
    made = choose_types(list(file.tensors.values()), file.metadata, replace(recipe, custom=rules), encoding.imatrix)
    mine = len(recipe.custom)
    for i, c in enumerate(made):
        if c.rule is not None and c.rule >= mine:
            made[i] = replace(c, rule=None, reason="target")
    return recipe, made, found


def load_imatrix(options: ToolOptions, covariance: Covariance | None) -> Imatrix | None:
    """Return the importance matrix without the entries that options exclude; None without any."""
    return _chosen(read_weights(options, covariance), options)


def _chosen(given: Imatrix | None, options: ToolOptions) -> Imatrix | None:
    found = given.filtered(options.include_weights, options.exclude_weights) if given is not None else None
    return found if found is not None and found.entries else None


def read_weights(options: ToolOptions, covariance: Covariance | None) -> Imatrix | None:
    """Return the importance matrix: that of the file, else the mean squares among the second moments."""
    if options.imatrix is not None:
        return read_imatrix(options.imatrix)
    return covariance.imatrix() if covariance is not None else options.assumed


def check_weight_rules(given: Imatrix | None, options: ToolOptions) -> list[str]:
    """Return notes about --include-weights and --exclude-weights that match the name of no entry."""
    notes: list[str] = []
    both = {"--include-weights": options.include_weights, "--exclude-weights": options.exclude_weights}
    names = list(given.entries) if given is not None else []
    for option, texts in both.items():
        if texts and given is None:
            notes += unmatched(["has no effect without importance weights (--imatrix)"], option, options.strict)
            continue
        empty = [text for text in texts if not any(text in name for name in names)]
        problems = [f'"{text}" {no_match(re.escape(text), names, "entry of the importance matrix")}' for text in empty]
        notes += unmatched(problems, option, options.strict)
    return notes


def encoding_of(file: GGUFFile, options: ToolOptions) -> Encoding:
    """Return how the tensors of a model are encoded with these options."""
    covariance = open_covariance(options.covariance) if options.covariance is not None else None
    imatrix = load_imatrix(options, covariance)
    if imatrix is not None:
        imatrix = with_borrowed(imatrix, file.tensors, file.metadata)
    return Encoding(imatrix, covariance, options.encode)


def _imatrix_notes(choices: Sequence[TypeChoice]) -> list[str]:
    missing = [c.name for c in choices if c.reason == "not in the importance matrix"]
    if not missing:
        return []
    return [
        f"the importance matrix was made without MLA: {len(missing)} attn_k_b and attn_v_b tensors are not in it and "
        "become q8_0 (a --custom-q rule for them is followed)"
    ]


def _input_file_type(file: GGUFFile) -> int | None:
    value = file.get("general.file_type")
    return int(value) & ~FILE_TYPE_GUESSED if isinstance(value, int) else None


def make_job(
    file: GGUFFile,
    output: str,
    choices: Sequence[TypeChoice],
    metadata: dict[str, Typed],
    options: ToolOptions,
    imatrix: Imatrix | None = None,
    covariance: Covariance | None = None,
) -> QuantizeJob:
    """Create the job that writes `choices` with these options."""
    return QuantizeJob(
        file=file,
        output=Path(output),
        choices=choices,
        metadata=metadata,
        imatrix=imatrix,
        covariance=covariance,
        n_threads=options.n_threads,
        encode_options=options.encode,
        keep_split=options.keep_split,
        skip_existing=options.partial_requant,
        allow_requantize=options.allow_requantize,
        force=options.force,
    )


def plan_repack(path: str, output: str, patterns: Sequence[str], unrepack: bool, options: ToolOptions) -> ToolPlan:
    """Plan to regroup every tensor that has a twin and matches one of `patterns` (none: all) and to copy the rest.

    With `strict`, raises UsageError if a pattern matches no tensor.
    """
    return plan_repack_of(open_gguf(path, options.overrides), output, patterns, unrepack, options)


def plan_repack_of(
    file: GGUFFile, output: str, patterns: Sequence[str], unrepack: bool, options: ToolOptions
) -> ToolPlan:
    """Do `plan_repack` for an open model."""
    from ikcli.quant.repack import repacked_file_type

    tensors = list(file.tensors.values())
    notes = _pattern_notes(patterns, list(file.tensors), options.strict)
    choices = [_repacked(t, patterns, unrepack) for t in tensors]
    old = _input_file_type(file)
    changed = any(c.changes for c in choices)
    file_type = old if old is None or not changed else _unpacked_file_type(old) if unrepack else repacked_file_type(old)
    lossy = [c for c in choices if c.old == GGMLType.F16 and c.changes]
    if lossy:
        notes.append(f"{len(lossy)} f16 tensors become bf16_r16, which has fewer mantissa bits")
    return ToolPlan(make_job(file, output, choices, output_metadata(file, file_type), options), tuple(notes))


def _pattern_notes(patterns: Sequence[str], names: Sequence[str], strict: bool) -> list[str]:
    option = "--repack-pattern"
    notes: list[str] = []
    for pattern in patterns:
        search = compile_pattern(pattern, option, pattern).search
        matched = [name for name in names if search(name)]
        notes += pattern_warnings(pattern, pattern, matched)
    return notes + pattern_notes(patterns, option, names, strict)


def _repacked(t: TensorInfo, patterns: Sequence[str], unrepack: bool) -> TypeChoice:
    if patterns and not any(re.search(p, t.name) for p in patterns):
        return TypeChoice(t.name, t.shape, t.type, t.type, "kept: no pattern matches")
    from ikcli.quant.repack import can_repack, repacked_type

    new: GGMLType | None
    if unrepack:
        new = TYPES[t.type].base
    else:
        # F16 loses bits, so it is converted only when asked for by name
        lossy = bool(patterns)
        new = repacked_type(t.type, lossy=lossy) if can_repack(t.type, t.shape, t.name, lossy=lossy) else None
    if new is None:
        return TypeChoice(t.name, t.shape, t.type, t.type, "kept")
    return TypeChoice(t.name, t.shape, t.type, new, "unrepack" if unrepack else "repack")


def _unpacked_file_type(number: int) -> int:
    """Return the plain file type; of several that repack alike, the one without a mix (Q4_K_S for Q4_K_R4)."""
    from ikcli.quant.repack import repacked_file_type

    return next((n for n in FILE_TYPES if n != number and repacked_file_type(n) == number), number)
