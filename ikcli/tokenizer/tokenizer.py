"""Convert text to token ids and back: special tokens, BOS and EOS rules, pieces, streaming detokenization.

`Tokenizer` combines a checked `Vocab` with the model for its kind (src/llama-vocab.cpp: tokenize, token_to_piece,
detokenize). Text is `str`; bytes that are not UTF-8 come in as surrogate escapes and go out as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from encodings import utf_8
from functools import cached_property
from typing import Any

from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.tokenizer import unicode as uni
from ikcli.tokenizer.models import FragmentModel, make_model
from ikcli.tokenizer.vocab import Attr, SpecialIds, Vocab, load_vocab, special_tokens

_C_SPACE = " \t\n\v\f\r"
_ESCAPED_SPACE = "\u2581"
_HIDDEN = int(Attr.UNKNOWN | Attr.CONTROL)


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self._pieces: dict[int, bytes] = {}
        self.whole: tuple[dict[int, str], dict[int, str]] = (
            {},
            {},
        )  # of `StreamDecoder`; the second includes special tokens

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """Make the tokenizer that GGUF metadata describe.

        `source` names the file in messages. Raise a FormatError if keys are missing or inconsistent, an
        UnsupportedError for an unknown tokenizer or pre-tokenizer.
        """
        return cls(load_vocab(metadata, source))

    @property
    def kind(self) -> str:
        """Return `spm`, `bpe`, `wpm`, `ugm`, or `none` for a model without vocabulary."""
        return self.vocab.kind

    @property
    def n_vocab(self) -> int:
        """Return the number of tokens."""
        return self.vocab.n_vocab

    @property
    def special_ids(self) -> SpecialIds:
        """Return ids by role: bos, eos, eot, eom, unk, sep, pad, cls, mask and the fill-in-the-middle tokens."""
        return self.vocab.ids

    @property
    def bos_id(self) -> int | None:
        """Return the beginning-of-sequence token."""
        return self.vocab.ids.bos

    @property
    def eos_id(self) -> int | None:
        """Return the end-of-sequence token."""
        return self.vocab.ids.eos

    @property
    def eog_ids(self) -> frozenset[int]:
        """Return all tokens that end a generation."""
        return self.vocab.eog_ids

    @property
    def add_bos(self) -> bool:
        """Return whether the model expects BOS before the text; WordPiece always does."""
        return self.vocab.add_bos or self.kind == "wpm"

    @property
    def add_eos(self) -> bool:
        """Return whether the model expects EOS after the text; WordPiece always does (SEP)."""
        return self.vocab.add_eos or self.kind == "wpm"

    @cached_property
    def newline_id(self) -> int | None:
        """Return the first token of a line feed."""
        ids = self.encode("\n", add_special=False) if self.kind == "bpe" else []
        if self.kind == "spm":
            ids = [i for t in ("<0x0A>", "\n") if (i := self.vocab.token_to_id.get(t)) is not None]
        return ids[0] if ids else self.vocab.ids.pad

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of `text`.

        `add_special` adds BOS/EOS (SEP for WordPiece) if the model expects them. `parse_special` recognizes the texts
        of control tokens; user-defined tokens are always recognized.
        """
        vocab = self.vocab
        model = self._model
        out: list[int] = []
        if add_special and self.add_bos:
            out.append(self._required("bos"))
        spm_prefix = vocab.kind == "spm" and vocab.add_space_prefix
        prefix = " " if spm_prefix else ""
        for fragment in self._fragments(uni.canonical(text), parse_special):
            if isinstance(fragment, int):
                out.append(fragment)
                prefix = " " if spm_prefix else ""
            else:
                model.encode(prefix + fragment, out)
                prefix = ""
        if add_special and vocab.kind == "wpm":
            out.append(self._required("sep"))
        elif add_special and vocab.add_eos:
            out.append(self._required("eos"))
        return out

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids` without the leading space of encoding; broken UTF-8 becomes U+FFFD.

        `skip_special` leaves out control and unknown tokens.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Return the bytes of `decode`, unchanged."""
        pieces = []
        strip = self.vocab.add_space_prefix
        for i in ids:
            piece = self.token_bytes(i, special=not skip_special)
            if strip and piece:
                piece = piece[1:] if piece.startswith(b" ") else piece
                strip = False
            pieces.append(piece)
        return b"".join(pieces)

    def token_bytes(self, token: int, special: bool = True) -> bytes:
        """Return the bytes of a token; empty for control and unknown tokens unless `special`."""
        if not 0 <= token < len(self.vocab.tokens):
            raise IkError(f"{self.vocab.source}: token id {token} is outside the vocabulary of {self.n_vocab} tokens")
        if not special and self.vocab.attrs[token] & _HIDDEN:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def token_text(self, token: int) -> str:
        """Return a token for display: its piece, with broken UTF-8 as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        """Return whether the token is a control token."""
        return bool(self.vocab.attrs[token] & Attr.CONTROL)

    @cached_property
    def _model(self) -> FragmentModel:
        if self.vocab.kind == "none":
            raise UnsupportedError(f"{self.vocab.source}: the model has no vocabulary; give token ids instead of text")
        return make_model(self.vocab)

    def _required(self, role: str) -> int:
        found: int | None = getattr(self.vocab.ids, role)
        if found is None:
            raise FormatError(
                f"{self.vocab.source}: the model wants a {role.upper()} token added, but its vocabulary names none; "
                f"switch that off with --override-kv tokenizer.ggml.add_{role}_token=bool:false"
            )
        return found

    @cached_property
    def _specials(self) -> list[tuple[str, int, int]]:
        return [(self.vocab.tokens[i], i, self.vocab.attrs[i]) for i in special_tokens(self.vocab)]

    @cached_property
    def _special_starts(self) -> set[str]:
        return {text[:2] for text, _, _ in self._specials}

    def _fragments(self, text: str, parse_special: bool) -> Iterator[int | str]:
        """Cut out special tokens, longest text first, each from left to right; keep the rest as text."""
        if not text:
            return iter(())
        fragments: list[int | str] = [text]
        starts = {start for start in self._special_starts if start in text}
        for token_text, token, attr in self._specials:
            if token_text[:2] not in starts or token_text not in text:
                continue
            if attr & (Attr.CONTROL | Attr.UNKNOWN) and not parse_special:
                continue
            fragments = list(_cut_out(fragments, token_text, token, attr))
        return iter(fragments)

    def _piece(self, token: int) -> bytes:
        vocab = self.vocab
        text, attr = vocab.tokens[token], vocab.attrs[token]
        if attr & (Attr.UNKNOWN | Attr.CONTROL | Attr.USER_DEFINED):
            return uni.to_bytes(text)
        if attr & Attr.NORMAL:
            if vocab.kind == "plamo":
                return uni.to_bytes(text)
            if vocab.kind != "bpe" or vocab.escape_whitespaces:
                return uni.to_bytes(text.replace(_ESCAPED_SPACE, " "))
            return _byte_decode(text)
        if attr & Attr.BYTE:
            return bytes([self._byte_value(token, text)])
        return b""

    def _byte_value(self, token: int, text: str) -> int:
        try:
            return int(text[3:5], 16)
        except ValueError:
            raise FormatError(
                f"{self.vocab.source}: tokenizer.ggml.tokens entry {token} has type byte, but {text!r} is not <0xNN>"
            ) from None


def _cut_out(fragments: list[int | str], text: str, token: int, attr: int) -> Iterator[int | str]:
    for fragment in fragments:
        if isinstance(fragment, int) or text not in fragment:
            yield fragment
            continue
        parts = fragment.split(text)
        for i, part in enumerate(parts):
            if i > 0:
                yield token
                part = part.lstrip(_C_SPACE) if attr & Attr.RSTRIP else part
            if i < len(parts) - 1:
                part = part.rstrip(_C_SPACE) if attr & Attr.LSTRIP else part
            if part:
                yield part


def _byte_decode(text: str) -> bytes:
    """Return the bytes of a token in the byte alphabet; name characters outside it."""
    try:
        return bytes([uni.CHAR_TO_BYTE[c] for c in text])
    except KeyError:
        pass
    out = bytearray()
    for c in uni.code_points(text):
        byte = uni.CHAR_TO_BYTE.get(c)
        if byte is not None:
            out.append(byte)
        else:
            utf8 = c.encode("utf-8", "surrogatepass")
            out += b"[UNK_BYTE_0x" + utf8.hex().encode() + uni.to_bytes(text) + b"]"
    return bytes(out)


class StreamDecoder:
    """A decoder of a stream of ids; it returns text only when its UTF-8 is complete."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, strip_prefix: bool = False) -> None:
        """`strip_prefix` drops the leading space of encoding (off when continuing a prompt)."""
        self._tokenizer = tokenizer
        self._special = not skip_special
        self._strip = strip_prefix and tokenizer.vocab.add_space_prefix
        self._whole = tokenizer.whole[self._special]  # texts of tokens that consist of whole characters
        self._utf8 = utf_8.IncrementalDecoder("replace")

    def feed(self, token: int) -> str:
        """Return the text completed by `token`, which may be empty."""
        begins = not self._utf8.buffer and not self._strip
        if begins and (known := self._whole.get(token)) is not None:
            return known
        piece = self._tokenizer.token_bytes(token, special=self._special)
        if self._strip and piece:
            piece = piece[1:] if piece.startswith(b" ") else piece
            self._strip = False
        text = self._utf8.decode(piece)
        if begins and not self._utf8.buffer:
            self._whole[token] = text
        return text

    def flush(self) -> str:
        """Return the rest at the end, an incomplete character as U+FFFD. The decoder can be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
