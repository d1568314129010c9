"""Identify the `tokenizer.ggml.pre` of a checkpoint by the behaviour of its pre-tokenizer, not by its definition.

The words into which the checkpoint's own pre-tokenizer cuts a text are compared with those of every known rule. All of
`PLAIN` must agree. `MARKED` only chooses among the rules that do, because rules treat combining marks and cased letters
beyond ASCII as readers of GGUF do, which may differ from the published tokenizer. If no rule gives the same words, the
resulting ids are compared (a vocabulary without tokens of two digits does not depend on how digits are cut).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.errors import UnsupportedError
from ikcli.log import warn
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS, cuts
from ikcli.tokenizer.unicode import byte_encode

PLAIN = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n      x\n       y\n        z\n         w     \n",
    "Hello world, I've been told he's there, 'RE you sure? We'Ve it'lL they're I'M a'b ''' he'd'd O'Neil",
    "3 33 333 3333 33333 333333 3333333 33333333 1,234.56 12:30 2.0.1",
    "a.b ..c (d) [e] {f} #include <x.h>/y\n//z/\n/\n\n !important @user $HOME %s ^hat &amp *bold* +1 =x `code` |p|",
    "foo(bar);\r\n\r\nif (x) {\r\n\treturn y;\t\t\n}\n  \r\n end. \n... \n!?\n\n(a)/ \n",
    '...... ======= ------ """" ???!!! <=> ++ -- :: -> => $$ ^^ || ``` <sentinel:12> IMGIMGABCZ x',
    "我想在apple工作天。你好，世界！ こんにちはカタカナ 안녕하세요 한국어 123",
    "“quoted” ‘single’ … — dash – 【测试】 ㄅㄆ ไทย \U0001f680 (normal) ✅ €5 © ™",
    "naïve фыва нещо שלום العالم، cafés one two three x  y   z    a     b",
    "trailing   ",
    "tabs\t\tand\tmore \t x",
)
"""Texts whose words, with those of the next two, distinguish all rules."""

CASES = "camelCase HTTPServer XMLHttp iPhone McDonald ABC abcDEF getURLFor TestABCs aB CamelCASE's IT'S"
DIGITS = "x1y22z333 0x1F n1234 v2 7th A1b2 word1word2 我想1314151天 ٣٤٥٦ ½"
DEVIATING: Mapping[str, tuple[str, ...]] = {
    "kimi-k2": (CASES,),
    "youtu": (CASES,),
    "tiny_aya": (CASES, DIGITS),
    "superbpe": (DIGITS,),
}
"""Texts that readers of GGUF cut differently from the published tokenizers of the same rule."""

MARKED = (
    "e\u0301cole नमस्ते กำลัง a\u0308b",
    "កាន់តែ x\u20dd \u0301 (\u0301)",
    "ДомКот ÉCOLEécole ~x~ a~b \u00a0nbsp\u3000wide",
)

_PREFERRED = {
    "llama3": "llama-bpe",
    "gpt-2": "gpt-2",
    "starcoder": "starcoder",
    "deepseek-v3": "deepseek-v3",
    "qwen2": "qwen2",
    "bloom": "bloom",
    "gpt-4o": "gpt-4o",
    "bailingmoe": "bailingmoe",
}
"""The most widely understood name of a rule; other rules take the first of their names."""

_BY_ARCHITECTURE = {
    "bailingmoe2": "bailingmoe2",
    "chatglm": "chatglm-bpe",
    "cohere2": "command-r",
    "cohere2_moe": "cohere2_moe",
    "command-r": "command-r",
    "dbrx": "dbrx",
    "deepseek2": "deepseek-v3",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "glm4moe": "glm4",
    "hunyuan-moe": "hunyuan",
    "llama4": "llama4",
    "mellum": "mellum2",
    "minimax-m2": "minimax-m2",
    "mpt": "mpt",
    "olmo": "olmo",
    "olmo2": "dbrx",
    "phi2": "phi-2",
    "refact": "refact",
    "stablelm": "stablelm2",
}
"""Names under which models of an architecture are published, if the rule found is theirs."""

