"""Values at the edges: types of numbers that are set, parts of a split model, overlapping tensors, sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.edit import _parse
from ikcli.gguf.overrides import apply_overrides, parse_override
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor

V = GGUFValueType


@pytest.mark.parametrize(
    ("numbers", "type"),
    [
        ([0], V.UINT32), ([2**32 - 1], V.UINT32), ([2**32], V.UINT64), ([0, 2**40], V.UINT64), ([1, 2**40], V.UINT64),
        ([-1], V.INT32), ([-(2**31)], V.INT32), ([-(2**31), 2**31 - 1], V.INT32), ([-1, 2**31], V.INT64),
        ([-(2**31) - 1], V.INT64), ([-1, 2**40], V.INT64), ([2**64 - 1], V.UINT64),
    ],
)  # fmt: skip
def test_numbers_get_the_smallest_usual_type_that_holds_all(numbers: list[int], type: GGUFValueType) -> None:
    key, value = _parse(f"k=int[]:{numbers}", {})
    assert (key, value.type, value.item_type) == ("k", V.ARRAY, type)
    assert np.asarray(value.value).tolist() == numbers
    assert _parse(f"k=int:{numbers[0]}", {})[1].value == numbers[0]


@pytest.mark.parametrize("text", [str(2**64), str(-(2**63) - 1)])
def test_numbers_that_no_type_holds(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        _parse(f"k=int:{text}", {})
    with pytest.raises(UsageError, match="is not a valid int"):
        parse_override(f"k=int:{text}")


@pytest.mark.parametrize(
    ("number", "type"),
    [
        (2**31 - 1, V.INT32), (2**31, V.INT64), (-(2**31), V.INT32), (-(2**31) - 1, V.INT64), (2**63 - 1, V.INT64),
        (2**63, V.UINT64), (2**64 - 1, V.UINT64), (-(2**63), V.INT64),
    ],
)  # fmt: skip
def test_overrides_of_new_keys(number: int, type: GGUFValueType) -> None:
    metadata: dict[str, object] = {}
    types: dict[str, GGUFValueType] = {}
    apply_overrides(metadata, types, {}, [f"k=int:{number}"], "m.gguf")
    assert (metadata["k"], types["k"]) == (number, type)


@pytest.mark.parametrize(("no", "count", "wrong"), [(1, 2, False), (0, 2, True), (1, 3, True), (2, 2, True)])
def test_a_part_must_be_of_this_division(tmp_path: Path, no: int, count: int, wrong: bool) -> None:
    specs = [NewTensor(f"t{i}.weight", (32,), GGMLType.F32) for i in range(2)]
    with GGUFWriter(tmp_path / "m", {"general.architecture": "llama"}, specs, splits=[1, 1]) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, np.zeros(32, np.float32))
        first, second = writer.paths
    keys = {"split.no": Typed(no, V.UINT16), "split.count": Typed(count, V.UINT16)}
    with GGUFWriter(tmp_path / "other.gguf", keys, specs[1:]) as writer:
        writer.write_tensor("t1.weight", np.zeros(32, np.float32))
    (tmp_path / "other.gguf").replace(second)
    if wrong:
        with pytest.raises(FormatError, match=f"says it is part {no + 1} of {count}, not part 2 of 2"):
            open_gguf(first)
    else:
        assert len(open_gguf(first).tensors) == 2
