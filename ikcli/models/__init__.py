"""Model architectures: one module each, found by the architecture name of the file and imported on first use.

A module defines `tensor_shapes(hp) -> TensorSpecs` and `build(g, hp, w, cfg) -> Node`, which returns the logits, or the
last states of an encoder.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast, runtime_checkable

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models.config import EXPAND_MIN_TOKENS, GraphConfig, MediaConfig, Outputs
from ikcli.models.hparams import HParams
from ikcli.models.rope import RopeParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights, check_tensors
from ikcli.models.unsupported import REASONS

ARCHITECTURES: dict[str, str] = {
    "afmoe": "ikcli.models.afmoe",
    "apertus": "ikcli.models.plain",
    "arcee": "ikcli.models.plain",
    "arctic": "ikcli.models.arctic",
    "baichuan": "ikcli.models.llama",
    "bailingmoe": "ikcli.models.plain",
    "bailingmoe2": "ikcli.models.plain",
    "bailingmoe3": "ikcli.models.recurrent.kimi_linear",
    "bert": "ikcli.models.bert",
    "bitnet": "ikcli.models.bitnet",
    "bitnet-25": "ikcli.models.bitnet",
    "bitnet-b1.58": "ikcli.models.bitnet",
    "bloom": "ikcli.models.gpt2",
    "chatglm": "ikcli.models.plain",
    "codeshell": "ikcli.models.gpt2",
    "cogvlm": "ikcli.models.cogvlm",
    "cohere2": "ikcli.models.cohere2",
    "cohere2_moe": "ikcli.models.cohere2",
    "cohere2moe": "ikcli.models.cohere2",  # llama.cpp's spelling
    "command-r": "ikcli.models.command_r",
    "dbrx": "ikcli.models.plain",
    "deci": "ikcli.models.deci",
    "deepseek": "ikcli.models.plain",
    "deepseek2": "ikcli.models.deepseek2",
    "deepseek32": "ikcli.models.deepseek2",
    "deepseek4": "ikcli.models.sparse.deepseek4",
    "dots1": "ikcli.models.plain",
    "dots3note": "ikcli.models.sparse.dots3note",
    "ernie4_5": "ikcli.models.plain",
    "ernie4_5-moe": "ikcli.models.plain",
    "eurobert": "ikcli.models.plain",
    "exaone": "ikcli.models.llama",
    "exaone-moe": "ikcli.models.plain",
    "exaone4": "ikcli.models.olmo2",
    "falcon": "ikcli.models.falcon",
    "falcon-h1": "ikcli.models.recurrent.mamba2",
    "flex-olmo": "ikcli.models.olmo2",
    "gemma": "ikcli.models.plain",
    "gemma-embedding": "ikcli.models.gemma.gemma2",
    "gemma2": "ikcli.models.gemma.gemma2",
    "gemma3": "ikcli.models.gemma.gemma2",
    "gemma3n": "ikcli.models.gemma.gemma3n",
    "gemma4": "ikcli.models.gemma.gemma4",
    "glm-dsa": "ikcli.models.deepseek2",
    "glm4": "ikcli.models.glm4",
    "glm4moe": "ikcli.models.plain",
    "gpt-oss": "ikcli.models.gpt_oss",
    "gpt2": "ikcli.models.gpt2",
    "gptneox": "ikcli.models.gptneox",
    "grok": "ikcli.models.grok",
    "granite": "ikcli.models.plain",
    "granite-swa": "ikcli.models.plain",  # in earlier files of ik
    "granite_swa": "ikcli.models.plain",
    "granitehybrid": "ikcli.models.recurrent.mamba2",
    "granitemoe": "ikcli.models.plain",
    "grovemoe": "ikcli.models.plain",
    "hunyuan-dense": "ikcli.models.plain",
    "hunyuan-moe": "ikcli.models.plain",
    "hy_v3": "ikcli.models.plain",
    "hy_v4": "ikcli.models.sparse.hy_v4",
    "internlm2": "ikcli.models.llama",
    "jais": "ikcli.models.plain",
    "jais2": "ikcli.models.gpt2",
    "jamba": "ikcli.models.recurrent.lfm2",
    "jina-bert-v2": "ikcli.models.bert",
    "jina-bert-v3": "ikcli.models.bert",
    "kimi-k3": "ikcli.models.recurrent.kimi_k3",
    "kimi-linear": "ikcli.models.recurrent.kimi_linear",
    "laguna": "ikcli.models.step35",
    "lfm2": "ikcli.models.recurrent.lfm2",
    "lfm2moe": "ikcli.models.recurrent.lfm2",
    "llama": "ikcli.models.llama",
    "llama-embed": "ikcli.models.llama",
    "llama4": "ikcli.models.llama4",
    "maincoder": "ikcli.models.plain",
    "mamba": "ikcli.models.recurrent.mamba",
    "mamba2": "ikcli.models.recurrent.mamba2",
    "maple": "ikcli.models.plain",
    "mellum": "ikcli.models.plain",
    "mimo2": "ikcli.models.plain",
    "minicpm": "ikcli.models.llama",
    "minicpm3": "ikcli.models.deepseek2",
    "minimax-01": "ikcli.models.recurrent.minimax01",
    "minimax-m2": "ikcli.models.plain",
    "minimax-m3": "ikcli.models.plain",
    "mistral3": "ikcli.models.llama",
    "mistral4": "ikcli.models.deepseek2",
    "modern-bert": "ikcli.models.modern_bert",
    "mpt": "ikcli.models.gpt2",
    "neo-bert": "ikcli.models.neo_bert",
    "nanbeige": "ikcli.models.looped",
    "nemotron": "ikcli.models.gpt2",
    "nemotron_h": "ikcli.models.recurrent.mamba2",
    "nemotron_h_moe": "ikcli.models.recurrent.mamba2",
    "muse-glimmer": "ikcli.models.muse_glimmer",
    "nomic-bert": "ikcli.models.bert",
    "nomic-bert-moe": "ikcli.models.bert",
    "olmo": "ikcli.models.olmo",
    "olmo2": "ikcli.models.olmo2",
    "olmoe": "ikcli.models.plain",
    "openelm": "ikcli.models.plain",
    "openpangu": "ikcli.models.sparse.openpangu",
    "orion": "ikcli.models.stablelm",
    "ouro": "ikcli.models.looped",
    "paddleocr": "ikcli.models.plain",
    "pangu-embedded": "ikcli.models.plain",
    "phi2": "ikcli.models.phi2",
    "phi3": "ikcli.models.plain",
    "phimoe": "ikcli.models.plain",
    "plamo": "ikcli.models.command_r",
    "plamo2": "ikcli.models.recurrent.plamo2",
    "plamo3": "ikcli.models.glm4",
    "plm": "ikcli.models.deepseek2",
    "qwen": "ikcli.models.plain",
    "qwen2": "ikcli.models.plain",
    "qwen2moe": "ikcli.models.plain",
    "qwen2vl": "ikcli.models.plain",
    "qwen3": "ikcli.models.plain",
    "qwen35": "ikcli.models.recurrent.qwen3next",
    "qwen35moe": "ikcli.models.recurrent.qwen3next",
    "qwen3moe": "ikcli.models.plain",
    "qwen3next": "ikcli.models.recurrent.qwen3next",
    "qwen3vl": "ikcli.models.plain",
    "qwen3vlmoe": "ikcli.models.plain",
    "qwen4exp": "ikcli.models.sparse.qwen4exp",
    "refact": "ikcli.models.llama",
    "seed_oss": "ikcli.models.plain",
    "smallthinker": "ikcli.models.smallthinker",
    "smollm3": "ikcli.models.plain",
    "spark2_5": "ikcli.models.plain",
    "stablelm": "ikcli.models.stablelm",
    "starcoder": "ikcli.models.gpt2",
    "starcoder2": "ikcli.models.gpt2",
    "step35": "ikcli.models.step35",
    "t5": "ikcli.models.t5",
    "t5encoder": "ikcli.models.t5",
    "talkie": "ikcli.models.talkie",
    "xverse": "ikcli.models.llama",
}

__all__ = [
    "ARCHITECTURES",
    "EXPAND_MIN_TOKENS",
    "GraphConfig",
    "HParams",
    "HasEncoder",
    "MediaConfig",
    "ModelModule",
    "Outputs",
    "RopeParams",
    "TensorSpec",
    "TensorSpecs",
    "Weights",
    "check_tensors",
    "find",
]


class ModelModule(Protocol):
    """The interface of an architecture's module."""

    def tensor_shapes(self, hp: HParams) -> TensorSpecs:
        """Return the expected tensors of the file."""

    def build(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
        """Record the graph and return the logits of the output rows, or their states if `hp.causal` is false."""


@runtime_checkable
class HasEncoder(Protocol):
    """A module of encoder-decoders: `build` records the decoder."""

    def build_encoder(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
        """Record the encoder, which stores keys and values of its states for the decoder."""


def find(arch: str, source: str = "the model") -> ModelModule:
    """Return the module of an architecture; raise UnsupportedError that lists the known ones."""
    if arch == "clip":
        raise UnsupportedError(f"{source} is a projector: name it with --mmproj, and the model it belongs to with -m")
    if arch in REASONS:
        raise UnsupportedError(
            f"{source}: models of architecture '{arch}' do not run: {REASONS[arch]}; inspect, quantize, repack and "
            "gguf-split take the file"
        )
    if arch not in ARCHITECTURES:
        raise UnsupportedError(f"{source}: architecture '{arch}' is not supported; known: {', '.join(ARCHITECTURES)}")
    return cast(ModelModule, importlib.import_module(ARCHITECTURES[arch]))
