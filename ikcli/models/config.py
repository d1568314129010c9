"""Settings of a recorded graph besides the model: attention mode, cache types, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ikcli.gguf.constants import GGMLType


class Outputs(Enum):
    """The outputs of a session: logits, embeddings or both."""

    LOGITS = "logits"
    EMBEDDINGS = "embeddings"  # the last normed state; the output matrix is not even loaded
    BOTH = "both"

    @classmethod
    def alone(cls, embeddings: bool) -> Outputs:
        """Return embeddings alone, or logits alone."""
        return cls.EMBEDDINGS if embeddings else cls.LOGITS

    @property
    def logits(self) -> bool:
        """Return whether there are logits."""
        return self is not Outputs.EMBEDDINGS

    @property
    def embeddings(self) -> bool:
        """Return whether there are embeddings."""
        return self is not Outputs.LOGITS


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Settings of the graph for images.

    n_deep: first layers behind which further rows of an image are added (deepstack). both: tokens of an image see each
    other in both directions, in the layers where the architecture has it. framed: most tokens of an image share one
    position, and visual experts compute them (CogVLM).
    """

    n_deep: int = 0
    both: bool = False
    framed: bool = False

    def cols(self, n_embd: int) -> int:
        """Return the columns of a row of an image."""
        return n_embd * (1 + self.n_deep)


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """Settings of one graph; a session records two (prompt: `n_ubatch` rows, `expand`; generation: few rows).

    mla: 0..3 (models without MLA ignore it). amb: MiB for attention temporaries, 0 = no cap. ser: (fewest experts,
    threshold) or None. k_hadamard, v_hadamard: rotate keys (with MLA: latent rows) and values before they are stored.
    n_ctx: cells of the whole cache. n_seq: sequences that share it. n_ubatch: most rows of a micro-batch. n_window:
    cells of a sequence in the caches of window layers, 0: as many as in others. index_top_k: positions that a query of
    a model with an indexer attends to, 0: all, -1: as the model says. type_index: of the cache of index keys.
    index_keys_only: queries see no more positions than may be chosen, so keys are stored and attention is to all.
    expand: the prompt path of mla 2 and 3, which needs batches of at least `EXPAND_MIN_TOKENS` tokens to pay off.
    outputs: where graphs end. n_heads: heads of the file that predict further tokens, which the session also runs.
    media: of images (None: tokens alone). expert_slots: by layer, the experts that have slots on a GPU beside those in
    RAM.
    """

    mla: int = 3
    flash_attn: bool = True
    amb: int = 256
    fmoe: bool = True
    ser: tuple[int, float] | None = None
    type_k: GGMLType = GGMLType.F16
    type_v: GGMLType = GGMLType.F16
    k_hadamard: bool = False
    v_hadamard: bool = False
    n_ctx: int = 512
    n_seq: int = 1
    n_ubatch: int = 512
    n_window: int = 0
    index_top_k: int = -1
    type_index: GGMLType = GGMLType.F16
    index_keys_only: bool = False
    expand: bool = False
    outputs: Outputs = Outputs.LOGITS
    n_heads: int = 0
    media: MediaConfig | None = None
    expert_slots: tuple[int, ...] = ()

    def slots_of(self, il: int) -> int:
        """Return the experts of a layer that have slots on a GPU."""
        return self.expert_slots[il] if 0 <= il < len(self.expert_slots) else 0


EXPAND_MIN_TOKENS = 128