_SAME = {"bailingmoe": "qwen2"}
"""Rules with different definitions that cut all texts alike; the second is better known."""


def words_of_rule(rule: str, text: str) -> list[str]:
    """Return the words into which a rule of ours cuts a text."""
    pieces = [text]
    for cut in cuts(rule):
        pieces = [part for piece in pieces for part in cut(piece)]
    return pieces


def words_of_checkpoint(pre_tokenizer: Any, text: str) -> list[str]:
    """Return the words into which the pre-tokenizer of a `tokenizer.json` cuts a text, in the byte alphabet."""
    if pre_tokenizer is None:
        return [byte_encode(text)]
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text) if word]


def rules() -> list[str]:
    """Return the candidates: all rules but those that no published byte-level tokenizer has."""
    return sorted({p.rule for p in PRE_TOKENIZERS.values()} - {"default", "gemma4"})


def recognise(fast: Any, architecture: str, ignore_merges: bool, source: str) -> str:
    """Return the name of the pre-tokenizer of `fast`, the tokenizer of a `tokenizer.json`.

    Raise an UnsupportedError if no rule behaves like it, or several do.
    """
    wanted = {text: words_of_checkpoint(fast.pre_tokenizer, text) for text in (*PLAIN, CASES, DIGITS, *MARKED)}

    def agrees(rule: str, text: str) -> bool:
        return [byte_encode(word) for word in words_of_rule(rule, text)] == wanted[text]

    plain = [rule for rule in rules() if all(agrees(rule, text) for text in PLAIN)]
    found = [rule for rule in plain if agrees(rule, CASES) and agrees(rule, DIGITS)]
    if not found:
        found = [r for r in plain if all(agrees(r, t) for t in (CASES, DIGITS) if t not in DEVIATING.get(r, ()))]
        if len(found) == 1:
            warn(
                f"{source}: GGUF has the name {found[0]!r} for this pre-tokenizer, but its readers do not cut all "
                "words as the checkpoint's own tokenizer does"
            )
    if len(found) > 1:
        agreeing = {rule: sum(agrees(rule, text) for text in MARKED) for rule in found}
        found = [rule for rule in found if agreeing[rule] == max(agreeing.values())]
    if not found:
        found = _by_ids(fast, wanted)
    found = _one_of_equals(found, architecture)
    if len(found) != 1:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        what = f"acts like several known ones ({', '.join(found)})" if found else "acts like none that is known"
        raise UnsupportedError(f"{source}: the pre-tokenizer {what}; choose one with --pre NAME (known: {known})")
    return _name(found[0], architecture, ignore_merges)


def _by_ids(fast: Any, wanted: Mapping[str, list[str]]) -> list[str]:
    """Return the rules whose words lead to the same ids."""

    def ids(words: list[str]) -> list[int]:
        return [token.id for word in words for token in fast.model.tokenize(word)]

    texts = (*PLAIN, CASES, DIGITS)
    own = {text: ids(wanted[text]) for text in texts}
    return [r for r in rules() if all(ids([byte_encode(w) for w in words_of_rule(r, t)]) == own[t] for t in texts)]


def _one_of_equals(found: list[str], architecture: str) -> list[str]:
    own = PRE_TOKENIZERS.get(_BY_ARCHITECTURE.get(architecture, ""))
    if own is not None and own.rule in found and {_SAME.get(r, r) for r in found} == {_SAME.get(own.rule, own.rule)}:
        return [own.rule]
    return [rule for rule in found if _SAME.get(rule) not in found]


def _name(rule: str, architecture: str, ignore_merges: bool) -> str:
    """Return the name to write for a rule."""

    def fits(name: str) -> bool:
        pre = PRE_TOKENIZERS.get(name)
        return pre is not None and pre.rule == rule and pre.ignore_merges == ignore_merges

    names = [pre.name for pre in PRE_TOKENIZERS.values() if pre.rule == rule]
    wanted = [_BY_ARCHITECTURE.get(architecture, ""), _PREFERRED.get(rule, ""), *names]
    return next((name for name in wanted if fits(name)), names[0])
