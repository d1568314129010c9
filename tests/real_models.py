"""Headers of released models (or of their size), one or two per family: keys, and tensors in file order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ikcli import models
from ikcli.models import HParams

Keys = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
_FUSED = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
}


@dataclass(frozen=True)
class Real:
    """`optional`: patterns of the tensors it has beside those that the architecture needs.

    `further`: blocks at the end that predict further tokens, with the tensors of the last block before them.
    `unused`: tensors of every block that a run leaves out.
    """

    arch: str
    keys: Mapping[str, Any] = field(repr=False)
    n_vocab: int
    optional: tuple[str, ...] = ("^output.weight",)
    further: int = 0
    layer_norm: bool = False
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def metadata(self) -> dict[str, Any]:
        keys = {"context_length": 131072, "vocab_size": self.n_vocab} | dict(self.keys)
        keys |= (
            {"attention.layer_norm_epsilon": 1e-5} if self.layer_norm else {"attention.layer_norm_rms_epsilon": 1e-6}
        )
        if self.further:
            keys |= {"nextn_predict_layers": self.further, "block_count": keys["block_count"] + self.further}
        named = {f"{self.arch}.{k}": v for k, v in keys.items() if v is not None}
        return {"general.architecture": self.arch, **named}

    @property
    def shapes(self) -> Shapes:
        hp = HParams.from_gguf(self.metadata, {}, self.arch)
        specs = models.find(self.arch).tensor_shapes(hp)
        wanted = re.compile("|".join(self.optional) or "^$")
        found = {name: s.shape for name, s in specs.items() if s.required or wanted.search(name)}
        for il in range(hp.n_layer):
            found |= {f"blk.{il}.{name}": shape for name, shape in self.unused.items()}
        for whole, parts in _FUSED.items():
            fused = [name.removesuffix(whole) for name in found if name.endswith(whole)]
            for name in [block + part for block in fused for part in parts]:
                found.pop(name, None)
        last, width = f"blk.{hp.n_layer - 1}.", hp.n_embd
        for il in range(hp.n_layer, hp.n_layer + self.further):
            block = f"blk.{il}."
            found |= {block + n.removeprefix(last): shape for n, shape in found.items() if n.startswith(last)}
            found |= {f"{block}nextn.eh_proj.weight": (2 * width, width)}
            found |= {f"{block}nextn.{n}.weight": (width,) for n in ("enorm", "hnorm", "shared_head_norm")}
        return found

    @property
    def matrices(self) -> Shapes:
        """Those that a file may have in another type than F32."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if len(shape) > 1 and name.endswith("weight") and "_norm" not in name and "gate_inp" not in name
        }


def _llama(layers: int, width: int, ff: int, heads: int, kv: int, head: int = 128, **more: Any) -> Keys:
    return {
        "block_count": layers, "embedding_length": width, "feed_forward_length": ff, "attention.head_count": heads,
        "attention.head_count_kv": kv, "attention.key_length": head, "attention.value_length": head,
        "rope.dimension_count": head, "rope.freq_base": 1e6,
    } | {k.replace("__", "."): v for k, v in more.items()}  # fmt: skip


