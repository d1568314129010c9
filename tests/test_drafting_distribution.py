"""Sampled text with drafts has the distribution of plain decoding: counts of answers against their probabilities.

Requests run through the engine's worker, four slots at once, with a small recurrent model, so that wrong drafts are
taken back as they are in service. A hook replaces the head's choice by tokens that are likely, since a head of random
weights is hardly ever right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_client import ByHand, Posted, by_hand
from factories import add_heads
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Continuation, Heads
from ikcli.engine.run.session import Session
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.messages import Final, TokenInfo
from ikcli.settings.values import parse_spec_type

Text = tuple[int, ...]
N_VOCAB, N_TOKENS, N_SLOTS = 96, 5, 4
PROMPT: Text = (5, 17, 3, 17)
SPEC = {"spec_type": parse_spec_type("mtp:p_min=0,n_max=3"), "spec_autotune": False}
CHAIN = SamplerParams(
    temperature=1.3, top_k=4, top_p=0.97, min_p=0.02, repeat_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
)
OTHERS = {
    "rare": replace(CHAIN, top_k=6, top_p=1.0, min_p=0.0, xtc_probability=0.5, xtc_threshold=0.1, typical_p=0.9),
    "mirostat": SamplerParams(temperature=0.9, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3),
    "dry": SamplerParams(
        temperature=1.0, top_k=3, dry_multiplier=1.5, dry_allowed_length=1, top_n_sigma=2.5, dynatemp_range=0.5
    ),
}


class Odd:
    """A constraint: after a token of the upper half of the vocabulary, only odd ones may follow."""

    def __init__(self) -> None:
        self.last = 0

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.ones(N_VOCAB, bool) if self.last < N_VOCAB // 2 else np.arange(N_VOCAB) % 2 == 1

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.packbits(self.allowed(), bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        self.last = token

    @property
    def finished(self) -> bool:
        return False


class Tree:
    """What may follow the prompt: logits by text, computed one token after the other, and probabilities from them."""

    def __init__(self, session: Session) -> None:
        self._session, self._rows = session, dict[Text, npt.NDArray[np.float64]]()

    def logits(self, text: Text) -> npt.NDArray[np.float64]:
        if text not in self._rows:
            self._session.truncate(0, 0)
            batch = Batch.single(np.array(PROMPT + text, np.int32), logits="last")
            self._rows[text] = np.array(self._session.decode(batch)[0], np.float64)
        return self._rows[text]

    def following(self, text: Text, p: SamplerParams, constraint: bool) -> dict[int, float]:
        """Probabilities of the next token by the definitions of the samplers."""
        x = self.logits(text).copy()
        odd = Odd()
        for token in text:
            odd.accept(token)
        if constraint:
            x[~odd.allowed()] = -np.inf
        seen = Counter((PROMPT + text)[-p.repeat_last_n :])
        for token, n in seen.items():
            x[token] = x[token] / p.repeat_penalty if x[token] > 0 else x[token] * p.repeat_penalty
            x[token] -= p.frequency_penalty * n + p.presence_penalty
        order = np.argsort(-x, kind="stable")[: p.top_k]
        order = order[np.isfinite(x[order])]
        probs = np.exp(x[order] - x[order[0]])
        total = np.cumsum(probs / probs.sum())
        n = int(np.searchsorted(total, p.top_p)) + 1
        n = min(n, int(np.count_nonzero(probs >= p.min_p * probs[0])))
        cooled = np.exp((x[order[:n]] - x[order[0]]) / p.temperature)
        return dict(zip(order[:n].tolist(), (cooled / cooled.sum()).tolist(), strict=True))

    def answers(self, p: SamplerParams, n_tokens: int, constraint: bool) -> dict[Text, float]:
        """Probabilities of the first tokens of all answers."""
        found: dict[Text, float] = {(): 1.0}
        for _ in range(n_tokens):
            found = {
                (*text, token): share * q
                for text, share in found.items()
                for token, q in self.following(text, p, constraint).items()
            }
        return found


def helped(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft the likeliest token, or the second one."""
    rng = np.random.default_rng(3)
    best: dict[Text, list[int]] = {}

    def draft(self: Heads, wanted: Sequence[Continuation]) -> None:
        for w in wanted:
            text = tuple(w.text[len(PROMPT) :].tolist())
            w.found.clear()
            for _ in range(w.n_max):
                if text not in best:
                    best[text] = np.argsort(-tree.logits(text))[:2].tolist()
                text += (best[text][int(rng.random() < 0.4)],)
                w.found.append(text[-1])

    monkeypatch.setattr(Heads, "draft", draft)


def answers_of(hand: ByHand, n: int, sampling: SamplerParams, first_seed: int, **fields: Any) -> list[Final]:
    """The answers to n requests, which differ in their seeds."""
    waiting: list[Posted] = []
    finals: list[Final] = []
    posted = 0
    while len(finals) < n:
        while len(waiting) < 2 * N_SLOTS and posted < n:
            seeded = replace(sampling, seed=first_seed + posted)
            waiting.append(hand.post(PROMPT, N_TOKENS, sampling=seeded, deltas=False, **fields))
            posted += 1
        hand.step()
        done = [p.final for p in waiting if p.final is not None]
        finals += done
        waiting = [p for p in waiting if p.final is None]
    return finals


def counted(finals: Sequence[Final], n_tokens: int = N_TOKENS) -> Counter[Text]:
    return Counter(tuple(t.id for t in f.tokens[:n_tokens]) for f in finals)


