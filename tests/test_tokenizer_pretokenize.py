"""Pre-tokenizers: where each named rule cuts, on text made to be awkward, and what every name stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikcli.tokenizer import unicode as uni
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS, cuts

# Contractions in both cases, long numbers, digits of two scripts, CJK, a combining mark, mixed case, white space of
# all sorts, emoji, CR LF, trailing spaces.
TEXT = (
    "Hi  wörld'Sup IT'S 1234567 x\u0663\u096a5 ~y $a+b: 你好，ひら 한a\u0301b HTTPServer"
    "\u00a0\u2003z\n\n  é\U0001f600!?\r\n\tEnd  "
)

CUTS = {
    "default": (
        "Hi| | wörld|'|Sup| IT|'|S| |123|456|7| x|\u0663\u096a5| |~|y| |$|a|+|b|:| 你好|，|ひら| 한a|\u0301|b| "
        "HTTPServer|\xa0|\u2003|z|\n\n | é|\U0001f600|!?|\r\n|\t|End|  "
    ),
    "gpt-2": (
        "Hi| | wörld|'|Sup| IT|'|S| 1234567| x|\u0663\u096a5| ~|y| $|a|+|b|:| 你好|，|ひら| 한a|\u0301|b| "
        "HTTPServer|\xa0|\u2003|z|\n\n | é|\U0001f600!?|\r\n|\t|End|  "
    ),
    "llama3": (
        "Hi| | wörld|'S|up| IT|'S| |123|456|7| x|\u0663\u096a5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "jais-2": (
        "Hi| | wörld|'S|up| IT|'S| |123|456|7| x|\u0663\u096a5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "deepseek-llm": (
        "Hi| | w|ö|rld|'|Sup| IT|'|S| |1234567| x|\u0663|\u096a|5| ~|y| $|a|+|b|:| |你好|，|ひら| |한|a|\u0301|b| "
        "HTTPServer|\xa0|\u2003z|\n|\n| | é|\U0001f600|!?|\r|\n|\tEnd|  "
    ),
    "deepseek-v3": (
        "Hi| | wörld|'Sup| IT|'S| |123|456|7| x|\u0663\u096a5| |~y| $|a|+b|:| |你好|，|ひら| 한a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "spark2_5": (
        "Hi| | wörld|'Sup| IT|'S| |123|456|7| x|\u0663\u096a5| |~y| $|a|+b|:| |你好|，|ひら| 한a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n|\n| | é|\U0001f600!?|\r|\n|\tEnd|  "
    ),
    "youtu": (
        "Hi| | wörld'S|up| IT'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| |你好|，|ひら| |한|a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "deepseek-coder": (
        "Hi| | wörld|'|Sup| IT|'|S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+|b|:| |你好|，|ひら| |한|a|\u0301|b| "
        "HTTPServer|\xa0|\u2003z|\n|\n| | é|\U0001f600|!?|\r|\n|\tEnd|  "
    ),
    "falcon": (
        "Hi| | wörld|'|Sup| IT|'|S| |123|456|7| x|\u0663\u096a5| |~|y| |$|a|+|b|:| 你好|，|ひら| 한a|\u0301|b| "
        "HTTPServer|\xa0|\u2003|z|\n\n | é|\U0001f600|!?|\r\n|\t|End|  "
    ),
    "starcoder": (
        "Hi| | wörld|'|Sup| IT|'|S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+|b|:| 你好|，|ひら| 한a|\u0301|b| "
        "HTTPServer|\xa0|\u2003|z|\n\n | é|\U0001f600!?|\r\n|\t|End|  "
    ),
    "qwen2": (
        "Hi| | wörld|'S|up| IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "qwen35": (
        "Hi| | wörld|'S|up| IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら| 한a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "bloom": (
        "Hi| | wörld'Sup| IT'S| 1234567| x\u0663\u096a5| ~y| $a+b:| 你好|，|ひら| 한a\u0301b| "
        "HTTPServer|\xa0\u2003|z|\n\n | é\U0001f600|!?\r\n\t|End|  "
    ),
    "viking": (
        "Hi| | wörld'Sup| IT'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~y| $a+b:| 你好|，|ひら| 한a\u0301b| "
        "HTTPServer|\xa0\u2003|z|\n\n | é\U0001f600|!?\r\n\t|End|  "
    ),
    "tekken": (
        "Hi| | wörld|'Sup| IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "gpt-4o": (
        "Hi| | wörld'S|up| IT'S| |123|456|7| x|\u0663\u096a5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "chameleon": (
        "Hi|  |wörld|'|Sup| IT|'|S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| |~|y| |$|a|+|b|:| 你好|，|ひら| 한a|\u0301|b| "
        "HTTPServer|\xa0|\u2003|z|\n|\n|  |é|\U0001f600|!|?|\r|\n|\t|End|  "
    ),
    "tiny_aya": (
        "Hi| | wörld'S|up| IT'S| |1|234|567| x|\u0663\u096a5| ~|y| $|a|+b|:| 你好|，ひら| 한a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "kimi-k2": (
        "Hi| | wörld'S|up| IT'S| |123|456|7| x|\u0663\u096a5| ~|y| $|a|+b|:| |你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "superbpe": (
        "Hi  wörld'Sup IT'S |1|234|567| x|\u0663\u096a5| ~y $a+b: 你好，ひら 한a\u0301b "
        "HTTPServer\xa0\u2003z\n\n  é\U0001f600!?\r\n\tEnd  "
    ),
    "bailingmoe": (
        "Hi| | wörld|'S|up| IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "seed-coder": (
        "Hi| | wörld|'S|up| IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら| 한a|\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?|\r\n|\tEnd|  "
    ),
    "afmoe": (
        "Hi| | wörld|'Sup| IT|'S| |1|234|567| x|\u0663\u096a5| |~y| $|a|+b|:| |你好|，|ひら| |한|a\u0301b| "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r\n|\tEnd|  "
    ),
    "exaone-moe": (
        "Hi| | wörld|'S|up IT|'S| |1|2|3|4|5|6|7| x|\u0663|\u096a|5| ~|y| $|a|+b|:| 你好|，ひら 한a\u0301b "
        "HTTPServer|\xa0|\u2003z|\n\n| | é|\U0001f600!?\r|\n|\tEnd|  "
    ),
    "gemma4": (
        "Hi  wörld'Sup IT'S 1234567 x\u0663\u096a5 ~y $a+b: 你好，ひら 한a\u0301b "
        "HTTPServer\xa0\u2003z|\n\n|  é\U0001f600!?\r|\n|\tEnd  "
    ),
}


def split(rule: str, text: str) -> list[str]:
    pieces = [text]
    for cut in cuts(rule):
        pieces = [part for piece in pieces for part in cut(piece)]
    return pieces


@pytest.mark.parametrize("rule", CUTS)
def test_known_cuts(rule: str) -> None:
    assert "|".join(split(rule, TEXT)) == CUTS[rule]


def test_every_name_has_a_rule_with_known_cuts() -> None:
    assert {pre.rule for pre in PRE_TOKENIZERS.values()} == set(CUTS)
    listed = (
        "default gpt-2 llama-bpe llama3 deepseek-llm deepseek-coder deepseek-v3 qwen2 starcoder falcon refact mpt "
        "command-r chatglm-bpe glm4 tekken smollm gpt-4o"
    )
    assert set(listed.split()) <= set(PRE_TOKENIZERS)


@pytest.mark.parametrize("rule", CUTS)
@given(text=st.text(alphabet="aZ1\u0663 \n\r\t'sS.,~你\u0301\u3000\ud800", max_size=30))
def test_cuts_keep_every_character(rule: str, text: str) -> None:
    pieces = split(rule, text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_numbers_in_threes_from_the_right() -> None:
    assert split("superbpe", "12345678 12 123") == ["12", "345", "678", " ", "12", " ", "123"]
    assert split("tiny_aya", "12345678") == ["12", "345", "678"]


def test_contractions_ignore_case_and_need_no_space_after() -> None:
    assert split("llama3", "it'LLgo") == ["it", "'LL", "go"]
    assert split("gpt-2", "it'LLgo it'llgo") == ["it", "'", "LLgo", " it", "'ll", "go"]


def test_characters_added_in_unicode_15() -> None:
    assert uni.category(0x11F04) == "L"  # Kawi letter
    assert uni.category(0x1F6DC) == "S"  # wireless
    assert uni.category(0x0378) == ""


def test_byte_alphabet_is_a_bijection_of_printable_characters() -> None:
    assert len(uni.CHAR_TO_BYTE) == 256
    assert uni.byte_encode("a b\n") == "a\u0120b\u010a"


@given(st.binary(max_size=40))
def test_lenient_decoding_takes_any_bytes(data: bytes) -> None:
    text = uni.decode_lenient(data)
    try:
        assert text == data.decode("utf-8")
    except UnicodeDecodeError:
        assert text
    assert uni.to_bytes(data.decode("utf-8", "surrogateescape")) == data
