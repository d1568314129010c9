"""Refuse requests for generation that no slot can serve."""

from __future__ import annotations

from ikcli.engine.run.session import Session
from ikcli.server.slots.failures import invalid
from ikcli.server.slots.messages import Failure, GenerationRequest
from ikcli.server.slots.states import ModelInfo


def refused(session: Session, model: ModelInfo, request: GenerationRequest) -> Failure | None:
    """Return why a request cannot be served, without looking at the slots, or None."""
    if not model.generates:
        text = f"This server generates nothing, it only embeds. {_instead(session)}"
        return Failure(501, "not_supported_error", text)
    n, n_ctx = len(request.prompt), model.n_ctx_slot
    if not -1 <= request.id_slot < model.n_slots:
        last = model.n_slots - 1
        return invalid(f"id_slot {request.id_slot} does not exist; slots are 0 to {last}, -1 takes any")
    if n >= n_ctx:
        text = (
            f"the request ({n} tokens) exceeds the available context size ({n_ctx} tokens, the answer included); "
            "shorten it or start again with a larger -c"
        )
        return Failure(400, "exceed_context_size_error", text, {"n_prompt_tokens": n, "n_ctx": n_ctx})
    if session.encodes and n > session.n_ubatch:
        text = f"the request ({n} tokens) exceeds the {session.n_ubatch} tokens that the encoder reads at once; "
        text += "shorten it, or start again with a larger -ub"
        return Failure(400, "exceed_context_size_error", text, {"n_prompt_tokens": n, "n_ctx": session.n_ubatch})
    if session.encodes and request.prompt_logprobs:
        return invalid("tokens of a prompt have no log-probabilities: an encoder reads it as a whole")
    media = session.graph_config.media
    widest = max((one.picture.n_tokens for one in request.pictures), default=0)
    if media is not None and media.both and widest > session.n_ubatch:
        return invalid(
            f"an image of {widest} tokens, which see each other in both directions, must be in one micro-batch; "
            f"start again with -ub {widest} or more"
        )
    least = min(request.prompt, default=0) if not request.pictures else 0  # those of images are keys below 0
    if n and not 0 <= least <= max(request.prompt) < model.n_vocab:
        return invalid(f"the prompt holds a token id outside the vocabulary of {model.n_vocab}")
    return None


def _instead(session: Session) -> str:
    hp = session.model.hp
    if not hp.causal:
        return f"Its model ({hp.arch}) has no next token; use another one"
    return f"Start it without `{'--reranking' if session.config.server.reranking else '--embeddings'}`"
