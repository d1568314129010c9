"""Read config.json with the defaults of transformers, and report keys that were not understood.

`data/config_defaults.json` holds, per `model_type`, the default of every key (null: derived from others) and
aliases of keys. A key that no conversion read and that is not at its default is an error: it may change the result.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ikcli.convert.json_files import read_json
from ikcli.errors import FormatError, UnsupportedError

_HARMLESS = """
    cache_implementation use_parallel_embedding output_dropout
    architectures model_type auto_map transformers_version torch_dtype dtype torchscript transformers.js_config
    tf_legacy_loss quantization_config unsloth_fixed unsloth_version unsloth_tokenizer_version id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix language
    chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
    pruned_heads keys_to_ignore_at_inference bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    eod_token_id decoder_start_token_id eos_token forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens bad_words_ids image_token_id image_token_index video_token_id video_token_index
    vision_start_token_id vision_end_token_id vision_token_id do_sample early_stopping num_beams num_beam_groups
    diversity_penalty length_penalty repetition_penalty temperature top_k top_p typical_p min_length max_length
    max_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    exponential_decay_length_penalty remove_invalid_values output_scores return_dict_in_generate return_dict
    output_attentions output_hidden_states output_router_logits initializer_range init_device init_method use_cache
    use_bfloat16 bf16 fp16 fp32 pretraining_tp tp_size ep_size gradient_checkpointing attn_implementation
    use_flash_attn use_flash_attention onnx_safe pre_allocate_kv_cache attention_dropout attention_dropout_prob
    attention_probs_dropout_prob attn_dropout attn_pdrop dropout embd_pdrop embd_dropout embedding_dropout
    emb_dropout_prob ffn_dropout hidden_dropout hidden_dropout_prob resid_dropout resid_pdrop residual_dropout
    classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    router_aux_loss_coef router_jitter_noise router_dtype router_z_loss_coef moe_aux_loss_coef aux_loss_alpha
    seq_aux z_loss_coefficient scale_attention_softmax_in_fp32 attention_softmax_in_fp32 softmax_in_fp32
    vision_config audio_config vision_feature_layer spatial_merge_size projector_hidden_act
    multimodal_projector_bias
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys about training, generation, tokens, precision, other libraries and modalities; none affects the weights."""


@lru_cache(maxsize=1)
def known_defaults() -> dict[str, Any]:
    """Return `{"aliases": ..., "defaults": ...}` by model_type."""
    text = files("ikcli").joinpath("data/config_defaults.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class Config:
    """The keys of a text model, or of the text part of a multimodal model."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"
        self.raw = read_json(self.path)
        self.values = _text_part(self.raw)
        self.model_type = str(self.values.get("model_type", ""))
        found = known_defaults().get(_SAME_TYPE.get(self.model_type, self.model_type), {"aliases": {}, "defaults": {}})
        self.defaults: dict[str, Any] = dict(found["defaults"])
        self._aliases: dict[str, str] = found["aliases"]
        for alias, name in self._aliases.items():
            if alias in self.values and name not in self.values:
                self.values[name] = self.values.pop(alias)
        self.used: set[str] = set()

    @property
    def classes(self) -> list[str]:
        """Return `architectures`, or raise a FormatError unless it is a list of names."""
        found = self.raw.get("architectures") or self.values.get("architectures")
        if not isinstance(found, list) or not found or not all(isinstance(c, str) for c in found):
            raise FormatError(f"{self.path}: architectures should name the class of the model")
        return found

    def fail(self, key: str, why: str) -> FormatError:
        return FormatError(f"{self.path}: key {key} {why}")

    def refuse(self, key: str, known: str) -> UnsupportedError:
        """Return an error for a value that cannot be converted; `known` describes values that can."""
        return UnsupportedError(f"{self.path}: key {key} is {_short(self.values.get(key))}; known is {known}")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these keys that has a value, else the default of transformers, else `default`.

        A key that is null counts as absent, without the default of transformers.
        """
        self.used.update(keys)
        found = next((self.values[key] for key in keys if self.values.get(key) is not None), None)
        if found is None and not any(key in self.values for key in keys):
            found = next((self.defaults[key] for key in keys if self.defaults.get(key) is not None), None)
        return default if found is None else found

    def ignore(self, *keys: str) -> None:
        """Mark keys as understood that the conversion does not need."""
        self.used.update(keys)

    def given(self, key: str) -> Any:
        """Return the value in the file itself, or None."""
        self.used.add(key)
        return self.values.get(key)

    def integer(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number of at least `least`; raise a FormatError if there is neither a value nor a default."""
        value = self.get(*keys, default=default)
        if value is None:
            raise self.fail(keys[0], "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self.fail(keys[0], f"should be a whole number of at least {least}, but is {_short(value)}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(*keys, default=default)
        if value is None:
            raise self.fail(keys[0], "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(keys[0], f"should be a finite number, but is {_short(value)}")
        return float(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            raise self.fail(keys[0], f"should be true or false, but is {_short(value)}")
        return value

    def items(self, *keys: str) -> list[Any] | None:
        """Return a list, or None."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, list):
            raise self.fail(keys[0], f"should be a list, but is {_short(value)}")
        return value

    def inner(self, key: str) -> dict[str, Any]:
        """Return an object, or an empty one if the key is absent."""
        value = self.get(key, default={})
        if not isinstance(value, dict):
            raise self.fail(key, f"should be an object, but is {_short(value)}")
        return value

    def inner_number(self, key: str, name: str, default: float) -> float:
        """Return a finite number in such an object."""
        value = self.inner(key).get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"has {name} {_short(value)}, which should be a finite number")
        return float(value)

    def inner_integer(self, key: str, name: str, default: int) -> int:
        """Return a whole number above 0 in such an object."""
        value = self.inner_number(key, name, default)
        if not value.is_integer() or not 0 < value < 1 << 31:
            raise self.fail(key, f"has {name} {_short(value)}, which should be a whole number above 0")
        return int(value)

    def expect(self, key: str, *known: Any) -> None:
        """Raise an UnsupportedError unless the key is absent or has one of these values."""
        value = self.get(key)
        if value is not None and value not in known:
            raise self.refuse(key, ", ".join(json.dumps(k) for k in known))

    def not_understood(self, harmless: frozenset[str] = frozenset()) -> list[str]:
        """Return the keys that were not read and differ from their defaults."""
        found: list[str] = []
        for key, value in self.values.items():
            if key in self.used or key in HARMLESS or key in harmless or key.startswith("_"):
                continue
            says_nothing = value is None or value is False or value in ([], {}, "")
            if not says_nothing and not (key in self.defaults and self.defaults[key] == value):
                found.append(key)
        return found


_SAME_TYPE = {"kimi_k2": "deepseek_v3", "ernie4_5_moe_vl": "ernie4_5_moe", "mimo_v2": "mimo_v2_flash"}
"""Aliases of model_type values."""


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    if isinstance(layer := raw.get("transformer_layer_config"), dict):  # heads of vLLM's speculators
        return {k: v for k, v in raw.items() if k != "transformer_layer_config"} | layer
    inner = next((raw[k] for k in ("text_config", "llm_config") if isinstance(raw.get(k), dict)), None)
    if inner is None:
        return dict(raw)
    if not inner.get("model_type") and raw.get("model_type") in _TEXT_TYPES:
        inner = inner | {"model_type": _TEXT_TYPES[str(raw["model_type"])]}
    outer = {k: raw[k] for k in ("tie_word_embeddings", "quantization_config") if raw.get(k) is not None}
    return outer | inner


_TEXT_TYPES = {
    "apertus1p5": "apertus1p5_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "muse_glimmer": "muse_glimmer_text",
    "kimi_k25": "deepseek_v3",
}
"""model_type of a multimodal model -> that of its text part, for configurations that do not state it."""


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
