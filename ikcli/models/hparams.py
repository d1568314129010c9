"""Read the hyper-parameters of a model from architecture keys (`<arch>.block_count`, ...).

Names are ggml's. Corresponds to `llm_load_hparams` of ik_llama.cpp. `rope.py` reads the keys of the rotation,
`windows.py` those of layers with windows, `recurrent.py` those of recurrent layers; no other module reads keys. Window
keys of an architecture that `windows.py` does not list are ignored, as in the reference: attention then covers the
whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ikcli.errors import FormatError, UnsupportedError
from ikcli.models.gemma.keys import read_gemma
from ikcli.models.keys import HasShape, Keys, by_layer
from ikcli.models.recurrent.states import HYBRID, KDA, SCAN, read_recurrent
from ikcli.models.rope import RopeParams, read_rope
from ikcli.models.rope_options import overrides
from ikcli.models.sparse.keys import read_sparse
from ikcli.models.sparse.ngrams import NGramTable
from ikcli.models.traits import (
    ALL_EXPERTS,
    BITNET,
    DENSE_LEAD,
    DENSE_MLA,
    ENCODERS,
    LAYER_NORM,
    MLA,
    NOT_NORMALISED,
    SIGMOID,
    SOFTCAPS,
    WHERE_ROUTED,
)
from ikcli.models.windows import read_windows
from ikcli.settings.adapters import RopeConfig

MAX_LAYERS = 512
MAX_EXPERTS = 1024
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax", 4: "sqrtsoftplus"}  # 3: over the chosen ones, as normalised
_RMS_KEY = "attention.layer_norm_rms_epsilon"
_LAYER_KEY = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True, order=True)
class Xielu:
    """The factors of the parts of xIELU: x squared where x > 0, exp(x) - 1 - x where x < 0, and x."""

    squared: float
    exponential: float
    linear: float


@dataclass(frozen=True, slots=True)
class HParams:
    """The numbers that define a model of one architecture; fields that an architecture does not use are 0.

    Where layers differ, `per_layer` holds the values of all layers by field name, `at` returns the values of one layer,
    and the field itself is the largest of them.
    """

    arch: str
    source: str  # file name, for messages
    n_vocab: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_rot: int
    n_ctx_train: int
    eps: float
    norm: str = "rms"  # or "layer"
    rope: RopeParams = field(default_factory=RopeParams)
    n_ff: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    n_embd_exp: int = 0  # width of what routed experts read and write; 0: that of the model
    n_expert_shared: int = 0
    n_layer_dense_lead: int = 0
    moe_step: int = 1
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds; in MiniMax-01, of what it is added to
    logit_scale: float = 1.0
    attention_scale: float = 0.0  # of K*Q; 0: 1 / sqrt(head_dim_k)
    temperature_scale: float = 0.0  # of queries beyond the original context
    expert_gating: str = "softmax"
    expert_weights_norm: bool = False
    expert_weights_scale: float = 1.0
    experts_per_group: int = 0  # adjacent experts that have a further one in common; 0: none have
    expert_group_scale: float = 1.0  # of what the further ones return
    n_ff_group: int = 0  # width of a further one
    weighs_inputs: bool = False  # weights of experts multiply what goes into them, not what comes out
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    window: int = 0  # positions that a query sees, itself included, in encoders on either side; 0: all
    chunk: int = 0  # a query sees those of its chunk of so many positions; 0: all
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    value_scale: float = 1.0
    n_layer_kv: int = 0  # layers with their own keys and values, which the others use; 0: all
    n_embd_per_layer: int = 0  # width of the layers' own embeddings
    laurel_rank: int = 0  # columns of a branch of low rank beside attention
    gate_cut: float = -math.inf  # gates of dense parts are cut off below so many standard deviations over their mean
    temperature_length: int = 0  # 0: the original context
    temperature_shift: int = 0
    xielu: Xielu | None = None  # of dense parts
    act: str = "silu"  # of dense parts, where files of one architecture differ
    swiglu_limit: float = 0.0  # of experts; 0: none
    swiglu_limit_shared: float = 0.0  # of shared experts and dense parts
    max_alibi_bias: float = 0.0  # attention is weakened by distance; 0: it is not
    clamp_kqv: float = 0.0  # q, k and v are held between this and its negative; 0: they are not
    parallel: bool = False  # attention and feed-forward part are side by side
    n_layer_dec: int = 0  # layers of the decoder of an encoder-decoder, whose other layers are the encoder's
    decoder_start: int = -1  # the token that the decoder of an encoder-decoder begins with
    causal: bool = True  # a token sees those before it only; False: encoders, which have no next token and no cache
    n_positions: int = 0  # of encoders: positions that are embedded; 0: any number
    n_buckets: int = 0  # of distances, each with a bias of scores
    n_token_types: int = 0  # parts of a text that have embeddings
    separator: int = -1  # token between the parts, where a model tells them apart
    is_moe: bool = True  # has experts, where the model has any
    recurrent_layers: frozenset[int] = frozenset()
    ssm_d_conv: int = 0  # taps of the convolution
    ssm_d_state: int = 0  # columns of a key head
    ssm_n_group: int = 0  # key heads
    ssm_dt_rank: int = 0  # value heads
    ssm_d_inner: int = 0  # columns of all value heads
    ssm_norm_eps: float = 0.0  # of the norms of what a scan is controlled by; 0: it is not normed
    kda_lower_bound: float = 0.0  # of logarithms of decays; 0: none
    residual_block: int = 0  # layers between outputs that later layers attend to; 0: none do
    situ_beta: float = 0.0  # bounds of SiTU's gate and of what it multiplies; 0: none
    situ_linear_beta: float = 0.0
    n_further: int = 0  # blocks after those of the model, each a head that predicts a further token (NextN, MTP)
    index_top_k: int = 0  # positions that a query attends to; 0: all (models/sparse/indexer.py)
    index_n_head: int = 0
    index_head_dim: int = 0
    index_owners: frozenset[int] = frozenset()  # layers that choose positions
    index_block: int = 0  # positions that are chosen together; 0: each is chosen by itself
    index_local: int = 0  # blocks up to the query's own that are always chosen
    pool_ratio: int = 0  # positions that become one entry, which later queries see in their place; 0: none do
    n_stream: int = 0  # streams of the residual; 0: it is one
    stream_iterations: int = 0  # of the sums of their weights
    stream_eps: float = 0.0
    stream_most: float = 2.0  # of what a layer returns, that a stream gets
    stream_rank: int = 0  # of the gates of streams
    ngrams: NGramTable | None = None  # embeddings of n-grams, which one layer reads
    n_sink: int = 0  # learned rows that come before all positions
    o_groups: int = 0  # of heads, each with an output projection of low rank
    o_lora_rank: int = 0
    n_hash: int = 0  # first layers whose experts depend on the token alone
    n_loop: int = 1  # times that all layers run, each time with caches of their own
    norms_loops: bool = False  # the last norm is also between these times
    per_layer: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, HasShape],
        source: str,
        rope: RopeConfig | None = None,
        *,
        further: bool = False,
    ) -> HParams:
        """Read and check the keys of the file `source`; raise FormatError that names a missing or wrong key.

        `rope`: the rotation options of the command line. `further`: the blocks that predict further tokens count as
        layers, so that `at` knows them.
        """
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise FormatError(f"{source}: no general.architecture; this is not a model file")
        keys = Keys(metadata, arch, source)
        arch = keys.arch
        values: dict[str, Any] = {"arch": arch, "source": source}
        n_layer = keys.integer("block_count", most=MAX_LAYERS, least=1)
        # Layers that predict further tokens (NextN, MTP) come last and are not part of the run.
        n_further = keys.integer("nextn_predict_layers", 0, most=n_layer - 1)
        if arch == "bailingmoe3" and f"blk.{n_layer - n_further}.nextn.eh_proj.weight" not in tensors:
            n_further = 0  # some files count a layer that they do not have
        n_main = n_layer - n_further
        values |= {"n_layer": n_layer if further else n_main, "n_further": n_further}
        if further:
            keys.alike = tuple(_alike(tensors, il, n_main) for il in range(n_main, n_layer))
        values["n_embd"] = keys.integer("embedding_length", least=1)
        values["n_ctx_train"] = keys.integer("context_length", least=1)
        values["n_vocab"] = _n_vocab(keys, tensors)
        values["n_ff"] = keys.per_layer("feed_forward_length", 0, n_layer=values["n_layer"])
        values |= _norms(keys)
        values |= _heads(keys, values["n_embd"], values["n_layer"])
        values |= _experts(keys, arch, tensors)
        values["rope"] = read_rope(keys, tensors, values["n_ctx_train"], overrides(rope or RopeConfig()))
        if arch in MLA:
            values |= _mla(keys, values)
        elif values["n_expert_used"] and not values["n_ff_exp"]:
            n_ff = max(by_layer(values["n_ff"], 1))
            values["n_ff_exp"] = n_ff // (values["n_expert_used"] if arch == "qwen3moe" else 1)
        values |= _widths(keys, tensors)
        if arch in WHERE_ROUTED and tensors:
            values["is_moe"] = tuple(f"blk.{il}.ffn_gate_inp.weight" in tensors for il in range(values["n_layer"]))
        if arch == "nomic-bert-moe":
            every = keys.integer("moe_every_n_layers", least=1)
            values["is_moe"] = tuple(every == 1 or il % every == 1 for il in range(values["n_layer"]))
        if further:
            routed = [f"blk.{il}.ffn_gate_inp.weight" in tensors or not tensors for il in range(n_main, n_layer)]
            values["is_moe"] = by_layer(values.get("is_moe", True), n_layer)[:n_main] + tuple(routed)
        values |= _scores(keys, values)
        if arch in ("deepseek4", "hy_v4", "maple", "step35") or (arch == "bailingmoe3" and "swiglu_clamp_exp" in keys):
            values |= _swiglu_limits(keys, values["n_layer"])
        if arch in ("gemma3n", "gemma4"):
            values |= read_gemma(keys, values["n_layer"], tensors)
        values |= read_windows(keys, values)
        values |= read_recurrent(keys, values, tensors)
        if further:
            values["recurrent_layers"] = frozenset(il for il in values.get("recurrent_layers", ()) if il < n_main)
        else:  # heads for further tokens attend to all positions, as in the reference
            values |= read_sparse(keys, values, tensors)
        if arch in ("granite", "granite_swa", "granitehybrid", "granitemoe"):
            values |= _multipliers(keys)
        if arch in ("deepseek2", "mistral3", "mistral4"):  # files of Mistral 4 do not say
            default = 0.1 if arch == "mistral4" else 0.0
            values["temperature_scale"] = keys.number("attention.temperature_scale", default, most=1e6)
            values["temperature_length"] = keys.integer("attention.temperature_length", 0)
        values |= _of_older_models(keys, values)
        if arch == "gptneox":
            values["parallel"] = bool(keys.raw("use_parallel_residual", True))
        if arch == "bailingmoe2":
            width = keys.integer("expert_shared_feed_forward_length", 0) or values["n_ff_exp"]
            values["n_ff_shexp"] = width * values["n_expert_shared"]
        if arch == "llama4":
            values |= _temperature(keys, values) | {"weighs_inputs": True, "n_ff_shexp": values["n_ff_exp"]}
        if arch in ("nanbeige", "ouro"):
            values["n_loop"] = keys.integer("num_loops", least=1, most=MAX_LAYERS // n_layer)
            values["norms_loops"] = not keys.raw("skip_loop_final_norm", False)
        if arch in ENCODERS:
            values |= _encoder(keys, values, tensors)
        if arch == "t5":
            values |= _encoder_decoder(keys, n_layer)
        hp = cls(**_by_layer(values))
        _check(hp)
        return hp

    def has_experts(self, il: int) -> bool:
        """Return whether the feed-forward part of block il consists of experts."""
        moe = self.n_expert > 0 and il >= self.n_layer_dense_lead and (il + 1) % self.moe_step == 0
        return moe and self.at(il).is_moe

    def is_recurrent(self, il: int) -> bool:
        """Return whether block il keeps a state instead of a cache."""
        return il in self.recurrent_layers

    def at(self, il: int) -> HParams:
        """Return the numbers of layer il."""
        if not self.per_layer:
            return self
        return replace(self, per_layer={}, **{name: values[il] for name, values in self.per_layer.items()})

    def no_next_token(self) -> UnsupportedError:
        """Return the error for an encoder where a next token is needed."""
        return UnsupportedError(
            f"{self.source}: {self.arch} models read texts in both directions and have no next token; use ik embed, or "
            "ik serve"
        )

    @property
    def kv_row(self) -> int:
        """Return the width of an MLA cache row: rotated key values, then the latent."""
        return self.n_rot + self.kv_lora_rank


def _alike(tensors: Mapping[str, HasShape], il: int, n_layer: int) -> int:
    """Return the last of n_layer layers whose attention has the tensors of layer il, in shape; else the last one."""

    def attention(block: int) -> list[tuple[int, ...]]:
        names = (f"blk.{block}.attn_{x}.weight" for x in ("q", "k", "v", "qkv", "output", "sinks", "gate"))
        return [tensors[name].shape if name in tensors else () for name in names]

    return next((other for other in reversed(range(n_layer)) if attention(other) == attention(il)), n_layer - 1)


def _norms(keys: Keys) -> dict[str, Any]:
    """Return kind and epsilon of the norms. For Cohere's MoE and Refact models the keys of the file tell the kind."""
    layer = keys.arch in LAYER_NORM or (keys.arch == "cohere2_moe" and not keys.number(_RMS_KEY, 0.0))
    layer = layer or (keys.arch == "refact" and _LAYER_KEY in keys)
    key = _LAYER_KEY if layer and keys.arch != "phimoe" else _RMS_KEY
    eps = keys.number(key)
    if eps <= 0:
        raise keys.fail(key, f"is {eps}; it must be positive")
    return {"norm": "layer" if layer else "rms", "eps": eps}


