"""Convert a checkpoint to a model file: make keys and tensors, check them against the model code, plan the writing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.convert.archs import architecture_of
from ikcli.convert.archs.drafts import check_head
from ikcli.convert.build import Architecture, Build, convert_tensors
from ikcli.convert.config import Config
from ikcli.convert.file import CheckpointFile, checkpoint_file
from ikcli.convert.json_files import read_object
from ikcli.convert.naming import Description, describe
from ikcli.convert.quantized import dequantized
from ikcli.convert.rerank import add_ranking, ranks
from ikcli.convert.rope import check_factors
from ikcli.convert.sentence import Sentence
from ikcli.convert.source import SafetensorsSource
from ikcli.convert.vocab import read_vocabulary
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.heads import Heads
from ikcli.gguf.overrides import apply_overrides
from ikcli.gguf.writer import GGUFWriter, NewTensor, plan_splits
from ikcli.models import HParams, check_tensors, find
from ikcli.models.heads import external
from ikcli.quant.output_check import check_output
from ikcli.quant.quantizer import QUANTIZATION_VERSION, output_metadata
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions, ToolPlan, plan_of

if TYPE_CHECKING:
    from ikcli.quant.target import TargetOptions

_UNREAD = r"\.indexer\.|^rope_f|_(k|v|kv)_b\.weight$|_gate_up_exps\.weight$|^output\.weight$|^cls\.|^dense_"
"""Tensors that are read elsewhere in ik, or kept for other programs."""
AUTO = {GGMLType.BF16: 32, GGMLType.F16: 1, GGMLType.F32: 1}  # file types; float32 checkpoints become f16
_FILE_TYPES = {GGMLType.MXFP4: 38, GGMLType.NVFP4: 39, GGMLType.Q4_0: 2}


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options for reading and describing a checkpoint."""

    model_name: str | None = None
    metadata: Path | None = None
    pre: str | None = None
    ignored_keys: tuple[str, ...] = ()
    keep: frozenset[str] = frozenset()  # keep weights that are blocks of these types
    heads: Heads = Heads.KEPT  # layers that predict further tokens
    target: Path | None = None  # the checkpoint that a head drafts for


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint as the model file it would become, and the tensors that were left out."""

    file: CheckpointFile
    description: Description
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def kept_type(self) -> GGMLType | None:
        """Return the type of the first weight that is kept as blocks."""
        return next((t.type for t in self.file.tensors.values() if t.type in _FILE_TYPES), None)

    @property
    def auto_type(self) -> int:
        """Return the file type of the first matrix that is not computed, which would make it float32."""
        kept = self.kept_type
        if kept is not None:
            return _FILE_TYPES[kept]
        types = [t.type for t in self.file.tensors.values() if len(t.shape) > 1]
        return AUTO[next((t for t in types if t != GGMLType.F32), GGMLType.F32)]


def open_checkpoint(directory: Path, options: CheckpointOptions | None = None) -> OpenCheckpoint:
    """Open a checkpoint without reading its data; errors name the key or tensor that is not understood."""
    options = options or CheckpointOptions()
    config = Config(directory)
    architecture = architecture_of(config)
    sentence = Sentence.of(directory)
    files = SafetensorsSource(directory, modules=sentence.dense)
    source = dequantized(files, _with_modelopt(directory, config.raw))
    target = _target(directory, architecture, options.target)
    m = Build(config, source, architecture.name, keep=options.keep, heads=options.heads, target=target)
    architecture.keys(m)
    convert_tensors(m, architecture)
    check_factors(m)
    m.notes += sentence.notes
    strange = [key for key in config.not_understood(architecture.harmless) if key not in options.ignored_keys]
    if strange:
        value = config.values[strange[0]]
        raise UnsupportedError(
            f"{config.path}: key {strange[0]} ({value!r}) is not understood for {architecture.name}"
            + (f", and so are {', '.join(strange[1:])}" if strange[1:] else "")
            + "; if it does not change the result, --ignore-config-key "
            + ",".join(strange)
        )
    description = describe(
        directory, [(t.name, t.shape) for t in m.tensors.values()], options.model_name, options.metadata
    )
    if target is None:
        vocabulary = read_vocabulary(directory, config.raw, m.arch, options.pre)
    else:
        vocabulary = read_vocabulary(target.path.parent, target.raw, architecture_of(target).name, options.pre)
    if ranks(m, directory):
        add_ranking(m, directory, vocabulary)
    elif sentence.pooling is not None:
        m.key("pooling_type", sentence.pooling)
    keys = {"general.architecture": m.arch, "general.type": "model", **description.keys}
    # in their usual place; the file type is known when the file is written
    written = {"general.file_type": 0, "general.quantization_version": QUANTIZATION_VERSION}
    file = checkpoint_file(files.paths, source, m.tensors, keys | m.metadata | written | vocabulary)
    _check_heads(m)
    if target is not None:
        check_head(file, target)
    elif options.heads is not Heads.ALONE and m.arch not in external.MODULES:  # heads are checked beside their model
        _check(file, directory)
    return OpenCheckpoint(file, description, tuple(m.dropped), tuple(m.notes))


def _with_modelopt(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with ModelOpt's settings, which older checkpoints have in a file of their own."""
    found = None if config.get("quantization_config") else read_object(directory / "hf_quant_config.json")
    inner = None if found is None else found.get("quantization")
    if not isinstance(inner, dict) or not inner.get("quant_algo"):
        return config
    return config | {"quantization_config": {"quant_method": "modelopt"} | inner}


