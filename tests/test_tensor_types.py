"""Records of tensor types: everything they name is there, and every type is complete or known not to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ikcli.backends.cpu.kernels.formats import weight_format
from ikcli.backends.cpu.lower import FLOAT_TYPES, stored_name
from ikcli.gguf.constants import GGMLType as T
from ikcli.gguf.types import TYPES, TensorType
from ikcli.quant.code_fields import code_space
from ikcli.quant.repack import layout
from ikcli.references import load

NOT_DECODED = {T.F64, T.I8, T.I16, T.I32, T.I64, T.Q4_0_4_4, T.Q4_0_4_8, T.Q4_0_8_8}
READ_ONLY = {T.I2_S}  # models compute with it as IQ2_BN
NOT_WRITTEN = {T.Q1_0_G128, T.Q2_0}
WITHOUT_GPU = {T.I2_S}
STORED = [t for t in TYPES.values() if t.storage]
ALL = pytest.mark.parametrize("record", TYPES.values(), ids=lambda t: t.name)


def test_every_number_has_a_record() -> None:
    assert list(TYPES) == list(T)
    assert len({t.name.lower() for t in TYPES.values()}) == len(TYPES)


@ALL
def test_what_is_named_is_there(record: TensorType) -> None:
    for reference in (record.decode, record.encode, record.encode_numpy):
        assert not reference or callable(load(reference))
    space = code_space(record.type)
    assert (space is not None) == bool(record.codes)
    if record.layout:
        found = layout(record.type)
        assert found.rows == record.rows and found.n_elements % record.block_size == 0
    if record.cpu:
        fmt = weight_format(stored_name(record.type))
        assert (fmt.name, fmt.mode, fmt.rows) == (record.name, record.tile, record.rows)
        assert (
            256 % record.block_size == 0 and fmt.step_bytes == record.rows * record.type_size * 256 // record.block_size
        )
    for other in (record.fallback, record.stand_in, record.base):
        assert other is None or not TYPES[other].is_interleaved


@pytest.mark.parametrize("record", STORED, ids=lambda t: t.name)
def test_a_type_that_files_have_can_be_used(record: TensorType) -> None:
    plain = TYPES[record.plain]
    assert bool(plain.decode) == (record.type not in NOT_DECODED)
    complete = record.type not in NOT_DECODED | READ_ONLY
    assert bool(plain.encode or plain.encode_numpy) == (complete and record.type not in NOT_WRITTEN)
    assert bool(record.cpu) or record.type in FLOAT_TYPES or not complete
    assert bool(plain.cuda) == (record.type not in NOT_DECODED | WITHOUT_GPU)
    assert bool(record.layout) == (record.is_interleaved and record.type not in NOT_DECODED)


def test_records_cost_no_imports() -> None:
    code = "import sys, ikcli.gguf.types; sys.exit(any(m in sys.modules for m in ('numpy', 'numba', 'ikcli.quant')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
