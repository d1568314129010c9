"""Qwen4-Exp (Qwen3.8-Flash-Next): text part, without heads for further tokens."""

from __future__ import annotations

import math
import re

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.qwen import base_keys, sections
from ikcli.convert.archs.recurrent.qwen3_next import QWEN35, recurrent_sizes
from ikcli.convert.pieces import TensorRows
from ikcli.convert.rope import read_rope
from ikcli.errors import FormatError

_ATTENTION = ("full_attention", "indexed_attention", "qwen_sparse_attention")
_PART = re.compile(r"\.ngram_embedding\.shard_(\d+)\.weight$")
_MOST_PARTS = 4096
_MASK = (1 << 64) - 1
_NUMBERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _qwen4exp(m: b.Build) -> None:
    c = m.config
    base_keys(m, n_ff=False)
    sections(m)
    k.experts(m)
    m.key("expert_shared_feed_forward_length", c.integer("shared_expert_intermediate_size"))
    c.expect("norm_topk_prob", True)
    c.ignore("intermediate_size")  # of dense layers, of which there are none
    recurrent_sizes(m)
    m.key("rope.dimension_count", int(c.integer("head_dim") * read_rope(c).partial))
    c.expect("output_gate_type", "sigmoid")
    if "output_gate_type" not in c:
        raise c.fail("output_gate_type", "is missing; known is sigmoid")
    m.key("hyper_connection.count", c.integer("hc_count", least=2))
    m.key("hyper_connection.low_rank", c.integer("hc_lowrank", least=1))
    kinds = _kinds(m)
    recurrent = [kind == "linear_attention" for kind in kinds]
    m.key("attention.recurrent_layers", recurrent)
    m.key("attention.indexer.head_count", c.integer("indexer_n_heads", least=1))
    m.key("attention.indexer.key_length", c.integer("indexer_head_dim", least=1))
    m.key("attention.indexer.top_k", c.integer("indexer_budget", least=1))
    c.expect("indexer_kv_heads", 1)
    ratio = c.integer("indexer_compress_ratio", least=1)
    m.key("attention.compress_ratios", [0 if delta else ratio for delta in recurrent])
    _ngram_keys(m)


