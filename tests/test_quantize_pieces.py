"""Pieces of the quantizer: whatever their size, type of the input and number of threads, the bytes are the same."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.errors import NonFiniteError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.gguf.unfinished import part_path
from ikcli.gguf.writer import SPLIT_KEYS, GGUFWriter, NewTensor
from ikcli.quant import quantizer
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_legacy
from ikcli.quant.job import JobProgress
from ikcli.quant.quantizer import Readers, Target, TensorEncoder, output_parts, part_is_done, run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.repack import repack_rows
from ikcli.quant.run_key import left_bytes, run_key
from ikcli.quant.tool import ToolOptions, plan_quantize

T = GGMLType
SHAPE = (64, 40, 3)  # 40 rows are no multiple of 16


def write(path: Path, tensors: dict[str, tuple[tuple[int, ...], GGMLType, np.ndarray]]) -> Path:
    specs = [NewTensor(name, shape, type) for name, (shape, type, _) in tensors.items()]
    with GGUFWriter(path, {"general.architecture": "llama"}, specs) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write_tensor(name, data)
    return path


def rows_of(rng: np.random.Generator, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return rng.normal(size=(math.prod(shape[1:]), shape[0])).astype(np.float32)


def made(source: Path, out: Path, number: int, n_threads: int = 2, **options: Any) -> Path:
    settings = ToolOptions(n_threads=n_threads, allow_requantize=True, **options)
    (path,) = run(plan_quantize(str(source), str(out), RecipeOptions(number, pure=True), settings).job)
    return path


@pytest.fixture(params=[1, 64 * 8, 64 * 24, 1 << 18], ids=lambda n: f"{n} elements")
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many elements to a piece, half as many read at a time."""
    monkeypatch.setattr(quantizer, "_MIN_PIECE", request.param)
    monkeypatch.setattr(quantizer, "_MAX_PIECE", request.param)
    monkeypatch.setattr(quantizer, "_IN_CACHE", max(1, request.param // 2))
    return int(request.param)


@pytest.mark.parametrize("old", [T.F16, T.Q8_0, T.Q8_0_R8])
@pytest.mark.parametrize(("number", "new"), [(1, T.F16), (2, T.Q4_0), (202, T.Q4_0_R8)])
def test_the_size_of_pieces_does_not_matter(
    tmp_path: Path, rng: np.random.Generator, piece: int, old: GGMLType, number: int, new: GGMLType
) -> None:
    x = rows_of(rng)
    raw = x.astype(np.float16).view(np.uint8).reshape(-1)
    if old != T.F16:
        raw = quantize_rows(x, T.Q8_0).reshape(-1)
        raw = repack_rows(raw, T.Q8_0_R8, SHAPE[0]).reshape(-1) if old == T.Q8_0_R8 else raw
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, old, raw)})
    known = dequantize(raw, old, SHAPE).reshape(x.shape)
    wanted = known.astype(np.float16).view(np.uint8) if new == T.F16 else quantize_rows(known, TYPES[new].plain)
    if TYPES[new].is_interleaved:
        wanted = repack_rows(wanted.reshape(-1), new, SHAPE[0])
    for n_threads in (1, 3):
        found = open_gguf(made(source, tmp_path / "out.gguf", number, n_threads))
        assert found.tensors["blk.0.ffn_up_exps.weight"].type == new
        np.testing.assert_array_equal(found.data("blk.0.ffn_up_exps.weight"), wanted.reshape(-1))


@pytest.mark.parametrize(("old", "number"), [(T.Q8_0, 207), (T.Q8_0_R8, 7)])
def test_regrouped_pieces_are_the_whole(
    tmp_path: Path, rng: np.random.Generator, piece: int, old: GGMLType, number: int
) -> None:
    plain = quantize_rows(rows_of(rng), T.Q8_0).reshape(-1)
    grouped = repack_rows(plain, T.Q8_0_R8, SHAPE[0]).reshape(-1)
    raw, wanted = (plain, grouped) if old == T.Q8_0 else (grouped, plain)
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, old, raw)})
    found = open_gguf(made(source, tmp_path / "out.gguf", number))
    np.testing.assert_array_equal(found.data("blk.0.ffn_up_exps.weight"), wanted)


