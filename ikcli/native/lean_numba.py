"""Leave out of Numba what kernels do not use: it compiles them in about half of the time.

Kernels consist of integers, floats, vectors and calls. They have no arrays that operators apply to, no closures that
become functions, no `literally`, no `with` blocks, no generators, no exceptions, and nothing that counts references.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import base, cgutils, compiler, ir, lowering, postproc, transforms, typed_passes, types, untyped_passes
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import UnsupportedError
from numba.core.types.functions import BaseFunction
from numba.core.typing.npydecl import NumpyRulesArrayOperator


class _Lower(lowering.Lower):
    """Numba's lowering, where no value is released: not before another is stored, and not after its last use."""

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Store the value of a variable."""
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def lower_block(self, block: Any) -> None:
        """Lower a block, without preparing a message for each statement."""
        for inst in block.body:
            self.loc = inst.loc
            self.lower_inst(inst)

    def return_exception(self, exc_class: Any, exc_args: Any = None, loc: Any = None) -> None:
        """Refuse `raise`: callers ignore the status (`_device_function`)."""
        raise UnsupportedError("kernels cannot raise exceptions", loc or self.loc)  # type: ignore[arg-type]


class _NativeLowering(typed_passes.NativeLowering):
    @property
    def lowering_class(self) -> type[_Lower]:
        return _Lower


class _Passes:
    """Run `_PASSES` on one function. Numba's own manager repeats several analyses after each pass."""

    pipeline_name = "kernels"

    def __init__(self) -> None:
        self.exec_times: dict[str, Any] = {}  # which Numba keeps

    def run(self, state: Any) -> None:
        """Compile one function."""
        for one in _PASSES:
            one.run_pass(state)


_PASSES = [
    untyped_passes.TranslateByteCode(),
    untyped_passes.FixupArgs(),
    untyped_passes.IRProcessing(),
    untyped_passes.DeadBranchPrune(),
    untyped_passes.GenericRewrites(),
    untyped_passes.InlineInlinables(),
    untyped_passes.ReconstructSSA(),
    untyped_passes.DeadBranchPrune(),
    typed_passes.NopythonTypeInference(),
    typed_passes.PreLowerStripPhis(),
    _NativeLowering(),
    typed_passes.NoPythonBackend(),
]
for _one in _PASSES:
    _one.analysis = {untyped_passes.DeadBranchPrune: None}  # one asks for an analysis, and makes nothing of it


class KernelPipeline(compiler.CompilerBase):
    """Numba's passes from bytecode to LLVM, without those that change nothing in kernels."""

    def define_pipelines(self) -> list[Any]:
        """Return the one pipeline."""
        return [_Passes()]


@contextmanager
def lean(context: Any) -> Iterator[None]:
    """Compile faster with this typing context; afterwards Numba is what it was."""
    context.refresh()
    changes = [
        (ir.Inst, "_rec_list_vars", _variables),
        (BaseFunction, "get_call_type", _remembered_call_type),
        (postproc.PostProcessor, "run", _canonicalize),
        (base, "user_function", _device_function),
        *((operator, "templates", templates) for operator, templates in _operators_of_numbers(context)),
    ]
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        with global_compiler_lock:
            yield
    finally:
        for owner, name, value in usual:
            setattr(owner, name, value)


_call_type = BaseFunction.get_call_type
_signatures: dict[Any, Any] = {}


def _remembered_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """Return the signature of a built-in function or an intrinsic; Numba asks two or three times at each call."""
    if kws:
        return _call_type(self, context, args, kws)
    found = _signatures.get((self, args))
    if found is None:
        found = _signatures[self, args] = _call_type(self, context, args, kws)
    return found


def _canonicalize(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Bring the blocks into Numba's usual form, without the lives of variables."""
    self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
    self.func_ir.generator_info = None


def _device_function(described: Any, libraries: Any) -> Any:
    """Return the emitter of calls of a device function, which ignore the status and pass no place for an exception."""

    def call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, convention = context.declare_function(builder.module, described), context.call_conv
        result = cgutils.alloca_once(builder, convention.get_return_type(described.restype).pointee)
        no_error = cgutils.get_null_value(function.args[1].type)
        packed = convention._get_arg_packer(described.argtypes).as_arguments(builder, args)
        builder.call(function, [result, no_error, *packed])
        return context.get_returned_value(builder, described.restype, builder.load(result))

    call.signature = described.argtypes  # type: ignore[attr-defined]
    call.libs = tuple(libraries)  # type: ignore[attr-defined]
    return call


def _operators_of_numbers(context: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the operators that also apply to arrays, with their rules for numbers only.

    Numba would try the rules for arrays with every pair of numbers.
    """
    found = []
    for operator in context._globals.values():
        if isinstance(operator, types.Function):
            of_numbers = tuple(t for t in operator.templates if not issubclass(t, NumpyRulesArrayOperator))
            if of_numbers and len(of_numbers) < len(operator.templates):
                found.append((operator, of_numbers))
    return found


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
