"""What is left out of Numba while kernels are compiled, and that it comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import base, compiler, ir, postproc
from numba.core.errors import LoweringError, UnsupportedError
from numba.core.registry import cpu_target
from numba.core.types.functions import BaseFunction

from ikcli.native import jit
from ikcli.native.kernel_library import KernelLibrary, native_function
from ikcli.native.lean_numba import _variables, lean

# In a process of its own, as compile workers are: what operators accept depends on what was typed before.
OPERATORS = """
import operator
from numba.core import ir, types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from ikcli.native.lean_numba import lean

def typed(*args):
    try:
        return cpu_target.typing_context.resolve_function_type(operator.add, args, {}).return_type
    except TypingError:
        return None

array, usual = types.float32[::1], ir.Inst._rec_list_vars
pairs = [(array, array), (types.int32, types.float64), (types.int64, types.int64)]
cpu_target.typing_context.refresh()
before = [typed(*pair) for pair in pairs]
assert before[0] == array, before
try:
    with lean(cpu_target.typing_context):
        assert [typed(*pair) for pair in pairs] == [None, *before[1:]]
        raise KeyError
except KeyError:
    assert [typed(*pair) for pair in pairs] == before and ir.Inst._rec_list_vars is usual
    print("as before")
"""


def test_operators_of_arrays_are_missing_only_while_kernels_are_compiled() -> None:
    ran = subprocess.run([sys.executable, "-c", OPERATORS], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("as before\n", 0), ran.stderr


def example(a: Any, b: Any, *rest: Any) -> Any:
    total = 0
    for i in range(a, b, 2):
        total += (i, a)[0] * b if i > 3 else -total
        total = max(total, abs(b), key=None)
    return total, [a, b, total], {"x": a}


def test_variables_of_instructions_are_those_that_numba_finds() -> None:
    function = compiler.run_frontend(example)
    instructions = [inst for block in function.blocks.values() for inst in block.body]
    instructions += [inst.value for inst in instructions if isinstance(getattr(inst, "value", None), ir.Inst)]
    assert len(instructions) > 40
    for inst in instructions:
        names = [v.name for v in inst._rec_list_vars(inst.__dict__)]
        assert [v.name for v in _variables(inst, inst.__dict__)] == names
    assert any(inst.list_vars() for inst in instructions)


def test_all_that_is_replaced_comes_back() -> None:
    def replaced() -> list[Any]:
        return [ir.Inst._rec_list_vars, BaseFunction.get_call_type, postproc.PostProcessor.run, base.user_function]

    usual = replaced()
    with lean(cpu_target.typing_context):
        assert not any(now is before for now, before in zip(replaced(), usual, strict=True))
    assert replaced() == usual


@jit.inline
def halved(n: Any) -> Any:
    if n & 1:
        raise ValueError
    return n >> 1


def test_kernels_that_raise_are_refused_since_nobody_would_see_it() -> None:
    def kernel(n: Any) -> Any:
        return halved(n)

    with pytest.raises((UnsupportedError, LoweringError), match="kernels cannot raise exceptions"):
        jit.compile_to_object(kernel, 1, True)


@jit.inline
def divided(n: Any, by: Any) -> Any:
    return n // by, n % by


@jit.inline
def collatz(n: Any) -> Any:
    steps = 0
    while n != 1:
        half, odd = divided(n, 2)
        divided(half, 3)  # nobody uses the result
        n = 3 * n + 1 if odd else half
        steps += 1
    return steps


def longest(first: int, last: int) -> int:
    best = where = 0
    for n in range(first, last):
        steps = collatz(n)
        if steps > best:
            best, where = steps, n
            shift = 1
        else:
            shift = 2
        where += shift - 2 if n == last - 1 else 0
    return where * 1000 + best


def test_variables_and_results_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, code = jit.compile_to_object(longest, 2, True)
    library = KernelLibrary()
    run = native_function(library._load(Path("longest"), symbol, code), 2)
    found = [run(first, last) for first, last in ((1, 2), (1, 30), (90, 100))]
    monkeypatch.setitem(globals(), "divided", divided.py_func)
    monkeypatch.setitem(globals(), "collatz", collatz.py_func)
    assert found == [longest(1, 2), longest(1, 30), longest(90, 100)] == [0, 27111, 97118]
