"""Convert text to token ids and back with GGUF vocabularies (`Tokenizer`, `StreamDecoder`).

Importing this package loads neither the `tokenizers` library nor Jinja2; both are imported on first use.
"""

from __future__ import annotations

from ikcli.tokenizer.tokenizer import StreamDecoder, Tokenizer
from ikcli.tokenizer.vocab import SpecialIds

__all__ = ["SpecialIds", "StreamDecoder", "Tokenizer"]
