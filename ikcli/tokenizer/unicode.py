"""Unicode helpers of the tokenizers: general categories, white space, lower case, byte alphabet, lenient UTF-8.

Regex pre-tokenizers work on a *category view* of the text: ASCII stays, and any other character becomes a placeholder
for its general category, so that a small ASCII pattern covers all of Unicode (src/unicode.cpp).
Categories are those of Unicode 15.1 on all Python versions that do not know a later one.
"""

from __future__ import annotations

import re
import unicodedata

WHITESPACE = frozenset(
    [*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
)

NUMBER, LETTER, PUNCTUATION, MARK, SYMBOL, OTHER = "\u00d1", "\u00d2", "\u00d3", "\u00d4", "\u00d5", "\u00d0"
HAN_LETTER, HAN_OTHER = "\u00d6", "\u00d7"
SPACE = "\x0b"  # represents all white space beyond ASCII

_PLACEHOLDER = {"N": NUMBER, "L": LETTER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL}

_HAN = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2EBEF),
    (0x2F800, 0x2FA1F),
)

# Characters added by Unicode 15.0 and 15.1, as "first-last" in hex, by major category.
_ADDED = {
    "L": "11240 11F02 11F04-11F10 11F12-11F33 1342F 13441-13446 1B132 1B155 1DF25-1DF2A 1E030-1E06D 1E4D0-1E4EB"
    " 1123F 2B739 2EBF0-2EE5D 31350-323AF",
    "M": "0CF3 0ECE 10EFD-10EFF 11241 11F00-11F01 11F03 11F34-11F3A 11F3E-11F42 13440 13447-13455 1E08F 1E4EC-1E4EF",
    "N": "11F50-11F59 1D2C0-1D2D3 1E4F0-1E4F9",
    "P": "11B00-11B09 11F43-11F4F",
    "S": "2FFC-2FFF 31EF 1F6DC 1F774-1F776 1F77B-1F77F 1F7D9 1FA75-1FA77 1FA87-1FA88 1FAAD-1FAAF 1FABB-1FABD"
    " 1FABF 1FACE-1FACF 1FADA-1FADB 1FAE8 1FAF7-1FAF8",
    "C": "13439-1343F",
}


def _added() -> dict[int, str]:
    table = {}
    for major, ranges in _ADDED.items():
        for item in ranges.split():
            first, _, last = item.partition("-")
            table.update(dict.fromkeys(range(int(first, 16), int(last or first, 16) + 1), major))
    return table


_ADDED_CATEGORY = _added()


def category(cpt: int) -> str:
    """Return the major category of a code point: N, L, Z, M, P, S or C; empty if unassigned."""
    added = _ADDED_CATEGORY.get(cpt)
    if added is not None:
        return added
    found = unicodedata.category(chr(cpt))
    return "" if found == "Cn" else found[0]


def is_han(cpt: int) -> bool:
    """Return whether a code point is in a CJK ideograph block, assigned or not."""
    return cpt >= 0x3400 and any(first <= cpt <= last for first, last in _HAN)


def lower(char: str) -> str:
    """Return the lower case of a character (the simple mapping of UnicodeData)."""
    return "i" if char == "\u0130" else char.lower()


def without_accents(char: str) -> str:
    """Return the canonical decomposition of a character without accents (Mn); empty for an accent."""
    if char < "\u00c0":
        return char
    return "".join(c for c in unicodedata.normalize("NFD", char) if unicodedata.category(c) != "Mn")


class _View(dict[int, str]):
    """A translation table, filled on demand: code point -> placeholder; ASCII maps to itself."""

    def __init__(self, han: bool) -> None:
        super().__init__()
        self._han = han

    def __missing__(self, cpt: int) -> str:
        if cpt < 0x80:
            value = chr(cpt)
        elif cpt in WHITESPACE:
            value = SPACE
        else:
            value = _PLACEHOLDER.get(category(cpt), OTHER)
            if self._han and is_han(cpt):
                value = HAN_LETTER if value == LETTER else HAN_OTHER
        self[cpt] = value
        return value


_CATEGORY_VIEW = _View(han=False)
_HAN_VIEW = _View(han=True)
_SPACES = {cpt: SPACE for cpt in WHITESPACE if cpt >= 0x80}


def category_view(text: str) -> str:
    """Replace every character beyond ASCII with the placeholder of its category; the length stays."""
    return text if text.isascii() else text.translate(_CATEGORY_VIEW)


def han_view(text: str) -> str:
    """Return `category_view` with a separate placeholder for ideographs."""
    return text if text.isascii() else text.translate(_HAN_VIEW)


def space_view(text: str) -> str:
    """Replace white space beyond ASCII with one ASCII white space; the length stays."""
    return text if text.isascii() else text.translate(_SPACES)


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
"""Return the GPT-2 byte alphabet: a printable character for each byte value."""
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
_BYTE_TABLE = dict(enumerate(BYTE_TO_CHAR))


def byte_encode(text: str) -> str:
    """Return the UTF-8 bytes of `text` in the GPT-2 byte alphabet."""
    return text.encode("utf-8", "surrogatepass").decode("latin-1").translate(_BYTE_TABLE)


def is_utf8(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8, that is, contains no surrogates."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def canonical(text: str) -> str:
    """Return `text` with undecodable bytes as surrogate escapes and no other surrogates."""
    return text if is_utf8(text) else to_bytes(text).decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8; surrogate escapes become their bytes, other surrogates three bytes each."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return b"".join(
            c.encode("utf-8", "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass") for c in text
        )


_SEQUENCE = re.compile(
    rb"[\x00-\x7f]+|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}|[\x80-\xff]", re.DOTALL
)


def decode_lenient(data: bytes) -> str:
    """Decode by sequence length alone: overlong forms and surrogates pass, other bad bytes become U+FFFD."""
    out = []
    for match in _SEQUENCE.finditer(data):
        seq = match.group()
        if seq[0] < 0x80:
            out.append(seq.decode("ascii"))
        elif len(seq) == 1:
            out.append("\ufffd")
        else:
            cpt = seq[0] & (0x7F >> len(seq))
            for byte in seq[1:]:
                cpt = cpt << 6 | byte & 0x3F
            out.append(chr(cpt) if cpt < 0x110000 else "\ufffd")
    return "".join(out)


def code_points(text: str) -> str:
    """Return canonical text as the code points that byte-level tokenizers read."""
    return text if is_utf8(text) else decode_lenient(to_bytes(text))
