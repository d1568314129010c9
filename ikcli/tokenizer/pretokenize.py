r"""Pre-tokenizers: rules, named by `tokenizer.ggml.pre`, that cut text into words before byte-level BPE merges.

A rule is a sequence of cuts. Each cut splits every segment of the previous one into matches and the gaps between them.
Patterns run on a view of the text with one character per code point (see `unicode`). In `_categories` patterns, `\p{X}`
and `\s` may appear only inside brackets, and beyond ASCII they represent placeholders.
Rules and flags follow src/llama-vocab.cpp and src/unicode.cpp, also where these differ from the published tokenizers:
beyond ASCII, cased letters count as both cases, `~` is not a symbol, and marks are not letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ikcli.tokenizer import unicode as uni

_CLASSES = {
    r"\p{N}": uni.NUMBER + "0-9",
    r"\p{L}": uni.LETTER + "A-Za-z",
    r"\p{Upper}": uni.LETTER + "A-Z",  # letters that are not ASCII lower case
    r"\p{Lower}": uni.LETTER + "a-z",
    r"\p{P}": uni.PUNCTUATION + r"!-#%-*,-/:;?@\[-\]_{}",
    r"\p{M}": uni.MARK,
    r"\p{S}": uni.SYMBOL + r"$+<->\^`|",
    r"\s": r"\t-\r ",
}

Cut = Callable[[str], list[str]]
"""A function that splits a segment of text into non-empty pieces."""


def _pieces(text: str, view: str, pattern: re.Pattern[str]) -> list[str]:
    pieces = []
    end = 0
    for match in pattern.finditer(view):
        start = match.start()
        if start > end:
            pieces.append(text[end:start])
        end = match.end()
        if end > start:
            pieces.append(text[start:end])
    if end < len(text):
        pieces.append(text[end:])
    return pieces


def _expand(pattern: str) -> str:
    for name, members in _CLASSES.items():
        pattern = pattern.replace(name, members)
    return pattern.replace(r"(?!\S)", r"(?![^\t-\r ])")


def _cut(pattern: str, view_of: Callable[[str], str]) -> Cut:
    compiled = re.compile(_expand(pattern))
    return lambda text: _pieces(text, view_of(text), compiled)


def _categories(pattern: str) -> Cut:
    return _cut(pattern, uni.category_view)


def _literal(pattern: str) -> Cut:
    return _cut(pattern, uni.space_view)


_NUMBERS = re.compile(_expand(r"[\p{N}]+"))
_DIGITS = re.compile(r"[0-9]+")


def _thousands_after_text(text: str) -> list[str]:
    """Cut numbers into groups of three from their end; text before a number stays with its first group."""
    pieces, end = [], 0
    for match in _NUMBERS.finditer(uni.category_view(text)):
        start, stop = match.span()
        for cut in range(start + ((stop - start) % 3 or 3), stop + 1, 3):
            pieces.append(text[end:cut])
            end = cut
    if end < len(text):
        pieces.append(text[end:])
    return pieces


def _thousands(text: str) -> list[str]:
    """Cut runs of three or more ASCII digits into groups of three from their end."""
    pieces, end = [], 0
    for match in _DIGITS.finditer(text):
        start, stop = match.span()
        for cut in range(start + (stop - start) % 3, stop, 3):
            if cut + 3 <= stop and cut > end:
                pieces.append(text[end:cut])
                end = cut
    pieces.append(text[end:])
    return pieces


_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"[\s]*[\r\n]+|[\s]+(?!\S)|[\s]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|[\s]+(?!\S)|[\s]+"
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}]+"
_WORD_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Upper}]*[\p{Lower}]+SUFFIX|[^\r\n\p{L}\p{N}]?[\p{Upper}]+[\p{Lower}]*SUFFIX|NUMBER|"
    + _REST_SLASH
)
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|[\p{{N}}]{{1,3}}|{_REST}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|[\p{{N}}]|{_REST}"
_QWEN35 = rf"{_SUFFIX}|{_WORD_MARKS}|[\p{{N}}]| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_KANA_HAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_BROAD = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HALVED_SPACES = "|".join(rf"[\s]{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|[\s]{1,2}(?!\S)|[\s]"
_ALPHABETIC = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    r"\U0001e900-\U0001e943"
)
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    r"\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANA_HAN
)
_SENTENCE = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _kimi() -> Cut:
    han, other = uni.HAN_LETTER, uni.HAN_OTHER
    any_letter = rf"\p{{L}}{han}"
    pattern = (
        rf"[{han}{other}]+|[^\r\n{any_letter}\p{{N}}]?[\p{{L}}]+{_SUFFIX}?|[\p{{N}}]{{1,3}}"
        rf"| ?[^\s{any_letter}\p{{N}}]+[\r\n]*|{_SPACES}"
    )
    return _cut(pattern, uni.han_view)


def _cased(suffix: str, number: str) -> list[Cut]:
    return [_categories(_CASED.replace("SUFFIX", suffix).replace("NUMBER", number))]


_GROUP3 = "[0-9][0-9][0-9]"

_RULES: dict[str, Callable[[], list[Cut]]] = {
    "default": lambda: [
        _categories(r"[\p{P}$+<=>\^~|]+"),
        _categories(_GPT2),
        _categories(r"[\p{N}]+"),
        _literal(_GROUP3),
    ],
    "gpt-2": lambda: [_categories(_GPT2)],
    "llama3": lambda: [_categories(_LLAMA3)],
    "jais-2": lambda: [
        _categories(rf"{_SUFFIX}|{_WORD}|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|[\s]*[\r\n]+|{_HALVED_SPACES}")
    ],
    "deepseek-llm": lambda: [
        _literal(r"[\r\n]"),
        _literal(rf"[\s]?[{_ALPHABETIC}]+"),
        _literal(r"[\s]?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        _literal(r"[\s]+\Z"),
        _literal(_CJK_BROAD),
        _categories(r"[\p{N}]+"),
    ],
    "deepseek-v3": lambda: [_categories(r"[\p{N}]{1,3}"), _literal(_KANA_HAN), _categories(_PUNCTUATED)],
    "spark2_5": lambda: [
        _categories(r"[\p{N}]{1,3}"),
        _literal(_KANA_HAN),
        _categories(_PUNCTUATED.replace(r"[\r\n]*|" + _SPACES, r"|[\r\n]|[\s]+(?!\S)|[\s]+")),
    ],
    "youtu": lambda: [
        _literal(_YOUTU),
        _categories(rf"{_WORD_MARKS}{_SUFFIX}?|[\p{{N}}]|{_REST_SLASH}"),
    ],
    "deepseek-coder": lambda: [
        _literal(r"[\r\n]"),
        _categories(r"[\s]?[\p{L}]+"),
        _categories(r"[\s]?[\p{P}]+"),
        _literal(_CJK_BROAD),
        _categories(r"[\p{N}]"),
    ],
    "falcon": lambda: [_categories(r"[\p{P}$+<=>\^~|`]+"), _categories(_GPT2), _literal(_GROUP3)],
    "starcoder": lambda: [_categories(r"[\p{N}]"), _categories(_GPT2)],
    "qwen2": lambda: [_categories(_QWEN2)],
    "qwen35": lambda: [_categories(_QWEN35)],
    "bloom": lambda: [_literal(_SENTENCE)],
    "viking": lambda: [_literal(_SENTENCE), _categories(r"[\p{N}]")],
    "tekken": lambda: _cased("", r"[\p{N}]"),
    "gpt-4o": lambda: _cased(_SUFFIX + "?", r"[\p{N}]{1,3}"),
    "chameleon": lambda: [
        _literal(r"<sentinel:[0-9]+>"),
        _literal(r"IMGIMG[A-I]{1,4}Z"),
        _literal(r"[\t\n]|    |  "),
        _categories(r"[\p{N}]"),
        _categories(r"[\p{P}!-/:-@\[-`{-~]"),
        _categories(_GPT2),
    ],
    "tiny_aya": lambda: [
        _thousands_after_text,
        _categories(rf"{_WORD_MARKS}{_SUFFIX}?|[\p{{N}}]{{1,3}}|{_REST_SLASH}"),
    ],
    "kimi-k2": lambda: [_kimi()],
    "superbpe": lambda: [_categories(r"[\p{N}]+"), _thousands],
    "bailingmoe": lambda: [
        _categories(
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            r"|[\s]*[\r\n]|[\s]+(?!\S)|[\s]+"
        )
    ],
    "seed-coder": lambda: [_categories(rf"{_SUFFIX}|{_WORD}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")],
    "afmoe": lambda: [_thousands_after_text, _literal(_ASIAN), _categories(_PUNCTUATED)],
    "exaone-moe": lambda: [
        _categories(
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:[\p{{L}}][\p{{M}}]*(?: [\p{{L}}][\p{{M}}]*)*)+|[\p{{N}}]"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|[\s]*[\r\n]|[\s]+(?!\S)|[\s]+"
        )
    ],
    "gemma4": lambda: [_literal(r"\n+")],
}


@cache
def cuts(rule: str) -> tuple[Cut, ...]:
    """Return the cuts of a rule, compiled on first use."""
    return tuple(_RULES[rule]())


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The meaning of a name in `tokenizer.ggml.pre`: a rule and the vocabulary flags that come with it."""

    name: str
    rule: str
    ignore_merges: bool = False  # a word that is a token is not cut further
    add_bos: bool = False
    no_bos: bool = False  # no default BOS id


