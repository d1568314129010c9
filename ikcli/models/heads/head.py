"""The hyperparameters of a head, for the module of its architecture (see `external.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikcli.models.hparams import HParams

MARKOV = "markov_w1.weight"
"""The tensor that makes a head of blocks one of DSpark."""


@dataclass(frozen=True, slots=True)
class Head:
    """The hyper-parameters of a head, and the layers of the model whose outputs it reads (none: the last states).

    `flags`: further choices of its architecture. `block`: tokens of a block and the one that stands for those to be
    drafted, of heads that draft blocks. `rope_base`: of the rotation of keys made of states, if it is another one.
    """

    own: HParams
    layers: tuple[int, ...] = ()
    flags: frozenset[str] = frozenset()
    block: tuple[int, int] = (0, 0)
    rope_base: float = 0.0


def renamed(metadata: Mapping[str, Any], arch: str, as_arch: str, n_vocab: int) -> dict[str, Any]:
    """Return the keys of a head as those of a model of another architecture with this vocabulary."""
    own = {as_arch + key.removeprefix(arch): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    return own | {"general.architecture": as_arch, f"{as_arch}.vocab_size": n_vocab}
