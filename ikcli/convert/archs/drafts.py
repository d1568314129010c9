"""Heads that draft for another model: EAGLE-3 as llama.cpp has them, DFlash and DSpark as ik_llama.cpp has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.config import Config
from ikcli.convert.file import CheckpointFile
from ikcli.convert.rope import read_rope
from ikcli.errors import FormatError, UnsupportedError
from ikcli.models import HParams, check_tensors
from ikcli.models.heads import external

EAGLE3 = "LlamaForCausalLMEagle3"
_NAMED = {
    "hidden_norm": "attn_norm_2", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _target(m: b.Build) -> Config:
    assert m.target is not None  # see Architecture.needs_target
    return m.target


def _width(target: Config) -> int:
    return target.integer("hidden_size", "n_embd", "d_model", "backbone_hidden_size", least=1)


def _n_layer(target: Config) -> int:
    return target.integer("num_hidden_layers", "n_layers", "n_layer", "num_layers", least=1)


# --- EAGLE-3 --------------------------------------------------------------------------------------------------------
def _eagle3(m: b.Build) -> None:
    """Write the keys of a Llama layer, and which layers of the model the head reads, named by their input."""
    c, target = m.config, _target(m)
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    width = k.head_dim(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("rope.dimension_count", width)
    k.no_window(m)
    for key in ("attention_bias", "mlp_bias"):
        c.expect(key, False)
    c.ignore("draft_vocab_size", "tie_word_embeddings", "eagle_config")
    n_layer = _n_layer(target)
    eagle = c.raw.get("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    given = c.items(name) or (eagle.get(name) if isinstance(eagle, dict) else None)
    layers = given or [2, n_layer // 2, n_layer - 3]
    if not isinstance(layers, list) or not all(isinstance(i, int) and 0 < i < n_layer for i in layers):
        raise c.fail(name, f"and the {n_layer} layers of the model give {layers}; they should be layers of the model")
    for key in ("extract_layers", "target_layers"):  # the name in older llama.cpp, and in newer one
        m.key(key, np.array(layers, np.int32))
    own = c.get("target_hidden_size")
    m.key("target_hidden_size", _width(target) if own is None else c.integer("target_hidden_size", least=1))
    m.key("norm_before_residual", c.flag("norm_before_residual"))
    if c.flag("norm_before_fc"):
        m.key("norm_before_fc", True)


def _ids(m: b.Build, found: b.Found) -> None:
    """Add the ids of the head's tokens, of which the checkpoint has the differences from their own numbers."""
    values = m.source.read(found.name).reshape(-1).astype(np.int64)
    values += np.arange(len(values))
    n_vocab = _target(m).integer("vocab_size", least=1)
    if len(values) and not (values.min() >= 0 and values.max() < n_vocab):
        raise FormatError(f"{m.config.path.parent}: tensor {found.name} has ids outside the vocabulary of {n_vocab}")
    if len(np.unique(values)) < len(values):
        raise FormatError(f"{m.config.path.parent}: tensor {found.name} has two tokens of the same id")
    m.constant("d2t", values)


def _finish_eagle3(m: b.Build) -> None:
    k.put_llama3(m, m.metadata[f"{m.arch}.rope.dimension_count"])


def _eagle3_table() -> b.Table:
    """Return the places of tensors; the layer is called `midlayer`, in checkpoints of speculators `layers.0`."""
    table: b.Table = {"fc": "fc", "input_norm": "enc.output_norm", "d2t": _ids, "t2d": b.drop}
    for layer in ("midlayer", "layers.*"):
        table |= {f"{layer}.{name}": f"blk.0.{place}" for name, place in _NAMED.items()}
        table[f"{layer}.self_attn.q_proj"] = b.to("blk.0.attn_q", order=b.rotated_pairs())
        table[f"{layer}.self_attn.k_proj"] = b.to("blk.0.attn_k", order=b.rotated_pairs("num_key_value_heads"))
    return table


# --- DFlash and DSpark ----------------------------------------------------------------------------------------------
def _setting(m: b.Build, name: str) -> Any:
    """Return a value of `dflash_config`, or else of config.json; None if neither has it."""
    c = m.config
    inner = c.inner("dflash_config").get(name)
    return c.given(name) if inner is None else inner


