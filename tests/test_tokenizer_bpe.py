"""Byte-level BPE: merge order, ignored merges, incomplete vocabularies, special tokens and the space around them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_vocabs import CONTROL, NORMAL, USER_DEFINED, bpe_metadata, texts

from ikcli.errors import FormatError, UnsupportedError
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS

MERGES = ["l l", "h e", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "o 1"]


def bpe(pre: str = "gpt-2", merges: list[str] | None = None, **keys: object) -> Tokenizer:
    extra = {"<|end|>": CONTROL, "<u>": USER_DEFINED, "<s>": CONTROL}
    meta = bpe_metadata(MERGES if merges is None else merges, pre, extra, **keys)
    meta["tokenizer.ggml.bos_token_id"] = meta["tokenizer.ggml.tokens"].index("<s>")
    meta["tokenizer.ggml.eos_token_id"] = meta["tokenizer.ggml.tokens"].index("<|end|>")
    return Tokenizer.from_metadata(meta, "test.gguf")


def test_merges_by_rank() -> None:
    assert texts(bpe(), "hello hello1234") == ["hello", "Ġhello", "123", "4"]


@given(st.lists(st.sampled_from(["h", "e", "l", "o", "1", "2", " ", "é", "hell", "x"]), max_size=12).map("".join))
def test_the_first_words_are_merged_as_all_others(text: str) -> None:
    """Also with results of merges that are no tokens, and merges that make the same text in two ways."""
    merges = [*MERGES, "h el", "e l", "el l", "he l", "hel l", "x x"]
    meta = bpe_metadata(merges, "gpt-2")
    i = meta["tokenizer.ggml.tokens"].index("hel")
    meta["tokenizer.ggml.tokens"][i] = "[other]"
    first, later = (Tokenizer.from_metadata(meta, "x") for _ in range(2))
    later._model._build()
    assert first.encode(text) == later.encode(text)
    assert first._model._bpe is None and later._model._ranks is None


def test_words_do_not_merge_with_each_other() -> None:
    assert texts(bpe(), "o1") == ["o", "1"]
    assert texts(bpe("superbpe", ["o 1"]), "o 1") == ["o", "Ġ", "1"]


def test_the_last_of_equal_names_decides_the_digits() -> None:
    assert texts(bpe("qwen2"), "1234") == ["1", "2", "3", "4"]
    assert texts(bpe("llama3"), "1234", add_special=False) == ["123", "4"]


def test_ignored_merges_take_a_whole_word() -> None:
    extra = {"xyz": NORMAL}
    kept = Tokenizer.from_metadata(bpe_metadata([], "gpt-2", extra), "x")
    whole = Tokenizer.from_metadata(bpe_metadata([], "tekken", extra, add_bos_token=False), "x")
    assert texts(kept, "xyz") == ["x", "y", "z"]
    assert texts(whole, "xyz") == ["xyz"]


def test_defaults_by_pre_tokenizer() -> None:
    assert bpe("llama-bpe").add_bos
    assert bpe("tekken").add_bos
    assert not bpe("gpt-2").add_bos
    assert bpe("gpt-2", add_bos_token=True, add_eos_token=True).encode("") == [bpe().bos_id, bpe().eos_id]


def test_special_tokens() -> None:
    tokenizer = bpe()
    assert texts(tokenizer, "hello<|end|> hello") == ["hello", "<|end|>", "Ġhello"]
    assert "<|end|>" not in texts(tokenizer, "hello<|end|>", parse_special=False)
    assert texts(tokenizer, "<u>1<u>", parse_special=False) == ["<u>", "1", "<u>"]
    assert tokenizer.eog_ids == {tokenizer.eos_id}


def test_longer_special_tokens_win() -> None:
    meta = bpe_metadata([], "gpt-2", {"<a": CONTROL, "<ab>": CONTROL})
    assert texts(Tokenizer.from_metadata(meta, "x"), "<ab><a") == ["<ab>", "<a"]


def test_white_space_that_belongs_to_special_tokens() -> None:
    meta = bpe_metadata([], "llama3", {"<|end|>": CONTROL, "<|endoftext|>": CONTROL}, add_bos_token=False)
    meta["general.name"] = "Phi-3 mini"
    tokenizer = Tokenizer.from_metadata(meta, "x")
    assert texts(tokenizer, "a <|end|> \n b") == ["a", "Ġ", "<|end|>", "b"]
    assert texts(tokenizer, "<|endoftext|> b") == ["<|endoftext|>", "Ġ", "b"]
    meta = bpe_metadata([], "jina-v2-code", {"<mask>": CONTROL})
    assert texts(Tokenizer.from_metadata(meta, "x"), "a \t<mask> b") == ["a", "<mask>", "Ġ", "b"]


def test_merges_through_texts_that_are_no_tokens() -> None:
    meta = bpe_metadata(["a b", "ab c"], "gpt-2")
    tokens = meta["tokenizer.ggml.tokens"]
    for gone in ("ab", "z"):
        i = tokens.index(gone)
        del tokens[i]
        del meta["tokenizer.ggml.token_type"][i]
    tokenizer = Tokenizer.from_metadata(meta, "x")
    assert texts(tokenizer, "abc") == ["abc"]
    assert texts(tokenizer, "abd") == ["a", "b", "d"]  # what was merged into no token falls apart into bytes
    assert texts(tokenizer, "azb") == ["a", "b"]  # a byte without a token is lost, but still keeps a and b apart


def test_bytes_that_are_not_utf8_become_the_replacement_character() -> None:
    tokenizer = bpe()
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a\ufffdb"
    assert tokenizer.encode("\udcc3\udca9") == tokenizer.encode("é")


def test_pieces() -> None:
    tokenizer = bpe()
    assert tokenizer.token_text(tokenizer.vocab.token_to_id["Ġhello"]) == " hello"
    assert tokenizer.token_bytes(0xC3) != b""
    with pytest.raises(Exception, match="outside the vocabulary"):
        tokenizer.token_bytes(10**6)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(pre: str) -> None:
    tokenizer = bpe(pre)
    text = "Hello wörld'S 12345 你好\u0301\n\n  x\u00a0😀"
    if pre != "gemma4":  # works on characters, which this vocabulary does not have
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def naive_bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    symbols = list(word)
    while True:
        pairs = [(ranks[p], i) for i, p in enumerate(pairwise(symbols)) if p in ranks]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


@given(st.integers(0, 10**6), st.text(alphabet="abc", min_size=1, max_size=24))
def test_merges_like_the_definition(seed: int, word: str) -> None:
    rng = random.Random(seed)
    known, merges = list("abc"), []
    for _ in range(20):
        merge = f"{rng.choice(known)} {rng.choice(known)}"
        merges.append(merge)
        known.append(merge.replace(" ", ""))
    ranks: dict[tuple[str, str], int] = {}
    for i, merge in enumerate(merges):
        left, right = merge.split()
        ranks.setdefault((left, right), i)
    tokenizer = Tokenizer.from_metadata(bpe_metadata(merges, "gpt-2"), "x")
    assert texts(tokenizer, word) == naive_bpe(word, ranks)


def test_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'new-one'.*--override-kv tokenizer\.ggml\.pre=str:NAME"):
        Tokenizer.from_metadata(bpe_metadata([], "new-one"), "test.gguf")


def test_missing_pre_tokenizer_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    meta = bpe_metadata([], "")
    tokenizer = Tokenizer.from_metadata(meta, "test.gguf")
    assert tokenizer.vocab.pre.name == "default"
    assert "tokenizer.ggml.pre is missing" in capsys.readouterr().err


@pytest.mark.parametrize("merge", ["ab", "a ", ""])
def test_broken_merges(merge: str) -> None:
    meta = bpe_metadata(["a b"], "gpt-2")
    meta["tokenizer.ggml.merges"] = ["a b", merge]
    with pytest.raises(FormatError, match=r"test\.gguf: tokenizer\.ggml\.merges entry 1"):
        Tokenizer.from_metadata(meta, "test.gguf")
