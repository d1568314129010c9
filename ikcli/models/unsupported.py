"""Architectures that files of llama.cpp and ik_llama.cpp have and that do not run, with the reason."""

from __future__ import annotations

_DRAFT = "it drafts from states of another model and is not a model of its own"
_DIFFUSION = "it makes text by diffusion, all tokens of a block at once, and has no next token"
_RWKV = "it has the recurrences of RWKV, which no backend computes"
_STREAMS = "it has attention over compressed or chosen positions with caches of their own, and streams of states"
_IMAGES = "it is the text part of a model for images that has no counterpart here"
_SPEECH = "it makes speech, not text"

REASONS = {
    "arwkv7": _RWKV,
    "chameleon": _IMAGES,
    "deepseek2-ocr": _IMAGES,
    "deepseek41": _STREAMS,
    "dflash": _DRAFT,
    "dflash-draft": _DRAFT,
    "dream": _DIFFUSION,
    "eagle3": _DRAFT,
    "gemma3n": "it has four parallel streams of states with a predictor between them",
    "gemma4-assistant": _DRAFT,
    "gemma4_mtp": _DRAFT,
    "gptj": "neither llama.cpp nor ik_llama.cpp has a graph for it",
    "hunyuan_vl": _IMAGES,
    "hy_v4": _STREAMS,
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "pockettts": _SPEECH,
    "qwen3tts": _SPEECH,
    "qwen4exp": _STREAMS,
    "rnd1": _DIFFUSION,
    "rwkv6": _RWKV,
    "rwkv6qwen2": _RWKV,
    "rwkv7": _RWKV,
    "talkie": "nothing it needs is known to be missing, but its graph is not written yet",
    "wavtokenizer-dec": _SPEECH,
}