def _experts(n: int, used: int, ff: int, shared: int = 0, lead: int = 0, **more: Any) -> Keys:
    found: Keys = {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": ff}
    if shared:
        found["expert_shared_count"] = shared
    if lead:
        found["leading_dense_block_count"] = lead
    return found | more


def _mla(q_lora: int, rank: int = 512, nope: int = 128, rot: int = 64, dv: int = 128) -> Keys:
    """Keys of the absorbed form, in which there is one key head."""
    keys: Keys = {
        "attention.head_count_kv": 1, "attention.key_length": rank + rot, "attention.value_length": rank,
        "attention.key_length_mla": nope + rot, "attention.value_length_mla": dv, "attention.kv_lora_rank": rank,
        "rope.dimension_count": rot,
    }  # fmt: skip
    return keys | ({"attention.q_lora_rank": q_lora} if q_lora else {})


def _delta(keys: int, values: int) -> Keys:
    return {
        "rope.dimension_count": 64, "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": keys, "ssm.time_step_rank": values,
        "ssm.inner_size": 128 * values, "full_attention_interval": 4,
    }  # fmt: skip


def _every(n: int, count: int, first: bool = True) -> np.ndarray[Any, Any]:
    """Flags of layers with windows: all but every n-th, which is the first of a period or the last."""
    return np.array([il % n != (0 if first else n - 1) for il in range(count)])


def _pick(flags: Any, yes: int, no: int) -> np.ndarray[Any, Any]:
    return np.where(flags, yes, no).astype(np.int32)


_OUT = "^output.weight"
_TIED: tuple[str, ...] = ()
_BIAS = r"attn_[qkv]\.bias"
_QK = r"attn_[qk]_norm\.weight"
_PROBS = r"exp_probs_b\.bias"
_KB = r"attn_[kv]_b\.weight"
_SHARED_SPLIT = "expert_shared_feed_forward_length"
_GEMMA4 = _every(6, 30, False)
_EDGE = np.array([(il + 1) % 6 != 0 for il in range(42)])
_STEP = _every(4, 48)
_MIMO = np.array([il != 0 and (il + 1) % 6 != 0 and il != 47 for il in range(48)])
_LAGUNA = _every(4, 40)
_KIMI = np.array([0 if (il + 1) % 4 and il != 26 else 32 for il in range(27)], np.int32)
_KIMI_K3 = np.array([int((il + 1) % 4 == 0 or il == 92) for il in range(93)], np.int32)
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096}
_GROUPS = {"expert_group_count": 8, "expert_group_used_count": 4}
_SIGMOID: Keys = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
_QKV = (r"attn_qkv\.bias", r"attn_output\.bias", r"ffn_(up|down)\.bias")

