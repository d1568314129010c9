"""Choose the type of every tensor of a model: file type, its mix, custom rules, fallbacks, options for single tensors.

The order per tensor is: type of the file type; its mix (`recipe_rules`); first matching custom rule; fallback for rows
that do not fit; options that name one tensor; plain types where interleaved ones cannot be. The functions are pure and
use only names, shapes and metadata. Corresponds to src/llama-quantize.cpp of ik_llama.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.reader import TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import READ_BY_ROW, tensor_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.recipe_rules import (
    NEEDS_IMATRIX,
    OUTPUT,
    PER_LAYER_TOKEN_EMBD,
    PLANS,
    TOKEN_EMBD,
    Situation,
    TensorKind,
)

T = GGMLType
EXTRA_OUTPUT = "output_extra.weight"
_Q2_K_S = 21
# Options that decide about exactly one tensor, after everything else.
_TENSOR_FLAGS = {
    "token_embd.weight": ("token_embedding_type", "--token-embedding-type"),
    "per_layer_token_embd.weight": ("per_layer_token_embedding_type", "--per-layer-token-embedding-type"),
    "output.weight": ("output_tensor_type", "--output-tensor-type"),
}
_KEPT_PARTS = (
    "altup_",
    "laurel_",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "ssm_x.weight",
    "ssm_dt.weight",
    "attn_rel_b.weight",
    "_compressor_ape.weight",
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
    "mhc_phi.weight",
    "attn_qa_conv.weight",
    "attn_compresskv_conv.weight",
    "attn_o_conv.weight",
    "ffn_gate_tid2eid.weight",
)


@dataclass(frozen=True, slots=True)
class CustomRule:
    """One `RE=TYPE` pair of --custom-q."""

    pattern: str
    type: GGMLType
    text: str


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """The command line's choice of types; `file_type` is a `general.file_type` number with a name."""

    file_type: int
    copy: bool = False
    pure: bool = False
    leave_output_tensor: bool = False
    ignore_imatrix_rules: bool = False
    custom: tuple[CustomRule, ...] = ()
    extra_output_type: GGMLType | None = None
    output_tensor_type: GGMLType | None = None
    token_embedding_type: GGMLType | None = None
    per_layer_token_embedding_type: GGMLType | None = None
    ffn_gate_inp_type: GGMLType | None = None
    attn_q_type: GGMLType | None = None
    attn_k_type: GGMLType | None = None
    attn_v_type: GGMLType | None = None
    attn_qkv_type: GGMLType | None = None
    attn_output_type: GGMLType | None = None
    ffn_gate_type: GGMLType | None = None
    ffn_down_type: GGMLType | None = None
    ffn_up_type: GGMLType | None = None

    @property
    def default_type(self) -> GGMLType:
        return FILE_TYPES[self.file_type].type

    @property
    def uses_rules(self) -> bool:
        """Return whether mixes and custom rules apply (not for float types, copies and --pure)."""
        return not self.pure and not self.copy and TYPES[self.default_type].kind != "float"


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The fate of one tensor; `rule` is the index of the custom rule that decided, `source` the tensor to read."""

    name: str
    shape: tuple[int, ...]
    old: GGMLType
    new: GGMLType
    reason: str
    rule: int | None = None
    fallback: bool = False
    source: str = ""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the result."""
        return tensor_size(self.new, self.shape)

    @property
    def changes(self) -> bool:
        return self.old != self.new


@dataclass(slots=True)
class _Model:
    """Facts about the model and the running counters of the mix."""

    gqa: int
    n_expert: int
    n_layer: int
    n_attn_v: int
    has_output: bool
    has_imatrix: bool
    falcon: bool
    is_70b: bool
    large_vocab: bool
    keeps_attn_v: bool
    counts: Counter[str] = field(default_factory=Counter)

    def situation(self, shape: tuple[int, ...], type: GGMLType, i: int = 0, n: int = 0) -> Situation:
        return Situation(
            gqa=self.gqa,
            n_expert=self.n_expert,
            has_imatrix=self.has_imatrix,
            has_output=self.has_output,
            falcon=self.falcon,
            is_70b=self.is_70b,
            large_vocab=self.large_vocab,
            keeps_attn_v=self.keeps_attn_v,
            row_fits=shape[0] % 256 == 0,
            i=i,
            n=n,
            type=type,
        )


def choose_types(
    tensors: Sequence[TensorInfo],
    metadata: Mapping[str, Any],
    options: RecipeOptions,
    imatrix: Imatrix | None = None,
) -> list[TypeChoice]:
    """Choose the type of every tensor, in file order, with an extra output tensor after its original.

    Raises IkError if importance weights are needed and missing, UsageError if a type does not suit a tensor.
    """
    check_file_type(options, imatrix)
    model = _facts(tensors, metadata, imatrix)
    names = {t.name for t in tensors}
    doubled = next((n for n in ("output.weight", "token_embd.weight") if n in names), None)
    choices: list[TypeChoice] = []
    for t in tensors:
        choice = _choose(t, model, options, imatrix)
        _check_weights(choice, options, imatrix)
        choices.append(choice)
        if options.extra_output_type is not None and t.name == doubled:
            extra = _plain_where_needed(options.extra_output_type, EXTRA_OUTPUT, t.shape)
            if tensor_size(extra, t.shape) < t.n_bytes:
                choices.append(TypeChoice(EXTRA_OUTPUT, t.shape, t.type, extra, "--extra-output-tensor", source=t.name))
    return choices