def _target(directory: Path, architecture: Architecture, target: Path | None) -> Config | None:
    """Return config.json of the model that a head drafts for, or None for other checkpoints."""
    if architecture.needs_target:
        if target is None:
            raise UsageError(
                f"{directory} holds a head that drafts for another model ({architecture.name}): name the directory of "
                "that model, which has the vocabulary, with --target-model-dir"
            )
        return Config(target)
    if target is not None:
        raise UsageError(
            f"--target-model-dir is for heads (EAGLE-3, DFlash, DSpark), and {directory} holds a model "
            f"({architecture.name})"
        )
    return None


def _check(file: CheckpointFile, directory: Path) -> None:
    """Raise a FormatError for a tensor that is missing, has an unexpected shape, or would never be read."""
    hp = HParams.from_gguf(file.metadata, file.tensors, str(directory))
    specs = find(hp.arch).tensor_shapes(hp)
    check_tensors(specs, file.tensors, str(directory))
    for name in file.tensors:
        block = re.match(r"blk\.(\d+)\.", name)
        further = block is not None and int(block[1]) >= hp.n_layer
        factor = name.endswith((".scale", ".input_scale")) and f"{name.rpartition('.')[0]}.weight" in specs
        if name not in specs and not further and not factor and not re.search(_UNREAD, name):
            raise UnsupportedError(f"{directory}: tensor {name} has no use in architecture {hp.arch}")


def _check_heads(m: Build) -> None:
    """Raise a FormatError unless each layer for further tokens has the tensors that make it one."""
    for il in range(m.n_layer, m.n_layer + m.n_further):
        for part in ("eh_proj", "enorm", "hnorm"):
            if f"blk.{il}.nextn.{part}.weight" not in m.tensors:
                raise FormatError(
                    f"{m.config.path.parent}: layer {il}, which predicts further tokens (MTP), has no {part}; "
                    "--no-mtp converts the model without it"
                )


def plan_convert(
    checkpoint: OpenCheckpoint,
    output: Path,
    recipe: RecipeOptions,
    options: ToolOptions,
    target: TargetOptions | None = None,
    max_tensors: int = 0,
    max_bytes: int = 0,
    advance: Callable[[float], None] = lambda n_bytes: None,
) -> ToolPlan:
    """Choose the types of all tensors, as `ik quantize` does for a file in the checkpoint's types, and plan the job."""
    file = checkpoint.file

    def opened() -> CheckpointFile:
        apply_overrides(file.metadata, file.value_types, file.item_types, options.overrides, str(file.paths[0]))
        return file

    plan = plan_of(opened, str(output), recipe, options, target, advance)
    if max_tensors or max_bytes:
        specs = [NewTensor(c.name, c.shape, c.new) for c in plan.job.choices]
        splits = plan_splits(specs, max_tensors, max_bytes)
        plan = replace(plan, job=replace(plan.job, splits=tuple(splits)))
    return plan


def write_vocabulary(checkpoint: OpenCheckpoint, output: Path, overrides: Sequence[str] = ()) -> Path:
    """Write a file with all keys and no tensors."""
    file = checkpoint.file
    apply_overrides(file.metadata, file.value_types, file.item_types, overrides, str(file.paths[0]))
    check_output([output], file.paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in output_metadata(file, None).items() if key != "general.file_type"}
    with GGUFWriter(output, keys, []):
        pass
    return output
