"""The models that cut a text fragment into tokens: SPM merges by score, byte-level BPE by rank, WordPiece, unigram.

Results equal those of src/llama-vocab.cpp; WordPiece follows BERT's own code where the two differ. One idea makes the
models fast: a fragment consists of short pieces that cannot influence each other, and pieces repeat, so their ids are
cached.
BPE merges and unigram models run in the `tokenizers` library (imported on first use). SPM merges by score need ties
between equal scores and between different splits of one token decided by position, which merge ranks cannot express;
they run here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import chain, pairwise
from operator import add
from typing import Any, Protocol

from ikcli.errors import FormatError
from ikcli.tokenizer import unicode as uni
from ikcli.tokenizer.plamo import PlamoModel
from ikcli.tokenizer.pretokenize import cuts
from ikcli.tokenizer.vocab import Attr, Vocab

_REMEMBERED_LENGTH = 48
_REMEMBERED_PIECES = 1 << 17
_UNCUT = 2000  # characters of text that are encoded before the work of cutting it pays
_FIRST = 500  # characters that are merged before the work of making a model for it pays
_ESCAPED_SPACE = "\u2581"
_LONGEST_WORD = 1 + 100  # further characters that BERT's own code separates


class FragmentModel(Protocol):
    """An encoder of text without special tokens."""

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of `text` (canonical, see `unicode.canonical`) to `out`."""


def make_model(vocab: Vocab) -> FragmentModel:
    """Return the model for `vocab.kind`, which must not be "none"."""
    if vocab.kind == "spm":
        return SpmModel(vocab)
    if vocab.kind == "ugm":
        return UgmModel(vocab)
    if vocab.kind == "plamo":
        return PlamoModel(vocab)
    return BpeModel(vocab) if vocab.kind == "bpe" else WpmModel(vocab)


def _unknown(vocab: Vocab, what: str) -> int:
    if vocab.ids.unk is None:
        raise FormatError(f"{vocab.source}: the vocabulary can encode {what} neither as bytes nor as unknown token")
    return vocab.ids.unk