def check_file_type(options: RecipeOptions, imatrix: Imatrix | None) -> None:
    """Raise IkError for the file types that are useless without an importance matrix."""
    if imatrix is None and options.file_type in NEEDS_IMATRIX and not (options.ignore_imatrix_rules or options.copy):
        raise IkError(
            f"Please do not use {FILE_TYPES[options.file_type].names[0]} quantization without an importance matrix; "
            "give one with --imatrix FILE, or --ignore-imatrix-rules if you know what you are doing"
        )


def _facts(tensors: Sequence[TensorInfo], metadata: Mapping[str, Any], imatrix: Imatrix | None) -> _Model:
    arch = metadata.get("general.architecture", "")

    def key(name: str, default: int = 0) -> int:
        value = metadata.get(f"{arch}.{name}", default)
        if isinstance(value, list | np.ndarray):
            value = value[0] if len(value) else default
        return int(value) if isinstance(value, int | float | np.number) else default

    n_head = key("attention.head_count")
    n_head_kv = key("attention.head_count_kv", n_head)
    if n_head_kv == 1 and any("attn_kv_a_mqa" in t.name for t in tensors):
        n_head_kv = n_head  # MLA files that store the cache as one head
    n_vocab = key("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    n_layer, n_embd = key("block_count"), key("embedding_length")
    is_70b = (arch in ("qwen2", "qwen2vl", "olmo", "deci") and n_layer == 80) or (
        arch == "llama" and n_layer == 80 and n_head != n_head_kv and key("expert_count") != 8
    )
    is_8b = (
        (arch == "llama" and key("expert_count") != 8 and n_layer in (32, 36))
        or (arch in ("qwen3", "qwen3vl") and n_layer == 36 and n_embd != 2560)
        or (arch == "cohere2" and n_layer == 32)
        or (arch == "mistral3" and n_layer == 34)
    )
    return _Model(
        gqa=n_head // n_head_kv if n_head_kv else 0,
        n_expert=key("expert_count"),
        n_layer=n_layer,
        n_attn_v=sum("attn_v.weight" in t.name or "attn_qkv.weight" in t.name for t in tensors),
        has_output=any(t.name == "output.weight" for t in tensors),
        has_imatrix=imatrix is not None,
        falcon=arch == "falcon",
        is_70b=is_70b,
        large_vocab=n_vocab >= 127999 and (is_8b or is_70b),
        keeps_attn_v=arch == "dflash-draft",
    )


def _kept_because(t: TensorInfo, options: RecipeOptions) -> str:
    """Explain why a tensor is copied as it is; empty if it may be quantized."""
    last = max((i for i, ne in enumerate(t.shape) if ne > 1), default=0)
    if options.copy:
        return "copy"
    if TYPES[t.type].kind == "integer":
        return "integers"
    if not t.name.endswith("weight"):
        return "not a weight"
    if last < 1:
        return "1-D"
    if "_norm.weight" in t.name:
        return "norm"
    if t.name == "output.weight" and options.leave_output_tensor:
        return "--leave-output-tensor"
    if "ffn_gate_inp.weight" in t.name and options.ffn_gate_inp_type is None:
        return "router"
    if t.name in ("position_embd.weight", "token_types.weight") or any(part in t.name for part in _KEPT_PARTS):
        return "small special tensor"
    return ""


def _choose(t: TensorInfo, model: _Model, options: RecipeOptions, imatrix: Imatrix | None) -> TypeChoice:
    kept = _kept_because(t, options)
    if kept:
        return TypeChoice(t.name, t.shape, t.type, t.type, f"kept: {kept}")
    new, reason, rule = options.default_type, "type", None
    if options.uses_rules:
        mixed = _mix(t, new, model, options)
        if mixed != new:
            new, reason = mixed, "mix"
        rule = next((i for i, r in enumerate(options.custom) if re.search(r.pattern, t.name)), None)
        if rule is not None:
            new, reason = options.custom[rule].type, f"rule {rule + 1}"
    fitting = _fit_rows(new, t)
    fallback = fitting != new
    if fallback:
        reason += f", fallback of {TYPES[new].name}"
        new = fitting
    flag = _tensor_flag(t.name, options)
    if flag is not None:
        new, reason, rule, fallback = flag[0], flag[1], None, False
        _check_rows(new, t, reason)
    plain = _plain_where_needed(new, t.name, t.shape)
    if plain != new:
        reason += f", not interleaved: {TYPES[new].name}"
        new = plain
    if rule is None and flag is None and _lacks_mla_weights(t, new, imatrix):
        new, reason, fallback = T.Q8_0, "not in the importance matrix", False
    return TypeChoice(t.name, t.shape, t.type, new, "same type" if new == t.type else reason, rule, fallback)


def _mix(t: TensorInfo, default: GGMLType, model: _Model, options: RecipeOptions) -> GGMLType:
    if t.name == "output.weight" or (t.name == "token_embd.weight" and not model.has_output):
        return _apply(OUTPUT, t, default, model, options)
    for part in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD):
        if t.name == part.names[0]:
            return _apply(part, t, default, model, options)
    group = next(g for g in PLANS if g.file_types is None or options.file_type in g.file_types)
    for part in group.parts:
        if model.n_expert >= part.min_experts and any(name in t.name for name in part.names):
            return _apply(part, t, default, model, options)
    return default


