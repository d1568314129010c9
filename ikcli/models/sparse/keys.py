"""Read the keys of sparse and compressed attention: indexers, entries of several positions, streams of a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ikcli.models.keys import HasShape, Keys, by_layer, short
from ikcli.models.recurrent.states import MAX_TAPS
from ikcli.models.rope import RopeParams
from ikcli.models.sparse.ngrams import read_ngrams

OVERLAPPING = 4  # positions of entries that overlap, and of which an indexer chooses


def read_sparse(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the attributes of architectures with an indexer, by field of `HParams`; tuples hold a value per layer."""
    if keys.arch in ("deepseek32", "dots3note", "glm-dsa"):
        return _indexer(keys, values, tensors)
    if keys.arch == "hy_v4":
        return _indexer(keys, values, tensors) | {
            "n_stream": keys.integer("hyper_connection.count", least=1, most=64),
            "stream_eps": keys.number("hyper_connection.epsilon"),
            "stream_most": keys.number("hyper_connection.magnitude", most=1e6),
        }
    if keys.arch == "minimax-m3":
        return _block_indexer(keys, values, tensors)
    if keys.arch == "openpangu":
        return _openpangu(keys, values, tensors)
    if keys.arch == "qwen4exp":
        return _qwen4exp(keys, values) | read_ngrams(keys, values, tensors)
    return _compressed(keys, values, tensors) if keys.arch == "deepseek4" else {}


def _indexer(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the numbers of the indexer; without its keys or tensors attention covers all positions."""
    n_layer, types = values["n_layer"], "attention.indexer.types"
    present = tuple(f"blk.{il}.indexer.proj.weight" in tensors for il in range(n_layer))
    if "attention.indexer.top_k" not in keys or not (types in keys or any(present)):
        return {}
    own = keys.items(types, n_layer) or present
    if keys.arch == "dots3note":  # layers with a window see all of it, the others choose for themselves
        windows = by_layer(values["window"], n_layer)
        if any(bool(window) == bool(owns) for window, owns in zip(windows, own, strict=True)):
            raise keys.fail(types, "gives layers with a window an indexer, or others none")
        if not any(own):
            return {}
    elif not own[0]:
        raise keys.fail(types, "gives the first layer no indexer of its own")
    if not values["q_lora_rank"]:
        raise keys.fail("attention.q_lora_rank", "is missing; an indexer needs low-rank queries")
    return {
        "index_top_k": keys.integer("attention.indexer.top_k", least=1),
        "index_n_head": keys.integer("attention.indexer.head_count", least=1, most=128),
        "index_head_dim": keys.integer(
            "attention.indexer.key_length", least=max(*by_layer(values["n_rot"], 1), 16), most=1024
        ),
        "index_owners": frozenset(il for il in range(n_layer) if own[il]),
    }


def _block_indexer(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the numbers of an indexer that chooses blocks of positions, of which there are `top_k`."""
    name = "attention.indexer.head_count"
    lead = keys.integer("leading_dense_block_count", 0)
    every = range(values["n_layer"])
    owners = frozenset(il for il in every if (f"blk.{il}.indexer.q_proj.weight" in tensors if tensors else il >= lead))
    if "attention.indexer.top_k" not in keys or not owners:
        return {}
    n_head, n_blocks = keys.integer(name, least=1), keys.integer("attention.indexer.top_k", least=1, most=1 << 20)
    if any(by_layer(values["n_head_kv"], values["n_layer"])[il] != n_head for il in owners):
        raise keys.fail(name, f"is {n_head}; supported is one index head per KV head")
    block = keys.integer("attention.indexer.block_size", least=1, most=1 << 20)
    return {
        "index_top_k": n_blocks * block,
        "index_n_head": n_head,
        "index_head_dim": keys.integer("attention.indexer.key_length", least=max(values["n_rot"], 16), most=1024),
        "index_owners": owners,
        "index_block": block,
        "index_local": keys.integer("attention.indexer.local_blocks", 1, least=1, most=n_blocks),
    }


def _compressed(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the numbers of DeepSeek V4: entries, their indexer, streams, groups of the output projection."""
    n_layer, d = values["n_layer"], values["head_dim_k"]
    ratios, window = _ratios(keys, values, tensors), keys.integer("attention.sliding_window", least=1, most=1 << 20)
    if max(r * (1 + (r == OVERLAPPING)) for r in ratios) > window:
        raise keys.fail("attention.sliding_window", f"is {window}, fewer positions than become one entry")
    if values["n_head_kv"] != 1 or d != values["head_dim_v"]:
        raise keys.fail("attention.head_count_kv", "and value_length should be those of one row, both key and value")
    n_head, first = values["n_head"], tensors.get("blk.0.attn_output_a.weight")
    groups = keys.integer("attention.output_group_count", n_head * d // first.shape[0] if first else None, least=1)
    if n_head % groups:
        raise keys.fail("attention.output_group_count", f"is {groups}, which does not divide {n_head} heads")
    rope: RopeParams = values["rope"]
    base = keys.number("attention.compress_rope_freq_base", rope.freq_base)
    if base <= 1:
        raise keys.fail("attention.compress_rope_freq_base", f"is {base}; it must be larger than 1")
    plain = replace(rope, scaling="none", factor=1.0, attn_factor=1.0)
    rotations = (plain, replace(rope, freq_base=base, attn_factor=1.0))
    n_rot, limits = values["n_rot"], "swiglu_clamp_shexp"
    owners = frozenset(il for il in range(n_layer) if ratios[il] == OVERLAPPING)
    found = {
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1),
        "window": window,
        "pool_ratio": ratios,
        "rope": tuple(rotations[r > 0] for r in ratios),
        "o_groups": groups,
        "o_lora_rank": keys.integer("attention.output_lora_rank", least=1),
        "n_stream": keys.integer("hyper_connection.count", least=1, most=64),
        "stream_iterations": keys.integer("hyper_connection.sinkhorn_iterations", 3, least=1, most=1000),
        "stream_eps": keys.number("hyper_connection.epsilon", values["eps"]),
        "n_hash": keys.integer("hash_layer_count", 0, most=n_layer),
        "expert_weights_norm": True,
    }
    if limits not in keys:  # shared experts have the limits of the others
        found["swiglu_limit_shared"] = values["swiglu_limit"]
    if not owners:
        return found
    return found | {
        "index_top_k": OVERLAPPING * keys.integer("attention.indexer.top_k", least=1, most=1 << 24),
        "index_n_head": keys.integer("attention.indexer.head_count", least=1, most=128),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=max(n_rot, 16), most=1024),
        "index_owners": owners,
    }


def _openpangu(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the numbers of openPangu: windows, streams, learned rows, and the indexer of layers without a window."""
    windows = _listed_windows(keys, values["n_layer"])
    names = (f"blk.{il}.attn_indexer_q_b.weight" for il in range(len(windows)))
    owners = frozenset(il for il, name in enumerate(names) if not windows[il] and (name in tensors or not tensors))
    found = {
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1),
        "window": windows,
        "n_stream": keys.integer("mhc_num_stream", least=1, most=64),
        "stream_iterations": keys.integer("mhc_recur_norm", least=1, most=1000),
        "n_sink": keys.integer("param_sink_number", least=1, most=1 << 16),
    }
    if not any(windows) or not owners or "attention.indexer.top_k" not in keys:
        return found  # as in the reference, layers of files without windows see all positions
    return found | {
        "index_top_k": keys.integer("attention.indexer.top_k", least=1),
        "index_n_head": keys.integer("attention.indexer.head_count", least=1, most=128),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=max(values["n_rot"], 16), most=1024),
        "index_owners": owners,
    }