class SpmModel:
    """SentencePiece: repeatedly join the adjacent pair whose text is the token of highest score, leftmost first."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._find = vocab.token_to_id
        self._joins: set[str] | None = None  # adjacent characters in tokens, as soon as there is enough text
        self._n_uncut = 0
        self._memo: dict[str, tuple[int, ...]] = {}
        self._byte_keys: dict[bytes, int] = {}

    def encode(self, text: str, out: list[int]) -> None:
        """Escape spaces in `text` and append its ids."""
        text = text.replace(" ", _ESCAPED_SPACE)
        if not uni.is_utf8(text):
            out += self._merge_bytes(uni.to_bytes(text))
            return
        memo = self._memo
        for piece in self._pieces(text):
            ids = memo.get(piece)
            if ids is None:
                ids = tuple(self._merge(piece))
                if len(piece) <= _REMEMBERED_LENGTH and len(memo) < _REMEMBERED_PIECES:
                    memo[piece] = ids
            out += ids

    def _pieces(self, text: str) -> Iterable[str]:
        """Cut between characters that are adjacent in no token, because no merge can cross there."""
        if self._joins is None and self._n_uncut + len(text) <= _UNCUT:
            self._n_uncut += len(text)
            yield text
            return
        if self._joins is None:
            self._joins = {t[i : i + 2] for t in self._vocab.tokens for i in range(len(t) - 1)}
        joins, start = self._joins, 0
        for i in range(1, len(text)):
            if text[i - 1 : i + 1] not in joins:
                yield text[start:i]
                start = i
        yield text[start:]

    def _merge(self, piece: str) -> list[int]:
        found = self._find.get(piece) if len(piece) == 1 else None
        if found is not None:
            return [found]
        return self._ids(merge_by_score(list(piece), self._find, self._vocab.scores, ""))

    def _merge_bytes(self, data: bytes) -> list[int]:
        """Cut text that is not UTF-8 into symbols of the length that their first byte announces."""
        if not self._byte_keys:
            self._byte_keys = {uni.to_bytes(text): i for text, i in self._find.items()}
        lengths = [1] * 12 + [2, 2, 3, 4]
        symbols, at = [], 0
        while at < len(data):
            n = lengths[data[at] >> 4]
            symbols.append(data[at : at + n])
            at += n
        return self._ids(merge_by_score(symbols, self._byte_keys, self._vocab.scores, b""))

    def _ids(self, symbols: Iterable[str] | Iterable[bytes]) -> list[int]:
        out: list[int] = []
        for symbol in symbols:
            found = self._byte_keys.get(symbol) if isinstance(symbol, bytes) else self._find.get(symbol)
            if found is not None:
                out.append(found)
            else:
                self._spell(uni.to_bytes(symbol) if isinstance(symbol, str) else symbol, out)
        return out

    def _spell(self, symbol: bytes, out: list[int]) -> None:
        """Append byte tokens `<0xNN>`, else one-byte tokens, else the unknown token once."""
        ids = []
        for byte in symbol:
            found = self._find.get(f"<0x{byte:02X}>")
            if found is None:
                found = self._find.get(bytes([byte]).decode("utf-8", "surrogateescape"))
            if found is None:
                ids = [_unknown(self._vocab, f"the byte 0x{byte:02X}")]
                break
            ids.append(found)
        out += ids


def merge_by_score(symbols: list[Any], find: dict[Any, int], scores: list[float], empty: Any) -> list[Any]:
    """Merge adjacent `symbols` in place by token score; they are all str or all bytes, like `empty`."""
    n = len(symbols)
    prev = list(range(-1, n - 1))
    after = [*range(1, n), -1]
    queue: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        token = find.get(symbols[left] + symbols[right])
        if token is not None:
            heapq.heappush(queue, (-scores[token], left, right, len(symbols[left]) + len(symbols[right])))

    for i in range(1, n):
        offer(i - 1, i)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        a, b = symbols[left], symbols[right]
        if not a or not b or len(a) + len(b) != size:
            continue  # one of the two was merged in the meantime
        symbols[left] = a + b
        symbols[right] = empty
        following = after[left] = after[right]
        if following >= 0:
            prev[following] = left
            offer(left, following)
        if prev[left] >= 0:
            offer(prev[left], left)
    return [s for s in symbols if s]


class BpeModel:
    """Byte-level BPE: the pre-tokenizer cuts text into words, merges join their characters by rank, leftmost first.

    The `tokenizers` package merges, except for the first words, since its model takes a tenth of a second to make.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._find = vocab.token_to_id
        self._cuts = cuts(vocab.pre.rule)
        self._memos: list[dict[str, tuple[int, ...]]] = [{} for _ in range(len(self._cuts) + 1)]
        self._raw = vocab.pre.rule == "gemma4"  # merges over plain characters instead of bytes
        self._ranks: dict[tuple[str, str], int] | None = None  # of merges, while `_bpe` is not made
        self._n_merged = 0  # characters
        self._bpe: Any = None
        self._extra: list[str] = []  # texts in merges that are not tokens, by id - n_vocab
        self._alphabet: frozenset[str] = frozenset()

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of `text`; bytes that are not UTF-8 count as U+FFFD."""
        if self._bpe is None and self._ranks is None:
            self._prepare()
        text = uni.code_points(text)
        if self._vocab.escape_whitespaces:
            text = text.replace(" ", _ESCAPED_SPACE)
        self._segment(text, 0, out)

    def _segment(self, text: str, level: int, out: list[int]) -> None:
        if level == len(self._cuts):
            out += self._word(text)
            return
        level += 1
        memo = self._memos[level]
        for piece in self._cuts[level - 1](text):
            ids = memo.get(piece)
            if ids is None:
                found: list[int] = []
                self._segment(piece, level, found)
                ids = tuple(found)
                if len(piece) <= _REMEMBERED_LENGTH and len(memo) < _REMEMBERED_PIECES:
                    memo[piece] = ids
            out += ids

    def _word(self, text: str) -> list[int]:
        word = text if self._raw else uni.byte_encode(text)
        if self._vocab.pre.ignore_merges or (self._raw and not word.strip("\n")):
            whole = self._find.get(word)
            if whole is not None:
                return [whole]
        if self._alphabet.issuperset(word):
            return self._merge(word)
        out: list[int] = []
        start = 0
        for i, char in enumerate(word):
            if char not in self._alphabet:
                out += self._merge(word[start:i])
                self._spell(char, out)
                start = i + 1
        return out + self._merge(word[start:])

    def _merge(self, word: str) -> list[int]:
        if not word:
            return []
        ranks = self._ranks
        if self._bpe is None:
            self._n_merged += len(word)
            if ranks is not None and self._n_merged <= _FIRST and len(word) <= _REMEMBERED_LENGTH:
                return self._merge_by_rank(word, ranks)
            self._build()
        out: list[int] = []
        n_vocab = self._vocab.n_vocab
        for token in self._bpe.tokenize(word):
            if token.id < n_vocab:
                out.append(token.id)
            else:
                self._spell(self._extra[token.id - n_vocab], out)
        return out

    def _merge_by_rank(self, word: str, ranks: dict[tuple[str, str], int]) -> list[int]:
        parts, none = list(word), len(ranks)
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, none), i) for i, pair in enumerate(pairwise(parts)))
            if rank == none:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out: list[int] = []
        for text in parts:
            found = self._find.get(text)
            if found is None:
                self._spell(text, out)
            else:
                out.append(found)
        return out

    def _spell(self, text: str, out: list[int]) -> None:
        """Append the byte tokens of a text that is not a token, as far as the vocabulary has them."""
        for byte in text.encode("utf-8", "surrogatepass"):
            name = f"<0x{byte:02X}>" if self._raw else bytes([byte]).decode("utf-8", "surrogateescape")
            found = self._find.get(name)
            if found is not None:
                out.append(found)

    def _prepare(self) -> None:
        """Find the ranks of merges and the characters that words consist of."""
        merges = self._vocab.merges
        if _plain("".join(self._find)) and _plain("".join(chain.from_iterable(merges))):
            self._alphabet = frozenset(t for t in chain(self._find, chain.from_iterable(merges)) if len(t) == 1)
            self._ranks = dict(zip(merges, range(len(merges)), strict=True))  # last: another thread may look
        else:
            self._build()

    def _build(self) -> None:
        from tokenizers.models import BPE

        ids, merges = dict(self._find), self._vocab.merges
        if not _plain("".join(ids)) or not _plain("".join(chain.from_iterable(merges))):
            ids = {text: i for text, i in ids.items() if _plain(text)}
            merges = [pair for pair in merges if _plain(pair[0]) and _plain(pair[1])]
        lefts, rights = zip(*merges, strict=True) if merges else ((), ())
        used = {*lefts, *rights, *map(add, lefts, rights)}
        extra: list[str] = []
        for left, right in merges if not used <= ids.keys() else ():
            for text in (left, right, left + right):
                if text not in ids:
                    ids[text] = self._vocab.n_vocab + len(extra)
                    extra.append(text)
        self._alphabet = frozenset(text for text in ids if len(text) == 1)
        self._extra = extra
        self._bpe, self._ranks = BPE(ids, merges, cache_capacity=0), None


def _plain(text: str) -> bool:
    """Return whether a text has no surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class UgmModel:
    """Unigram: characters are normalized, and a word becomes the tokens whose scores add up to most.

    Words begin with an escaped space. If a token of the vocabulary reaches across one, whole texts are cut at once.
    """

    def __init__(self, vocab: Vocab) -> None:
        from tokenizers.models import Unigram
        from tokenizers.normalizers import Precompiled

        self._vocab = vocab
        text = [bool(a & (Attr.NORMAL | Attr.USER_DEFINED | Attr.BYTE)) and _plain(t)
                for t, a in zip(vocab.tokens, vocab.attrs, strict=True)]  # fmt: skip
        least = min((s for s, used in zip(vocab.scores, text, strict=True) if used), default=0.0)
        # Tokens that no text becomes get names that no text contains.
        pieces = [(t, s) if used else (f"\0{i}", least)
                  for i, (t, s, used) in enumerate(zip(vocab.tokens, vocab.scores, text, strict=True))]  # fmt: skip
        in_bytes = any(a & Attr.BYTE for a in vocab.attrs)
        self._unigram = Unigram(pieces, _unknown(vocab, "some characters"), in_bytes)
        self._words = not any(_ESCAPED_SPACE in t[1:] for t, used in zip(vocab.tokens, text, strict=True) if used)
        try:
            self._normal = Precompiled(vocab.charsmap) if vocab.charsmap else None
        except Exception as e:
            raise FormatError(f"{vocab.source}: tokenizer.ggml.precompiled_charsmap cannot be read: {e}") from None
        self._memo: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of `text`; characters without a token become the unknown token."""
        text = uni.code_points(text)
        if self._normal is not None:
            text = self._normal.normalize_str(text)
        if self._vocab.remove_extra_whitespaces:
            text = " ".join(word for word in text.split(" ") if word)
        if not text:
            return
        text = text.replace(" ", _ESCAPED_SPACE)
        if self._vocab.add_space_prefix and not text.startswith(_ESCAPED_SPACE):
            text = _ESCAPED_SPACE + text
        for word in _from_spaces(text) if self._words else [text]:
            ids = self._memo.get(word)
            if ids is None:
                ids = tuple(token.id for token in self._unigram.tokenize(word))
                if len(word) <= _REMEMBERED_LENGTH and len(self._memo) < _REMEMBERED_PIECES:
                    self._memo[word] = ids
            out += ids


def _from_spaces(text: str) -> Iterable[str]:
    """Cut before every escaped space."""
    start = 0
    while (end := text.find(_ESCAPED_SPACE, start + 1)) > 0:
        yield text[start:end]
        start = end
    yield text[start:]


class WpmModel:
    """WordPiece: words in lower case without accents, cut greedily into the longest tokens."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._find = vocab.token_to_id
        self._longest = max(len(text) for text in vocab.tokens)
        self._memo: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of `text`; a word that tokens cannot cover becomes the unknown token."""
        for word in words(uni.code_points(text)):
            ids = self._memo.get(word)
            if ids is None:
                ids = tuple(self._word(_ESCAPED_SPACE + word))
                if len(self._memo) < _REMEMBERED_PIECES:
                    self._memo[word] = ids
            out += ids

    def _word(self, word: str) -> list[int]:
        if len(word) > _LONGEST_WORD:
            return [_unknown(self._vocab, "some words")]
        ids, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                found = self._find.get(word[start:end])
                if found is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                return [_unknown(self._vocab, "some words")]
        return ids


def words(text: str) -> list[str]:
    """BERT's basic tokenizer: drop accents and controls, lower the case, separate punctuation and ideographs."""
    out: list[str] = []
    word = ""
    for char in text:
        kind, base = _BASIC[char]
        if kind == "letter":
            word += base
        elif kind != "drop":
            if word:
                out.append(word)
                word = ""
            if kind == "single":
                out.append(base)
    return [*out, word] if word else out


_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B81F),
    (0x2B920, 0x2CEAF),  # as in BERT's own code, which omits 2B820-2B91F
    (0x2F800, 0x2FA1F),
)


class _Basic(dict[str, tuple[str, str]]):
    """Character -> (letter, single, space or drop; its lower-case base), filled on first use."""

    def __missing__(self, char: str) -> tuple[str, str]:
        base = uni.without_accents(char)
        kind = self._kind(ord(base[0])) if base else "drop"
        found = self[char] = (kind, "".join(map(uni.lower, base)))
        return found

    @staticmethod
    def _kind(cpt: int) -> str:
        if cpt in uni.WHITESPACE:
            return "space"
        major = uni.category(cpt)
        if cpt in (0, 0xFFFD) or major == "C":
            return "drop"
        if major == "P" or (major == "S" and cpt < 0x7F) or any(a <= cpt <= b for a, b in _IDEOGRAPHS):
            return "single"
        return "letter"


_BASIC = _Basic()
