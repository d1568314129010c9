"""Access records of parameters (`backends/cpu/params.py`) inside kernels: an address becomes a value with attributes.

An attribute is a load in place, of the word that the declaration gives it; an undeclared name ends the compilation. A
field made of several records is indexed: `params.k[1].width`. `address` is that of the record.
"""

import operator

import llvmlite.ir as ir
from numba.core import types
from numba.core.errors import TypingError
from numba.core.imputils import lower_builtin, lower_getattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ikcli.native.simd.vec import pointer

_WORD = ir.IntType(64)
_NUMBERS = {
    "i64": (types.int64, _WORD),
    "f32": (types.float32, ir.FloatType()),
    "f64": (types.float64, ir.DoubleType()),
    "words": (types.int64, None),
}


class RecordType(types.Type):
    """The address of a record of this class."""

    def __init__(self, record):
        self.record = record
        super().__init__(name=record.__name__)


@register_model(RecordType)
class RecordModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _WORD)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, value, name):
        fields = value.record.fields
        if name == "address":
            return types.int64
        if name not in fields:
            raise TypingError(f"{value.record.__name__} has no parameter {name!r}; it has {', '.join(fields)}")
        kind = fields[name].kind
        return _NUMBERS[kind][0] if isinstance(kind, str) else RecordType(kind)


@lower_getattr_generic(RecordType)
def _load(context, builder, record_type, value, name):
    if name == "address":
        return value
    at, kind = record_type.record.fields[name]
    address = builder.add(value, _WORD(8 * at))
    element = _NUMBERS[kind][1] if isinstance(kind, str) else None
    return builder.load(pointer(builder, address, element), align=1) if element else address


@infer_global(operator.getitem)
class _Items(AbstractTemplate):
    def generic(self, args, kws):
        record, index = args
        if isinstance(record, RecordType) and isinstance(index, types.Integer):
            return signature(record, record, types.int64)
        return None


@lower_builtin(operator.getitem, RecordType, types.int64)
def _next(context, builder, sig, args):
    size = _WORD(8 * sig.args[0].record.n_words)
    return builder.add(args[0], builder.mul(args[1], size))


def at(record):
    """Return at(address): the record at an address."""
    record_type = RecordType(record)

    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, sig, args):
            return args[0]

        return record_type(types.int64), codegen

    return read


def kernel(record):
    """Decorate a kernel (params, ith, nth) whose parameters are a record."""

    def describe(function):
        return function, (RecordType(record), types.int64, types.int64), False

    return describe
