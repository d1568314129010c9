"""The step block's layout is one: what Python writes is what CPU and GPU kernels read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import ikcli
from ikcli.backends import step_block
from ikcli.backends.cpu import cell_places
from ikcli.backends.cpu.kernels import common, state_rows
from ikcli.backends.step_block import StepBlock
from ikcli.graph import Rows
from ikcli.graph.micro_batch import Segment


def test_cpu_kernels_read_what_is_written() -> None:
    block = StepBlock(8, 64)
    tokens, pos = np.array([5, 6, 7], np.int32), np.array([3, 4, 0], np.int32)
    block.set(tokens, pos, np.array([1, 2]), [Segment(0, 2, 10, 3, 0, -2), Segment(2, 1, 40, 0, 5, 7)])
    words, *arrays = block.arrays()
    assert words[[common.N_TOKENS, common.N_OUTPUTS, common.N_KV, common.N_SEG]].tolist() == [3, 2, 6, 2]
    order = (common.TOKENS, common.POS, common.CELLS, common.OUT_IDS, common.SEGMENTS, common.KV_CELLS,
             state_rows.SEQS, cell_places.WINDOW_CELLS, cell_places.WINDOWS)  # fmt: skip
    assert [int(words[i]) for i in order] == [a.ctypes.data for a in arrays]
    assert arrays[2].tolist() == [13, 14, 40] and arrays[5].tolist() == [10, 11, 12, 13, 14, 40]
    assert arrays[6].tolist() == [0, 5]
    assert arrays[7].tolist() == [1, 2, 7] and arrays[8].tolist() == [-2, 7]
    assert cell_places.CELLS == common.CELLS
    second = arrays[4][1]
    named = {common.SEG_TOKEN: 2, common.SEG_N_TOKENS: 1, common.SEG_CELL: 40, common.SEG_POS: 0,
             common.SEG_KV_ROW: 5, common.SEG_N_KV: 1}  # fmt: skip
    assert {i: int(second[i]) for i in named} == named and len(second) == common.SEG_WORDS
    index = {Rows.TOKENS: common.N_TOKENS, Rows.OUTPUTS: common.N_OUTPUTS, Rows.KV: common.N_KV}
    assert index == step_block.STATE_INDEX


def test_a_step_is_the_same_as_a_batch() -> None:
    """Single tokens of several sequences, described the short way."""
    a, b = StepBlock(8, 64), StepBlock(8, 64)
    a.set(
        np.array([9, 8], np.int32),
        np.array([2, 7], np.int32),
        np.arange(2),
        [Segment(0, 1, 0, 2, 0, 0), Segment(1, 1, 32, 7, 1, -3)],
    )
    b.set_step([9, 8], [2, 7], [0, 1], 32, 2, [0, -3])
    assert a.rows == b.rows and a.n_segments == b.n_segments
    for x, y in zip(a.arrays()[1:6] + a.arrays()[7:], b.arrays()[1:6] + b.arrays()[7:], strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_step_does_not_depend_on_what_came_before() -> None:
    """What is the same as in the last step is not written again, unless something else was between."""
    other = StepBlock(8, 64)
    other.set(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.array([2]), [Segment(0, 3, 8, 0, 4, 0)])
    packed = memoryview(b"".join(part.tobytes() for part in other.packed()))
    used = StepBlock(8, 64)
    for n_ctx, seqs in ((32, [0, 1]), (32, [0, 1]), (16, [0, 1]), (16, [1, 0]), (16, [3]), (16, [3]), (16, [3, 0, 1])):
        for between in ("nothing", "batch", "arrived"):
            if between == "batch":
                pos = np.arange(2, dtype=np.int32)
                used.set(pos, pos, np.array([1]), [Segment(0, 2, 40, 0, 5, 0)])
            elif between == "arrived":
                used.unpack(packed, compact=False)
            fresh = StepBlock(8, 64)
            for block in (used, fresh):
                block.set_step(list(range(len(seqs))), [5 + i for i in seqs], seqs, n_ctx, len(seqs))
            assert used.rows == fresh.rows
            for i in (1, 2, 3, 4, 5, 7):
                np.testing.assert_array_equal(used.arrays()[i], fresh.arrays()[i])


def test_gpu_kernels_use_the_same_numbers() -> None:
    source = (Path(ikcli.__file__).parent / "backends" / "cuda" / "kernels" / "common.cuh").read_text(encoding="utf-8")
    found = {name: int(number) for name, number in re.findall(r"(SEG_\w+) = (\d+)", source)}
    assert found == {
        "SEG_WORDS": common.SEG_WORDS, "SEG_START": common.SEG_TOKEN, "SEG_TOKENS": common.SEG_N_TOKENS,
        "SEG_CELL": common.SEG_CELL, "SEG_POS": common.SEG_POS, "SEG_KV_START": common.SEG_KV_ROW,
        "SEG_KV": common.SEG_N_KV,
    }  # fmt: skip
    assert step_block.SEG_WORDS == common.SEG_WORDS
    states = (Path(ikcli.__file__).parent / "backends" / "cuda" / "kernels" / "states.cuh").read_text(encoding="utf-8")
    assert f"ST_P_SEQS = {state_rows.SEQS};" in states
