"""The growing text of one generation: complete characters, stop texts, banned texts, and the text ready to send.

Text is sent once it can no longer become part of a stop text or of a banned text. Positions are characters of the whole
text; `starts[i]` is where the text of token i begins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ikcli.server.slots.messages import Bans, TokenInfo
from ikcli.tokenizer.tokenizer import StreamDecoder, Tokenizer

NO_BANS = Bans()


class Output:
    """Text and tokens of one generation."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], bans: Bans = NO_BANS, *, keep_special: bool = False
    ) -> None:
        self._tokenizer, self._keep_special = tokenizer, keep_special
        self._decoder = StreamDecoder(tokenizer, skip_special=not keep_special)
        self._n_texts = len(tokenizer.vocab.tokens)  # a model's output may be wider than its vocabulary
        self._stop = tuple(s for s in stop if s)
        self._bans, self._banned = bans, tuple(_fold(b) for b in bans.strings if b)
        self._holds = bool(self._stop or bans)  # whether text may have to wait
        self._allowed = 0  # position up to which banned texts are let through
        self._sent: list[str] = []  # sent text, in pieces
        self._held = ""  # text after that
        self._n_sent = 0  # characters of _sent
        self._n_sent_tokens = 0
        self.tokens: list[TokenInfo] = []
        self.starts: list[int] = []
        self.n_total = 0  # all tokens ever added, including those that a stop text removed
        self.stopping_word = ""
        self.has_new_line = False
        self._line_start = 0  # position after the last line end

    # --- growing ----------------------------------------------------------------------------------------------------
    def add(self, token: TokenInfo, *, is_text: bool = True) -> str:
        """Append a token and return its text; `is_text` False for tokens that end the generation."""
        self.tokens.append(token)
        self.starts.append(self._n_sent + len(self._held))
        self.n_total += 1
        piece = self._decoder.feed(token.id) if is_text and token.id < self._n_texts else ""
        self._held += piece
        return piece

    def check_stop(self) -> bool:
        """Truncate the text at the first stop text, if there is one; also note line ends."""
        held = self._held
        found = [(i, s) for s in self._stop if (i := held.find(s)) >= 0] if self._stop else []
        if found:
            at, self.stopping_word = min(found)
            self.cut(self._n_sent + at)
        if "\n" in self._held:
            self.has_new_line = True
        return bool(found)

    def cut(self, position: int) -> None:
        """Drop the text from this position on, which has not been sent, and the tokens that begin there."""
        self._held = self._held[: position - self._n_sent]
        n = max(bisect_left(self.starts, position), self._n_sent_tokens)
        del self.tokens[n:], self.starts[n:]

    def line_indent(self, new_text: str, n_indent: int) -> bool:
        """Check the indentation of the line that `new_text` continues.

        If the text of the line is indented by less than this, drop the line and return False.
        """
        text = self.text
        start = self._line_start
        line = text[start:]
        if "\n" in line:
            self._line_start = start = start + line.rindex("\n") + 1
            line = text[start:]
        body = line.lstrip(" \t")
        if self.has_new_line and body and len(line) - len(body) < n_indent:
            self.cut(max(start, self._n_sent))
            return False
        return True

    # --- banned texts -----------------------------------------------------------------------------------------------
    def find_banned(self) -> int | None:
        """Return the index of the token with which a banned text begins, or None."""
        if not self._bans:
            return None
        skip = max(self._allowed - self._n_sent, 0)
        text = self._held[skip:]
        folded = _fold(text)
        before = self._held[skip - 1] if skip else self._sent[-1][-1] if self._sent else ""
        at = [skip + i for b in self._banned if (i := folded.find(b)) >= 0]
        at += [skip + i for p in self._bans.patterns if (i := p.search(text, before)) >= 0]
        if not at:
            return None
        return max(bisect_right(self.starts, self._n_sent + min(at)) - 1, self._n_sent_tokens)

    def allow_banned(self) -> None:
        """Let the present banned texts through unchanged."""
        self._allowed = self._n_sent + len(self._held)

    def rewind(self, n_tokens: int) -> None:
        """Drop every token from this one on; they have not been sent."""
        kept = self.tokens[:n_tokens]
        if not self._bans.counts:
            self.n_total -= len(self.tokens) - len(kept)
        self._decoder = StreamDecoder(self._tokenizer, skip_special=not self._keep_special)
        text = "".join(self._decoder.feed(t.id) for t in kept if t.id < self._n_texts)
        self._held = text[self._n_sent :]
        del self.tokens[n_tokens:], self.starts[n_tokens:]
        self.stopping_word = ""
        self.has_new_line = "\n" in text
        self._line_start = 0  # computed again when it is needed

    # --- sending ------------------------------------------------------------------------------------------------------
    def take(self, *, everything: bool = False) -> tuple[str, tuple[TokenInfo, ...]]:
        """Return text that is certain, and its tokens; at the end of the generation all of it."""
        held, n_tokens = self._held, len(self.tokens)
        n = len(held)
        if not everything:
            if self._holds and (n_uncertain := self._n_uncertain()):
                n -= n_uncertain
                n_tokens = bisect_left(self.starts, self._n_sent + n)
            if n <= 0:
                return "", ()
        text, self._held = held[:n], held[n:]
        tokens = tuple(self.tokens[self._n_sent_tokens : n_tokens])
        self._n_sent_tokens = max(n_tokens, self._n_sent_tokens)
        self._sent.append(text)
        self._n_sent += n
        return text, tokens

    @property
    def text(self) -> str:
        """Return all text so far, sent or not, without an incomplete character at the end."""
        return "".join(self._sent) + self._held

    def _n_uncertain(self) -> int:
        """Return the number of characters at the end that could begin a stop text or a banned text."""
        held = self._held
        n = max((_n_partial(held, s) for s in self._stop), default=0)
        if self._banned:
            held = _fold(held)
            n_banned = max(_n_partial(held, b) for b in self._banned)
            if n_banned:  # with the whole token in which it begins, which may have to be removed
                end = self._n_sent + len(held)
                n = max(n, end - self.starts[bisect_right(self.starts, end - n_banned) - 1])
        if n_tokens := min(self._bans.n_held, len(self.starts)):
            n = max(n, self._n_sent + len(self._held) - self.starts[-n_tokens])
        return min(n, len(self._held))


def _n_partial(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def _fold(text: str) -> str:
    """Lower the case character by character, so that positions stay the same."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(x if len(x := c.lower()) == 1 else c for c in text)
