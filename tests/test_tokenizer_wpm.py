"""WordPiece: basic tokenization, greedy longest pieces, unknown words, CLS and SEP."""

from __future__ import annotations

import pytest
from tokenizer_vocabs import CONTROL, NORMAL, metadata, texts

from ikcli.errors import FormatError
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.models import words

TOKENS = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL, "[MASK]": CONTROL} | dict.fromkeys(
    ("▁hello", "▁hell", "▁wor", "ld", "l", "▁,", "▁你", "▁好", "▁a", "a", "▁"), NORMAL
)
IDS = {
    "bos_token_id": 2,
    "unknown_token_id": 1,
    "seperator_token_id": 3,
    "padding_token_id": 0,
    "mask_token_id": 4,
}


@pytest.fixture
def wpm() -> Tokenizer:
    return Tokenizer.from_metadata(metadata("bert", TOKENS, **IDS), "test.gguf")


def test_known_answer(wpm: Tokenizer) -> None:
    expected = ["[CLS]", "▁hello", "▁,", "▁wor", "ld", "▁你", "▁好", "[SEP]"]
    assert texts(wpm, "Hello, Wörld 你好") == expected


def test_longest_piece_first_and_no_way_back(wpm: Tokenizer) -> None:
    assert texts(wpm, "hellol hella", add_special=False) == ["▁hello", "l", "▁hell", "a"]
    assert texts(wpm, "hellx a", add_special=False) == ["[UNK]", "▁a"]


def test_special_tokens(wpm: Tokenizer) -> None:
    assert texts(wpm, "a [MASK] a", add_special=False) == ["▁a", "[MASK]", "▁a"]
    assert texts(wpm, "a [MASK]", add_special=False, parse_special=False) == ["▁a", "[UNK]", "[UNK]", "[UNK]"]
    assert wpm.special_ids.mask == 4


def test_words() -> None:
    assert words("ÀÉ\u0130 it's  A+B\u00ad\x00x\ufffd") == ["aei", "it", "'", "s", "a", "+", "bx"]
    assert words("¿que?€5") == ["¿", "que", "?", "€5"]
    assert words(" \u3000\n") == []


def test_words_are_those_of_bert() -> None:
    """Accents go, also those that stand alone; what else a character is made of stays."""
    assert words("cafe\u0301 \u0301 naïve") == ["cafe", "naive"]
    assert words("한") == ["\u1112\u1161\u11ab"]
    assert words("हिन्दी") == ["हिनदी"]


def test_very_long_words_are_unknown(wpm: Tokenizer) -> None:
    assert texts(wpm, "a" * 100, add_special=False) == ["▁a", *["a"] * 99]
    assert texts(wpm, "a" * 101 + " a", add_special=False) == ["[UNK]", "▁a"]


def test_default_ids_outside_the_vocabulary_are_not_used() -> None:
    tokenizer = Tokenizer.from_metadata(metadata("bert", TOKENS), "test.gguf")
    assert tokenizer.encode("a", add_special=False) == [list(TOKENS).index("▁a")]
    with pytest.raises(FormatError, match="wants a BOS token"):
        tokenizer.encode("a")
