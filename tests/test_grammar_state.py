"""What grammars remember during a generation: triggers that come in pieces, digits in a row, copies, the way back."""

from __future__ import annotations

import pytest
from test_grammar_gbnf import EOS, GRAMMARS, TOKENIZER, allowed

from ikcli.grammar.constraint import Digits
from ikcli.grammar.grammars import _MOST_KEPT, Grammars
from ikcli.grammar.spec import GrammarKind, GrammarSpec, TriggerWatcher

VOCABULARY = GRAMMARS.prepare()


def test_a_trigger_that_begins_like_reasoning() -> None:
    assert TriggerWatcher(lazy("<t>call")).feed("a <t>call") == "<t>call"


def lazy(*triggers: str, at_start: tuple[str, ...] = (), after: str = "", reasoning: bool = True) -> GrammarSpec:
    tags = ("<t>", "</t>") if reasoning else None
    return GrammarSpec(GrammarKind.TREE, lazy=True, triggers=triggers, at_start=at_start, after=after, reasoning=tags)


@pytest.mark.parametrize(
    ("spec", "text", "rest"),
    [
        (lazy("<call>"), "some <call>x", "<call>x"),
        (lazy("<call>"), "<cal <call", None),
        (lazy("ab", "abc"), "xabcd", "abcd"),
        (lazy("<call>"), "<t>a <call> b</t> <call>", "<call>"),
        (lazy("<call>"), "text <t>a <call> b</t><t></t>c<call>", "<call>"),
        (lazy("<call>"), "<t>a <call>", None),
        (lazy("<call>", reasoning=False), "<t>a <call>", "<call>"),
        (lazy("<", at_start=("{",)), ' \n{"a', '{"a'),
        (lazy("<", at_start=("{",)), 'x {"a', None),
        (lazy("<", at_start=("{",)), 'x {"a <', "<"),
        (lazy("<x>", at_start=("{",)), '<t>thoughts</t>\n {"a', '{"a'),
        (lazy("<x>", at_start=("{",)), 'said <t>thoughts</t>{"a', None),
        (lazy("<x>", at_start=("[CALL]",)), "[CAT] [CALL]", None),
        (lazy("<x>", at_start=("[CALL]",)), "[CALL]", "[CALL]"),
        (lazy("<x>", after="</s>"), "<x> </s></ <x>", "<x>"),
        (lazy("<x>", after="</s>"), "<x> </", None),
        (GrammarSpec(GrammarKind.TREE, after="</s>"), "free </s> then", " then"),
        (GrammarSpec(GrammarKind.TREE, after="</s>"), "free </s>", ""),
    ],
)
def test_from_which_text_on_a_grammar_holds(spec: GrammarSpec, text: str, rest: str | None) -> None:
    """However the text is cut: nothing before the end of its trigger, and then all from its beginning on."""
    assert TriggerWatcher(spec).feed(text) == rest
    for size in (1, 2, 3):
        watcher, got = TriggerWatcher(spec), None
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        while pieces and got is None:
            got = watcher.feed(pieces.pop(0))
        if rest is None:
            assert got is None and not watcher.active
        else:
            assert got is not None and watcher.active and got + "".join(pieces) == rest
            with pytest.raises(RuntimeError):
                watcher.feed("")
    assert TriggerWatcher(GrammarSpec(GrammarKind.TREE)).active


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("", 0), ("12", 2), ("12.345", 3), ("1e10", 2), ('"123', 0), ('"123"', 0), ('"1"23', 2), (r'"1\"2', 0),
        (r'"\\"12', 2), (r'"\\\"12', 0), (r'"\\\\"1', 1), ('[1,"a\\"b",77', 2), ("-7", 1), ("7 ", 0), ('{"1":12', 2),
        ('12"3"', 0),
    ],
)  # fmt: skip
def test_digits_in_a_row(text: str, digits: int) -> None:
    """As many as `most` are free; with one fewer allowed, no further one may come."""
    mask = VOCABULARY.digits | 1 << 31
    for size in (1, 3):
        for most, free in ((digits + 1, True), (digits, False)):
            count = Digits(VOCABULARY, most)
            for i in range(0, len(text), size):
                count.feed(text.encode()[i : i + size])
            other = count.copy()
            for state in (count, other):
                assert (state.limit(mask) & VOCABULARY.digits).any() == free
            other.feed(b"12345")
            other.rollback(1)
            count.feed(b"xyz" if not text.count('"') % 2 else b"")
            assert (other.limit(mask) & VOCABULARY.digits).any() == free
            other.rollback(10**6)
            assert (other.limit(mask) & VOCABULARY.digits).any() == (most > 0)
    only_digits = VOCABULARY.digits
    assert (Digits(VOCABULARY, 0).limit(only_digits) == only_digits).all()  # a number that may not end goes on


def test_a_lazy_grammar_goes_back_to_every_place() -> None:
    text = b"free text ab12"
    maker = GRAMMARS.gbnf('root ::= "ab" [0-9]+', triggers=("ab",))
    for n in range(len(text) + 3):
        constraint = maker()
        for byte in text:
            constraint.accept(byte)
        other = constraint.copy()
        constraint.rollback(n)
        kept = maker()
        for byte in text[: max(len(text) - n, 0)]:
            kept.accept(byte)
        for one in (constraint, kept):
            mask = one.mask()
            found = None if mask is None else allowed(mask)
            assert (found is None) == (len(text) - n < len(b"free text ab"))
            if found is not None:
                assert (EOS in found) == (n < 2) and ord("7") in found
        for byte in text[max(len(text) - n, 0) :]:
            constraint.accept(byte)
        mask, wanted = constraint.mask(), other.mask()
        assert mask is not None and wanted is not None and allowed(mask) == allowed(wanted)


def test_only_the_last_grammars_are_kept() -> None:
    grammars = Grammars(TOKENIZER)
    grammars.__dict__["_vocabulary"] = VOCABULARY
    for i in range(_MOST_KEPT):
        grammars.gbnf(f'root ::= "a{i}"')
    grammars.gbnf('root ::= "a0"')  # used again, so the next oldest goes
    grammars.gbnf('root ::= "new"')
    kept = list(grammars._kept)
    assert len(kept) == _MOST_KEPT and '"new"' in kept[-1] and '"a0"' in kept[-2] and '"a2"' in kept[0]
