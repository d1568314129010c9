"""Emit operations on vectors of any length as LLVM IR, from which weight formats are described."""

import llvmlite.ir as ir

from ikcli.native import isa
from ikcli.native.simd.emit import I32, I64, Emitter
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    f32x8,
    i8x16,
    i8x32,
    i32x8,
    llvm_type,
    pointer,
    splat_value,
)

_I8, _I16, _F32 = ir.IntType(8), ir.IntType(16), ir.FloatType()


def indices(values):
    """Return a constant shuffle mask."""
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


class VectorEmitter(Emitter):
    """Addresses are i64 values."""

    scale_order = tuple(range(16))  # blocks of 16 columns whose scales are wanted, as lanes of f32x16

    # --- loads --------------------------------------------------------------------------------------------------------
    def word(self, address, bits=32):
        """Load an unsigned integer of 8, 16, 32 or 64 bits, as i32 (i64 for 64)."""
        t = ir.IntType(bits)
        x = self.b.load(pointer(self.b, address, t), align=1)
        return x if bits >= 32 else self.b.zext(x, I32)

    def half(self, address):
        """Load a half float as f32."""
        if isa.current().is_arm64:
            return half_to_f32(self.b, self.b.load(pointer(self.b, address, _I16), align=1))
        # By way of an integer register: LLVM would insert it into a vector register and wait for what that held.
        bits = self.opaque(self.b.zext(self.word(address, 16), I64))
        return half_to_f32(self.b, self.b.trunc(bits, _I16))

    def half_everywhere(self, address):
        """Load a half float into all lanes of f32x8."""
        bits = self.b.load(pointer(self.b, address, ir.VectorType(_I16, 1)), align=1)
        return half_to_f32(self.b, self.pick(bits, [0] * 8))

    def two_halves(self, address):
        """Load two adjacent half floats as f32."""
        zeros = ir.Constant(ir.VectorType(I32, 4), None)
        words = self.b.insert_element(zeros, self.word(address), self.index(0))
        v = half_to_f32(self.b, self.pick(self.b.bitcast(words, ir.VectorType(_I16, 8)), range(4)))
        return [self.b.extract_element(v, self.index(i)) for i in range(2)]

    def single(self, address):
        """Load a float."""
        return self.b.load(pointer(self.b, address, _F32), align=1)

    def halves_at(self, address, stride, count=8):
        """Load f32x8 (or x16) of half floats `stride` bytes apart."""
        v = ir.Constant(ir.VectorType(_I16, count), None)  # zeros: see `half`
        for i in range(count):
            x = self.b.load(pointer(self.b, self.offset(address, i * stride), _I16), align=1)
            v = self.b.insert_element(v, x, ir.Constant(I32, i))
        return half_to_f32(self.b, v)

    def load_bytes(self, address, count):
        """Load `count` unsigned bytes as i32 lanes."""
        t = ir.VectorType(_I8, count)
        return self.b.zext(self.b.load(pointer(self.b, address, t), align=1), ir.VectorType(I32, count))

    def words_at(self, address, count):
        """Load `count` u16 as i32 lanes."""
        v = self.b.load(pointer(self.b, address, ir.VectorType(_I16, count)), align=1)
        return self.b.zext(v, ir.VectorType(I32, count))

    def bytes_at(self, address, count):
        """Load `count` bytes."""
        return self.b.load(pointer(self.b, address, ir.VectorType(_I8, count)), align=1)

    def nibbles_at(self, address):
        """Load the nibbles of 8 bytes as 16 bytes: all lower ones, then all upper ones."""
        v = self.bytes_at(address, 8)
        return self.joined([self.all_and(v, 15), self.lshr(v, [4] * 8)])

    def nibbles16(self, address):
        """Load the nibbles of 8 bytes, the lower one of each first, as 16 bytes in the order of scales."""
        return self.in_scale_order(self.pick(self.nibbles_at(address), [8 * (n % 2) + n // 2 for n in range(16)]))

    def nibbles16_twice(self, address, apart=False):
        """Load the nibbles of 8 bytes as 32 bytes, the same in both halves. For AVX2.

        The lower one of each byte comes first, or `apart`, all lower ones do.
        """
        v = self.hidden(self.pick(self.bytes_at(address, 8), [*range(8)] * 4))
        words = self.b.bitcast(v, ir.VectorType(_I16, 16))
        low, high = self.all_and(v, 15), self.all_and(self.b.bitcast(self.lshr(words, [4] * 16), v.type), 15)
        order = [(n, odd) for odd in range(2) for n in range(8)] if apart else [(n // 2, n % 2) for n in range(16)]
        lanes = [16 * half + n + 32 * odd for half in range(2) for n, odd in order]
        return self.b.shuffle_vector(low, high, indices(lanes))

    def two_bits_at(self, address, to):
        """Load the two-bit fields of 4 bytes, at bit `to` of 16 bytes.

        The lowest field of each byte comes first, then the next, and so on.
        """
        words = self.pick(self.b.bitcast(self.word(address), ir.VectorType(I32, 1)), [0] * 4)
        fields = self.all_and(self.lshr(words, [0, 2, 4, 6]), 0x03030303)
        return self.b.bitcast(
            self.b.shl(fields, ir.Constant(fields.type, [ir.Constant(I32, to)] * 4)), llvm_type(i8x16)
        )

    def two_bits_twice(self, address):
        """Load the two-bit fields of 4 bytes as `two_bits_at` does, at bit 4, the same in both halves. For AVX2."""
        fields = self.lshr(self.hidden(self.splat_int(self.word(address))), [0, 2, 4, 6] * 2)
        high = self.all_and(self.b.shl(fields, self.ints([4] * 8)), 0x30303030)
        return self.b.bitcast(high, llvm_type(i8x32))

    def fields_at(self, address, starts, width, bits=32):
        """Load fields of an integer of `bits` as i32x8: `width` bits from each of eight `starts` on."""
        return self.all_and(self.lshr(self.splat_int(self.word(address, bits)), starts), (1 << width) - 1)

    def singles(self, address, count):
        """Load adjacent floats."""
        return self.b.load(pointer(self.b, address, ir.VectorType(_F32, count)), align=1)

    def vector_pointer(self, address, bits, count):
        """Return a pointer to a vector of integers."""
        return pointer(self.b, address, ir.VectorType(ir.IntType(bits), count))

    def table(self, values, bits, name):
        """Put a constant array into the kernel's data section; return its address (i64)."""
        name = f"ik.table.{name}"
        module = self.b.module
        if name not in module.globals:
            t = ir.ArrayType(ir.IntType(bits), len(values))
            g = ir.GlobalVariable(module, t, name)
            g.linkage, g.global_constant, g.align = "internal", True, 64
            g.initializer = ir.Constant(t, [ir.Constant(ir.IntType(bits), int(x)) for x in values])
        return self.b.ptrtoint(module.globals[name], I64)

    def opaque_table(self, values, bits, name, w):
        """Return a `table` whose address is known only once w is.

        Vectors of it then stay in memory instead of taking registers through a loop.
        """
        t = ir.FunctionType(I64, [I64, I64])
        return self.b.asm(t, "", "=r,0,r", [self.table(values, bits, name), w], False)

    # --- lanes --------------------------------------------------------------------------------------------------------
    def joined(self, parts):
        """Join vectors of equal length."""
        while len(parts) > 1:
            lanes = indices(range(2 * parts[0].type.count))
            parts = [self.b.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def index(self, i):
        """Return a lane number."""
        return ir.Constant(I32, i)

    def zero8(self):
        return self.zero(f32x8)

    def zero_words(self):
        """Return four zeros."""
        return ir.Constant(ir.VectorType(I32, 4), None)

    def hidden(self, v):
        """Hide 32 bytes from the optimiser, which would shuffle 16 of them and copy the result. Needs AVX2."""
        return self.b.asm(ir.FunctionType(v.type, [v.type]), "", "=x,0", [v], False)

    # --- f32 vectors --------------------------------------------------------------------------------------------------
    def splat(self, x, vec=f32x8):
        return splat_value(self.b, vec, x)

    def in_scale_order(self, v):
        """Reorder 16 lanes that belong to 16 scales to the order of `scale_order`."""
        return v if self.scale_order == tuple(range(16)) else self.pick(v, self.scale_order)

    def mul(self, x, y):
        return self.b.fmul(x, y)

    def ints_to_f32(self, v):
        """Convert signed i32 lanes to floats."""
        return self.b.sitofp(v, ir.VectorType(_F32, v.type.count))

    def bytes_to_f32(self, v, signed=True):
        """Convert byte lanes to floats."""
        wide = ir.VectorType(I32, v.type.count)
        return self.ints_to_f32(self.b.sext(v, wide) if signed else self.b.zext(v, wide))

    def pick(self, v, lanes):
        """Return lanes of v in any order and number."""
        return self.b.shuffle_vector(v, v, indices(lanes))

    def fused(self, a, b, c):
        """Return a*b + c for f32 vectors of any length."""
        return call_llvm(self.b, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    # --- i32 vectors --------------------------------------------------------------------------------------------------
    def splat_int(self, x, vec=i32x8):
        return splat_value(self.b, vec, x)

    def ints(self, values, vec=i32x8):
        return const_vector(vec, values)

    def constants(self, values, bits):
        """Return a constant vector of integers."""
        t = ir.IntType(bits)
        return ir.Constant(ir.VectorType(t, len(values)), [ir.Constant(t, x) for x in values])

    def bits_set(self, v, positions):
        """Return a mask of the integer lanes whose bit at this position is set."""
        width = v.type.element.width
        # AVX2 chooses lanes by their upper bit; ARM64 and AVX-512 have instructions that test bits.
        if width == 32 and "avx512f" not in self.features() and not isa.current().is_arm64:
            shifted = self.b.shl(v, self.constants([31 - p for p in positions], 32))
            return self.b.icmp_signed("<", shifted, self.constants([0] * len(positions), 32))
        bits = self.constants([1 << p for p in positions], width)
        return self.b.icmp_unsigned("!=", self.b.and_(v, bits), self.constants([0] * len(positions), width))

    def lshr(self, v, amounts):
        """Shift integer lanes right by constants."""
        return self.b.lshr(v, ir.Constant(v.type, [ir.Constant(v.type.element, a) for a in amounts]))

    def all_and(self, v, m):
        """Return every lane (of any integer width) and m."""
        return self.b.and_(v, ir.Constant(v.type, [ir.Constant(v.type.element, m)] * v.type.count))

    def bytes_of_words(self, x, y):
        """Return 32 bytes: the low ones of two i32x16 of numbers below 256."""
        if "avx2" not in self.features():
            half = ir.VectorType(_I8, 16)
            return self.b.shuffle_vector(self.b.trunc(x, half), self.b.trunc(y, half), indices(range(32)))
        pairs, quads = ir.VectorType(_I16, 16), llvm_type(i8x32)
        halves = [[self.pick(v, range(first, first + 8)) for first in (0, 8)] for v in (x, y)]
        words = [call_llvm(self.b, "llvm.x86.avx2.packusdw", pairs, half) for half in halves]
        mixed = self.b.bitcast(call_llvm(self.b, "llvm.x86.avx2.packuswb", quads, words), llvm_type(i32x8))
        return self.b.bitcast(self.pick(mixed, [0, 4, 1, 5, 2, 6, 3, 7]), quads)
