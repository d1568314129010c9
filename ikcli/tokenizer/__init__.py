"""GGUF vocabularies to token ids and back (`Tokenizer`, `StreamDecoder`).

Importing this package loads neither the `tokenizers` library nor Jinja2; both come in when first needed.
"""

from __future__ import annotations

from ikcli.tokenizer.tokenizer import StreamDecoder, Tokenizer
from ikcli.tokenizer.vocab import SpecialIds

__all__ = ["SpecialIds", "StreamDecoder", "Tokenizer"]
