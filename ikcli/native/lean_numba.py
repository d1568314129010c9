"""Leave out of Numba what kernels do not use: it compiles them in about three quarters of the time, to the same code.

Kernels consist of integers, floats, vectors and calls. They have no arrays that operators apply to, no closures that
become functions, no `literally`, no `with` blocks and no array expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import compiler, ir, typed_passes, types, untyped_passes
from numba.core.compiler_machinery import PassManager
from numba.core.typing.npydecl import NumpyRulesArrayOperator


class KernelPipeline(compiler.CompilerBase):
    """Numba's passes from bytecode to LLVM, without those that change nothing in kernels."""

    def define_pipelines(self) -> list[Any]:
        """Return the one pipeline."""
        passes = [
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.InlineClosureLikes,
            untyped_passes.DeadBranchPrune,
            untyped_passes.GenericRewrites,
            untyped_passes.InlineInlinables,
            untyped_passes.DeadBranchPrune,
            untyped_passes.ReconstructSSA,
            untyped_passes.DeadBranchPrune,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            typed_passes.NativeLowering,
            typed_passes.NoPythonBackend,
        ]
        manager = PassManager("kernels")
        for one in passes:
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]


@contextmanager
def lean(context: Any) -> Iterator[None]:
    """Compile faster with this typing context; afterwards Numba is what it was."""
    context.refresh()
    usual = ir.Inst._rec_list_vars
    ir.Inst._rec_list_vars = _variables  # type: ignore[method-assign]
    operators = _operators_of_numbers(context)
    for operator, templates in operators:
        operator.templates = tuple(t for t in templates if not issubclass(t, NumpyRulesArrayOperator))
    try:
        yield
    finally:
        for operator, templates in operators:
            operator.templates = templates
        ir.Inst._rec_list_vars = usual  # type: ignore[method-assign]


def _operators_of_numbers(context: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the operators that apply to arrays as well, which Numba tries with every pair of numbers."""
    functions = [found for found in context._globals.values() if isinstance(found, types.Function)]
    kinds = [(found, [issubclass(t, NumpyRulesArrayOperator) for t in found.templates]) for found in functions]
    return [(found, found.templates) for found, arrays in kinds if any(arrays) and not all(arrays)]


def _variables(self: Any, value: Any) -> list[Any]:
    """Return the variables in a part of an instruction, as Numba's function does, which looks at types one by one."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    if kind is str or kind is int or value is None:
        return []
    if isinstance(value, ir.Inst):
        return value.list_vars()
    if kind is dict:
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [v for part in value for v in ([part] if type(part) is ir.Var else _variables(self, part))]