def _named(names: str, rule: str, **flags: bool) -> dict[str, PreTokenizer]:
    return {name: PreTokenizer(name, rule, **flags) for name in names.split()}


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named("default", "default"),
    **_named(
        "llama3 llama-v3 llama-bpe laguna falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        "llama3",
        ignore_merges=True,
        add_bos=True,
    ),
    **_named("deepseek-llm", "deepseek-llm"),
    **_named("deepseek-coder", "deepseek-coder"),
    **_named("deepseek-v3 hunyuan-dense joyai-llm", "deepseek-v3"),
    **_named("youtu", "youtu", ignore_merges=True),
    **_named("spark2_5", "spark2_5"),
    **_named("falcon", "falcon"),
    **_named("mpt gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", "gpt-2"),
    **_named("olmo jais exaone4 jina-v1-en jina-v2-code roberta-bpe trillion granite-docling", "gpt-2"),
    **_named("starcoder refact codeshell exaone minerva-7b mellum2 command-r cohere2_moe smollm", "starcoder"),
    **_named("jais-2", "jais-2"),
    **_named("gemma4", "gemma4"),
    **_named("qwen2 deepseek-r1-qwen kormo openpangu f2llmv2 hunyuan grok-2 solar-open stablelm2 megrez", "qwen2"),
    **_named("qwen35", "qwen35"),
    **_named("dbrx smaug-bpe", "llama3"),
    **_named("poro-chat bloom gpt3-finnish", "bloom"),
    **_named("glm4 chatglm-bpe", "llama3", no_bos=True),
    **_named("viking", "viking"),
    **_named("tekken", "tekken", ignore_merges=True, add_bos=True),
    **_named("exaone-moe", "exaone-moe"),
    **_named("chameleon", "chameleon", add_bos=True),
    **_named("gpt-4o llama4 kanana2 minimax-m2", "gpt-4o"),
    **_named("tiny_aya", "tiny_aya"),
    **_named("superbpe", "superbpe"),
    **_named("bailingmoe bailingmoe2 llada-moe", "bailingmoe"),
    **_named("seed-coder", "seed-coder"),
    **_named("kimi-k2", "kimi-k2"),
    **_named("afmoe", "afmoe"),
}
"""All known values of `tokenizer.ggml.pre`."""
