"""Locate the parts of a quantized activation row in code that is written as LLVM IR.

The layout is that of `kernels/activations.py`.
"""

import copy
import functools

import llvmlite.ir as ir

from ikcli.backends.cpu.tile_modes import MORE_BYTES, first_sum
from ikcli.native.simd.emit import I32
from ikcli.native.simd.vec import call_llvm, const_vector, f32x8, f32x16, i32x8, i32x16, llvm_type, pointer, splat_value

# bytes of 256 columns
_STEP_BYTES = {
    **dict.fromkeys(("codes_at", "second_at"), 256),
    "more_at": MORE_BYTES,
    **dict.fromkeys(("sums_at", "s16_at"), 64),
    **dict.fromkeys(("d_at", "s_at"), 32),
}


class ActivationRow:
    """Addresses (i64 values) of the parts of a row of k columns."""

    def __init__(self, e, a, k):
        nb4 = e.times(e.b.lshr(k, e.int(5)), 4)
        self.codes_at = a
        self.d_at = e.offset(a, k)
        self.s_at = e.offset(self.d_at, nb4)
        self.sums_at = e.offset(self.s_at, nb4, nb4)
        self.s16_at = e.offset(self.sums_at, nb4, nb4)
        end = e.offset(self.s16_at, nb4, nb4)
        past = e.b.and_(e.b.sub(e.int(0), e.b.sub(end, a)), e.int(63))
        self.second_at = e.offset(end, past)
        whole = e.b.and_(e.offset(k, 255), e.int(-256))
        self.more_at = e.offset(self.second_at, whole)  # AVX2 only

    def at_step(self, e, i):
        """Return the row from step i on: what follows sees it as a row of its own, whose step 0 is step i."""
        places = {name: e.offset(at, e.times(i, _STEP_BYTES[name])) for name, at in vars(self).items()}
        return self._at({name: e.opaque(at) for name, at in places.items()})

    def moved(self, e, by):
        """Return the row that is `by` bytes further on."""
        return self._at({name: e.offset(at, by) for name, at in vars(self).items()})

    def _at(self, places):
        other = copy.copy(self)
        vars(other).update(places)
        return other

    def scales(self, e, i, valid):
        """Load the scales of the blocks of step i (f32x8); zeros beyond `valid` of them."""
        return _floats(e, e.offset(self.d_at, e.times(i, 32)), valid, 1)

    def scaled_sums(self, e, i, valid, per_block):
        """Load sums of the columns of step i, times scales.

        There is one sum (f32x8) or two (f32x16) per block, with zeros beyond `valid`.
        """
        at = self.s_at if per_block == 1 else self.s16_at
        return _floats(e, e.offset(at, e.times(i, 32 * per_block)), valid, per_block)


def without_bias(e, fmt, sums):
    """Return -bias * sum and (shift - bias) * sum, from the stored sums: the negated contribution of zero codes."""
    if first_sum():
        sums = e.b.sub(sums, const_vector(i32x16, [first_sum()] * 16))

    def times(n):
        """Return -n * sum, for a power of two."""
        return e.b.ashr(sums, ir.Constant(sums.type, [8 - n.bit_length()] * 16)) if n < 128 else sums

    plain = times(fmt.bias) if fmt.bias else e.zero(i32x16)
    more = [times(1 << bit) for bit in range(3) if fmt.shift >> bit & 1]
    return plain, functools.reduce(e.b.sub, more, plain)


def _floats(e, address, valid, per_block):
    vec, ints = (f32x8, i32x8) if per_block == 1 else (f32x16, i32x16)
    if valid is None:
        return e.load(vec, address)
    limit = splat_value(e.b, ints, e.b.trunc(e.times(valid, per_block), I32))
    mask = e.b.icmp_signed("<", const_vector(ints, range(vec.n)), limit)
    t = llvm_type(vec)
    args = [pointer(e.b, address, t), ir.Constant(I32, 1), mask, e.zero(vec)]
    return call_llvm(e.b, f"llvm.masked.load.v{vec.n}f32.p0", t, args)
