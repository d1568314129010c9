"""Streaming detokenization: text comes out as soon as it is complete and never as broken UTF-8."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizer_vocabs import spm_metadata

from ikcli.tokenizer import StreamDecoder, Tokenizer

TOKENIZER = Tokenizer.from_metadata(spm_metadata({"▁": 0.0, "a": -1.0, "▁a": -2.0}), "test.gguf")
FIRST_BYTE = 3


def test_a_character_in_pieces() -> None:
    stream = StreamDecoder(TOKENIZER)
    assert [stream.feed(FIRST_BYTE + b) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    stream = StreamDecoder(TOKENIZER)
    assert stream.feed(FIRST_BYTE + 0xF0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.feed(FIRST_BYTE + ord("a")) == "a"


def test_special_tokens_and_the_prefix_space() -> None:
    ids = TOKENIZER.encode("a a")
    assert "".join(map(StreamDecoder(TOKENIZER).feed, ids)) == " a a"
    assert "".join(map(StreamDecoder(TOKENIZER, strip_prefix=True).feed, ids)) == "a a"
    assert "".join(map(StreamDecoder(TOKENIZER, skip_special=False).feed, ids)) == "<s> a a"


@given(st.lists(st.integers(0, TOKENIZER.n_vocab - 1), max_size=40))
def test_equals_decoding_at_once(ids: list[int]) -> None:
    stream = StreamDecoder(TOKENIZER, strip_prefix=True)
    parts = [*map(stream.feed, ids), stream.flush()]
    for part in parts:
        part.encode("utf-8")
    assert "".join(parts) == TOKENIZER.decode(ids, skip_special=True)
