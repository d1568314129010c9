"""GGUF vocabularies to token ids and back (`Tokenizer`, `StreamDecoder`), and chat templates (`ChatTemplate`).

Importing this package loads neither the `tokenizers` library nor Jinja2; both come in when first needed.
"""

from __future__ import annotations

from ikcli.tokenizer.chat import ChatTemplate
from ikcli.tokenizer.tokenizer import StreamDecoder, Tokenizer
from ikcli.tokenizer.vocab import SpecialIds

__all__ = ["ChatTemplate", "SpecialIds", "StreamDecoder", "Tokenizer"]
