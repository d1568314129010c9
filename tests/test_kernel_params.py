"""Parameters of CPU kernels: lowering fills and kernels read them by name, and wrong names are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.backends.cpu.params import F32, F64, Address, Params, Record, Words
from ikcli.backends.cpu.params_attention import FlashParams, FullParams
from ikcli.native.kernel_library import KernelLibrary, native_function


class Pair(Record):
    """Two numbers."""

    a: int
    b: F32


class SumParams(Params):
    """One of everything."""

    out: Address
    factor: F64
    pairs: tuple[Pair, Pair]
    last: Pair


class MoreParams(SumParams):
    """... and an array."""

    n: int
    numbers: Words


def more(**changed: Any) -> MoreParams:
    values: dict[str, Any] = {"out": 0, "factor": 0.5, "pairs": (Pair(a=1, b=2.0), Pair(a=3, b=4.0)),
                              "last": Pair(a=5, b=6.0), "n": 2, "numbers": (70, 80)}  # fmt: skip
    return MoreParams(**(values | changed))


def test_words_lie_in_the_order_of_the_declaration() -> None:
    half, two, four, six = (int(np.array(x, t).view(i)) for x, t, i in (
        (0.5, "f8", "i8"), (2, "f4", "i4"), (4, "f4", "i4"), (6, "f4", "i4")))  # fmt: skip
    assert more().words == [0, half, 1, two, 3, four, 5, six, 2, 70, 80]
    assert {name: field.at for name, field in MoreParams.fields.items()} == {
        "state": 0, "row_count": 1, "row_factor": 2, "out": 3, "factor": 4, "pairs": 5, "last": 9, "n": 11,
        "numbers": 12,
    }  # fmt: skip
    shared = SumParams.fields.items()
    assert shared <= MoreParams.fields.items()
    assert all(FlashParams.fields[name] == FullParams.fields[name] for name in ("tile", "v"))


def test_lowering_refuses_names_that_are_not_declared() -> None:
    with pytest.raises(TypeError, match=r"MoreParams has no parameter 'fator'; it has out, factor, pairs, last, n"):
        more(fator=1.0)
    with pytest.raises(TypeError, match=r"Pair lacks the parameter 'b'; it has a, b"):
        Pair(a=1)  # type: ignore[call-arg]


def test_a_kind_that_is_not_known_is_refused_when_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.x is declared as float, which is none of int, Address, F32, F64"):

        class Wrong(Params):
            x: float


def compiled(function: Any) -> Any:
    from ikcli.backends.cpu.kernels.records import kernel
    from ikcli.native.jit import compile_to_object

    return compile_to_object(*kernel(MoreParams)(function))


def test_a_kernel_with_a_name_that_is_not_declared_is_not_compiled() -> None:
    def kernel(params: Any, ith: int, nth: int) -> None:
        params.pairs[1].c  # noqa: B018

    with pytest.raises(Exception, match=re.escape("Pair has no parameter 'c'; it has a, b")):
        compiled(kernel)


def test_a_kernel_reads_what_lowering_wrote() -> None:
    from ikcli.native.simd.vec import ld_i64, st_f32

    def kernel(params: Any, ith: int, nth: int) -> None:
        for i in range(2):
            st_f32(params.out + 8 * i, np.float32(params.pairs[i].a))
            st_f32(params.out + 8 * i + 4, params.pairs[i].b)
        st_f32(params.out + 16, np.float32(params.factor) * params.last.b)
        for i in range(params.n):
            st_f32(params.out + 20 + 4 * i, np.float32(ld_i64(params.numbers + 8 * i) + params.pairs[1].a))

    out = np.zeros(7, np.float32)
    words = np.array([0, 0, 0, *more(out=out.ctypes.data).words], np.int64)
    library = KernelLibrary()
    native_function(library._load(Path("test"), *compiled(kernel)), 3)(words.ctypes.data, 0, 1)
    assert out.tolist() == [1, 2, 3, 4, 3, 73, 83]
