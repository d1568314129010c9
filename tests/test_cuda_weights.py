"""Matrix products and embeddings of the CUDA backend, emulated, for every weight type.

Embeddings must be the decoder's values to the last bit, which tests the description of a format; products are compared
with float64 sums over decoded weights and quantized activations. Work memory starts as NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import EmulatedDevice, emulation_only, needs_emulation, run_kernel
from cuda_graphs import LIMITS
from cuda_weights import ProductRun, activations, check, device_rows, product
from weight_bytes import fitting, stored

from ikcli.backends.cuda.device import Launch
from ikcli.backends.cuda.lower import Counts
from ikcli.backends.cuda.matmul_tiles import parts_of, tiles_of
from ikcli.backends.cuda.rules_matmul import MV_ROWS
from ikcli.backends.cuda.upload import (
    device_bytes,
    device_format,
    device_type,
    is_float,
    table_bytes,
    table_name,
)
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import HeadSlice, Weight
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import get_format, row_size

pytestmark = needs_emulation
Array = npt.NDArray[Any]
T = GGMLType
WITH_KERNELS = [t.type for t in TYPES.values() if t.cuda]
REGROUPED = [t.type for t in TYPES.values() if t.base is not None]
TWO_SMS = replace(LIMITS, n_sm=2)
SMALL_SHARED = replace(LIMITS, max_shared=101376, shared_per_sm=102400)
# Compared with the matrix products of every arithmetic by default; `-m slow` adds all other types.
_OF_ONE_FILE = {T.TQ1_0, T.TQ2_0, T.Q1_0_G128, T.Q2_0, T.NVFP4}  # no other test compiles it
_COMMON = {T.Q8_0, T.Q4_K, T.Q6_K, T.Q2_K, T.IQ4_XS, T.IQ3_S, T.F16, T.F32}


def names(types: Any, common: Any = None) -> list[Any]:
    """Test parameters for types; all but the common ones are slow."""
    return [
        pytest.param(t, id=get_format(t).name, marks=() if common is None or t in common else pytest.mark.slow)
        for t in types
    ]


def k_of(type_: T) -> tuple[int, ...]:
    """Row lengths to try: one block, parts of a step, more than a warp covers at once."""
    if type_ in (T.F32, T.F16, T.BF16):
        return 32, 33, 320, 1408
    if type_ == T.BF16_R16:
        return 32, 34
    block = get_format(type_).block_size
    return tuple(k for k in (32, 64, 256, 320, 1280) if k % block == 0)


# --- formats ----------------------------------------------------------------------------------------------------------
def embedded(type_: T, k: int, data: Array, tokens: list[int]) -> Array:
    """Rows by the embedding kernel."""
    n_rows = data.size // row_size(type_, k)
    w = Weight("token_embd.weight", type_, (k, n_rows))
    d = EmulatedDevice()
    try:
        s = d.stream()

        def upload(x: Array) -> int:
            memory = d.alloc(x.nbytes, "test")
            d.upload(s, memory.address, x)
            return memory.address

        st = np.zeros(16, np.int64)
        st[0], st[4] = len(tokens), upload(np.array(tokens, np.int32))
        grid = table_name(type_)
        table = 0 if not grid else upload(np.frombuffer(table_bytes(grid), np.uint8))
        fmt, out = device_format(type_), np.empty((len(tokens), k), np.float32)
        y = d.alloc(out.nbytes, "out")
        units = np.int32(k if is_float(type_) else k // 32)
        args = (upload(st), upload(device_rows(data, w)), fmt.row_bytes(k), units, y.address, table)
        d.launch(s, Launch(f"embed_{fmt.name}", (len(tokens) + 2, 1, 1), 128, 0, args))
        d.download(s, out, y.address)
        d.synchronize(s)
        return out
    finally:
        d.close()


def scaled(type_: T, values: Array) -> Array:
    """Decoded values with the constant that products multiply the row scale by."""
    factor = TYPES[device_type(type_)].matmul_scale
    return values if factor == 1 else values * np.float32(factor)


@pytest.mark.parametrize("type_", names([*WITH_KERNELS, *REGROUPED], {*WITH_KERNELS, *REGROUPED} - _OF_ONE_FILE))
def test_formats_are_the_decoders(type_: T) -> None:
    """Random bytes of every type, exactly; a factor on the row scale moves one rounding."""
    for k in k_of(type_):
        n_rows = fitting(type_, 6)
        data = stored(type_, n_rows, k)
        tokens = [n_rows - 1, 0, 2, 2]
        wanted = scaled(type_, dequantize(data, type_, (k, n_rows))[tokens].astype(np.float32))
        found = embedded(type_, k, data, tokens)
        if TYPES[device_type(type_)].matmul_scale != 1:
            np.testing.assert_allclose(found, wanted, rtol=3e-7)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("type_", names([T.Q8_0, T.Q4_K, T.IQ3_XXS, T.IQ2_KL, T.IQ4_KT, T.IQ1_M, T.IQ4_K_R4]))
def test_formats_decode_golden_tensors(type_: T, shared_dir: Any) -> None:
    with np.load(shared_dir / "golden" / "quant" / f"{type_.name}.npz") as z:
        names_of = [k.removesuffix("/f32") for k in z.files if k.endswith("/f32")]
        assert names_of
        for name in names_of:
            values = z[f"{name}/f32"].reshape(-1, z[f"{name}/f32"].shape[-1])
            tokens = [0, len(values) - 1]
            data = z[f"{name}/{z['f32_of']}"].view(np.uint8).reshape(-1)
            np.testing.assert_array_equal(embedded(type_, values.shape[1], data, tokens), values[tokens])


def test_mxfp4_has_scales_down_to_denormals() -> None:
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    data = blocks[:255].reshape(-1)
    tokens = [0, 1, 2, 3, 127, 254]
    np.testing.assert_array_equal(embedded(T.MXFP4, 32, data, tokens), dequantize(data, T.MXFP4, (32, 255))[tokens])


def test_upload_is_hardly_larger_than_the_file() -> None:
    for type_ in WITH_KERNELS:
        k = max(k_of(type_))
        stored_bytes = row_size(type_, k)
        fmt = device_format(type_)
        assert stored_bytes - 8 <= fmt.row_bytes(k) <= stored_bytes + 16 * (len(fmt.planes) + 1)
    assert device_bytes(Weight("w", T.Q4_K, (2048, 10, 3))) == 30 * row_size(T.Q4_K, 2048)


def test_types_without_kernels_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.0\.w is i2_s, which has no CUDA kernel"):
        device_format(T.I2_S, "blk.0.w")


# --- products ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", names(WITH_KERNELS, _COMMON))
@pytest.mark.parametrize("n", [1, 3, 8, 9, 70])
def test_mul_mat(type_: T, n: int) -> None:
    for k in k_of(type_)[:: 1 if n < 70 else 2]:
        for n_rows in (1, 5, 67):
            found, w, x = product(type_, k, n_rows, n)
            check(found, w, x, type_)


@pytest.mark.parametrize("type_", names([t for t in WITH_KERNELS if not is_float(t)], _COMMON))
def test_mul_mat_of_wide_tiles(type_: T) -> None:
    """More rows than a narrow tile has, on a device that wide tiles fill: whole tiles and parts of them."""
    for k, n_rows, n in ((k_of(type_)[-1], 130, 200), (k_of(type_)[0], 67, 129)):
        _, wide = tiles_of(TWO_SMS, device_format(device_type(type_)))
        assert wide is not None and wide.count(n_rows, n) >= TWO_SMS.n_sm and n > wide.tokens
        found, w, x = product(type_, k, n_rows, n, limits=TWO_SMS)
        check(found, w, x, type_)


def test_tiles_come_in_full_waves() -> None:
    """Parts that leave no wave nearly empty, and none where a product fills the device often."""
    narrow, wide = tiles_of(LIMITS, device_format(T.Q8_0))
    assert wide is not None and (narrow.on_sm, wide.on_sm) == (2, 1)
    assert tiles_of(SMALL_SHARED, device_format(T.Q2_K))[0].on_sm == 1
    for n_rows, k, n in ((18432, 7168, 16), (1536, 7168, 512), (7168, 2048, 32)):
        tiles = narrow.count(n_rows, n)
        parts = parts_of(narrow, LIMITS.n_sm, k, tiles, 4 * n * n_rows)
        waves = tiles * parts / (narrow.on_sm * LIMITS.n_sm)
        assert parts > 1 and waves / math.ceil(waves) > 0.7
    assert parts_of(wide, LIMITS.n_sm, 7168, wide.count(18432, 2048), 4 * 2048 * 18432) == 1
    assert not narrow.divisible(LIMITS.n_sm, 7168, narrow.count(152064, 9))


@pytest.mark.parametrize(("k", "sum_bytes", "most"), [
    (1 << 16, 1 << 10, 256),  # by columns: 256 each
    (1 << 16, 1 << 20, 16), (1 << 16, 3 << 20, 5), (1 << 16, 17 << 20, 1),  # by 16 MiB of sums
    (511, 1 << 10, 1), (512, 1 << 10, 2),
])  # fmt: skip
def test_parts_of_a_product_have_columns_and_memory(k: int, sum_bytes: int, most: int) -> None:
    """One tile on a GPU of any size, so that more parts are always better but for these limits."""
    tile = replace(tiles_of(LIMITS, device_format(T.Q4_K))[0], step=1)
    assert max(parts_of(tile, n_sm, k, 1, sum_bytes) for n_sm in (1 << 8, 1 << 12, 1 << 16, 1 << 24)) == most


@pytest.mark.parametrize("n", range(1, 10))
def test_every_small_number_of_rows_with_odd_matrices(n: int) -> None:
    """Host and kernel agree on how many rows a block has."""
    for n_rows in (1, 2, 3, 7, 9):
        for type_ in (T.Q8_0, T.F16):
            found, w, x = product(type_, 64, n_rows, n)
            check(found, w, x, type_)


@pytest.mark.parametrize("type_", names([T.Q8_0, T.Q4_K, T.Q6_K, T.Q2_K, T.IQ4_XS, T.F16, T.F32]))
def test_few_rows_together_are_each_row_alone(type_: T) -> None:
    """To the last bit."""
    k, x = 1280, activations(MV_ROWS, 1280)
    results = []
    for n in range(1, MV_ROWS + 1):
        run = ProductRun(batch_invariant=True)
        w = run.tensor("w", type_, (k, 35))
        results += run.run(run.graph.mul_mat(w, run.input("x", x[:n]), "y"), seed=n)
    for n, found in enumerate(results, 1):
        np.testing.assert_array_equal(found, results[-1][:n])


def test_order_of_blocks_and_warps_does_not_matter() -> None:
    for n in (5, 70):
        results = [product(T.Q4_K, 512, 67, n, seed)[0] for seed in (1, 2, 3)]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_ranges_of_rows() -> None:
    run = ProductRun()
    w = run.tensor("w", T.Q4_0, (320, 50))
    x = activations(3, 320)
    (found,) = run.run(run.graph.mul_mat(w.rows(7, 21), run.input("x", x), "y"))
    check(found, run.weights["w"][7:28], x, T.Q4_0)


@pytest.mark.parametrize("type_", names([T.Q8_0, T.Q6_K, T.Q4_K_R4, T.F16, T.F32]))
@pytest.mark.parametrize("n", [1, 5, 20])
def test_mul_mat_heads(type_: T, n: int) -> None:
    """Head slices that start inside a row and overlap nothing; matrices one after the other."""
    heads, k, rows = 3, 256, fitting(type_, 36)
    run = ProductRun()
    w = run.tensor("w", type_, (k, rows, heads))
    x = activations(n, 40 + heads * (k + 24))
    node = run.graph.mul_mat_heads(w, HeadSlice(run.input("x", x), 40, k, k + 24), "y")
    (found,) = run.run(node)
    for h in range(heads):
        part = x[:, 40 + h * (k + 24) :][:, :k]
        check(found[:, h * rows : (h + 1) * rows], run.weights["w"][h], part, device_type(type_))


def test_bad_values_are_seen() -> None:
    """A NaN or Inf among the activations reaches every result of its row, and no other."""
    for n in (2, 20):
        for type_ in (T.Q8_0, T.Q4_K, T.F16):
            run = ProductRun()
            w = run.tensor("w", type_, (256, 40))
            x = activations(n, 256)
            x[1, 100] = np.nan if n == 2 else np.inf
            (found,) = run.run(run.graph.mul_mat(w, run.input("x", x), "y"))
            assert not np.isfinite(found[1]).any()
            assert np.isfinite(np.delete(found, 1, axis=0)).all()


def test_large_activations_do_not_overflow() -> None:
    """Beyond the range of f16."""
    for type_ in (T.F16, T.BF16, T.Q8_0):
        for n in (2, 20):
            run = ProductRun()
            w = run.tensor("w", type_, (256, 40))
            x = activations(n, 256) * np.float32(1e6)
            (found,) = run.run(run.graph.mul_mat(w, run.input("x", x), "y"))
            check(found, run.weights["w"], x, type_)


@pytest.mark.parametrize("type_", names([T.Q8_0, T.Q4_K, T.F16]))
@pytest.mark.parametrize("spare", [0, 20])
def test_products_of_one_input_share_a_launch(type_: T, spare: int) -> None:
    """Up to three matrices of a type; every node is shown only when it was computed."""
    sizes, n = (5, 64, 33, 18), 3
    run = ProductRun(spare=spare)
    x = run.input("x", activations(n, 256))
    nodes = [run.graph.mul_mat(run.tensor(f"w{i}", type_, (256, size), i), x, f"y{i}") for i, size in enumerate(sizes)]
    other = run.graph.mul_mat(run.tensor("other", T.Q4_0, (256, 10)), x, "other")
    *found, last = run.run(*nodes, other)
    for i, y in enumerate(found):
        check(y, run.weights[f"w{i}"], run.values[x], type_)
    check(last, run.weights["other"], run.values[x], T.Q4_0)
    launches = [launch for launch in run.launched if launch.kernel.startswith("mv_")]
    assert len(launches) == 3
    shown = [node for node, _, _ in run.program.node_ops()]
    assert all(shown.count(node) == 1 for node in nodes)


def test_matrices_of_a_shared_launch_keep_their_results() -> None:
    """A token alone and with others, to the last bit."""
    x, results = activations(MV_ROWS, 1280), []
    for n in (1, MV_ROWS):
        run = ProductRun(batch_invariant=True)
        node = run.input("x", x[:n])
        products = [run.graph.mul_mat(run.tensor(name, T.Q6_K, (1280, 35)), node, name) for name in ("a", "b")]
        results.append(run.run(*products))
    for one, eight in zip(*results, strict=True):
        np.testing.assert_array_equal(one, eight[:1])


def test_kernels_by_bucket() -> None:
    """One kernel per number of rows, and grids that cover the largest step of a bucket."""
    run = ProductRun(spare=600)
    w = run.tensor("w", T.Q4_K, (256, 130))
    node = run.graph.mul_mat(w, run.input("x", activations(1, 256)), "y")
    run.run(node)
    for n in (1, 8, 9, 512):
        products = [r for r in run.program.launches(Counts(n, 1, n)) if r.kernel[:3] in ("mv_", "mm_")]
        assert [r.kernel for r in products] == ["mv_q4_K_one" if n == 1 else "mv_q4_K" if n <= MV_ROWS else "mm_q4_K"]
        assert products[0].grid[1] == (1 if n <= MV_ROWS else -(-n // 64))


@pytest.mark.parametrize("type_", names([T.Q4_K, T.Q8_0, T.F16, T.F32]))
def test_few_tiles_are_divided_by_columns(type_: T) -> None:
    """Parts of the columns side by side where a matrix would leave most of a device idle, none where it is large."""
    for k, heads, n in ((1280, 1, 9), (1280, 1, 70), (512, 3, 20)):
        run = ProductRun()
        w = run.tensor("w", type_, (k, 70, heads))
        x = activations(n, k * heads)
        (found,) = run.run(run.graph.mul_mat_heads(w, HeadSlice(run.input("x", x), 0, k, k), "y"))
        for h in range(heads):
            check(found[:, 70 * h : 70 * h + 70], run.weights["w"][h], x[:, k * h : k * h + k], type_)
        kernels = {launch.kernel: launch for launch in run.launched}
        assert kernels[f"mm_{device_format(type_).name}"].grid[2] == heads * (k // 256)
        assert "weights_add_parts" in kernels
    run = ProductRun(spare=3000)
    w = run.tensor("w", T.Q8_0, (64, 64 * 20))
    run.run(run.graph.mul_mat(w, run.input("x", activations(10, 64)), "y"))
    launches = {r.kernel: r for r in run.program.launches(Counts(3000, 1, 3000))}
    assert launches["mm_q8_0_n128"].grid == (10, 24, 1) and "weights_add_parts" not in launches


@emulation_only
@pytest.mark.parametrize("grid", [(1, 1), (7, 1), (5, 16), (288, 32), (3, 37)])
def test_tiles_of_products_are_visited_in_groups(grid: tuple[int, int], tmp_path: Path) -> None:
    """Every tile once; blocks that run together (two on each of 132 SMs) share weight rows and activation rows."""
    source = tmp_path / "order.cu"
    source.write_text(
        '#include "weights_gemm.cuh"\nextern "C" __global__ void __launch_bounds__(32) order(int* out) {\n'
        "  const Place p = place_of();\n  int* to = out + 2 * (blockIdx.y * gridDim.x + blockIdx.x);\n"
        "  if (threadIdx.x == 0) to[0] = p.weights, to[1] = p.tokens;\n}\n"
    )
    order = np.full((grid[0] * grid[1], 2), -1, np.int32)
    run_kernel("order", grid, 32, order, source=source)
    assert len({tuple(x) for x in order.tolist()}) == len(order)
    assert (order >= 0).all() and (order < grid).all()
    reads = sum(len(set(order[i : i + 264, 0].tolist())) for i in range(0, len(order), 264))
    waves = math.ceil(len(order) / 264)
    assert reads <= grid[0] * math.ceil(grid[1] / 16) + 2 * waves
