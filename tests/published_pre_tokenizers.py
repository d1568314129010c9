"""Pre-tokenizers as published tokenizers have them, by the rule of this project that stands for each."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex
from tokenizers import pre_tokenizers as pt

from ikcli.tokenizer.pretokenize import _ALPHABETIC


def _bytes(*steps: Any) -> Any:
    return pt.Sequence([*steps, pt.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split(pattern: str) -> Any:
    return pt.Split(Regex(pattern), "isolated")


_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HALVED = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_SENTENCE = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_KANA_HAN, _BROAD = "[一-龥\u3040-ゟ゠-ヿ]+", "[一-龥\u0800-一가-\ud7ff]+"


def _cased(suffix: str, number: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return words + f"|{number}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _kimi() -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"\p{{Han}}+|{lead}{upper}*{lower}+{_SUFFIX}?|{lead}{upper}+{lower}*{_SUFFIX}?"
    return words + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES


PUBLISHED: dict[str, Any] = {
    "gpt-2": pt.ByteLevel(add_prefix_space=False),
    "llama3": _bytes(_split(_LLAMA3)),
    "qwen2": _bytes(_split(_LLAMA3.replace("{1,3}", ""))),
    "qwen35": _bytes(
        _split(
            _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    ),
    "jais-2": _bytes(_split(_LLAMA3.removesuffix(_SPACES) + r"\s*[\r\n]+|" + _HALVED)),
    "seed-coder": _bytes(_split(_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES)),
    "exaone-moe": _bytes(
        _split(
            _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "gpt-4o": _bytes(_split(_cased(_SUFFIX + "?", r"\p{N}{1,3}"))),
    "tekken": _bytes(_split(_cased("", r"\p{N}"))),
    "tiny_aya": _bytes(_split(r"\d{1,3}(?=(?:\d{3})*\b)"), _split(_cased(_SUFFIX + "?", r"\p{N}{1,3}"))),
    "starcoder": pt.Sequence([pt.Digits(individual_digits=True), pt.ByteLevel(add_prefix_space=False)]),
    "deepseek-v3": _bytes(
        _split(r"\p{N}{1,3}"),
        _split(_KANA_HAN),
        _split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
        ),
    ),
    "deepseek-coder": _bytes(
        _split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(_BROAD), pt.Digits(individual_digits=True)
    ),
    "deepseek-llm": _bytes(
        _split("[\r\n]"),
        _split(rf"\s?[{_ALPHABETIC.encode().decode('unicode_escape')}]+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+".replace(r"\u3000", "\u3000")),
        _split(r"\s+$"),
        _split(_BROAD),
        pt.Digits(individual_digits=True),
    ),
    "falcon": pt.Sequence(
        [
            pt.Punctuation("contiguous"),
            pt.ByteLevel(add_prefix_space=False),
            pt.Digits(individual_digits=False),
            _split("[0-9][0-9][0-9]"),
        ]
    ),
    "bloom": _bytes(_split(_SENTENCE)),
    "viking": _bytes(_split(_SENTENCE), pt.Digits(individual_digits=True)),
    "kimi-k2": _bytes(_split(_kimi())),
    "youtu": _bytes(
        _split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANA_HAN),
        _split(_cased(_SUFFIX + "?", r"\p{N}")),
    ),
    "superbpe": _bytes(_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))")),
}

BY_IDS = ("deepseek-llm", "falcon")
"""Those whose rule cuts numbers otherwise, which only a vocabulary without tokens for them does not see."""
