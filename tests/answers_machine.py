"""Random requests, cancellations, slot actions, context shifts, evictions and restarts of engines with a prompt cache.

Every answer is compared, bit by bit, with that of an engine that reuses nothing. Tokens are computed one by one
(-ub 1), since a micro-batch of another size may round differently.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_client import GREEDY, Call, request, serving, until
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ikcli.server.slots import reuse
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Final

N_CTX = 256  # a multiple of what sessions round to
LONG = 220  # tokens of a text
FIELDS: dict[str, Any] = {"sampling": replace(GREEDY, n_probs=3)}
EVEN = random.Random(7)
TEXTS = [[EVEN.randrange(3, 96) for _ in range(LONG)] for _ in range(3)]


def prompt_of(rng: random.Random) -> tuple[int, ...]:
    """The beginning of a text and some of another; there are 216."""
    at = rng.choice((20, 80, 150))
    return tuple(rng.choice(TEXTS)[:at] + rng.choice(TEXTS)[at : at + rng.choice((1, 2, 7, 20, 40, 69))])


@dataclass
class Found:
    """Steps, and prompt tokens by where they came from, of all engines."""

    steps: int = 0
    slots: int = 0
    ram: int = 0
    disk: int = 0
    shifted: int = 0
    known: dict[Any, Any] = field(default_factory=dict)


def answer(final: Final) -> tuple[Any, ...]:
    """Tokens with the log-probabilities of the likeliest ones."""
    return (final.text, final.stop_type, final.truncated, final.tokens)


class Answers(RuleBasedStateMachine):
    """See the module. Subclasses say which engines."""

    plain: Engine
    found: Found
    n_slots: int
    config: dict[str, Any]

    @initialize(disk=st.sampled_from((True, True, False)))
    def begin(self, disk: bool) -> None:
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.disk = disk
        self.start(700)

    def start(self, tokens: int) -> None:
        """Open an engine whose prompt cache has room for this many tokens, which it writes to disk soon."""
        server: dict[str, Any] = {"cache_ram": 1, "context_shift": True, "ctx_checkpoints_interval": 16}
        if self.disk:
            server |= {"cache_disk": self.folder / "cache", "cache_disk_limit": 2e-3}
        self.opened = ExitStack()
        config = self.config | {"n_ctx": N_CTX * self.n_slots}
        self.engine = self.opened.enter_context(serving(self.n_slots, server=server, **config))
        assert self.engine._worker is not None
        self.reuse: reuse.Reuse = self.engine._worker._reuse
        self.reuse._quiet = 0.01
        sequences = self.engine._worker.session.sequences
        row, checkpoint = (
            sum(a * b for a, b in shapes) for shapes in (sequences.shapes(1, 1), sequences.checkpoint_shapes(80, 0))
        )
        self.reuse.store.limit = tokens * (row + 4 + checkpoint // 16)

    def stop(self) -> None:
        until(lambda: not any(s.is_processing for s in self.engine.slots()))
        metrics = self.engine.metrics(reset=False)
        self.found.slots += metrics.prompt_tokens_slot_total
        self.found.ram += metrics.prompt_tokens_ram_total
        self.found.disk += metrics.prompt_tokens_disk_total
        self.opened.close()

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            self.stop()
            self.stack.close()

    @rule(seed=st.integers(0, 1 << 62))
    def step(self, seed: int) -> None:
        """Take one of the steps below; of several rules, Hypothesis would leave some out for a whole example."""
        rng = random.Random(seed)
        self.found.steps += 1
        (take,) = rng.choices((self.requests, self.act, self.damage, self.restart), (85, 10, 3, 2))
        take(rng)

    def requests(self, rng: random.Random) -> None:
        """Ask up to as many requests at once as there are slots, of which some are cancelled."""
        asked = [(prompt_of(rng), rng.choice((1, 4, 4, 120)), rng.random() < 0.2) for _ in range(rng.randint(1, 4))]
        asked, slot = asked[: self.n_slots], rng.randrange(-1, self.n_slots)
        calls = [
            Call(self.engine, request(prompt, n, id_slot=slot if i == 0 else -1, **FIELDS))
            for i, (prompt, n, _) in enumerate(asked)
        ]
        for call, (_, _, cancelled) in zip(calls, asked, strict=True):
            if cancelled:
                call.ticket.cancel()
        for call, (prompt, n, cancelled) in zip(calls, asked, strict=True):
            if cancelled:
                continue
            wanted = self.found.known.get((prompt, n))
            if wanted is None:
                wanted = answer(Call(self.plain, request(prompt, n, cache_prompt=False, **FIELDS)).final)
                self.found.known[prompt, n] = wanted
            final = call.final
            self.found.shifted += final.truncated
            assert answer(final) == wanted, (prompt, n)

    def act(self, rng: random.Random) -> None:
        slot, action = rng.randrange(self.n_slots), rng.choice(("save", "restore", "erase"))
        file = self.folder / "slot.bin"
        if action == "restore" and not file.exists():
            action = "save"
        self.engine.slot_action(slot, action, None if action == "erase" else file).result(60)

    def restart(self, rng: random.Random) -> None:
        """Start again with another limit; what is on disk stays."""
        self.stop()
        self.start(rng.choice((150, 700, 5000)))

    def damage(self, rng: random.Random) -> None:
        """Damage a file of the cache."""
        how = rng.choice(("remove", "cut", "change"))
        files = sorted((self.folder / "cache").glob("*.rows"))
        try:
            file = rng.choice(files)
            data = file.read_bytes()
            if how == "remove":
                file.unlink()
            else:
                file.write_bytes(data[:-5] if how == "cut" else data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
        except (IndexError, FileNotFoundError):  # there are none, or the engine removed it
            return

    @invariant()
    def within_the_limit(self) -> None:
        if hasattr(self, "opened"):
            assert self.reuse.store.n_bytes <= self.reuse.store.limit


def mixed(path: Path, n_slots: int, n_steps: int, **changes: Any) -> Found:
    """Take at least n steps, 50 or fewer with the same engine; return what was seen.

    Hypothesis begins with an example of the simplest steps, which reuse nothing.
    """
    config = {"model": path, "n_ubatch": 1, "n_batch": 1, "n_threads": 1, "n_threads_batch": 1} | changes
    found = Found()
    at_once = min(n_steps, 50)
    how = settings(
        max_examples=1 - -n_steps // at_once, stateful_step_count=at_once, deadline=None, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with serving(1, server={"cache_ram": 0, "context_shift": True}, **config | {"n_ctx": N_CTX}) as plain:
        fields = {"plain": plain, "found": found, "n_slots": n_slots, "config": config}
        while found.steps < n_steps:
            run_state_machine_as_test(type("Mixed", (Answers,), fields), settings=how)
    return found
