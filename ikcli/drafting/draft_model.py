"""Draft tokens with a small model of the same vocabulary (`-md`), for all slots that want a draft at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ikcli.engine.plan.head_file import holds_heads_alone
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Continuation
from ikcli.engine.run.opening import open_session
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.settings.adapters import AdapterConfig, RopeConfig
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig

Tokens = npt.NDArray[np.int32]


class DraftModel:
    """A separate session whose sequences follow those of the slots."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._cached = [np.zeros(0, np.int32) for _ in range(session.n_seq_max)]

    @classmethod
    def open(cls, config: RunConfig, target: Session) -> DraftModel:
        """Load the draft model of `config`; raise UsageError if its vocabulary differs."""
        s = config.server
        n_ctx = s.draft_ctx or target.n_ctx
        changed = replace(
            config, model=s.model_draft, type_k=s.draft_type_k, type_v=s.draft_type_v,
            n_gpu_layers=config.n_gpu_layers if s.draft_gpu_layers is None else s.draft_gpu_layers,
            override_tensor=s.draft_override_tensor, device=s.draft_device or config.device,
            server=replace(s, spec_type=(), model_draft=None),
            override_kv=(), rope=RopeConfig(), adapters=AdapterConfig(), fleet=BatchConfig(),  # these are the model's
        )  # fmt: skip
        planner = Planner.of_file(changed)
        if holds_heads_alone(planner.file):
            raise UsageError(
                f"{s.model_draft}: holds heads that predict further tokens (MTP) alone; add --spec-type mtp"
            )
        session = open_session(
            changed, planner=planner, n_ctx=n_ctx, n_seq_max=target.n_seq_max, n_step=target.n_seq_max
        )
        tokens, theirs = (x.model.file.get("tokenizer.ggml.tokens") for x in (session, target))
        if session.n_vocab != target.n_vocab or list(tokens or ()) != list(theirs or ()):
            session.close()
            raise UsageError(f"{s.model_draft}: the draft model's vocabulary is not the model's; use one of its family")
        return cls(session)

    def draft(self, wanted: Sequence[Continuation]) -> None:
        """Fill `found` of every text; each must have caught up."""
        active = list(wanted)
        tokens = {w.seq: int(w.text[-1]) for w in active}
        while active:
            logits = self.session.step(self._batch(active, tokens))
            best = logits.argmax(axis=1)
            going = []
            for w, row, token in zip(active, logits, best.tolist(), strict=True):
                self._cached[w.seq] = np.append(self._cached[w.seq], np.int32(tokens[w.seq]))
                probability = float(1 / np.exp(row - row[token]).sum())
                if not probability >= w.p_min:
                    continue
                w.found.append(token)
                w.probabilities.append(probability)
                tokens[w.seq] = token
                if len(w.found) < w.n_max:
                    going.append(w)
            active = going

    def catch_up(self, w: Continuation) -> bool:
        """Compute the text except its last token, at most a ubatch; return False if more is left or it does not fit."""
        session = self.session
        if w.n_max <= 0 or len(w.text) + w.n_max > session.n_ctx_seq:
            return False
        n = session.truncate(w.seq, min(_common_prefix(self._cached[w.seq], w.text), len(w.text) - 1))
        piece = w.text[n : len(w.text) - 1][: session.n_ubatch]
        if len(piece):
            session.compute(Batch.single(piece, n, w.seq, logits="none"))
        self._cached[w.seq] = w.text[: n + len(piece)]
        session.sequences.checkpoint(w.seq, passing=True)
        return n + len(piece) == len(w.text) - 1

    def _batch(self, active: Sequence[Continuation], tokens: dict[int, int]) -> Batch:
        ids = np.array([tokens[w.seq] for w in active], np.int32)
        pos = np.array([len(self._cached[w.seq]) for w in active], np.int32)
        seq = np.array([w.seq for w in active], np.int32)
        return Batch(ids, pos, seq, np.ones(len(ids), np.bool_))

    def close(self) -> None:
        self.session.close()


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of equal tokens at the start of both."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    return int(different[0]) if different.size else n
