"""Small hand-made vocabularies, as GGUF metadata, for the tokenizer tests."""

from __future__ import annotations

from typing import Any

from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.unicode import BYTE_TO_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata(model: str, tokens: dict[str, int], **keys: Any) -> dict[str, Any]:
    """Metadata with `tokens` (text -> type) and other `tokenizer.ggml.*` keys by their last part."""
    meta: dict[str, Any] = {"tokenizer.ggml.model": model}
    meta["tokenizer.ggml.tokens"] = list(tokens)
    meta["tokenizer.ggml.token_type"] = list(tokens.values())
    meta.update({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return meta


def spm_metadata(pieces: dict[str, float], types: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """An SPM vocabulary: <unk>, <s>, </s>, 256 byte tokens, then `pieces` (text -> score)."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    tokens |= {f"<0x{b:02X}>": BYTE for b in range(256)}
    n = len(tokens)
    tokens |= {text: (types or {}).get(text, NORMAL) for text in pieces}
    return metadata("llama", tokens, scores=[0.0] * n + list(pieces.values()), **keys)


def bpe_metadata(merges: list[str], pre: str, extra: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary: the byte alphabet, the results of `merges`, then `extra` tokens (text -> type)."""
    tokens = dict.fromkeys(BYTE_TO_CHAR, NORMAL)
    tokens |= {merge.replace(" ", ""): NORMAL for merge in merges}
    tokens |= extra or {}
    return metadata("gpt2", tokens, pre=pre, merges=merges, **keys)


def texts(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    """The tokens of `text` by their vocabulary text."""
    return [tokenizer.vocab.tokens[i] for i in tokenizer.encode(text, **options)]