def _kinds(m: b.Build) -> list[str]:
    """Return what layers have in place of attention, or that they have it."""
    c = m.config
    interval = c.integer("full_attention_interval", default=4, least=1)
    kinds = c.items("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (i + 1) % interval else _ATTENTION[0] for i in range(m.n_layer)]
    if len(kinds) != m.n_layer or set(kinds) - {"linear_attention", *_ATTENTION}:
        raise c.refuse("layer_types", f"linear_attention or one of {', '.join(_ATTENTION)} for every layer")
    return kinds


def _ngram_keys(m: b.Build) -> None:
    """Write how n-grams become rows of the table, if a layer reads one."""
    c = m.config
    layers = c.items("ple_layer_ids") or []
    c.ignore("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "seed")
    c.ignore("make_ngram_vocab_size_divisible_by", "split_ngram_parts", "number_of_conv_states")
    if not layers:
        return
    if len(layers) > 1 or not isinstance(layers[0], int) or not 1 <= layers[0] <= m.n_layer:
        raise c.refuse("ple_layer_ids", "one layer, counted from 1")
    longest = c.integer("ngram_size", least=2)
    n_rows = (longest - 1) * c.integer("heads_per_ngram", least=1)
    end = c.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if isinstance(end, bool) or not isinstance(end, int):
        raise c.fail("eos_token_id", "is missing; n-grams begin behind it")
    m.key("ple.layers", [layers[0] - 1])
    m.key("ple.ngram_size", longest)
    m.key("ple.heads_per_ngram", c.integer("heads_per_ngram"))
    m.key("ple.conv_kernel", c.integer("ple_conv_kernel_size", least=2))
    m.key("ple.eos_token_id", end)
    image = c.raw.get("image_token_id")
    m.key("ple.image_token_id", image if isinstance(image, int) else None)
    width = c.integer("ple_embed_dim", default=c.integer("hidden_size"), least=1)
    m.key("embedding_length_per_layer_input", width // n_rows)
    names = ("layer_multipliers", "head_vocab_sizes", "head_offsets")
    for name, numbers in zip(names, _hashing(m, layers[0] - 1, longest, n_rows), strict=True):
        m.key(f"ple.{name}", np.array(numbers, np.uint64))


def _hashing(m: b.Build, layer: int, longest: int, n_rows: int) -> list[list[int]]:
    """Return multipliers, sizes and offsets: those of the checkpoint, else those that its code computes."""
    ends = {part: f"layers.{layer}.ple.ple_embedding.{part}" for part in _NUMBERS}
    names = [next((n for n in m.source.names if n.endswith(ends[part])), None) for part in _NUMBERS]
    if any(names):
        found = []
        for name, part, n in zip(names, _NUMBERS, (longest, n_rows, n_rows), strict=True):
            if name is None or m.source.dtype(name) != "I64" or m.source.shape(name) != (n,):
                raise FormatError(f"{m.config.path.parent}: {ends[part]} should be {n} whole numbers of 64 bits")
            found.append([int(x) for x in m.source.read(name).reshape(-1)])
        return found
    c = m.config
    half = max(1, ((1 << 63) - 1) // c.integer("vocab_size", least=1) // 2)
    seed = c.integer("seed", default=1234)
    multipliers = [2 * (_mixed(seed + 0x9E3779B97F4A7C15 * (i + 1)) % half) + 1 for i in range(longest)]
    sizes, size = list[int](), c.integer("ngram_vocab_size_base", least=1) - 1
    for _ in range(n_rows):
        size = _prime_after(size)
        sizes.append(size)
    return [multipliers, sizes, [sum(sizes[:i]) for i in range(n_rows)]]


def _mixed(value: int) -> int:
    """Return the next number of SplitMix64 behind a state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _prime_after(n: int) -> int:
    n += 1
    while n < 2 or any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def _table(m: b.Build, found: b.Found) -> None:
    """Add the table of n-grams, whole or in numbered parts, when its first part comes."""
    parts = {int(part[1]): name for name in m.source.names if (part := _PART.search(name))}
    if not parts:
        m.plain(found, "per_layer_token_embd.weight")
        return
    if int(_PART.search(found.name)[1]):  # type: ignore[index]
        return
    wanted = m.config.integer("split_ngram_parts", default=len(parts))
    if sorted(parts) != list(range(wanted)):
        raise FormatError(f"{m.config.path.parent}: the table of n-grams has {len(parts)} parts, not {wanted}")
    shapes = {i: m.source.shape(name) for i, name in parts.items()}
    pieces = [TensorRows(parts[i], shapes[i][0], shapes[i][1]) for i in range(wanted)]
    m.add("per_layer_token_embd.weight", pieces)


def _in_keys(m: b.Build, found: b.Found) -> None:
    """Place nothing: these numbers are in the metadata."""


def _index_parts(m: b.Build, n: int) -> tuple[int, int]:
    c = m.config
    queries = c.integer("indexer_n_heads", least=1) * c.integer("indexer_head_dim", least=1)
    return queries, n - queries


def _conv(m: b.Build, found: b.Found) -> None:
    m.plain(found, f"blk.{found.block}.ple_conv1d.weight", (found.shape[0], found.shape[-1]))


_GATES = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_NGRAMS = "layers.*.ple.ple_embedding."
QWEN4EXP: b.Table = {key: rule for key, rule in QWEN35.items() if ".linear_attn." in key or ".self_attn." in key} | {
    f"{old}.{part}": b.to(f"{new}_{name}", **({"value": b.plus_one} if name == "norm" else {}))
    for old, new in (
        ("layers.*.attn_hyper_connection", "blk.*.hc_attn"),
        ("layers.*.mlp_hyper_connection", "blk.*.hc_ffn"),
        ("hyper_connection_mixer", "output_hc"),
    )
    for part, name in _GATES.items()
} | {
    "layers.*.self_attn.indexer.index_qk_proj": b.split(
        "blk.*.indexer.q_proj", "blk.*.indexer.k_proj", at=_index_parts
    ),
    "layers.*.self_attn.indexer.q_layernorm": b.to("blk.*.indexer.q_norm", value=b.plus_one),
    "layers.*.self_attn.indexer.k_layernorm": b.to("blk.*.indexer.k_norm", value=b.plus_one),
    "layers.*.ple.key_proj": "blk.*.ple_key",
    "layers.*.ple.value_proj": "blk.*.ple_value",
    **{f"layers.*.ple.norm_{x}": b.to(f"blk.*.ple_norm_{x}", value=b.plus_one) for x in ("key", "query", "conv")},
    "layers.*.ple.conv1d": _conv,
    **{f"{_NGRAMS}{part}": _in_keys for part in _NUMBERS},
    f"{_NGRAMS}ngram_embedding": _table,
    **{f"{_NGRAMS}ngram_embedding.shard_{i}": _table for i in range(_MOST_PARTS)},
}  # fmt: skip
# Heads for further tokens (MTP) are left out.
_HARMLESS = frozenset({"mtp_use_dedicated_embeddings", "attn_output_gate", "mamba_ssm_dtype", "mtp"})

ARCHITECTURES = (
    b.Architecture(
        "qwen4exp", ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), _qwen4exp, QWEN4EXP, k.tied,
        r"(^|\.)visual\.|(^|\.)mtp\.", _HARMLESS | {"mtp_num_hidden_layers"}, further=False, names="qwen35moe",
    ),
)  # fmt: skip
