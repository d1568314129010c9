"""SPM: merges by score, ties, prefix space, byte fallback, user-defined tokens, text that is not UTF-8."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_vocabs import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, metadata, spm_metadata, texts

from ikcli.errors import FormatError
from ikcli.tokenizer import Tokenizer, models
from ikcli.tokenizer.models import merge_by_score

PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -4.5, "▁a": -6.0, "abc": -20.0}


def spm(**keys: object) -> Tokenizer:
    return Tokenizer.from_metadata(spm_metadata(PIECES, **keys), "test.gguf")


def test_highest_score_merges_first() -> None:
    assert texts(spm(), "abc", add_special=False) == ["▁a", "bc"]


def test_prefix_space_is_optional() -> None:
    assert texts(spm(add_space_prefix=False), "abc", add_special=False) == ["abc"]


def test_bos_and_eos() -> None:
    assert texts(spm(), "a") == ["<s>", "▁a"]
    assert texts(spm(add_bos_token=False, add_eos_token=True), "a") == ["▁a", "</s>"]
    assert texts(spm(), "") == ["<s>"]


def test_unknown_characters_become_bytes() -> None:
    assert texts(spm(), "é", add_special=False) == ["▁", "<0xC3>", "<0xA9>"]


def test_special_tokens_restart_the_prefix_space() -> None:
    assert texts(spm(), "a</s>b", add_special=False) == ["▁a", "</s>", "▁", "b"]
    assert "</s>" not in texts(spm(), "a</s>b", add_special=False, parse_special=False)


def test_user_defined_tokens_are_always_parsed() -> None:
    meta = spm_metadata(PIECES | {"<x>": 0.0}, {"<x>": USER_DEFINED})
    tokenizer = Tokenizer.from_metadata(meta, "test.gguf")
    assert texts(tokenizer, "a<x>a", add_special=False, parse_special=False) == ["▁a", "<x>", "▁a"]


def test_equal_scores_merge_from_the_left() -> None:
    pieces = {"a": 0.0, "aa": -1.0}
    tokenizer = Tokenizer.from_metadata(spm_metadata(pieces, add_space_prefix=False), "test.gguf")
    assert texts(tokenizer, "aaa", add_special=False) == ["aa", "a"]
    pieces = {"a": 0.0, "b": 0.0, "ab": -1.0, "ba": -1.0}
    tokenizer = Tokenizer.from_metadata(spm_metadata(pieces, add_space_prefix=False), "test.gguf")
    assert texts(tokenizer, "bab", add_special=False) == ["ba", "b"]


def test_two_splits_of_one_token_merge_from_the_left() -> None:
    """[a, aa, a] can become aaa in two ways; which split a merge table lists first must not matter."""
    symbols = ["a", "aa", "a"]
    assert merge_by_score(symbols, {"a": 0, "aa": 1, "aaa": 2}, [0.0, -1.0, -2.0], "") == ["aaa", "a"]


def naive_merge(symbols: list[str], scores: dict[str, float]) -> list[str]:
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


@given(st.integers(0, 10**6), st.text(alphabet="ab▁", max_size=24))
def test_merges_like_the_definition(seed: int, text: str) -> None:
    rng = random.Random(seed)
    pieces = {"".join(rng.choices("ab▁", k=rng.randint(1, 5))): float(rng.randint(-4, 0)) for _ in range(25)}
    tokenizer = Tokenizer.from_metadata(spm_metadata(pieces, add_space_prefix=False), "test.gguf")
    expected = [
        t for symbol in naive_merge(list(text), pieces) for t in ([symbol] if symbol in pieces else fallback(symbol))
    ]
    assert texts(tokenizer, text, add_special=False) == expected


def fallback(symbol: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in symbol.encode()]


@given(st.text(max_size=30))
def test_round_trip(text: str) -> None:
    tokenizer = spm()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False), skip_special=True) == text.replace("▁", " ")


@given(st.binary(max_size=20))
def test_any_bytes_survive(data: bytes) -> None:
    tokenizer = spm(add_space_prefix=False)
    text = data.decode("utf-8", "surrogateescape")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    # After an invalid byte a space may stay in its escaped form: both are spaces here.
    assert tokenizer.decode_bytes(ids).replace("▁".encode(), b" ") == data.replace("▁".encode(), b" ")


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "▁": NORMAL, "a": NORMAL}
    meta = metadata("llama", tokens, scores=[0.0] * 5)
    assert texts(Tokenizer.from_metadata(meta, "x"), "aéa", add_special=False) == ["▁", "a", "<unk>", "a"]


def test_pieces() -> None:
    tokenizer = spm()
    assert tokenizer.token_bytes(tokenizer.vocab.token_to_id["▁a"]) == b" a"
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.newline_id == 3 + 0x0A
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(1, special=False) == b""


def test_scores_must_match_the_tokens() -> None:
    meta = spm_metadata(PIECES)
    meta["tokenizer.ggml.scores"] = meta["tokenizer.ggml.scores"][:-1]
    with pytest.raises(FormatError, match=r"test\.gguf: tokenizer\.ggml\.scores has"):
        Tokenizer.from_metadata(meta, "test.gguf")


def test_cutting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is cut where no token reaches across as soon as there is enough of it; the ids are those of uncut text."""
    samples = ["hello a b\nhe llo", "aé▁b  c", "x" * 50, ""]
    whole = [spm().encode(text) for text in samples]
    monkeypatch.setattr(models, "_UNCUT", 5)
    tokenizer = spm()
    assert [tokenizer.encode(text) for text in samples] == whole
    assert tokenizer._model._joins
