"""Architectures that files of llama.cpp and ik_llama.cpp have and that do not run, with the reason."""

from __future__ import annotations

_DRAFT = "it drafts for another model: name that with -m, and this file with -md and --spec-type"
_DIFFUSION = "it makes text by diffusion, all tokens of a block at once, and has no next token"
_RWKV = "it has the recurrences of RWKV, which no backend computes"
_IMAGES = "it is the text part of a model for images that has no counterpart here"
_SPEECH = "it makes speech, not text"
_GLM_NEXT = "its indexer chooses among pools of positions, and it has several streams of states"

REASONS = {
    "arwkv7": _RWKV,
    "axk2": "its norms have gates of low rank, and its attention is gated by the compressed query",
    "chameleon": _IMAGES,
    "clef": "it chooses among given options with a head of its own on states of Qwen3.5 and makes no text",
    "deepseek2-ocr": _IMAGES,
    "deepseek41": "it has attention over compressed and chosen positions of another kind than that of DeepSeek V4",
    "dflash": "it drafts for another model, in a layout that is not read; make a head for -md with ik convert",
    "dflash-draft": _DRAFT,
    "diffusion-gemma": _DIFFUSION,
    "dream": _DIFFUSION,
    "eagle3": _DRAFT,
    "gemma4-assistant": _DRAFT,
    "gemma4_mtp": _DRAFT,
    "gigachat35": "it has latent attention beside delta nets whose gates and limits differ from those of other models",
    "glm5-next": _GLM_NEXT,
    "glm5next": _GLM_NEXT,
    "gptj": "neither llama.cpp nor ik_llama.cpp has a graph for it",
    "graniteswitch": "tokens of the text choose the adapters that the tokens after them are computed with",
    "hrm_text": "two stacks of layers take turns, and the tokens of a prompt see each other in both directions",
    "hunyuan_vl": _IMAGES,
    "k2horizon": "the values of its attention are chosen among experts, and its norms are in groups",
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "motif3": "its attention subtracts a second one (noise heads), and its experts have the activation PolyNorm",
    "phi4flash": "its attention is the difference of two, and the last layers reuse states of a Mamba layer",
    "pockettts": _SPEECH,
    "qwen3tts": _SPEECH,
    "rnd1": _DIFFUSION,
    "rwkv6": _RWKV,
    "rwkv6qwen2": _RWKV,
    "rwkv7": _RWKV,
    "wavtokenizer-dec": _SPEECH,
}
