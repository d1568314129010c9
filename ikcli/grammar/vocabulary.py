"""The model's vocabulary as llguidance sees it: the bytes of each token, which are special, which end a generation."""

from __future__ import annotations

import numpy as np
from llguidance import LLTokenizer

from ikcli.errors import UnsupportedError
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.vocab import Attr

_NO_TEXT = Attr.CONTROL | Attr.UNKNOWN | Attr.UNUSED


class Vocabulary:
    """The tokenizer data that the grammar library and markers need; built once per model, in a second or two."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.kind == "none" or not tokenizer.eog_ids:
            raise UnsupportedError("the model has no vocabulary with an end token, so grammars cannot be applied")
        self.n_vocab = tokenizer.n_vocab
        self.eog_ids = sorted(i for i in tokenizer.eog_ids if i < self.n_vocab)
        self.eos_token_id = self.eog_ids[0]
        attrs = tokenizer.vocab.attrs
        special = {i for i in range(self.n_vocab) if attrs[i] & _NO_TEXT} | set(self.eog_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [tokenizer.token_bytes(i) for i in range(self.n_vocab)]
        starts = np.array([token[:1].isdigit() for token in self.tokens] + [False] * (-self.n_vocab % 32))
        self.digits = np.packbits(starts, bitorder="little").view("<u4").astype(np.uint32)
        """Packed mask of the tokens that begin with a digit."""
        self._by_text = {self.tokens[i].decode("utf-8", "replace"): i for i in reversed(self.special_token_ids)}
        self._tokenizer = tokenizer
        self.native = LLTokenizer(self, n_vocab=self.n_vocab, eos_token=self.eog_ids)  # type: ignore[arg-type]

    def __call__(self, text: bytes | str) -> list[int]:
        # Part of the library's interface, but unused since no tokens are forced (lark.HEADER).
        return self.native.greedy_tokenize(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)

    def special(self, text: str) -> int | None:
        """Return the id of the control token with this text, or None."""
        return self._by_text.get(text)

    def token_of(self, text: str) -> int | None:
        """Return the id of the token with this text, special or not, or None."""
        found = self._by_text.get(text)
        if found is None and text in self._tokenizer.vocab.token_to_id:
            found = self._tokenizer.vocab.token_to_id[text]
        return found