def _qwen4exp(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of Qwen4-Exp: streams, and the indexer of layers with attention."""
    n_layer, name = values["n_layer"], "attention.compress_ratios"
    ratios = by_layer(keys.per_layer(name, 0, n_layer=n_layer), n_layer)
    recurrent = frozenset(values.get("recurrent_layers", ()))
    owners = frozenset(il for il, ratio in enumerate(ratios) if ratio and il not in recurrent)
    if any(ratios[il] == 1 or ratios[il] > MAX_TAPS for il in owners):
        raise keys.fail(name, f"is {max(ratios)}; an indexer has entries of 2 to {MAX_TAPS} positions")
    found = {
        "n_stream": keys.integer("hyper_connection.count", least=2, most=64),
        "stream_rank": keys.integer("hyper_connection.low_rank", least=1),
    }
    if not owners:
        return found
    return found | {
        "pool_ratio": tuple(ratio if il in owners else 0 for il, ratio in enumerate(ratios)),
        "index_top_k": keys.integer("attention.indexer.top_k", least=max(ratios), most=1 << 24),
        "index_n_head": keys.integer("attention.indexer.head_count", least=1, most=128),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=max(values["n_rot"], 16), most=1024),
        "index_owners": owners,
    }


def _listed_windows(keys: Keys, n_layer: int) -> tuple[int, ...]:
    """Return the windows of layers from a list of layers and one of their windows; 0: layers that are not listed."""
    layers = _whole_numbers(keys, "swa_layers")
    if "sliding_window_list" in keys:
        sizes = _whole_numbers(keys, "sliding_window_list")
    else:
        sizes = [keys.integer("attention.sliding_window")] * len(layers) if layers else []
    if len(sizes) != len(layers):
        raise keys.fail("sliding_window_list", f"has {len(sizes)} values for {len(layers)} layers")
    found = dict(zip(layers, sizes, strict=True))
    return tuple(found.get(il, 0) for il in range(n_layer))


def _whole_numbers(keys: Keys, key: str) -> list[int]:
    """Return a list of any length."""
    value: Any = keys.raw(key, [])
    numbers = [x for x in value if hasattr(value, "dtype") or isinstance(x, int)] if hasattr(value, "__len__") else []
    if not hasattr(value, "__len__") or len(numbers) < len(value) or any(x != int(x) & 0xFFFFFF for x in numbers):
        raise keys.fail(key, f"should be a list of whole numbers, but is {short(value)}")
    return [int(x) for x in numbers]


def _ratios(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> tuple[int, ...]:
    """Return how many positions become one entry in every layer, 0: layers without entries."""
    key, n_layer = "attention.compress_ratios", values["n_layer"]
    found = keys.items(key, n_layer)
    if found is None:
        if not tensors:
            raise keys.fail(key, "is missing")
        has = [any(f"blk.{il}.{x}_kv.weight" in tensors for x in ENTRY_NAMES["attn"]) for il in range(n_layer)]
        chosen = [f"blk.{il}.indexer.attn_q_b.weight" in tensors for il in range(n_layer)]
        return tuple(OVERLAPPING if c else 128 * h for c, h in zip(chosen, has, strict=True))
    ratios = by_layer(found, n_layer)
    if any(isinstance(r, bool) or not isinstance(r, int) or not (r == 0 or 1 < r <= 1 << 16) for r in ratios):
        raise keys.fail(key, "should be numbers of positions, 0 in layers without entries")
    return ratios


ENTRY_NAMES = {
    "attn": ("attn_compressor", "attn_compress"),
    "index": ("indexer_compressor", "indexer.compress"),
}
"""Names of the tensors of entries, without their endings; programs differ."""
