"""Apply a grammar during a generation: compute masks over the vocabulary, accept tokens, roll back."""

from __future__ import annotations

import codecs

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from ikcli.grammar.nodes import GrammarError
from ikcli.grammar.numbers import MOST_DIGITS, most_digits
from ikcli.grammar.spec import GrammarKind, GrammarSpec, Schema, TriggerWatcher, Until, parts_of
from ikcli.grammar.vocabulary import Vocabulary


class Digits:
    """Counts the digits at the end of JSON text, outside strings; a number should end after `most` of them."""

    def __init__(self, vocabulary: Vocabulary, most: int = MOST_DIGITS) -> None:
        self._vocabulary = vocabulary
        self._most = most
        self._states = [(False, False, 0)]  # per token: within a string, after a backslash, digits in a row

    def feed(self, data: bytes) -> None:
        """Advance by the bytes of a token."""
        within, escaped, n = self._states[-1]
        for byte in data:
            if within:
                within, escaped = escaped or byte != 0x22, byte == 0x5C and not escaped
            else:
                within, n = byte == 0x22, n + 1 if 0x30 <= byte <= 0x39 else 0
        self._states.append((within, escaped, n))

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens."""
        del self._states[max(len(self._states) - n, 1) :]

    def limit(self, mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Return `mask` without digits where the number has enough of them and may end."""
        if self._states[-1][2] < self._most:
            return mask
        ended = mask & ~self._vocabulary.digits
        return ended if ended.any() else mask

    def copy(self) -> Digits:
        """Return a copy of the state."""
        other = Digits(self._vocabulary, self._most)
        other._states = list(self._states)
        return other


class GrammarConstraint:
    """A grammar that applies from the first token on. With `digits` (JSON only) its numbers are bounded."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, digits: Digits | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._digits = digits

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return a new packed mask (ceil(n_vocab / 32),) whose bit i is set if token i may follow."""
        mask = np.zeros((self._vocabulary.n_vocab + 31) // 32, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask if self._digits is None else self._digits.limit(mask)

    def accept(self, token: int) -> None:
        """Advance by a token; raise GrammarError if the mask did not allow it."""
        if not self._matcher.consume_token(token):
            self._check()
        if self._digits is not None:
            self._digits.feed(self._vocabulary.tokens[token] if token < self._vocabulary.n_vocab else b"")

    def accept_text(self, text: str) -> None:
        """Advance by text, however its tokens are cut."""
        tokens = self._vocabulary.native.greedy_tokenize(text)
        self._matcher.consume_tokens(tokens)
        self._check()
        if self._digits is not None:
            for token in tokens:
                self._digits.feed(self._vocabulary.tokens[token])

    @property
    def finished(self) -> bool:
        """True if nothing but the end of generation may follow."""
        return self._matcher.is_stopped()

    def rollback(self, n: int) -> None:
        """Take back the last `n` tokens."""
        if n > 0 and not self._matcher.rollback(n):
            raise GrammarError("the grammar cannot go back that far")
        if n > 0 and self._digits is not None:
            self._digits.rollback(n)

    def copy(self) -> GrammarConstraint:
        """Return an independent constraint in the same state."""
        digits = None if self._digits is None else self._digits.copy()
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, digits)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar could not be followed: {first_line(self._matcher.get_error())}")


class LazyConstraint:
    """Free text until a trigger of the spec appears; from there on the grammar, trigger included.

    If the text so far does not fit the grammar after all, it stays free.
    """

    def __init__(self, spec: GrammarSpec, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._spec = spec
        self._start = matcher
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._watcher = TriggerWatcher(self._spec)
        self._decoder = _decoder()
        self._inner: GrammarConstraint | None = None
        if self._watcher.active:
            self._inner = self._whole()
        self._free = 0

    def _whole(self) -> GrammarConstraint:
        """Return the grammar at its start."""
        return GrammarConstraint(self._start.deep_copy(), self._vocabulary, digits_of(self._spec, self._vocabulary))

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Return the mask of the grammar; None as long as every token may follow."""
        return None if self._inner is None else self._inner.mask()

    def accept(self, token: int) -> None:
        """Advance by a token; raise GrammarError if the mask did not allow it."""
        self._tokens.append(token)
        if self._inner is not None:
            self._inner.accept(token)
            return
        text = self._decoder.decode(self._vocabulary.tokens[token] if token < self._vocabulary.n_vocab else b"")
        self._texts.append(text)
        rest = self._watcher.feed(text)
        if rest is not None:
            self._inner = self._started(rest)
            self._free = len(self._tokens)
            if self._inner is None:
                self._watcher, self._decoder = TriggerWatcher(self._spec), _decoder()
                self._texts.clear()

    @property
    def finished(self) -> bool:
        """True if nothing but the end of generation may follow."""
        return self._inner is not None and self._inner.finished

    def rollback(self, n: int) -> None:
        """Take back the last `n` tokens."""
        if n <= 0:
            return
        if self._inner is not None and len(self._tokens) - n >= self._free:
            self._inner.rollback(n)
            del self._tokens[-n:]
            return
        tokens = self._tokens[:-n]
        self._begin()
        for token in tokens:
            self.accept(token)

    def copy(self) -> LazyConstraint:
        """Return an independent constraint in the same state."""
        other = LazyConstraint(self._spec, self._start, self._vocabulary)
        for token in self._tokens:
            other.accept(token)
        return other

    def _started(self, text: str) -> GrammarConstraint | None:
        """Return the grammar advanced by `text`, the latest output; None if it does not accept it."""
        inner = self._whole()
        at, n = len(self._texts), 0
        while n < len(text):
            at -= 1
            n += len(self._texts[at])
        tokens = self._tokens[len(self._tokens) - (len(self._texts) - at) :]
        try:
            if n > len(text):  # the trigger begins within a token
                inner.accept_text(self._texts[at][n - len(text) :])
                tokens = tokens[1:]
            for token in tokens:
                inner.accept(token)
        except GrammarError:
            return None
        return inner


def digits_of(spec: GrammarSpec, vocabulary: Vocabulary) -> Digits | None:
    """Return the digit counter for a grammar of JSON only: a schema, or a tree without free text."""
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return Digits(vocabulary, most_digits(spec.schema))
    if spec.tree is None:
        return None
    waiting, most = [spec.tree], MOST_DIGITS
    while waiting:
        node = waiting.pop()
        if isinstance(node, Until):
            return None
        if isinstance(node, Schema):
            most = max(most, most_digits(node.schema))
        waiting += parts_of(node)
    return Digits(vocabulary, most)


def first_line(message: str) -> str:
    """Return a message of the grammar library without the state that it appends."""
    return message.split("\n<state>")[0].strip().splitlines()[0] if message.strip() else "unknown error"


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
