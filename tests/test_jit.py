"""Device functions: equal ones are shared, and Numba works as usual around the compilation of a kernel."""

from __future__ import annotations

from typing import Any

import numba
import pytest

from ikcli.native.jit import compile_to_object, inline


def adder(amount: object) -> Any:
    @inline
    def add(x: int) -> Any:
        return x + amount

    return add


def test_equal_functions_are_one() -> None:
    assert adder(3) is adder(3)
    one = adder(adder(3))
    assert one is adder(adder(3)) and one is not adder(adder(4))


@pytest.mark.parametrize(("a", "b"), [(3, 4), (1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1, 2.0))])
def test_what_is_captured_counts(a: object, b: object) -> None:
    assert adder(a) is not adder(b)


def test_defaults_and_code_count() -> None:
    def named(source: str) -> Any:
        names: dict[str, Any] = {"__name__": __name__}
        exec(source, names)
        return inline(names["f"])

    assert named("def f(x, y=1): return x + y") is named("def f(x, y=1): return x + y")
    assert named("def f(x, y=1): return x + y") is not named("def f(x, y=2): return x + y")
    assert named("def f(x, y=1): return x + y") is not named("def f(x, y=1): return x - y")


def test_what_cannot_be_compared_is_not_shared() -> None:
    assert adder([1]) is not adder([1])


def test_numba_calls_what_it_compiles_around_a_kernel() -> None:
    add, shared = adder(5), adder(7)

    @numba.njit
    def before(x: int) -> Any:
        return add(x)

    assert before(1) == 6
    symbol, code = compile_to_object(lambda a: shared(a) + add(a), 1, True)
    assert symbol and code

    @numba.njit
    def after(x: int) -> Any:
        return shared(x) + add(x)

    assert after(1) == 14