def _number(m: b.Build, name: str) -> int:
    value = _setting(m, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise m.config.fail(name, f"is {value}; DFlash needs a whole number, in dflash_config or beside it")
    return value


def _dflash(m: b.Build) -> None:
    """Write the keys of Qwen3 layers that see the whole block, and what the head reads of the model."""
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    rope = k.rope(m)
    k.rms_eps(m)
    width = k.head_dim(m)
    m.key("attention.causal", False)
    m.key("rope.dimension_count", int(width * rope.partial))
    for name, key in (("backbone_rotary_base", "dflash.backbone_rotary_base"),
                      ("attention_value_scale", "attention.value_scale")):  # fmt: skip
        value = _setting(m, name)
        m.key(key, None if value is None else float(value))
    m.key("dflash.block_size", _number(m, "block_size"))
    m.key("dflash.mask_token_id", _number(m, "mask_token_id"))
    layers = _setting(m, "target_layer_ids")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) for i in layers):
        raise c.fail("target_layer_ids", f"is {layers}; DFlash needs a list of layers of the model")
    m.key("dflash.target_layer_ids", np.array(layers, np.int32))
    given = _setting(m, "n_target_features")
    m.key("dflash.n_target_features", _width(_target(m)) * len(layers) if given is None else int(given))
    if c.given("use_sliding_window") or _setting(m, "use_swa"):
        raise UnsupportedError(f"{c.path}: DFlash heads with windows (use_sliding_window) are not supported")
    c.ignore(
        "sliding_window", "max_window_layers", "layer_types", "attention_bias", "vocab_size", "tie_word_embeddings"
    )
    if read_rope(c).type not in ("default", "linear", "yarn"):
        raise c.refuse("rope_scaling", "default, linear or yarn")


def _dspark(m: b.Build) -> None:
    _dflash(m)
    m.config.expect("markov_head_type", "vanilla")


def _squeezed(m: b.Build, found: b.Found) -> None:
    m.plain(found, f"conf_proj{found.suffix}", (found.shape[-1],))


_DFLASH: b.Table = {
    "fc": "dflash_fc",
    "hidden_norm": "dflash_hidden_norm",
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.self_attn.attention_sink_bias": "blk.*.attn_sinks.weight",
}
_DSPARK: b.Table = {
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": _squeezed,
    "embed_tokens": b.drop,
    "lm_head": b.drop,
}


def _finish_dflash(m: b.Build) -> None:
    if "output.weight" in m.tensors and "token_embd.weight" not in m.tensors:
        raise FormatError(
            f"{m.config.path.parent}: the head has an lm_head.weight, and no embed_tokens.weight beside it"
        )


def _finish_dspark(m: b.Build) -> None:
    for name in ("markov_w1", "markov_w2"):
        if f"{name}.weight" not in m.tensors:
            raise FormatError(f"{m.config.path.parent}: tensor markov_head.{name}.weight is missing")


def check_head(file: CheckpointFile, target: Config) -> None:
    """Raise an error unless the tensors are those that a run beside a model of the target's sizes reads."""
    sizes = {
        "block_count": _n_layer(target), "embedding_length": _width(target),
        "vocab_size": target.integer("vocab_size", least=1), "context_length": 1, "feed_forward_length": 1,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    source, metadata = str(file.paths[0].parent), {"general.architecture": "llama"}
    hp = HParams.from_gguf(metadata | {f"llama.{key}": value for key, value in sizes.items()}, {}, source)
    module = external.module_of(file.arch)
    specs = module.tensor_shapes(module.read(file.metadata, file.arch, hp, source), hp, file.tensors, "")
    check_tensors(specs, file.tensors, source)
    for name in file.tensors:
        if name not in specs:
            raise UnsupportedError(f"{source}: tensor {name} has no use in architecture {file.arch}")


_ABOUT = frozenset(
    ["speculators_config", "speculators_model_type", "speculators_version", "embed_requires_grad", "num_target_layers",
     "has_no_defaults_at_init", "markov_rank", "num_anchors", "modules", "target_model_type"]
)  # fmt: skip
"""Keys about training and the model, which say nothing that the tensors do not."""

ARCHITECTURES = (
    b.Architecture(
        "eagle3", (EAGLE3, "Eagle3Speculator", "Eagle3DraftModel"), _eagle3, _eagle3_table(), _finish_eagle3,
        harmless=_ABOUT, names="llama", needs_target=True,
    ),
    b.Architecture(
        "dflash-draft", ("DFlashDraftModel",), _dflash, _DFLASH, _finish_dflash, harmless=_ABOUT, names="qwen3",
        needs_target=True,
    ),
    b.Architecture(
        "dflash-draft", ("Qwen3DSparkModel",), _dspark, _DFLASH | _DSPARK, _finish_dspark, harmless=_ABOUT,
        names="qwen3", needs_target=True,
    ),
)  # fmt: skip
