"""Defaults by architecture for what GGUF files do not state: norms, gating, where experts are, normalised weights."""

from __future__ import annotations

from ikcli.models.recurrent.states import KDA

ALL_EXPERTS = (
    "arctic", "bailingmoe", "dbrx", "flex-olmo", "gpt-oss", "granitemoe", "grok", "grovemoe", "hunyuan-moe", "maple",
    "mellum", "minimax-01", "minimax-m2", "olmoe", "phimoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next",
    "qwen3vlmoe", "qwen4exp", "smallthinker",
)  # fmt: skip
"""Experts in every layer."""
DENSE_MLA = ("minicpm3", "plm")
MLA = (
    "deepseek2", "deepseek32", "dots3note", "glm-dsa", "hy_v4", "mistral4", "openpangu", *DENSE_MLA, *KDA,
)  # fmt: skip
"""Multi-head latent attention."""
DENSE_LEAD = (
    *MLA, "afmoe", "bailingmoe2", "cohere2_moe", "deepseek", "dots1", "ernie4_5-moe", "exaone-moe", "glm4moe", "hy_v3",
    "laguna", "minimax-m3", "step35",
)  # fmt: skip
"""Experts in all layers but the first ones."""
SIGMOID = (
    "afmoe", "cohere2_moe", "dots1", "dots3note", "exaone-moe", "glm-dsa", "glm4moe", "hy_v3", "hy_v4", "laguna",
    "lfm2moe", "llama4", "mimo2", "minimax-m2", "minimax-m3", "nemotron_h_moe", "openpangu", "smallthinker", "step35",
)  # fmt: skip
"""Gating of files that do not say."""
NOT_NORMALISED = (
    "bailingmoe", "bailingmoe2", "cohere2_moe", "deepseek", "deepseek2", "deepseek32", "flex-olmo", "hy_v4", "jamba",
    "laguna", "llama4", "minimax-m3", "nomic-bert-moe", "olmoe", "openpangu", "phimoe", "qwen2moe", "step35",
)  # fmt: skip
"""Weights of experts where files do not say; most architectures always normalise, and their files do not say so."""
LAYER_NORM = (
    "bloom", "codeshell", "cohere2", "command-r", "dbrx", "falcon", "gpt2", "gptneox", "jais", "jais2", "mpt",
    "nemotron", "olmo", "orion", "phi2", "phimoe", "stablelm", "starcoder", "starcoder2", "bert", "jina-bert-v2",
    "jina-bert-v3", "modern-bert", "nomic-bert", "nomic-bert-moe",
)  # fmt: skip
BITNET = ("bitnet", "bitnet-25", "bitnet-b1.58")
ENCODERS = (
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert",
    "nomic-bert", "nomic-bert-moe", "t5encoder",
)  # fmt: skip
"""Attention in both directions, no next token."""
WHERE_ROUTED = ("jamba", "laguna", "mimo2", "step35")  # layers with a router are those with experts
CAPPED_GATES = ("deepseek4", "hy_v4", "maple")
"""Limits of SwiGLU cap the gate before its activation, not behind it."""
SOFTCAPS = {
    "gemma2": (50.0, 30.0), "gemma3": (0.0, 0.0), "gemma3n": (0.0, 30.0), "gemma4": (0.0, 30.0),
    "grok": (30.0, 0.0), "muse-glimmer": (0.0, 30.0),
}  # fmt: skip
"""Soft caps on K*Q and on logits where files do not say; of other architectures they are not read."""