def test_pieces_cover_all_rows_in_whole_groups(tmp_path: Path, rng: np.random.Generator, piece: int) -> None:
    raw = repack_rows(quantize_rows(rows_of(rng), T.Q8_0).reshape(-1), T.Q8_0_R8, SHAPE[0]).reshape(-1)
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, T.Q8_0_R8, raw)})
    settings = ToolOptions(allow_requantize=True)
    job = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(2, pure=True), settings).job
    work = TensorEncoder(job.file, [Target(job, job.choices[0])], 2, Readers())
    pieces = list(work.pieces())
    assert [m for m, first, _ in pieces] == [first // 40 for _, first, _ in pieces]
    assert [first for _, first, _ in pieces] == [0, *(stop for _, _, stop in pieces[:-1])] and pieces[-1][2] == 120
    assert all(first % 8 == stop % 8 == 0 for _, first, stop in pieces)
    longest = max(stop - first for _, first, stop in pieces)
    assert longest == min(40, max(8, piece // 64 // 8 * 8))


def test_progress_counts_every_byte_once(tmp_path: Path, rng: np.random.Generator, piece: int) -> None:
    x = rows_of(rng)
    source = write(
        tmp_path / "in.gguf",
        {"blk.0.ffn_up.weight": (SHAPE, T.F16, x.astype(np.float16)), "blk.0.ffn_norm.weight": ((64,), T.F32, x[0])},
    )
    job = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(7, pure=True), ToolOptions()).job
    seen: list[tuple[int, str]] = []
    amounts: list[float] = []
    run(job, JobProgress(tensor=lambda number, c: seen.append((number, c.name)), advance=amounts.append))
    assert seen == [(1, "blk.0.ffn_up.weight"), (2, "blk.0.ffn_norm.weight")]
    assert sum(amounts) == job.file.n_bytes and all(amount > 0 for amount in amounts)


def test_rows_with_bad_values_are_numbered_over_the_whole_tensor(
    tmp_path: Path, rng: np.random.Generator, piece: int
) -> None:
    x = rows_of(rng)
    x[77, 5] = np.nan
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, T.F32, x)})
    with pytest.raises(NonFiniteError, match=r"tensor blk\.0\.ffn_up_exps\.weight holds NaN or Inf in row 77"):
        made(source, tmp_path / "o.gguf", 7)
    x[77, 5] = 1e6
    source = write(tmp_path / "in2.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, T.F32, x)})
    with pytest.raises(NonFiniteError, match=r"blk.0.ffn_up_exps.weight, row 77: the values are too large for f16"):
        made(source, tmp_path / "o.gguf", 1)


def test_copied_tensors_are_checked_piece_by_piece(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer, "_COPY_BYTES", 512)
    x = rows_of(rng)
    x[11, 9] = np.inf
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_norm.weight": ((7680,), T.F32, x.reshape(-1))})
    with pytest.raises(NonFiniteError, match=f"holds NaN or Inf at element {11 * 64 + 9}$"):
        made(source, tmp_path / "o.gguf", 7)
    x[11, 9] = 0
    source = write(tmp_path / "in2.gguf", {"blk.0.ffn_norm.weight": ((7680,), T.F32, x.reshape(-1))})
    found = open_gguf(made(source, tmp_path / "o.gguf", 7))
    np.testing.assert_array_equal(found.data("blk.0.ffn_norm.weight"), x.reshape(-1).view(np.uint8))


def test_ternary_weights_may_be_off_by_rounding(tmp_path: Path, rng: np.random.Generator) -> None:
    """Zeros up to 2 % of the magnitude of the row, and its magnitude from 98 % on; rows at both ends are sampled."""
    signs = rng.integers(-1, 2, (40, 64)).astype(np.float32) * rng.uniform(0.5, 2, (40, 1)).astype(np.float32)
    for change, ternary in ((0.0, True), (0.015, True), (0.03, False), (0.985, True), (0.96, False)):
        for row in (0, 39):
            x = signs.copy()
            largest = np.abs(x[row]).max()
            x[row, 0], x[row, 1] = largest, change * largest
            source = write(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": ((64, 40), T.F32, x)})
            job = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(136), ToolOptions()).job
            if ternary:
                quantizer.check(job)
            else:
                with pytest.raises(UsageError, match="is not ternary"):
                    quantizer.check(job)


def test_parts_that_are_done(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rows_of(rng)
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up_exps.weight": (SHAPE, T.F16, x.astype(np.float16))})
    job = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(7, pure=True), ToolOptions()).job
    (part,) = output_parts(job)
    assert not part_is_done(part)
    run(job)
    assert part_is_done(part)
    other = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(2, pure=True), ToolOptions()).job
    with pytest.raises(UsageError, match=r"o\.gguf exists, but holds other tensors or types"):
        part_is_done(output_parts(other)[0])
    (tmp_path / "o.gguf").write_bytes(part.path.read_bytes()[:-40])
    assert not part_is_done(part), "a damaged file is written again"


