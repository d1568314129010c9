"""What is left out of Numba while kernels are compiled, and that it comes back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from numba.core import compiler, ir

from ikcli.native.lean_numba import _variables

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
