"""Sampling parameters with the names and defaults of llama-server, and the names of the samplers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ikcli.errors import UsageError
from ikcli.settings.sampling import SamplingValues

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "tfs_z",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

# Letters of --sampling-seq; n and s both mean top_n_sigma (ik and mainline differ), so do w and a for adaptive_p.
_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "n": "top_n_sigma",
    "k": "top_k",
    "f": "tfs_z",
    "y": "typical_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "w": "adaptive_p",
    "a": "adaptive_p",
}
_OTHER_NAMES = {"nucleus": "top_p", "typical": "typical_p", "typ": "typical_p", "typ_p": "typical_p", "tfs": "tfs_z"}
_OTHER_NAMES |= {"temp": "temperature", "penalty": "penalties"}
# Names without a sampler here: `dist` always comes last, `infill` is not a filter.
_IGNORED = frozenset({"dist", "infill"})
_ENDLESS_SEED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplerParams(SamplingValues):
    """How the next token of one generation is chosen.

    `seed` -1 takes a random one. `logit_bias` pairs a token id with what is added to its logit (-inf: never).
    `temperature` <= 0 always takes the most likely token. `repeat_last_n` and `dry_penalty_last_n`: -1 looks at the
    whole context, 0 switches off. `penalty_prompt` replaces the prompt for penalties. `samplers` run in the given
    order; `adaptive_p` (on if `adaptive_target` >= 0) always comes last.
    """

    seed: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    penalty_prompt: tuple[int, ...] | None = None

    @property
    def random_seed(self) -> bool:
        """True if `seed` asks for a random one (any negative number, or -1 as unsigned)."""
        return self.seed < 0 or self.seed == _ENDLESS_SEED


def check_params(params: SamplerParams) -> None:
    """Raise UsageError, naming the parameter, for values that no sampler could work with."""
    for field in fields(params):
        value = getattr(params, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{field.name} must be a finite number, not {value}")
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        if getattr(params, name) < -1:
            raise UsageError(f"{name} must be -1 (the whole context) or more, not {getattr(params, name)}")
    if params.repeat_penalty <= 0:
        raise UsageError(f"repeat_penalty must be greater than 0, not {params.repeat_penalty:g}; 1 switches it off")
    if params.mirostat not in (0, 1, 2):
        raise UsageError(f"mirostat must be 0, 1 or 2, not {params.mirostat}")
    for token, bias in params.logit_bias:
        if math.isnan(bias):
            raise UsageError(f"logit_bias of token {token} is not a number")
    unknown = [name for name in params.samplers if name not in _LETTERS.values()]
    if unknown:
        sampler_names(unknown)


def sampler_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse sampler names, in order, from a list of names (llama-server's spellings) or a string of letters.

    UsageError for a name or letter that is not known.
    """
    if isinstance(names, str):
        return _from_letters(names)
    found = []
    for name in names:
        plain = name.strip().lower().replace("-", "_")
        plain = _OTHER_NAMES.get(plain, plain)
        if plain in _IGNORED:
            continue
        if plain not in _LETTERS.values():
            known = ", ".join(dict.fromkeys(_LETTERS.values()))
            raise UsageError(f"unknown sampler {name!r}; known are {known}")
        found.append(plain)
    return tuple(found)


def _from_letters(letters: str) -> tuple[str, ...]:
    unknown = [letter for letter in letters if letter not in _LETTERS and letter != "i"]
    if unknown:
        known = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
        raise UsageError(f"unknown sampler letter {unknown[0]!r} in {letters!r}; known are {known}")
    return tuple(_LETTERS[letter] for letter in letters if letter in _LETTERS)