def test_what_a_killed_run_left_is_dropped_unless_it_goes_on(tmp_path: Path) -> None:
    mine, dead, other = (tmp_path / f".o.gguf.{name}.tmp" for name in (os.getpid(), 4194305, "x"))
    for path in (mine, dead, other):
        path.write_bytes(b"x")
    quantizer.prepare_folder([tmp_path / "o.gguf"])
    assert mine.exists() and other.exists() and not dead.exists()


def test_few_pieces_are_in_work_at_a_time() -> None:
    """Results come in order, and no more inputs are taken than are needed to keep threads busy."""
    taken: list[int] = []

    def items() -> Iterator[tuple[int]]:
        for i in range(20):
            taken.append(i)
            yield (i,)

    with ThreadPoolExecutor(2) as pool:
        found = []
        for result in quantizer._in_order(pool, lambda i: i * i, items(), 3):
            found.append(result)
            assert len(taken) <= len(found) + 2
    assert found == [i * i for i in range(20)]


def test_later_parts_have_what_belongs_to_a_part_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rows_of(rng, (64, 8)).astype(np.float16)
    specs = [NewTensor(f"blk.{i}.ffn_up.weight", (64, 8), T.F16) for i in range(3)]
    keys = {"general.architecture": "llama", "general.name": "mine", "general.alignment": 64}
    with GGUFWriter(tmp_path / "in.gguf", keys, specs, alignment=64, splits=[1, 2]) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, x)
        first = writer.paths[0]
    job = plan_quantize(str(first), str(tmp_path / "o"), RecipeOptions(7, pure=True), ToolOptions(keep_split=True)).job
    one, two = output_parts(job)
    assert (one.metadata["general.name"].value, len(one.choices), len(two.choices)) == ("mine", 1, 2)
    assert set(two.metadata) == {"general.alignment", *SPLIT_KEYS}
    assert [p.metadata["split.no"].value for p in (one, two)] == [0, 1]
    paths = run(job)
    assert [open_gguf(paths[0]).tensors[s.name].file_index for s in specs] == [0, 1, 1]


def test_an_interrupted_run_goes_on_only_where_everything_is_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    """The key is another one for other inputs, importance data or settings of encoders."""
    source = write(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": ((64, 8), T.F16, rows_of(rng, (64, 8)).astype("f2"))})
    entry = ImatrixEntry(np.ones((1, 64), np.float32), np.ones(1, np.float32))
    matrix = Imatrix({"blk.0.ffn_up.weight": entry, "z": entry}, path=str(tmp_path / "i.dat"))
    write_legacy(matrix, tmp_path / "i.dat")
    job = plan_quantize(str(source), str(tmp_path / "o.gguf"), RecipeOptions(7), ToolOptions()).job
    job = replace(job, imatrix=matrix)
    keys = {
        "same": run_key(job),
        "options": run_key(replace(job, encode_options=EncodeOptions(least_squares=True))),
        "no matrix": run_key(replace(job, imatrix=None)),
        "excluded": run_key(replace(job, imatrix=matrix.filtered(exclude=["z"]))),
        "fewer": run_key(replace(job, imatrix=replace(matrix, entries={"z": entry}))),
        "choice": run_key(replace(job, choices=[replace(job.choices[0], source="other")])),
    }
    assert run_key(job) == keys["same"]
    for name, path in (("matrix", tmp_path / "i.dat"), ("input", source)):
        about = path.stat()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1_000_000))
        keys[f"{name} time"] = run_key(job)
        with path.open("ab") as out:
            out.write(b"x")
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1_000_000))
        keys[f"{name} size"] = run_key(job)
    assert len(set(keys.values())) == len(keys)
    assert left_bytes(tmp_path / "o.gguf") == 0
    part_path(tmp_path / "o.gguf").write_bytes(b"123")
    assert left_bytes(tmp_path / "o.gguf") == 3