REAL: dict[str, Real] = {
    "bailingmoe2-flash": Real(
        "bailingmoe2",
        _llama(32, 4096, 9216, 32, 4) | _experts(256, 8, 1024, 1, 1, **_GROUPS) | _SIGMOID
        | {_SHARED_SPLIT: 1024},
        157184, (_OUT, _PROBS), 1,
    ),
    "chatglm-6b": Real(
        "chatglm", _llama(28, 4096, 13696, 32, 2, rope__dimension_count=64), 65024, (_OUT, r"attn_qkv\.weight")
    ),
    "cohere2-7b": Real(
        "cohere2", _llama(32, 4096, 14336, 32, 8, attention__sliding_window=4096, logit_scale=0.25), 256000, _TIED,
        layer_norm=True,
    ),
    "cohere2-moe": Real(
        "cohere2_moe", _llama(48, 4096, 16384, 64, 8, attention__sliding_window=4096, logit_scale=0.25) | {
            "attention.sliding_window_pattern": _every(4, 48, False), _SHARED_SPLIT: 2048,
        } | _experts(128, 8, 2048, 1, 1) | _SIGMOID, 256000, _TIED,
    ),
    "deepseek2-v3": Real(
        "deepseek2",
        _llama(61, 7168, 18432, 128, 1) | _mla(1536) | _experts(256, 8, 2048, 1, 3, **_GROUPS) | _SIGMOID | _YARN
        | {"rope.scaling.yarn_log_multiplier": 0.1},
        129280, (_OUT, _PROBS, _KB),
    ),
    "deepseek2-v2-lite": Real(
        "deepseek2",
        _llama(27, 2048, 10944, 16, 16, 192, attention__value_length=128, rope__dimension_count=64,
               attention__kv_lora_rank=512) | _experts(64, 6, 1408, 2, 1, expert_weights_scale=1.0) | _YARN
        | {"rope.scaling.yarn_log_multiplier": 0.0707},
        102400, (_OUT, r"attn_kv_b\.weight"),
    ),
    "dots1": Real(
        "dots1", _llama(62, 4096, 10944, 32, 32) | _experts(128, 6, 1408, 2, 1) | _SIGMOID, 152064, (_OUT, _PROBS)
    ),
    "ernie4_5-21b": Real(
        "ernie4_5-moe",
        _llama(28, 2560, 12288, 20, 4) | _experts(64, 6, 1536, 2, 1, interleave_moe_layer_step=1)
        | {_SHARED_SPLIT: 3072},
        103424, (_PROBS,),
    ),
    "falcon-7b": Real("falcon", _llama(32, 4544, 18176, 71, 1, 64), 65024, layer_norm=True),
    "gemma2-9b": Real("gemma2", _llama(42, 3584, 14336, 16, 8, 256, attention__sliding_window=4096), 256000, _TIED),
    "gemma3-27b": Real(
        "gemma3", _llama(62, 5376, 21504, 32, 16, attention__sliding_window=1024) | {
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, 262144, _TIED
    ),
    "gemma4-26b": Real(
        "gemma4",
        _llama(30, 2816, 2112, 16, 8, 512, attention__sliding_window=1024, embedding_length_per_layer_input=0) | {
            "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
            "attention.sliding_window_pattern": _GEMMA4, "attention.head_count_kv": _pick(_GEMMA4, 8, 2),
            "rope.freq_base_swa": 10000.0,
        } | _experts(128, 8, 704),
        262144, (r"layer_output_scale", r"rope_freqs", r"ffn_down_exps\.scale", r"ffn_gate_up_exps\.weight",
                 r"blk\.(?!5\.|11\.|17\.|23\.|29\.)\d+\.attn_v\.weight"),
    ),
    "gemma4-e4b": Real(
        "gemma4",
        _llama(42, 2560, 10240, 8, 2, 512, attention__sliding_window=512, embedding_length_per_layer_input=256) | {
            "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
            "attention.sliding_window_pattern": _EDGE, "attention.shared_kv_layers": 18,
            "rope.freq_base_swa": 10000.0,
        },
        262144, (r"layer_output_scale", r"rope_freqs", r"attn_[kv]\.weight", r"attn_k_norm"),
    ),
    "glm-dsa": Real(
        "glm-dsa",
        _llama(78, 6144, 12288, 64, 1) | _mla(2048, nope=192, dv=256) | _experts(256, 8, 2048, 1, 3) | _SIGMOID
        | {"attention.indexer.head_count": 32, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048},
        154880, (_OUT, _PROBS, _KB), 1,
        unused={"indexer.attn_k.weight": (6144, 128), "indexer.attn_q_b.weight": (2048, 4096),
                "indexer.proj.weight": (6144, 32), "indexer.k_norm.weight": (128,), "indexer.k_norm.bias": (128,)},
    ),
    "glm4-32b": Real("glm4", _llama(61, 6144, 23040, 48, 2, rope__dimension_count=64), 151552),
    "glm4moe-355b": Real(
        "glm4moe", _llama(92, 5120, 12288, 96, 8, rope__dimension_count=64) | _experts(160, 8, 1536, 1, 3) | _SIGMOID,
        151552, (_OUT, _PROBS, _BIAS, _QK), 1,
    ),
    "gpt-oss-120b": Real(
        "gpt-oss", _llama(36, 2880, 2880, 64, 8, 64, attention__sliding_window=128) | _experts(128, 4, 2880) | _YARN,
        201088, (_OUT, _BIAS, r"attn_output\.bias", r"ffn_(gate_inp|(up|down|gate)_exps)\.bias"),
    ),
    "granitemoe-3b": Real(
        "granitemoe", _llama(32, 1536, 512, 24, 8, 64, logit_scale=6.0, attention__scale=0.015625,
                             embedding_scale=12.0, residual_scale=0.22) | _experts(40, 8, 512), 49155, _TIED,
    ),
    "grok-1": Real("grok", _llama(64, 6144, 32768, 48, 8) | _experts(8, 2, 32768), 131072, _TIED),
    "hunyuan-a13b": Real(
        "hunyuan-moe", _llama(32, 4096, 3072, 32, 8) | _experts(64, 8, 3072, 1) | {_SHARED_SPLIT: 3072}, 128167, _TIED
    ),
    "kimi-k3": Real(
        "kimi-k3",
        _llama(93, 7168, 33792, 96, 1) | _mla(1536) | _experts(896, 16, 3072, 2, 1) | _SIGMOID
        | {"attention.head_count_kv": _KIMI_K3, "ssm.conv_kernel": 4, "kda.head_dim": 128, "expert_weights_scale": 1.0,
           "kda.gate_lower_bound": -5.0, "attn_res.block_size": 12, "expert_latent_length": 3584,
           "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0},
        163840, (_OUT, _PROBS, _KB, r"attn_gate\.weight", r"ffn_routed_norm\.weight"),
    ),
    "kimi-linear-48b": Real(
        "kimi-linear",
        _llama(27, 2304, 9216, 32, 1) | _mla(0) | _experts(256, 8, 1024, 1, 1) | _SIGMOID
        | {"attention.head_count_kv": _KIMI, "ssm.conv_kernel": 4, "kda.head_dim": 128},
        163840, (_OUT, _PROBS, _KB),
    ),
    "laguna-xs": Real(
        "laguna",
        _llama(40, 2048, 8192, 48, 8, attention__sliding_window=512, rope__dimension_count=64) | {
            "attention.head_count": _pick(_LAGUNA, 64, 48), "attention.sliding_window_pattern": _LAGUNA,
            "rope.freq_base_swa": 10000.0, _SHARED_SPLIT: 512, "rope.dimension_count_swa": 128,
        } | _experts(256, 8, 512, 1, 1) | _SIGMOID | _YARN,
        100352, (_OUT, _PROBS, _QK, r"attn_gate\.weight"),
    ),
    "llama-70b": Real("llama", _llama(80, 8192, 28672, 64, 8), 128256, (_OUT, "rope_freqs")),
    "llama-8b": Real("llama", _llama(32, 4096, 14336, 32, 8), 128256, (_OUT, "rope_freqs")),
    "llama-mixtral-8x7b": Real("llama", _llama(32, 4096, 14336, 32, 8) | _experts(8, 2, 14336), 32000),
    "llama4-maverick": Real(
        "llama4", _llama(48, 5120, 16384, 40, 8) | _experts(128, 1, 8192, interleave_moe_layer_step=2), 202048,
        (_OUT, "rope_freqs"),
    ),
    "mimo2-flash": Real(
        "mimo2",
        _llama(48, 4096, 16384, 64, 4, 192, attention__sliding_window=128) | {
            "attention.value_length": 128, "attention.head_count_kv": _pick(_MIMO, 8, 4), "rope.dimension_count": 64,
            "attention.sliding_window_pattern": _MIMO, "rope.freq_base_swa": 10000.0,
        } | _experts(256, 8, 2048, 0, 1) | _SIGMOID,
        152576, (_OUT, _PROBS, r"attn_sinks"),
    ),
    "minimax-m2": Real(
        "minimax-m2", _llama(62, 3072, 1536, 48, 8, rope__dimension_count=64) | _experts(256, 8, 1536) | _SIGMOID,
        200064, (_OUT, _PROBS),
    ),
    "minimax-m3": Real(
        "minimax-m3",
        _llama(60, 6144, 12288, 64, 4, rope__dimension_count=64) | _experts(128, 4, 3072, 1, 3) | _SIGMOID,
        200064, (_OUT, _PROBS),
    ),
    "mistral3-8b": Real("mistral3", _llama(34, 4096, 14336, 32, 8) | _YARN, 131072),
    "mistral4-119b": Real(
        "mistral4",
        _llama(36, 4096, 12288, 32, 1) | _mla(1024, 256, 64) | _experts(128, 4, 2048, 1) | _YARN
        | {"expert_weights_norm": True, "expert_weights_scale": 1.0, "leading_dense_block_count": 0},
        131072, (_OUT, _KB, r"ffn_gate_up_exps\.weight"),
    ),
    "minicpm3-4b": Real(
        "minicpm3",
        _llama(62, 2560, 6400, 40, 40, 64) | {"attention.q_lora_rank": 768, "attention.kv_lora_rank": 256,
        "attention.key_length": 96, "rope.dimension_count": 32},
        73448, (r"attn_kv_b\.weight",),
    ),
    "phimoe-42b": Real("phimoe", _llama(32, 4096, 6400, 32, 8) | _experts(16, 2, 6400), 32064, (_OUT, _BIAS)),
    "phi3-mini": Real(
        "phi3", _llama(32, 3072, 8192, 32, 32, 96) | {"attention.sliding_window": 262144,
        "rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.19},
        32064, (_OUT, r"attn_qkv\.weight", "rope_factors"),
    ),
    "phi3-phi4": Real(
        "phi3", _llama(40, 5120, 17920, 40, 10) | {"attention.sliding_window": 131072, "context_length": 16384},
        100352, (_OUT, r"attn_qkv\.weight"),
    ),
    "qwen2-72b": Real("qwen2", _llama(80, 8192, 29568, 64, 8), 152064, (_OUT, _BIAS)),
    "qwen2-0.5b": Real("qwen2", _llama(24, 896, 4864, 14, 2, 64), 151936, (_BIAS,)),
    "qwen2moe-57b": Real(
        "qwen2moe", _llama(28, 3584, 18944, 28, 4) | _experts(64, 8, 2560) | {_SHARED_SPLIT: 20480}, 151936,
        (_OUT, _BIAS),
    ),
    "qwen3-8b": Real("qwen3", _llama(36, 4096, 12288, 32, 8), 151936),
    "qwen3moe-235b": Real("qwen3moe", _llama(94, 4096, 12288, 64, 4) | _experts(128, 8, 1536), 151936),
    "qwen3next-80b": Real(
        "qwen3next", _llama(48, 2048, 5120, 16, 2, 256) | _delta(16, 32) | _experts(512, 10, 512)
        | {_SHARED_SPLIT: 512},
        151936, (_OUT, r"attn_(qkv|gate)\.weight", r"ssm_ba\.weight"),
    ),
    "qwen35-27b": Real("qwen35", _llama(64, 5120, 17408, 24, 4, 256) | _delta(16, 48), 248320),
    "qwen35moe-397b": Real(
        "qwen35moe",
        _llama(60, 4096, 1024, 32, 2, 256) | _delta(16, 64) | _experts(512, 10, 1024) | {_SHARED_SPLIT: 1024}, 248320,
    ),
    "qwen4exp-flash": Real(
        "qwen4exp",
        _llama(48, 2560, 0, 24, 2, 256) | _delta(16, 48) | _experts(512, 10, 640) | {
            _SHARED_SPLIT: 640, "hyper_connection.count": 4, "hyper_connection.low_rank": 320,
            "attention.compress_ratios": np.array([0, 0, 0, 4] * 12, np.int32), "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048, "ple.layers": [1],
            "ple.ngram_size": 3, "ple.heads_per_ngram": 8, "ple.conv_kernel": 4, "ple.eos_token_id": 248044,
            "embedding_length_per_layer_input": 160,
            "ple.layer_multipliers": np.array([23703573157769, 20109073645365, 8052911324071], np.uint64),
            "ple.head_vocab_sizes": np.full(16, 20000003, np.uint64),
            "ple.head_offsets": np.arange(16, dtype=np.uint64) * 20000003,
        },
        248320,
    ),
    "starcoder-15b": Real("starcoder", _llama(40, 6144, 24576, 48, 1), 49152, (_OUT, *_QKV), layer_norm=True),
    "step35-flash": Real(
        "step35",
        _llama(45, 4096, 11264, 64, 8, attention__sliding_window=512) | {
            "attention.head_count": _pick(_STEP, 96, 64), "attention.sliding_window_pattern": _STEP,
            "attention.head_count_kv": np.full(48, 8, np.int32), "rope.freq_base_swa": 10000.0, _SHARED_SPLIT: 1280,
            "rope.scaling.original_context_length": 131072,
            "swiglu_clamp_exp": np.zeros(48, np.float32), "swiglu_clamp_shexp": np.zeros(48, np.float32),
        } | _experts(288, 8, 1280, 1, 3) | _SIGMOID,
        128896, (_OUT, _PROBS, _QK, r"attn_gate\.weight", "rope_freqs"), 3,
    ),
}  # fmt: skip