def critical(cells: int, z: float = 3.1) -> float:
    """The value that chi-square exceeds once in a thousand times (Wilson and Hilferty)."""
    k = cells - 1
    return float(k * (1 - 2 / (9 * k) + z * np.sqrt(2 / (9 * k))) ** 3)


def chi_square(found: Counter[Text], probabilities: dict[Text, float]) -> tuple[float, int]:
    """The statistic and the number of cells; answers that are expected less than ten times are one cell."""
    n = found.total()
    frequent = [text for text, q in probabilities.items() if n * q >= 10]
    cells = [(found[text], n * probabilities[text]) for text in frequent]
    rest = n - sum(e for _, e in cells)
    if rest > 1:
        cells.append((n - sum(c for c, _ in cells), rest))
    return sum((c - e) ** 2 / e for c, e in cells), len(cells)


def chi_square_of_two(a: Counter[Text], b: Counter[Text]) -> tuple[float, int]:
    """The statistic of two samples of the same size; rare answers are one cell."""
    frequent = [text for text in a | b if a[text] + b[text] >= 20]
    cells = [(a[text], b[text]) for text in frequent]
    rest = a.total() - sum(x for x, _ in cells), b.total() - sum(y for _, y in cells)
    cells += [rest] if sum(rest) else []
    return sum((x - y) ** 2 / (x + y) for x, y in cells), len(cells)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = add_heads(tiny("qwen35", context_length=512))
    model.set("output.weight", 0.4 * model.values("output.weight"))  # so that several tokens are likely
    keys = model.metadata | {"tokenizer.ggml.model": "none"}
    return write_model(model, tmp_path_factory.mktemp("model") / "m.gguf", keys)


def opened(path: Path, spec: bool = True) -> Any:
    return by_hand(path, N_SLOTS + 1, server=SPEC if spec else None, n_ctx=64 * (N_SLOTS + 1), n_ubatch=32)


def run(path: Path, monkeypatch: pytest.MonkeyPatch, n: int, work: Callable[[ByHand, Tree], None]) -> None:
    """Let `work` ask a worker that drafts; check that it did."""
    with by_hand(path) as plain:
        tree = Tree(plain.worker.session)
        helped(tree, monkeypatch)
        with opened(path) as hand:
            work(hand, tree)
            c = hand.worker.counters
            drafted, accepted = c.drafted, c.accepted
        assert n // 20 < accepted < drafted - n // 4, (accepted, drafted)


def check_chain(path: Path, monkeypatch: pytest.MonkeyPatch, n: int, n_tokens: int) -> None:
    """Compare the first tokens of n answers; the very first one is not drafted."""
    found: list[Final] = []
    expected: dict[Text, float] = {}
    favourites: dict[Text, int] = {}

    def work(hand: ByHand, tree: Tree) -> None:
        expected.update(tree.answers(CHAIN, n_tokens, constraint=True))
        for text in expected:
            favourites[text[:-1]] = int(tree.logits(text[:-1]).argmax())
        found.extend(answers_of(hand, n, CHAIN, 0, constraint=Odd))

    run(path, monkeypatch, n, work)
    counts = counted(found, n_tokens)
    assert set(counts) <= set(expected)
    value, cells = chi_square(counts, expected)
    assert cells > 12 and value < critical(cells), (value, cells, critical(cells))
    biased = {text: q * (2 if text[-1] == favourites[text[:-1]] else 1) for text, q in expected.items()}
    total = sum(biased.values())
    wrong, cells = chi_square(counts, {text: q / total for text, q in biased.items()})
    assert wrong > critical(cells), "a draft that is taken too often has to be seen"


def test_a_few_answers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chain(path, monkeypatch, 400, 2)


@pytest.mark.slow("100,000 draws")
def test_chain_penalties_and_grammar(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chain(path, monkeypatch, 100_000 // N_TOKENS, N_TOKENS)


@pytest.mark.slow("100,000 draws of each kind, with drafts and without")
@pytest.mark.parametrize("name", OTHERS)
def test_samplers_with_states(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against other draws without drafts; mirostat has so many answers that their beginnings are compared."""
    n, n_tokens = 100_000 // N_TOKENS, 2 if name == "mirostat" else N_TOKENS
    with opened(path, False) as hand:
        plain = counted(answers_of(hand, n, OTHERS[name], 10_000_000), n_tokens)
    found: list[Final] = []
    run(path, monkeypatch, n, lambda hand, tree: found.extend(answers_of(hand, n, OTHERS[name], 0)))
    value, cells = chi_square_of_two(counted(found, n_tokens), plain)
    assert cells > 20, cells
    assert value < critical(cells), (value, cells, critical(cells))


@pytest.mark.parametrize("post", [False, True], ids=["logits", "candidates"])
def test_log_probabilities_are_those_of_plain_decoding(post: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, as are the tokens: also those of the candidates that were drawn from."""
    sampling = replace(CHAIN, n_probs=6, post_sampling_probs=post)

    def tokens(hand: ByHand) -> list[tuple[TokenInfo, ...]]:
        finals = answers_of(hand, 40, sampling, 5)
        return sorted((f.tokens for f in finals), key=repr)

    with opened(path, False) as hand:
        plain = tokens(hand)
    found: list[Any] = []
    run(path, monkeypatch, 40, lambda hand, tree: found.extend(tokens(hand)))
    assert found == plain and all(len(t.top) == 6 and t.logprob <= 0 for text in plain for t in text)
