"""Llama and models that differ from it in settings: Mistral, Mixtral, SmolLM3, MiniCPM, XVERSE, Orion, Seed-OSS."""

from __future__ import annotations

import math

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope


def llama_keys(m: b.Build) -> None:
    """Write all keys but those of experts."""
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    width = k.head_dim(m)
    m.key("vocab_size", m.config.integer("vocab_size", least=1))
    m.key("rope.dimension_count", width)


def _keys(m: b.Build) -> None:
    c = m.config
    llama_keys(m)
    if c.get("num_local_experts"):
        k.experts(m, "num_local_experts", width=False)
    k.no_window(m)
    c.ignore("attention_bias", "mlp_bias", "bias", "qkv_bias")


def _both_directions(m: b.Build) -> None:
    _keys(m)
    m.key("attention.causal", False)
    m.config.ignore("pooling", "temperature")


def _arcee(m: b.Build) -> None:
    k.activation(m, "relu2")
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    m.key("rope.dimension_count", k.head_dim(m))
    k.biases(m)


def _pairs_normed(m: b.Build) -> None:
    k.plain(m)
    m.key("rope.dimension_count", k.head_dim(m))
    k.no_window(m)


def _mistral3(m: b.Build) -> None:
    """Write the keys of Ministral 3, which scales queries beyond the original context by position."""
    c = m.config
    llama_keys(m)
    k.no_window(m)
    found = read_rope(c)
    if found.type == "yarn":
        scale, whole = found.number("mscale", 0.0), found.number("mscale_all_dim", 0.0)
        if scale and whole:  # readers take the key for mscale_all_dim, with an mscale of 1
            if scale not in (1.0, whole):
                raise c.fail(
                    "rope_parameters",
                    f"has mscale {scale} and mscale_all_dim {whole}; known are equal ones, and mscale 1",
                )
            m.key("rope.scaling.yarn_log_multiplier", 1.0 if scale == whole else whole)
    if "llama_4_scaling_beta" in found.values:
        m.key("attention.temperature_scale", found.number("llama_4_scaling_beta"))


def _smollm3(m: b.Build) -> None:
    c = m.config
    llama_keys(m)
    k.no_window(m)
    rotated = c.items("no_rope_layers")
    every = c.integer("no_rope_layer_interval", default=4)
    expected = [int((i + 1) % 4 != 0) for i in range(m.n_layer)]
    found = rotated if rotated is not None else [int((i + 1) % every != 0) for i in range(m.n_layer)]
    if found != expected:
        raise c.refuse("no_rope_layers", "every fourth layer without rotation")
    k.biases(m)


def factors(m: b.Build) -> None:
    """Write MiniCPM's factors of embeddings, branches and logits."""
    c = m.config
    m.key("embedding_scale", c.number("scale_emb", default=1.0))
    m.key("residual_scale", c.number("scale_depth", default=1.0) / math.sqrt(m.n_layer))
    m.key("logit_scale", k.embd(m) / c.number("dim_model_base", default=1.0))


def _minicpm(m: b.Build) -> None:
    llama_keys(m)
    if (found := read_rope(m.config)).type == "longrope":  # MiniCPM 4
        k.long_rope(m, found)
    factors(m)
    m.config.ignore("attention_bias", "rope_interleaved", "mup_denominator", "sparse_config")


def _finish_minicpm(m: b.Build) -> None:
    finish(m)
    k.put_long_rope(m)


def _xverse(m: b.Build) -> None:
    llama_keys(m)
    m.config.ignore("max_tokenizer_truncation", "model_max_length")


def _orion(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    m.key("attention.layer_norm_epsilon", c.number("rms_norm_eps"))
    c.ignore("vocab_size", "attention_bias")


def _cogvlm(m: b.Build) -> None:
    llama_keys(m)
    m.config.ignore("template_version")


def finish(m: b.Build) -> None:
    """Add the factors of Llama 3 rotations and settle the output matrix."""
    k.put_llama3(m, m.metadata[f"{m.arch}.rope.dimension_count"])
    k.tied(m)


ARCHITECTURES = (
    b.Architecture(
        "llama",
        (
            "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM",
        ),
        _keys, b.PAIRS, finish,
    ),
    b.Architecture("llama", ("HeliumForCausalLM",), _keys, finish=finish),  # its pairs are adjacent already
    b.Architecture(
        "mistral3", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), _mistral3, b.PAIRS, finish,
        r"vision_tower|multi_modal_projector|vision_encoder|patch_merger",
    ),
    b.Architecture("llama-embed", ("LlamaBidirectionalModel",), _both_directions, b.PAIRS, finish),
    b.Architecture("cogvlm", ("CogVLMForCausalLM",), _cogvlm, finish=k.tied, drop=r"(^|\.)vision\."),
    b.Architecture("arcee", ("ArceeForCausalLM",), _arcee, b.PAIRS, finish),
    b.Architecture("maincoder", ("MaincoderForCausalLM",), _pairs_normed, b.PAIRS, k.tied),
    b.Architecture(
        "pangu-embedded", ("PanguEmbeddedForCausalLM",), k.plain, finish=k.tied, harmless=frozenset({"bias"})
    ),
    b.Architecture("smollm3", ("SmolLM3ForCausalLM",), _smollm3, b.PAIRS, finish),
    b.Architecture("minicpm", ("MiniCPMForCausalLM",), _minicpm, b.PAIRS, _finish_minicpm),
    b.Architecture("xverse", ("XverseForCausalLM",), _xverse, b.PAIRS, k.tied),
    b.Architecture("orion", ("OrionForCausalLM",), _orion, finish=k.tied),
    b.Architecture("seed_oss", ("SeedOssForCausalLM",), k.plain, finish=k.tied),
)  # fmt: skip
