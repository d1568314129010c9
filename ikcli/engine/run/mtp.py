"""Draft tokens with the model's own heads (multi-token prediction, MTP; NextN), which `models/heads/mtp.py` defines.

A session that runs heads has one `Heads`. It sees the states that every micro-batch leaves and computes the rows of the
heads' caches from them: row p from the state of position p and the token after it. Rows are computed when a draft is
wanted, or when many are due, since several cost little more than one. The caches belong to the sequences of the
session, so rows are saved, copied and rolled back with them.

States themselves are kept for the last positions only. Where the state of a row is not known, because a sequence was
restored or copied, the row is computed as if it were zero: a head then guesses worse, and since every guess is checked,
nothing else changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.backends.step_block import StepBlock
from ikcli.engine.plan.heads import BLOCK, FEW, HEAD, KEPT_STATES, MARKOV, kept_states
from ikcli.engine.run.media_places import places_of_text
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import Observer
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.engine.run.sequences import Sequences
from ikcli.graph import Rows
from ikcli.graph.micro_batch import Segment
from ikcli.models import GraphConfig
from ikcli.settings.run import RunConfig

Tokens = npt.NDArray[np.int32]
FloatRows = npt.NDArray[np.float32]

DUE = KEPT_STATES // 2  # rows that are computed without a draft, so that states do not pile up


class Continuation(Protocol):
    """A text to continue: all tokens of a sequence, of which the session has computed all but the last.

    At most `n_max` tokens are wanted, each at least as probable as `p_min`. They are appended to `found`, and their
    probabilities to `probabilities`.
    """

    seq: int
    text: Tokens
    n_max: int
    p_min: float
    found: list[int]
    probabilities: list[float]


@dataclass(slots=True)
class Draft:
    """A `Continuation`."""

    seq: int
    text: Tokens
    n_max: int
    p_min: float
    found: list[int]
    probabilities: list[float]


class Host(Protocol):
    """The session whose heads run, as far as they use it."""

    config: RunConfig
    model: Model
    graph_config: GraphConfig
    runner: Runner
    programs: dict[str, DividedProgram]
    sequences: Sequences
    step_block: StepBlock
    n_step: int
    n_ubatch: int
    n_vocab: int

    @property
    def n_ctx_seq(self) -> int: ...

    @property
    def n_outputs(self) -> int: ...

    @property
    def observer(self) -> Observer | None: ...

    def plan_outputs(self, n: int) -> None: ...


class Follower(Protocol):
    """Computes the rows of the heads in place of drafting, to measure them; see `head_rows.py`."""

    def take(self, seq: int, pos: int, tokens: Tokens, states: FloatRows) -> None: ...

    def run(self) -> None: ...


class _Known:
    """Tokens and states of the positions first..end-1 of a sequence, and the rows that every head has computed."""

    def __init__(self, n_heads: int, n_rows: int, n_embd: int) -> None:
        self.version = -1
        self.first = self.end = 0
        self.fed = [0] * n_heads  # rows before this one are in the cache of the head
        self.after = -1  # token after the last position, with which its row was computed
        self._tokens = np.zeros(n_rows, np.int32)
        self._states = np.zeros((n_rows, n_embd), np.float32)

    def begin(self, pos: int, version: int) -> None:
        """Forget all positions; the next one is `pos`, and the row before it depends on its token."""
        self.version, self.first, self.end, self.after = version, pos, pos, -1
        self.fed = [max(pos - 1, 0)] * len(self.fed)

    def cut(self, pos: int, token: int) -> None:
        """Drop positions from `pos` on; `token` is now the one at `pos`."""
        same = token == (self.after if pos == self.end else int(self._tokens[pos - self.first]))
        self.end, self.after = pos, token
        self.fed = [min(fed, pos if same else max(pos - 1, 0)) for fed in self.fed]

    def append(self, tokens: Tokens, states: FloatRows) -> None:
        """Add positions at the end."""
        n, at = len(tokens), self.end - self.first
        if at + n > len(self._tokens):
            kept = max(min(*self.fed, self.end - DUE), self.first, self.end + n - len(self._tokens))
            old, at = slice(kept - self.first, at), self.end - kept
            self._tokens[:at], self._states[:at] = self._tokens[old].copy(), self._states[old].copy()
            self.first = kept
            self.fed = [max(fed, kept - 1) for fed in self.fed]
        self._tokens[at : at + n], self._states[at : at + n] = tokens, states
        self.end += n
        self.after = -1

    def rows(self, first: int, stop: int, after: int) -> tuple[Tokens, FloatRows]:
        """Return the tokens after the positions first..stop-1 (`after` is the one at `end`), and the states there."""
        states = np.zeros((stop - first, self._states.shape[1]), np.float32)
        tokens = np.full(stop - first, after, np.int32)
        known = max(first, self.first)
        states[known - first :] = self._states[known - self.first : stop - self.first]
        last = min(stop + 1, self.end)
        tokens[: last - first - 1] = self._tokens[first + 1 - self.first : last - self.first]
        return tokens, states


@dataclass(slots=True)
class Piece:
    """Consecutive rows of one sequence for a head."""

    seq: int
    pos: int
    tokens: Tokens
    states: FloatRows


class Heads:
    """The heads of a session; see the module. `session.heads` is the only one.

    `asleep`: sequences that get no draft soon, whose states are not kept, so that they cost nothing. When one wakes
    up, the rows between are missing, as if the sequence had been restored. `seconds`, `n_steps`: time that keeping
    states and computing rows took, and the micro-batches of it.
    """

    def __init__(self, session: Host) -> None:
        self.session = session
        self.n_embd = session.model.n_state
        head = session.model.external
        self.n_heads = session.graph_config.n_heads if head is None else 1
        self.drafts_blocks = head is not None and head.module.BLOCK
        self.ids = session.model.ids_of_head()  # tokens of its logits; None: all tokens
        self._constant = head is not None and head.constant  # it has no rows of its own
        self.follower: Follower | None = None
        self._known: dict[int, _Known] = {}
        self.asleep: set[int] = set()
        self.skips = False  # the states of the next micro-batch, all of sequences that are asleep
        self.seconds, self.n_steps = 0.0, 0
        self._n_rows = 0  # kept since rows were computed that are due

    # --- what the session computes ----------------------------------------------------------------------------------
    def saw(self, program: DividedProgram) -> None:
        """Keep the states of the micro-batch that was just computed."""
        session, block = self.session, self.session.step_block
        if self.skips:
            self.skips = False
            return
        began = time.perf_counter()
        found = program.graph.states
        _, tokens, _, _, _, segments, _, seqs, *_ = block.arrays()
        if found is None:  # of embeddings, whose texts replace those of the sequence
            for seq in seqs.tolist():
                self._known.pop(seq, None)
            return
        states = session.runner.states(program, len(tokens))
        assert found.rows.symbol is Rows.TOKENS or block.rows[Rows.OUTPUTS] == len(tokens)
        for seq, (start, n, _, pos, *_) in zip(seqs.tolist(), segments.tolist(), strict=True):
            if self.follower is not None:
                self.follower.take(
                    seq, pos, tokens[start : start + n].astype(np.int32), states[start : start + n].copy()
                )
                continue
            known = self._at(seq, pos, int(tokens[start]))
            known.append(tokens[start : start + n].astype(np.int32), states[start : start + n])
        self._n_rows += len(tokens)
        self.seconds += time.perf_counter() - began
        self.n_steps += 1

    def _at(self, seq: int, pos: int, token: int) -> _Known:
        """Return what is known of the positions before `pos`, where `token` is or will be."""
        version = self.session.sequences.version[seq]
        known = self._known.get(seq)
        if known is None:
            n_rows = kept_states(self.session.n_ubatch)
            known = self._known[seq] = _Known(self.n_heads, n_rows, self.n_embd)
        if known.version != version or not known.first <= pos <= known.end:
            known.begin(pos, version)
        if pos < known.end or known.after != token:
            known.cut(pos, token)
        return known

    def settle(self, seq: int | None = None) -> None:
        """Compute rows that are due, of one sequence or where they are many; called while nothing is in flight."""
        if self.follower is not None:
            self.follower.run()
            return
        if (seq is None and self._n_rows < DUE) or self._constant:
            return
        began, self._n_rows = time.perf_counter(), 0
        for s, known in list(self._known.items()):
            least = DUE if seq is None else 1
            if seq not in (None, s) or known.version != self.session.sequences.version[s]:
                continue
            end = min(known.end, self.session.sequences.n_past[s])
            for head in range(self.n_heads):
                if end - 1 - known.fed[head] >= least:
                    for piece in self._due(known, s, head, end - 1, -1):
                        self._run(head, [piece], np.zeros(0, np.int64))
                    known.fed[head] = end - 1
        self.seconds += time.perf_counter() - began

    def _due(self, known: _Known, seq: int, head: int, stop: int, after: int) -> Iterator[Piece]:
        """Yield the rows before `stop` that a head has not computed, as many at a time as a micro-batch holds."""
        for first in range(known.fed[head], stop, self.session.n_ubatch):
            yield Piece(seq, first, *known.rows(first, min(first + self.session.n_ubatch, stop), after))

    # --- drafts -----------------------------------------------------------------------------------------------------
    def draft(self, wanted: Sequence[Continuation]) -> None:
        """Fill `found` and `probabilities` of every text; of one that the session has not computed, find nothing."""
        active = [self._begin(w) for w in wanted if self._can(w)]
        if self.drafts_blocks:
            for d in active:
                self._draft_block(d)
            return
        step = 0
        while active:
            head = min(step, self.n_heads - 1)
            logits, states = self._next(head, active)
            best = logits.argmax(axis=1)
            going = []
            for d, row, state, token in zip(active, logits, states, best.tolist(), strict=True):
                probability = float(1 / np.exp(row - row[token]).sum())
                if not probability >= d.wanted.p_min:
                    continue
                d.wanted.found.append(token if self.ids is None else int(self.ids[token]))
                d.wanted.probabilities.append(probability)
                d.states.append(state)
                if len(d.wanted.found) < d.n_max:
                    going.append(d)
            active, step = going, step + 1

    def _draft_block(self, d: _Drafting) -> None:
        """Draft all tokens at once, after the rows of the text, with a head that does (`models/heads/dflash.py`).

        The rows of a block are stored behind those of the text, and replaced when their positions get states.
        """
        session, w = self.session, d.wanted
        n_past, head = len(w.text) - 1, session.model.external
        assert head is not None
        for piece in self._due(d.known, w.seq, 0, n_past, -1):
            self._run(0, [piece], np.zeros(0, np.int64))
        d.known.fed[0] = n_past
        size, mask = head.head.block
        last, is_chain = int(w.text[-1]), MARKOV + FEW in session.programs  # of tokens, each by the one before
        n = min(d.n_max, size - 1 + is_chain, session.n_ctx_seq - n_past - 1, session.n_step - 1)
        rows = self._block_rows(w.seq, [last, *[mask] * (n - is_chain)], n_past)
        token = last
        for row in rows.copy() if is_chain else rows[1:]:
            if is_chain:
                row = row + self._after(w.seq, token, n_past)
            token = int(row.argmax())
            probability = float(1 / np.exp(row - row[token]).sum())
            if not probability >= w.p_min:
                break
            w.found.append(token)
            w.probabilities.append(probability)

    def _block_rows(self, seq: int, tokens: Sequence[int], first: int) -> FloatRows:
        """Return the logits of the rows of a block at positions `first` and on; the next run overwrites them.

        Every row is a segment that ends with the block, so that it sees all of it.
        """
        n = len(tokens)
        self.session.sequences.room(seq, n)
        block = self.session.step_block
        block.set_step(tokens, [first + n - 1] * n, [seq] * n, self.session.n_ctx_seq, n)
        block.spread(np.arange(first, first + n), seq * self.session.n_ctx_seq)
        return self._run_few(BLOCK, n)

    def _after(self, seq: int, token: int, pos: int) -> FloatRows:
        """Return what a token adds to the logits of the next one; the next run overwrites it."""
        self.session.step_block.set_step([token], [pos], [seq], self.session.n_ctx_seq, 1)
        return self._run_few(MARKOV, 1)[0]

    def _run_few(self, name: str, n: int) -> FloatRows:
        """Run a program for the rows that the step block describes; return its n rows."""
        session = self.session
        program, block = session.programs[name + FEW], session.step_block
        if session.observer is None:
            session.runner.run(program, session.config.n_threads, block)
        else:
            session.runner.run_observed(program, session.config.n_threads, block, session.observer)
        return session.runner.result(program, n)

    def _can(self, w: Continuation) -> bool:
        n_past = self.session.sequences.n_past[w.seq]
        return w.n_max > 0 and 0 < n_past == len(w.text) - 1

    def _begin(self, w: Continuation) -> _Drafting:
        n_past = len(w.text) - 1
        known = self._at(w.seq, n_past, int(w.text[-1]))
        known.fed[0] = n_past - 1 if self._constant else min(known.fed[0], n_past - 1)  # again, if it was drafted for
        return _Drafting(w, known, min(w.n_max, self.session.n_ctx_seq - n_past), self._constant)

    def _next(self, head: int, active: Sequence[_Drafting]) -> tuple[FloatRows, FloatRows]:
        """Return the logits after what was found so far, and the states; both are copies."""
        last: list[Piece] = []
        for d in active:
            seq, n_past = d.wanted.seq, len(d.wanted.text) - 1
            *before, piece = [*self._due(d.known, seq, head, n_past, int(d.wanted.text[-1])), None]
            if before:  # all but the last piece are too many for one micro-batch with others
                for early in before[:-1]:
                    self._run(head, [early], np.zeros(0, np.int64))
                piece = before[-1]
            d.known.fed[head] = n_past
            last.append(d.continued(head, piece))
        for d in active if not self._constant else ():
            self.session.sequences.room(d.wanted.seq, len(d.states))
        last = [self._last_rows(head, piece) for piece in last]
        logits, states = [], []
        most = self.session.n_ubatch
        at = 0
        while at < len(last):
            group = [last[at]]
            while at + len(group) < len(last) and sum(len(p.tokens) for p in (*group, last[at + len(group)])) <= most:
                group.append(last[at + len(group)])
            ends = np.cumsum([len(p.tokens) for p in group]) - 1
            rows, kept = self._run(head, group, ends)
            logits.append(rows.copy())
            states.append(kept.copy())
            at += len(group)
        return np.concatenate(logits), np.concatenate(states)

    def _last_rows(self, head: int, piece: Piece) -> Piece:
        """Compute all rows but the last that fit a micro-batch, and return these; a head may be far behind."""
        most, n = self.session.n_ubatch, len(piece.tokens)
        ends = [*range(most, n - most, most), n - most] if n > most else []
        for first, end in zip([0, *ends], ends, strict=False):
            early = Piece(piece.seq, piece.pos + first, piece.tokens[first:end], piece.states[first:end])
            self._run(head, [early], np.zeros(0, np.int64))
        at = ends[-1] if ends else 0
        return Piece(piece.seq, piece.pos + at, piece.tokens[at:], piece.states[at:])

    # --- rows -------------------------------------------------------------------------------------------------------
    def _run(self, head: int, pieces: Sequence[Piece], out_ids: npt.NDArray[np.int64]) -> tuple[FloatRows, FloatRows]:
        """Compute rows of a head; return logits and states of the rows `out_ids`, which the next run overwrites."""
        session = self.session
        sequences, block = session.sequences, session.step_block
        segments, start = [], 0
        for p in pieces:
            window = sequences.window_cell(p.seq) if sequences.has_windows else 0
            segments.append(Segment(start, len(p.tokens), p.seq * session.n_ctx_seq, p.pos, p.seq, window))
            start += len(p.tokens)
        name = f"{HEAD}{head}"
        few = start <= session.n_step and start <= session.n_ubatch
        program = session.programs[name + FEW if few else name]
        tokens = np.concatenate([p.tokens for p in pieces])
        given = np.concatenate([p.states for p in pieces])
        pos = np.concatenate([np.arange(p.pos, p.pos + len(p.tokens), dtype=np.int32) for p in pieces])
        block.set(tokens, pos + 1 if self._constant else pos, out_ids, segments)
        if session.graph_config.media is not None:
            shifts = [np.full(len(p.tokens), sequences.shift(p.seq), np.int32) for p in pieces]
            block.set_media(places_of_text(pos, np.concatenate(shifts)))
        block.give(given)
        n_threads = session.config.n_threads if few else session.config.n_threads_batch
        if session.observer is None:
            session.runner.run(program, n_threads, block)
        else:
            session.runner.run_observed(program, n_threads, block, session.observer)
        runner, n = session.runner, len(out_ids)
        return runner.result(program, n), runner.states(program, n)

    def rows(self, head: int, piece: Piece) -> tuple[FloatRows, FloatRows]:
        """Compute rows of a head; return logits and states of all, which the next run overwrites."""
        n = len(piece.tokens)
        if n > self.session.n_outputs:
            self.session.plan_outputs(n)
        return self._run(head, [piece], np.arange(n))

    def logits(self, seq: int, after: int) -> FloatRows:
        """Return the first head's logits of all rows that are due, where token `after` follows the last position.

        Row p predicts the token at p + 2. Call it after every micro-batch of a text to get all of them.
        """
        known = self._at(seq, self.session.sequences.n_past[seq], after)
        found = []
        for piece in self._due(known, seq, 0, known.end, after):
            found.append(self.rows(0, piece)[0].copy())
        known.fed[0] = known.end
        return np.concatenate([np.empty((0, self.session.n_vocab), np.float32), *found])


class _Drafting:
    """A text, what is known of it, and the states that heads left for every token found."""

    def __init__(self, wanted: Continuation, known: _Known, n_max: int, constant: bool) -> None:
        self.wanted, self.known = wanted, known
        self.n_max, self.constant = n_max, constant
        self.states: list[FloatRows] = []
        self._n_seen: dict[int, int] = {}  # found tokens whose rows a head has computed

    def continued(self, head: int, piece: Piece | None) -> Piece:
        """Return the rows that are due, then those of the tokens found."""
        first, n = self._n_seen.get(head, 0), len(self.states)
        self._n_seen[head] = n
        n_past = len(self.wanted.text) - 1
        if self.constant and piece is None:
            first, n_past = n - 1, n_past - n
        tokens = np.array(self.wanted.found[first:n], np.int32)
        states = np.array(self.states[first:n], np.float32)
        if piece is None:
            return Piece(self.wanted.seq, n_past + first, tokens, states)
        if n == first:
            return piece
        return Piece(
            piece.seq, piece.pos, np.concatenate([piece.tokens, tokens]), np.concatenate([piece.states, states])
        )
