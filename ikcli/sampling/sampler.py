"""Choose tokens for one generation: biases, grammar mask, samplers in order, the draw, and its probabilities.

The order is llama-server's (common/sampling.cpp), except that a grammar's mask comes first, so that tokens are drawn
from the constrained distribution. `sample` changes only the random state; `accept` changes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.errors import NonFiniteError
from ikcli.sampling import filters
from ikcli.sampling.adaptive import Adaptive
from ikcli.sampling.candidates import Candidates, NoTokenError, allowed_only, draw, top_indices
from ikcli.sampling.dry import Dry, dry_active
from ikcli.sampling.filters import Step, active_filters
from ikcli.sampling.mirostat import Mirostat
from ikcli.sampling.params import SamplerParams, check_params
from ikcli.sampling.penalties import History, Penalties, penalizes
from ikcli.sampling.short import ShortChain, short_chain
from ikcli.sampling.vocab import SamplerVocab

_LARGEST_BIAS = 1e6


class Sampled(NamedTuple):
    """A chosen token, its log-probability (natural logarithm) and the `n_probs` most likely tokens with theirs.

    Without `n_probs` the log-probability is NaN, because computing it takes as long as choosing.
    It refers to the model's logits or, with `post_sampling_probs`, to the candidates that were drawn from.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampler of one generation; instances share nothing."""

    def __init__(self, params: SamplerParams, vocab: SamplerVocab) -> None:
        check_params(params)
        self.params = params
        self._vocab = vocab
        self._greedy = params.temperature <= 0
        self._history = History()
        self._prompt: tuple[int, ...] = ()
        self._bias_ids, self._bias = _biases(params, vocab)
        self._penalties = Penalties(params, vocab.newline, vocab.n_vocab) if penalizes(params) else None
        self._dry = None
        if dry_active(params):
            self._dry = Dry(params, vocab.breakers(params.dry_sequence_breakers), vocab.n_vocab)
        random = not self._greedy
        self._mirostat = Mirostat(params) if random and params.mirostat else None
        self._adaptive = Adaptive(params) if random and not params.mirostat and params.adaptive_target >= 0 else None
        self._seed = np.random.SeedSequence().entropy if params.random_seed else params.seed
        self._rng = self._new_rng()
        self._filters = active_filters(params)
        self._steps = tuple(self._make_steps())
        self._short = None if self._greedy or self._mirostat or self._adaptive else short_chain(params)
        self._plain = self._short if params.n_probs <= 0 else None

    def prime(self, prompt: Sequence[int]) -> None:
        """Start after a prompt: penalties and DRY look at its tokens too."""
        self._prompt = tuple(prompt)
        self._start()

    def reset(self) -> None:
        """Start again after the prompt, with the same random numbers."""
        self._rng = self._new_rng()
        self._start()

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        mask: npt.NDArray[np.uint32] | None = None,
        banned: Collection[int] = (),
        ban_bias: float = -math.inf,
    ) -> Sampled:
        """Choose a token. `logits` (n_vocab,) are not changed; bit i of the grammar's `mask` allows token i.

        `ban_bias` is added to the logits of banned tokens.

        NoTokenError if nothing is left, NonFiniteError if the logits hold NaN or +Inf.
        """
        if self._plain and mask is None and not banned:
            token = self._draw(self._plain, logits)
            if token >= 0:
                return Sampled(token, math.nan)
        largest = float(np.maximum.reduce(logits))
        if not largest < math.inf:
            raise NonFiniteError("the model's output is not finite (NaN or Inf among the logits)")
        c = self._candidates(logits, mask, banned, ban_bias, largest)
        if self._short is not None:
            token = self._short.sample(c, self._rng)
        else:
            token, final = self._sample_greedy(c) if self._greedy else self._sample_random(c)
            if self.params.n_probs and self.params.post_sampling_probs:
                return _after_sampling(token, final, logits, self.params.n_probs)
        if self.params.n_probs <= 0:
            return Sampled(token, math.nan)
        return _before_sampling(token, logits, largest, self.params.n_probs)

    def accept(self, token: int) -> None:
        """Append a token to the history that penalties, DRY, mirostat and adaptive-p use."""
        self._history.append(token)
        if self._penalties is not None:
            self._penalties.appended(self._history)
        if self._mirostat is not None:
            self._mirostat.accept(token)
        if self._adaptive is not None:
            self._adaptive.accept(token)

    def rollback(self, n: int) -> None:
        """Undo the last `n` accepted tokens; the random state is kept."""
        n = min(n, len(self._history) - self._n_prompt)
        if n <= 0:
            return
        self._history.truncate(len(self._history) - n)
        if self._penalties is not None:
            self._penalties.rebuild(self._history)
        for stateful in (self._mirostat, self._adaptive):
            if stateful is not None:
                stateful.rollback(n)

    @property
    def _n_prompt(self) -> int:
        replaced = self.params.penalty_prompt
        return len(self._prompt if replaced is None else replaced)

    def _start(self) -> None:
        self._history = History()
        replaced = self.params.penalty_prompt
        self._history.extend(self._prompt if replaced is None else replaced)
        if self._penalties is not None:
            self._penalties.rebuild(self._history)
        if self._mirostat is not None:
            self._mirostat = Mirostat(self.params)
        if self._adaptive is not None:
            self._adaptive = Adaptive(self.params)

    def _new_rng(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._seed))

    def _draw(self, chain: ShortChain, logits: npt.NDArray[np.float32]) -> int:
        """Draw from the whole vocabulary, or return -1. Biases are added in place and undone, which saves a copy."""
        ids = self._bias_ids
        if not len(ids):
            return chain.sample_all(logits, self._rng)
        if not logits.flags.writeable:
            return chain.sample_all(self._biased(logits), self._rng)
        before = logits[ids]
        logits[ids] = before + self._bias
        try:
            return chain.sample_all(logits, self._rng)
        finally:
            logits[ids] = before

    def _biased(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if not len(self._bias_ids):
            return logits
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        return logits

    def _candidates(
        self,
        logits: npt.NDArray[np.float32],
        mask: npt.NDArray[np.uint32] | None,
        banned: Collection[int],
        ban_bias: float,
        largest: float,
    ) -> Candidates:
        changed = mask is not None or len(self._bias_ids) > 0 or len(banned) > 0
        logits = self._biased(logits)
        if len(banned):
            logits = logits.copy()
            logits[list(banned)] += np.float32(ban_bias)
        c = Candidates(None, logits) if mask is None else allowed_only(logits, mask)
        if changed:
            largest = c.logits.max() if len(c.logits) else -math.inf
        if largest == -math.inf:
            raise NoTokenError("no token is left to choose from: the grammar, logit_bias and bans exclude all of them")
        return c

    def _sample_greedy(self, c: Candidates) -> tuple[int, Candidates]:
        for step in self._steps:
            c = step(c)
        best = int(c.logits.argmax())
        if not self.params.n_probs:
            return c.token(best), c
        return c.token(best), c.take(np.array([best]), descending=True)

    def _sample_random(self, c: Candidates) -> tuple[int, Candidates]:
        for step in self._steps:
            c = step(c)
        if self._mirostat is not None:
            return self._mirostat.draw(c, self._rng)
        if self._adaptive is not None:
            return self._adaptive.draw(c, self._rng)
        return c.token(draw(np.exp(c.logits - c.logits.max()), self._rng)), c

    def _make_steps(self) -> list[Step]:
        """Return the active samplers as functions; greedy and mirostat skip those that only cut the tail."""
        p = self.params
        names = p.samplers
        if self._greedy or self._mirostat is not None:
            names = tuple(name for name in names if name in ("penalties", "dry"))
        steps = [step for name in names if (step := self._make_step(name)) is not None]
        if self._mirostat is not None:
            steps.append(partial(filters.temperature, t=p.temperature))
        if self._adaptive is not None:
            first = 1 if self._penalties is not None and names[:1] == ("penalties",) else 0
            steps.insert(first, lambda c: self._adaptive.remember(c) if self._adaptive is not None else c)
        return steps

    def _make_step(self, name: str) -> Step | None:
        p = self.params
        if name == "penalties":
            return self._penalties.apply if self._penalties is not None else None
        if name == "dry":
            dry = self._dry
            return (lambda c: dry.apply(c, self._history.tokens)) if dry is not None else None
        if name == "temperature":
            if p.dynatemp_range > 0:
                spread, exponent = p.dynatemp_range, p.dynatemp_exponent
                return partial(filters.dynamic_temperature, t=p.temperature, spread=spread, exponent=exponent)
            return partial(filters.temperature, t=p.temperature) if p.temperature != 1 else None
        if name == "xtc":
            return self._xtc if p.xtc_probability > 0 and p.xtc_threshold <= 0.5 else None
        return self._filters.get(name)

    def _xtc(self, c: Candidates) -> Candidates:
        p = self.params
        if p.xtc_probability < 1 and self._rng.random() >= p.xtc_probability:
            return c
        return filters.xtc(c, p.xtc_threshold, max(1, p.min_keep))


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> Sampled:
    """Return the log-probability of `token` and of the `n_top` most likely tokens under `logits` (n_vocab,)."""
    return _before_sampling(token, logits, float(logits.max()), n_top)


def _before_sampling(token: int, logits: npt.NDArray[np.float32], largest: float, n_probs: int) -> Sampled:
    weights = np.subtract(logits, np.float32(largest))
    total = largest + math.log(float(np.add.reduce(np.exp(weights, out=weights))))
    if n_probs <= 0:
        return Sampled(token, float(logits[token]) - total)
    ids = top_indices(logits, min(n_probs, len(logits)))
    values = logits[ids].astype(np.float64) - total
    return Sampled(token, float(logits[token]) - total, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _after_sampling(token: int, final: Candidates, logits: npt.NDArray[np.float32], n_probs: int) -> Sampled:
    """Return probabilities among the final candidates, padded with tokens that were cut."""
    best = final.head(min(n_probs, len(final.logits)))
    total = float(np.exp(final.logits - final.logits.max()).sum())
    logprobs = best.logits - best.logits[0] - math.log(total)
    ids = best.ids if best.ids is not None else np.arange(len(best.logits))
    top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    chosen = np.flatnonzero(ids == token)
    logprob = float(logprobs[chosen[0]]) if len(chosen) else _logprob_in(final, token, total)
    if len(top) < n_probs:
        seen = {i for i, _ in top}
        rest = top_indices(logits, min(n_probs + len(seen), len(logits))).tolist()
        top += [(i, -math.inf) for i in rest if i not in seen][: n_probs - len(top)]
    return Sampled(token, logprob, tuple(top))


def _logprob_in(c: Candidates, token: int, total: float) -> float:
    index = token if c.ids is None else int(np.flatnonzero(c.ids == token)[0])
    return float(c.logits[index] - c.logits.max()) - math.log(total)


def _biases(params: SamplerParams, vocab: SamplerVocab) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return biased ids and their biases; ids outside the vocabulary have no effect, as in llama-server."""
    sums: dict[int, float] = {}
    for token, bias in params.logit_bias:
        if 0 <= token < vocab.n_vocab:
            sums[token] = min(sums.get(token, 0.0) + min(bias, _LARGEST_BIAS), _LARGEST_BIAS)
    if params.ignore_eos:
        sums.update(dict.fromkeys(vocab.eog, -math.inf))
    return np.array(list(sums), np.int64), np.array(list(sums.values()), np.float32)
