"""The store of rows shared by prefix: what it keeps, what it drops first, what it gives back, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from prefix_machine import OneSlot, Prefixes
from sequence_memory import CELLS, STATES, WINDOWS, Shelf

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.server.prefix.cost import Cost
from ikcli.server.prefix.explain import describe, find_miss, tree_lines
from ikcli.server.prefix.keys import common_prefix, default_limit
from ikcli.server.prefix.reused import Miss, Reused
from ikcli.server.prefix.store import PrefixStore

TOKEN = 8 + 4  # bytes of a row of CELLS and its key


def keys(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def kept(store: PrefixStore, shelf: Shelf, text: range | list[int], added: Added = NOTHING) -> int:
    """Compute a text and store it."""
    shelf.truncate(0, 0)
    shelf.add(0, text)
    return store.keep(0, keys(*text), added)


def one(limit: int = 1 << 20, block: int = 16) -> tuple[PrefixStore, Shelf]:
    shelf = Shelf(CELLS, n_ctx=300)
    return PrefixStore(shelf.sequences, limit, block=block), shelf


@pytest.mark.parametrize("machine", [Prefixes, OneSlot])
def test_any_mix_of_requests(machine: type[Prefixes]) -> None:
    few = settings(
        max_examples=5, stateful_step_count=10, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=few)


@pytest.mark.slow("thousands of random steps")
@pytest.mark.parametrize("machine", [Prefixes, OneSlot])
def test_any_long_mix_of_requests(machine: type[Prefixes]) -> None:
    many = settings(
        max_examples=60, stateful_step_count=50, deadline=None, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=many)


def test_a_row_is_stored_once() -> None:
    store, shelf = one()
    shared = list(range(100))
    for tail in range(5):
        assert kept(store, shelf, [*shared, *range(1000 * tail + 1000, 1000 * tail + 1020)]) == 120
    assert store.n_bytes == (100 + 5 * 20) * TOKEN and len(store) == 5
    assert kept(store, shelf, shared) == 100 and store.n_bytes == 200 * TOKEN, "the beginning of what is there"
    assert kept(store, shelf, shared, Added((0.5,))) == 100 and store.n_bytes == 300 * TOKEN
    assert store.find(keys(*range(90), 7), NOTHING).n == 90
    assert store.find(keys(*range(90), 7), Added((1.0,))).n == 0


def test_what_fits_is_kept() -> None:
    store, shelf = one(limit=100 * TOKEN, block=10)
    assert kept(store, shelf, range(105)) == 100 and store.n_bytes == store.limit
    assert kept(PrefixStore(shelf.sequences, 0), shelf, range(105)) == 0
    assert store.find(keys(*range(105)), NOTHING).n == 100


def test_ends_of_texts_that_were_not_used_go_first() -> None:
    store, shelf = one(limit=100 * TOKEN, block=10)
    for start in (1000, 2000, 3000):
        kept(store, shelf, range(start, start + 30))
    assert store.load(1, store.find(keys(*range(1000, 1030)), NOTHING), 0) == (30, 0)
    shelf.holds(1, tuple(range(1000, 1030)))
    kept(store, shelf, range(4000, 4030))
    held = [store.find(keys(*range(k, k + 30)), NOTHING).n for k in (1000, 2000, 3000, 4000)]
    assert held == [30, 10, 30, 30]
    for start in range(5000, 8000, 1000):
        kept(store, shelf, range(start, start + 30))
    assert store.find(keys(*range(2000, 2030)), NOTHING).n == store.find(keys(*range(3000, 3030)), NOTHING).n == 0
    for start in range(10_000, 40_000, 1000):
        kept(store, shelf, range(start, start + 30))
    assert store.find(keys(*range(1000, 1030)), NOTHING).n == 0, "what was used ages too"


def test_what_is_slow_to_compute_stays_longer() -> None:
    store, shelf = one(limit=250 * TOKEN, block=100)
    store.cost.observe(0, 10, 1.0)
    store.cost.observe(100, 10, 10.0)
    kept(store, shelf, range(200))
    kept(store, shelf, range(1000, 1050))
    kept(store, shelf, range(2000, 2050))
    assert [store.find(keys(*range(k, k + 200)), NOTHING).n for k in (0, 1000, 2000)] == [200, 0, 50]


@pytest.mark.parametrize("caches", [(CELLS, STATES), (CELLS, WINDOWS), (CELLS, WINDOWS, STATES)])
def test_checkpoints_hang_where_they_were_made(caches: tuple) -> None:
    shelf = Shelf(*caches)
    store = PrefixStore(shelf.sequences, 1 << 20, block=16)
    for start, stop in ((0, 50), (50, 130)):
        shelf.add(0, range(start, stop))
        shelf.checkpoint(0)
    shelf.add(0, range(130, 200))
    assert store.keep(0, keys(*range(200)), NOTHING) == 200
    for n in (200, 131, 130, 60, 50, 49):
        match = store.find(keys(*range(n), 7), NOTHING)
        wanted = max((c for c in (50, 130, 200) if c <= n), default=0)
        assert (match.n_same, match.n) == (n, wanted)
        assert store.load(1, match, 0)[0] == wanted
        shelf.holds(1, tuple(range(wanted)))
    before = store.n_bytes
    assert store.keep(0, keys(*range(200)), NOTHING) == 200 and store.n_bytes == before


def test_windows_serve_a_text_that_ends_a_little_earlier() -> None:
    shelf = Shelf(CELLS, WINDOWS)
    store = PrefixStore(shelf.sequences, 1 << 20)
    for start in range(0, 200, 20):
        shelf.add(0, range(start, start + 20))
    store.keep(0, keys(*range(200)), NOTHING)
    for n, reached in ((199, 199), (150, 150), (120, 0)):
        match = store.find(keys(*range(n), 7), NOTHING)
        assert match.n == reached and store.load(1, match, 0)[0] == reached
        shelf.holds(1, tuple(range(reached)))


def test_the_time_to_compute_is_measured() -> None:
    cost = Cost()
    before = cost.seconds(0, 1000)
    cost.observe(0, 0, 1.0)
    assert cost.seconds(0, 1000) == before > 0
    cost.observe(0, 100, 2.0)
    assert cost.seconds(500, 100) == pytest.approx(2.0)
    cost = Cost()
    for first, n in ((0, 1000), (5000, 200), (0, 3000), (100, 40)):
        cost.observe(first, n, 1e-3 * n + 1e-6 * n * (first + (n - 1) / 2))
    assert cost.seconds(7000, 100) == pytest.approx(0.1 + 1e-6 * 100 * 7049.5)
    for _ in range(20):
        cost.observe(0, 1000, 1.0)
        cost.observe(9000, 1000, 0.5)  # the machine was busy before
    assert cost.seconds(0, 100) > 0 and cost.seconds(10_000, 100) > 0


def test_limits() -> None:
    assert default_limit(None, 4 << 30) == 1 << 30 and default_limit(None, 1 << 40) == 8192 << 20
    assert default_limit(0, 1 << 30) == 0 == default_limit(None, None) and default_limit(5, None) == 5 << 20
    assert default_limit(-1, None) > 1 << 50
    assert common_prefix(keys(), keys(1)) == 0 and common_prefix(keys(1, 2, 3), keys(1, 2, 4)) == 2


# --- what is told -----------------------------------------------------------------------------------------------------
def text_of(tokens: object) -> str:
    return " ".join(f"t{t}" for t in tokens)  # type: ignore[attr-defined]


def test_why_a_prompt_was_missed() -> None:
    store, shelf = one()
    kept(store, shelf, range(50))

    def miss(prompt: list[int], *held: tuple[np.ndarray, int]) -> Miss | None:
        tokens = keys(*prompt)
        return find_miss(tokens, len(tokens) - 1, store.find(tokens[:-1], NOTHING), held)

    assert miss([*range(20), 999, 5]) == Miss(20, "differs", 999, 20)
    assert miss([*range(50), 999, 5]) is None, "the text just goes on"
    assert miss(list(range(30))) is None and miss([7, 8, 9]) is None
    held = keys(*range(30), 555)
    assert miss([*range(30), 999, 5], (held, 30)) == Miss(30, "differs", 999, 30)
    assert miss([*range(48), 999, 5], (held, 30)) == Miss(48, "differs", 999, 48)
    assert miss([*range(50), 60, 999, 5], (keys(*range(50), 60, 61), 51)) == Miss(51, "differs", 999, 61)
    assert miss([*range(50), 60, 999, 5], (keys(*range(50), 60), 51)) is None
    recurrent = Shelf(CELLS, STATES)
    store = PrefixStore(recurrent.sequences, 1 << 20)
    recurrent.add(0, range(50))
    store.keep(0, keys(*range(50)), NOTHING)
    assert miss(list(range(41))) == Miss(40, "no checkpoint")
    told = describe(Reused(3, 20, 0, Miss(20, "differs", 999, 20)), text_of)
    assert told == {
        "n_slot": 3, "n_ram": 20, "n_disk": 0, "missed_at": 20, "missed_because": "differs",
        "token": 999, "text": "t999", "cached_token": 20, "cached_text": "t20",
    }  # fmt: skip
    assert describe(Reused(3), text_of) == {"n_slot": 3, "n_ram": 0, "n_disk": 0}
    assert describe(Reused(1, 1, 1, Miss(9, "differs", -5, 2)), text_of)["text"] == "[image]"


def test_tokens_that_were_not_kept_after_all_are_not_counted() -> None:
    reused = Reused(10, 20, 30)
    assert [reused.cut(n)[:3] for n in (60, 35, 30, 12, 10, 4, 0)] == [
        (10, 20, 30), (10, 20, 5), (10, 20, 0), (10, 2, 0), (10, 0, 0), (4, 0, 0), (0, 0, 0)
    ]  # fmt: skip
    assert reused.n == 60


def test_the_tree_is_printed() -> None:
    store, shelf = one()
    for tail in (500, 600):
        kept(store, shelf, [*range(40), *range(tail, tail + 9)])
    lines = list(tree_lines(store.tree, text_of))
    assert lines[0].startswith("prompt cache: 2 texts in 6 nodes, 0.0 MiB") and len(lines) == 4
    assert lines[1].startswith("└─ 0..39 ") and lines[2].startswith("   ├─ 40..48 ") and "t500" in lines[2]
    assert lines[3].startswith("   └─ 40..48 ") and "t600" in lines[3] and "used 1 times" in lines[3]