def _apply(part: TensorKind, t: TensorInfo, default: GGMLType, model: _Model, options: RecipeOptions) -> GGMLType:
    i, n = 0, 0
    if part.counts:
        i = model.counts[part.counts]
        n = model.n_attn_v if part.counts == "attn_v" else model.n_layer
        model.counts[part.counts] += 1
        block = re.match(r"blk\.(\d+)\.", t.name)
        if model.n_expert > 1 and part.counts != "attn_v" and part.by_block and block:
            i = int(block[1])
    flag = getattr(options, part.flag) if part.flag else None
    if flag is not None:
        chosen: GGMLType = flag
        return chosen
    s = model.situation(t.shape, default, i, n)
    found = next((rule for rule in part.rules if rule.applies(options.file_type, s)), None)
    return found.result(s) if found is not None else default


def _fit_rows(type: GGMLType, t: TensorInfo) -> GGMLType:
    """Return the type, or its fallback when the rows are not a multiple of its blocks."""
    ne0 = t.shape[0]
    if TYPES[type].kind == "ternary" and ne0 % 64:
        raise UsageError(f"tensor {t.name} has rows of {ne0} elements; {TYPES[type].name} needs a multiple of 64")
    fallback = TYPES[type].fallback
    if ne0 % 256 and fallback is not None:
        type = fallback
    return type if ne0 % TYPES[type].block_size == 0 else T.F16


def _check_rows(type: GGMLType, t: TensorInfo, option: str) -> None:
    need = TYPES[type].block_size
    if t.shape[0] % need:
        raise UsageError(
            f"{option} {TYPES[type].name}: tensor {t.name} has rows of {t.shape[0]} elements, "
            f"{TYPES[type].name} needs a multiple of {need}; use q8_0 or f16 for it"
        )


def _tensor_flag(name: str, options: RecipeOptions) -> tuple[GGMLType, str] | None:
    if "ffn_gate_inp.weight" in name and options.ffn_gate_inp_type is not None:
        return options.ffn_gate_inp_type, "--ffn-gate-inp-type"
    field_name, option = _TENSOR_FLAGS.get(name, ("", ""))
    chosen = getattr(options, field_name) if field_name else None
    return None if chosen is None else (chosen, option)


def plain_twin(type: GGMLType) -> tuple[GGMLType, int]:
    """Return the fallback of an interleaved type where rows cannot be grouped, and its height; (type, 1) if plain."""
    fmt = TYPES[type]
    plain = fmt.base if fmt.stand_in is None else fmt.stand_in
    return (plain, fmt.rows) if plain is not None else (type, 1)


def _plain_where_needed(type: GGMLType, name: str, shape: tuple[int, ...]) -> GGMLType:
    """Avoid interleaved types for embeddings, which are read row by row, and for groups that straddle matrices."""
    plain, rows = plain_twin(type)
    n_rows = shape[1] if len(shape) > 1 else 1
    return plain if name.endswith(READ_BY_ROW) or n_rows % rows else type


def _lacks_mla_weights(t: TensorInfo, new: GGMLType, imatrix: Imatrix | None) -> bool:
    """Return whether a matrix made without MLA lacks this tensor (attn_k_b or attn_v_b)."""
    if imatrix is None or not t.name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        return False
    narrower = TYPES[new].is_quantized and TYPES[new].bpw < TYPES[T.Q8_0].bpw
    return narrower and t.shape[0] % 32 == 0 and imatrix.find(t.name, t.shape) is None


def refused_without_weights(choice: TypeChoice, options: RecipeOptions, imatrix: Imatrix | None) -> bool:
    """Return whether a very low-bit type is refused because the tensor has no importance weights."""
    needs = TYPES[choice.new].needs_imatrix or (choice.new == T.Q2_K and options.file_type == _Q2_K_S)
    exempt = choice.name in ("token_embd.weight", "output.weight") or options.ignore_imatrix_rules
    if not needs or exempt or not choice.changes:
        return False
    return imatrix is None or imatrix.find(choice.name, choice.shape) is None


def _check_weights(choice: TypeChoice, options: RecipeOptions, imatrix: Imatrix | None) -> None:
    """Raise IkError for a very low-bit tensor without importance weights."""
    if refused_without_weights(choice, options, imatrix):
        raise IkError(
            f"{TYPES[choice.new].name} for tensor {choice.name} needs importance weights, and "
            + ("the importance matrix has none for it" if imatrix is not None else "there is no --imatrix")
            + "; choose another type for it with --custom-q, or give --ignore-imatrix-rules"
        )
