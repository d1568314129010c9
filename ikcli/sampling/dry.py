"""Apply DRY, an exponential penalty for tokens that would extend a repetition (p-e-w, llama.cpp PR 9702).

A token that followed an earlier occurrence of the last L tokens (L >= allowed length) loses
multiplier * base ** (L - allowed length). Sequence breakers end a repetition: L never reaches back over one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ikcli.sampling.candidates import Candidates
from ikcli.sampling.params import SamplerParams
from ikcli.sampling.penalties import find

Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""First token of a sequence breaker -> the tokens that must follow it (none if it holds the whole breaker)."""

_MAX_BREAKER_CHARS = 40
_MAX_BREAKER_TOKENS = 20
_LOG_MAX = 80.0  # just under the logarithm of the largest float32
_LONGEST = 4096
_FEW = 16


def dry_active(params: SamplerParams) -> bool:
    """Return True if the parameters switch DRY on."""
    return params.dry_multiplier != 0 and params.dry_base >= 1 and params.dry_penalty_last_n != 0


def find_breakers(
    texts: Iterable[str], pieces: list[str], encode: Callable[[str], list[int]]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Find the token sequences that can spell the breaker `texts`; `pieces` are the texts of all tokens.

    A token that contains a breaker is one by itself; a token that ends in the start of a breaker is one together with
    the tokens of the rest.
    """
    found: dict[int, set[tuple[int, ...]]] = {}
    for text in texts:
        text = text[:_MAX_BREAKER_CHARS]
        if not text:
            continue
        tails = {n: tuple(encode(text[n:])[:_MAX_BREAKER_TOKENS]) for n in range(1, len(text))}
        for token, piece in enumerate(pieces):
            if text in piece:
                found.setdefault(token, set()).add(())
            elif tails and text[0] in piece:
                for n, tail in tails.items():
                    if piece.endswith(text[:n]):
                        found.setdefault(token, set()).add(tail)
    return {token: tuple(sorted(sequences)) for token, sequences in found.items()}


class Dry:
    """DRY penalties for one generation."""

    def __init__(self, params: SamplerParams, breakers: Breakers, n_vocab: int) -> None:
        self._params = params
        self._breakers = breakers
        self._is_head = np.zeros(n_vocab, np.bool_)
        self._is_head[[token for token in breakers if token < n_vocab]] = True
        self._alone = np.array(sorted(token for token, tails in breakers.items() if () in tails), np.int64)
        log_base = math.log(params.dry_base)
        self._max_exponent = min(int(_LOG_MAX / log_base), _LONGEST) if log_base > 1e-6 else _LONGEST

    def apply(self, c: Candidates, history: npt.NDArray[np.int64]) -> Candidates:
        """Penalize the candidates that would extend a repetition in `history`."""
        tokens, lengths = self.repeats(history)
        if not len(tokens):
            return c
        exponents = np.minimum(lengths - self._params.dry_allowed_length, self._max_exponent)
        penalties = self._params.dry_multiplier * self._params.dry_base ** exponents.astype(np.float64)
        logits = c.logits.copy()
        if c.ids is None:
            logits[tokens] -= penalties.astype(logits.dtype)
        else:
            where = find(tokens, c.ids)
            at = np.flatnonzero(where >= 0)
            logits[at] -= penalties[where[at]]
        return Candidates(c.ids, logits)

    def repeats(self, history: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens that would extend a repetition, and the longest length each would extend."""
        p = self._params
        window = history[-p.dry_penalty_last_n :] if p.dry_penalty_last_n > 0 else history
        none = np.empty(0, np.int64)
        allowed = max(p.dry_allowed_length, 1)
        if len(window) <= allowed:
            return none, none
        limit = min(self._since_breaker(window), allowed + self._max_exponent)
        if limit < allowed:
            return none, none
        ends, lengths = _earlier_matches(window, limit, allowed)
        tokens = window[ends + 1]
        keep = ~np.isin(tokens, self._alone) & (tokens >= 0) & (tokens < len(self._is_head))
        distinct, inverse = np.unique(tokens[keep], return_inverse=True)
        longest = np.zeros(len(distinct), np.int64)
        np.maximum.at(longest, inverse, lengths[keep])
        return distinct, longest

    def _since_breaker(self, window: npt.NDArray[np.int64]) -> int:
        """Count the tokens after the last sequence breaker."""
        n = len(window)
        clipped = np.clip(window, 0, len(self._is_head) - 1)
        for at in np.flatnonzero(self._is_head[clipped])[::-1]:
            after = n - 1 - int(at)
            matches = [
                len(tail)
                for tail in self._breakers.get(int(window[at]), ())
                if len(tail) <= after and tuple(window[at + 1 : at + 1 + len(tail)]) == tail
            ]
            if matches:
                return after - max(matches)
        return n


def _earlier_matches(
    window: npt.NDArray[np.int64], limit: int, least: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where earlier copies of the last tokens end, and their lengths (`least` .. `limit`)."""
    n = len(window)
    ends = np.flatnonzero(window[:-1] == window[-1])
    length = 1
    done_ends: list[npt.NDArray[np.int64]] = []
    done_lengths: list[npt.NDArray[np.int64]] = []
    while len(ends) > _FEW and length < limit:
        longer = (ends >= length) & (window[ends - length] == window[n - 1 - length])
        if length >= least:
            done_ends.append(ends[~longer])
            done_lengths.append(np.full(len(ends) - np.count_nonzero(longer), length, np.int64))
        ends = ends[longer]
        length += 1
    if length >= limit:
        done_ends.append(ends)
        done_lengths.append(np.full(len(ends), limit, np.int64))
    else:
        lengths = np.array([_match_length(window, int(end), limit) for end in ends], np.int64)
        done_ends.append(ends[lengths >= least])
        done_lengths.append(lengths[lengths >= least])
    return np.concatenate(done_ends), np.concatenate(done_lengths)


def _match_length(window: npt.NDArray[np.int64], end: int, limit: int) -> int:
    """Count the tokens up to `end` that equal the last ones of `window`, at most `limit`."""
    n = min(end + 1, limit)
    differs = np.flatnonzero(window[end + 1 - n : end + 1] != window[len(window) - n :])
    return n - 1 - int(differs[-1]) if len(differs) else n
