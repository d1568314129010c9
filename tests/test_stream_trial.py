"""The times of prompts decide whether experts are copied to a GPU, where they say something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ikcli.engine.run.stream_trial import AGAIN, FEWEST, LEAST, StreamTrial

RULE = 512


class Machine:
    """Runs micro-batches in simulated time: `gpu` and `cpu` return the seconds of n tokens."""

    def __init__(self, gpu: Callable[[int], float], cpu: Callable[[int], float]) -> None:
        self._now, self._seconds = 0.0, {True: gpu, False: cpu}
        self.trial = StreamTrial(RULE, lambda: self._now)

    def run(self, n: int, times: int = 1) -> bool:
        for _ in range(times):
            copied = self.trial.begin(n)
            self._now += self._seconds[copied](n)
            self.trial.end()
        return copied


def bus(n: int) -> float:
    return max(1.0, n / 4000)


@pytest.mark.parametrize("rate", [20, 100, 400, 2000, 8000])
def test_both_ways_are_used_where_they_are_faster(rate: float) -> None:
    """From about `rate` tokens on copies are faster; no choice is worse than that of the rule."""
    machine = Machine(bus, lambda n: n / rate)
    for _ in range(4):
        for n in (40, 90, 200, 450, 700, 1000, 2000, 4000):
            machine.run(n)
    for n in (40, 90, 200, 450, 700, 1000, 2000, 4000):
        copied = machine.run(n)
        fast = bus(n) < n / rate
        assert copied == fast or copied == (n >= RULE), n
        if max(bus(n), n / rate) > 2.5 * min(bus(n), n / rate):
            assert copied == fast, n


def test_the_rule_holds_until_both_ways_are_known() -> None:
    machine = Machine(bus, lambda n: n / 5)
    assert not machine.run(400, 5)
    assert machine.run(600, LEAST - 1) and not machine.run(400)
    machine.run(600)
    assert machine.run(400)
    (line,) = machine.trial.news
    assert line == (
        "offload: 400 tokens are computed with experts copied to the GPU, at most 1000 ms; on the CPU they take at "
        "least 80000 ms (measured)"
    )


def test_first_times_with_cold_pages_do_not_count() -> None:
    seconds = iter([100.0, *[0.5] * 50])
    machine = Machine(bus, lambda n: next(seconds))
    machine.run(600, LEAST)
    assert not any(machine.run(400) for _ in range(5))


def test_few_tokens_are_not_measured() -> None:
    machine = Machine(bus, lambda n: 100.0)
    machine.run(600, 3)
    assert not machine.run(FEWEST - 1, 9) and not machine.run(FEWEST, LEAST) and machine.run(FEWEST)


def test_the_other_way_is_timed_again() -> None:
    load = [100.0]
    machine = Machine(bus, lambda n: load[0] * n / 400)
    machine.run(600, 3)
    machine.run(400, 3)
    assert machine.run(400)
    load[0] = 0.1
    found = [machine.run(400) for _ in range(3 * AGAIN)]
    assert found.count(False) and not any(found[-20:])
