"""What is left out of Numba while kernels are compiled, and that it comes back."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from numba.core import compiler, ir, types
from numba.core.registry import cpu_target

from ikcli.native.lean_numba import _variables, lean


def typed(*args: types.Type) -> types.Type | None:
    try:
        found = cpu_target.typing_context.resolve_function_type(operator.add, args, {})
    except Exception:
        return None
    return found and found.return_type


def test_operators_of_arrays_are_missing_only_while_kernels_are_compiled() -> None:
    array = types.float32[::1]
    cpu_target.typing_context.refresh()
    usual = ir.Inst._rec_list_vars
    before = typed(array, array), typed(types.int32, types.float64), typed(types.int64, types.int64)
    assert before[0] == array
    with pytest.raises(KeyError), lean(cpu_target.typing_context):
        assert typed(array, array) is None
        assert (typed(types.int32, types.float64), typed(types.int64, types.int64)) == before[1:]
        raise KeyError
    assert (typed(array, array), typed(types.int32, types.float64), typed(types.int64, types.int64)) == before
    assert ir.Inst._rec_list_vars is usual


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