def _n_vocab(keys: Keys, tensors: Mapping[str, HasShape]) -> int:
    if "vocab_size" in keys:
        return keys.integer("vocab_size", least=1)
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens):
        return len(tokens)
    embd = tensors.get("token_embd.weight")
    if embd is not None and len(embd.shape) == 2:
        return embd.shape[1]
    raise keys.fail("vocab_size", "is missing, and so is tokenizer.ggml.tokens")


def _by_layer(values: dict[str, Any]) -> dict[str, Any]:
    """Turn tuples of numbers, one per layer, into `per_layer` and their largest value."""
    values = {name: _uniform(value) for name, value in values.items()}
    layered = {name: value for name, value in values.items() if isinstance(value, tuple)}
    return values | {name: max(value) for name, value in layered.items()} | {"per_layer": layered}


def _uniform(value: Any) -> Any:
    """Return the common value of a tuple of equal values; other tuples stay."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _heads(keys: Keys, n_embd: int, n_layer: int) -> dict[str, Any]:
    if keys.arch in SCAN:  # no attention
        return {"n_head": 0, "n_head_kv": 0, "head_dim_k": 0, "head_dim_v": 0, "n_rot": 0}
    least = 0 if keys.arch in (*HYBRID, "deci") else 1  # there the list says which layers have no attention
    n_head = keys.per_layer("attention.head_count", n_layer=n_layer, least=least)
    n_head_kv = n_head
    if "attention.head_count_kv" in keys and keys.arch not in KDA:  # there, too
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer=n_layer, least=least)
    if keys.arch in HYBRID:
        n_head, n_head_kv = max(by_layer(n_head, n_layer)), max(by_layer(n_head_kv, n_layer))
        if not (n_head and n_head_kv):
            raise keys.fail("attention.head_count_kv", "is 0 in all layers; at least one has attention")
    for q, kv in zip(by_layer(n_head, n_layer), by_layer(n_head_kv, n_layer), strict=True):
        if kv and q % kv:
            raise keys.fail("attention.head_count_kv", f"is {kv}, which does not divide head_count {q}")
    width = n_embd // max(by_layer(n_head, n_layer))
    k = keys.integer("attention.key_length", width, least=1)
    v = keys.integer("attention.value_length", width, least=1)
    n_rot = keys.integer("rope.dimension_count", k, least=2)
    if n_rot % 2 or n_rot > k:
        raise keys.fail("rope.dimension_count", f"is {n_rot}; it must be even and at most the key length {k}")
    return {"n_head": n_head, "n_head_kv": n_head_kv, "head_dim_k": k, "head_dim_v": v, "n_rot": n_rot}


def _experts(keys: Keys, arch: str, tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    n_expert = keys.integer("expert_count", 0, most=MAX_EXPERTS)
    n_used = keys.integer("expert_used_count", 0)
    if (n_expert > 0) != (n_used > 0) or n_used > n_expert:
        raise keys.fail("expert_used_count", f"is {n_used} with {n_expert} experts")
    # Of DeepSeek's kind, models with a bias for the choice (V3 and its heirs, GLM-4.7-Flash) are those with sigmoid.
    sigmoid = arch in SIGMOID or (arch in MLA and any(name.endswith("exp_probs_b.bias") for name in tensors))
    gating = keys.integer("expert_gating_func", 0) or (2 if sigmoid else 1)
    if gating not in GATING:
        raise UnsupportedError(
            f"{keys.source}: {keys.name('expert_gating_func')} is {gating}; known are 1, 3 (softmax), 2 (sigmoid) and "
            "4 (square root of softplus)"
        )
    groups = keys.integer("expert_group_count", 1) or 1
    groups_used = keys.integer("expert_group_used_count", groups) or groups
    if n_expert % groups or groups_used > groups:
        raise keys.fail("expert_group_count", f"is {groups} ({groups_used} used) with {n_expert} experts")
    shared = keys.integer("expert_shared_count", 0)
    ff_exp = keys.integer("expert_feed_forward_length", 0)
    return {
        "n_expert": n_expert,
        "n_expert_used": n_used,
        "n_ff_exp": ff_exp,
        "n_expert_shared": shared,
        "n_ff_shexp": keys.integer("expert_shared_feed_forward_length", shared * ff_exp),
        **_groups(keys, n_expert),
        "n_embd_exp": keys.integer("moe_latent_size", 0) if arch == "nemotron_h_moe" else 0,
        "n_layer_dense_lead": keys.integer("leading_dense_block_count", 0),
        "moe_step": keys.integer("interleave_moe_layer_step", 1) or 1,
        "expert_gating": "sparsemixer" if arch == "phimoe" and gating == 1 else GATING[gating],
        "expert_weights_norm": gating == 3 or bool(keys.raw("expert_weights_norm", arch not in NOT_NORMALISED)),
        "expert_weights_scale": keys.number("expert_weights_scale", 1.0) or 1.0,
        "n_expert_groups": groups,
        "n_expert_groups_used": groups_used,
    }


def _groups(keys: Keys, n_expert: int) -> dict[str, Any]:
    """Return the further experts of GroveMoE."""
    if keys.arch != "grovemoe":
        return {}
    size = keys.integer("experts_per_group", 2, least=1)
    if n_expert % size:
        raise keys.fail("experts_per_group", f"is {size}, which does not divide {n_expert} experts")
    scale = keys.number("expert_group_scale", 0.05, most=1e6)
    width = keys.integer("expert_chunk_feed_forward_length", least=1)
    return {"experts_per_group": size, "expert_group_scale": scale, "n_ff_group": width}


def _widths(keys: Keys, tensors: Mapping[str, HasShape]) -> dict[str, int]:
    """Return the rows of expert matrices that keys lack; for shared experts keys may be wrong (ERNIE 4.5, Hunyuan)."""
    found = {}
    for field_name, name in (("n_ff_exp", "ffn_down_exps.weight"), ("n_ff_shexp", "ffn_down_shexp.weight")):
        width = next((t.shape[0] for key, t in tensors.items() if key.endswith(name)), 0)
        if width and (field_name == "n_ff_shexp" or "expert_feed_forward_length" not in keys):
            found[field_name] = width
    return found


def _scores(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return factors and soft caps around attention and logits."""
    arch, n_embd = values["arch"], values["n_embd"]
    found: dict[str, Any] = {}
    if arch in SOFTCAPS:
        attn, final = SOFTCAPS[arch]
        found["attn_softcap"] = keys.number("attn_logit_softcapping", attn, most=1e9) if attn else 0.0
        found["final_softcap"] = keys.number("final_logit_softcapping", final, most=1e9)
    if arch == "grok":  # files of Grok 1 do not say
        found["embedding_scale"] = keys.number("embedding_scale", 78.38367176906169, most=1e9)
        found["logit_scale"] = keys.number("logit_scale", 0.5773502691896257, most=1e9)
        found["attention_scale"] = keys.number("attention.output_scale", 0.08838834764831845, most=1e9)
    if (arch, values["n_layer"]) in (("gemma2", 46), ("gemma3", 62)):  # the models of 27B
        found["attention_scale"] = 1 / math.sqrt(n_embd // max(by_layer(values["n_head"], 1)))
    if arch.startswith("gemma") or arch == "afmoe":
        found["embedding_scale"] = math.sqrt(n_embd)
    if arch in ("cohere2", "cohere2_moe", "command-r", "muse-glimmer"):
        found["logit_scale"] = keys.number("logit_scale", most=1e9) or 1.0
    if arch == "mimo2":
        found["value_scale"] = keys.number("attention.value_scale", 1.0, most=1e9)
    return found


def _of_older_models(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return what single architectures read, or have without a key for it."""
    arch, n_layer, n_embd = values["arch"], values["n_layer"], values["n_embd"]
    if arch in BITNET:
        act = keys.raw("hidden_act", "silu" if arch == "bitnet" else "relu2")
        if act not in ("silu", "relu2", "relu_sqr"):
            raise UnsupportedError(f"{keys.source}: {keys.name('hidden_act')} is {act}; known are silu and relu2")
        return {"act": "silu" if act == "silu" else "relu_sqr"}
    if arch == "qwen":
        return {"n_ff": max(by_layer(values["n_ff"], 1)) // 2}
    if arch in ("dbrx", "olmo"):
        return {"clamp_kqv": keys.number("attention.clamp_kqv", None if arch == "dbrx" else 0.0, most=1e9)}
    if arch in ("minicpm", "minicpm3"):
        depth, divisor = 1.4 / math.sqrt(n_layer), keys.number("logit_scale", n_embd / 256, most=1e9) or 1.0
        return {
            "embedding_scale": keys.number("embedding_scale", 12.0, most=1e9),
            "residual_scale": keys.number("residual_scale", depth, most=1e9),
            "logit_scale": 1 / divisor,
        }
    if arch == "talkie":
        return {"logit_scale": keys.number("logit_scale", 1.0, most=1e9)}
    if arch in ("bloom", "refact") or (arch == "baichuan" and n_layer == 40):  # Baichuan 13B
        return {"max_alibi_bias": 8.0}
    if arch == "apertus":
        return {"xielu": _xielu(keys, n_layer)}
    if arch == "jais":
        width = n_embd // max(by_layer(values["n_head"], 1))
        return {"max_alibi_bias": keys.number("attention.max_alibi_bias", most=1e3), "attention_scale": 1 / width}
    if arch == "mpt":
        return {
            "max_alibi_bias": keys.number("attention.max_alibi_bias", most=1e3),
            "clamp_kqv": keys.number("attention.clamp_kqv", 0.0, most=1e9),
        }
    return {}


def _xielu(keys: Keys, n_layer: int) -> tuple[Xielu, ...]:
    """Return the factors of xIELU by layer; a file has what softplus makes factors of, in keys without architecture."""

    def listed(name: str) -> tuple[float, ...]:
        value: Any = keys.metadata.get(f"xielu.{name}")
        found = tuple(map(float, value)) if hasattr(value, "__len__") and not isinstance(value, str) else ()
        if len(found) != n_layer or not all(map(math.isfinite, found)):
            raise FormatError(f"{keys.source}: metadata key xielu.{name} should hold {n_layer} finite numbers")
        return found

    parts = zip(listed("alpha_p"), listed("alpha_n"), listed("beta"), strict=True)
    return tuple(Xielu(float(np.logaddexp(0, p)), b + float(np.logaddexp(0, n)), b) for p, n, b in parts)


def _encoder(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the settings of encoders: no causal mask, positions, token types, and the separator of rerankers."""
    if keys.raw("attention.causal", False):
        raise UnsupportedError(f"{keys.source}: {keys.name('attention.causal')} is true; only encoders are supported")
    types = tensors.get("token_types.weight")
    n_types = 0 if types is None else types.shape[1] if len(types.shape) > 1 else 1
    ranks = any(name.startswith("cls.") for name in tensors) and n_types > 1
    sep = keys.metadata.get("tokenizer.ggml.seperator_token_id") if ranks else None
    act = keys.raw("hidden_act", "gelu")
    if keys.arch == "modern-bert" and act not in ("gelu", "silu"):
        raise UnsupportedError(f"{keys.source}: {keys.name('hidden_act')} is {act}; known are gelu and silu")
    return {
        "causal": False,
        "act": act,
        "attention_scale": 1.0 if keys.arch == "t5encoder" else 0.0,
        "n_buckets": keys.integer("attention.relative_buckets_count", least=4) if keys.arch == "t5encoder" else 0,
        "n_positions": values["n_ctx_train"] if keys.arch == "bert" else 0,
        "n_token_types": n_types,
        "separator": -1 if sep is None else int(sep),
        "max_alibi_bias": 8.0 if keys.arch == "jina-bert-v2" else 0.0,
    }


def _encoder_decoder(keys: Keys, n_layer: int) -> dict[str, Any]:
    """Return the settings of T5: its decoder, the token this begins with, and the buckets of distances."""
    start = keys.integer("decoder_start_token_id", int(keys.metadata.get("tokenizer.ggml.bos_token_id", -1)), least=-1)
    if start < 0:
        raise keys.fail("decoder_start_token_id", "is missing; the decoder cannot begin")
    return {
        "n_layer_dec": keys.integer("decoder_block_count", n_layer, least=1, most=MAX_LAYERS),
        "decoder_start": start,
        "attention_scale": 1.0,
        "n_buckets": keys.integer("attention.relative_buckets_count", least=4),
    }


def _temperature(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return the position scale of Llama 4's queries in layers without RoPE; files do not store it."""
    scale = keys.number("attention.temperature_scale", 0.1, most=1e6)
    length = keys.integer("attention.temperature_length", 8192, least=1)
    scales = tuple(0.0 if n_rot else scale for n_rot in by_layer(values["n_rot"], values["n_layer"]))
    return {"temperature_scale": scales, "temperature_length": length, "temperature_shift": 1}


def _swiglu_limits(keys: Keys, n_layer: int) -> dict[str, tuple[float, ...]]:
    """Return the limits of gated feed-forward layers (Step-3.5, Ling 3), stored under either of two names."""
    names = {"swiglu_limit": ("limits", "clamp_exp"), "swiglu_limit_shared": ("limits_shared", "clamp_shexp")}
    found = {}
    for field_name, (first, second) in names.items():
        key = f"swiglu_{first}" if f"swiglu_{first}" in keys else f"swiglu_{second}"
        limits = keys.numbers(key, 7.0 if keys.arch == "maple" and first == "limits" else 0.0, n_layer=n_layer)
        found[field_name] = tuple(x if x >= 1e-6 else 0.0 for x in limits)
    return found


def _multipliers(keys: Keys) -> dict[str, float]:
    """Return Granite's factors on embeddings, branches and K*Q; logits are divided by theirs."""
    divisor = keys.number("logit_scale", 1.0, most=1e9) or 1.0
    factors = {name: keys.number(name, 1.0, most=1e9) or 1.0 for name in ("embedding_scale", "residual_scale")}
    return factors | {"logit_scale": 1 / divisor, "attention_scale": keys.number("attention.scale", 0.0, most=1e9)}


def _mla(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSeek2's lora ranks, and head sizes for files in the absorbed form (576/512, one kv head)."""
    rank = keys.integer("attention.kv_lora_rank", least=1)
    default = None if values["n_expert"] else 0  # Youtu has no experts
    fixed: dict[str, Any] = {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0),
        "n_layer_dense_lead": keys.integer(
            "leading_dense_block_count", values["n_layer"] if keys.arch in DENSE_MLA else None
        ),
        "n_ff_exp": keys.integer("expert_feed_forward_length", default, least=1 if values["n_expert"] else 0),
        "n_expert_shared": keys.integer("expert_shared_count", default),
        "expert_weights_scale": keys.number("expert_weights_scale", default),
    }
    fixed["n_ff_shexp"] = fixed["n_ff_exp"] * fixed["n_expert_shared"]
    many = max(by_layer(values["n_head"], 1)) > 1
    absorbed = values["n_head_kv"] == 1 and values["head_dim_k"] == rank + values["n_rot"] and many
    if "attention.key_length_mla" in keys:
        fixed["head_dim_k"] = keys.integer("attention.key_length_mla", least=1)
        fixed["head_dim_v"] = keys.integer("attention.value_length_mla", least=1)
    elif absorbed:
        if (rank, values["n_rot"]) != (512, 64):
            raise keys.fail("attention.key_length_mla", "is missing; the head sizes of this file cannot be known")
        fixed["head_dim_k"], fixed["head_dim_v"] = 192, 128
    fixed["n_head_kv"] = values["n_head"]
    if fixed.get("head_dim_k", values["head_dim_k"]) <= values["n_rot"]:
        raise keys.fail("attention.key_length_mla", "leaves no room beside the rotated part")
    return fixed


def _check(hp: HParams) -> None:
    lead = hp.arch in DENSE_LEAD and hp.n_layer_dense_lead < hp.n_layer
    if hp.n_expert == 0 and (lead or hp.arch in ALL_EXPERTS):
        raise FormatError(f"{hp.source}: metadata key {hp.arch}.expert_count is missing or 0")
    dense = hp.n_expert == 0 or hp.n_layer_dense_lead > 0 or hp.moe_step > 1 or hp.arch == "llama"
    if dense and hp.n_ff < 1 and hp.arch not in SCAN:
        raise FormatError(f"{hp.source}: metadata key {hp.arch}.feed_forward_length is missing or 0")
