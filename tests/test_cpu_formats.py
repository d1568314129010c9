"""Every quantized weight type in the kernels: exact activations, stored bytes of the reference; `-rtr`.

Activations are whole numbers up to 127, with 127 in every block of 32: rounding them to int8 loses nothing, so that the
result differs from float64 only by the rounding of a float32 sum.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model
from kernel_harness import Harness, Segment
from weight_bytes import QUANTIZED, fitting, params, stored

from ikcli.backends.cpu.kernels.rowformat import PREFETCH_BYTES, prefetch_step
from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS
from ikcli.engine.run import repacking
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight
from ikcli.native import isa
from ikcli.quant import repack
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import get_format, row_size, tensor_size
from ikcli.settings.run import RunConfig

Array = npt.NDArray[Any]
N_TOKENS = (1, 2, 4, 13)
TERNARY = (GGMLType.IQ1_BN, GGMLType.IQ2_BN, GGMLType.IQ2_BN_R4)
TWINS = [t.type for t in TYPES.values() if t.base is not None]


def whole_numbers(n: int, k: int) -> Array:
    x = np.random.default_rng([n, k]).integers(-127, 128, (n, k)).astype(np.float32)
    x[:, ::32] = 127
    return x


def check_products(type_: GGMLType, data: Array, k: int, n_rows: int) -> None:
    guarded = np.full(data.size + 4096, 0xFF, np.uint8)
    guarded[: data.size] = data
    w = dequantize(data, type_, (k, n_rows)).astype(np.float64) * TYPES[type_].matmul_scale
    run = Harness(max(N_TOKENS), 64, RULES)
    x = run.input("x", k)
    run.compile(run.graph.mul_mat(Weight("w", type_, (k, n_rows)), x, "y"), 2, {"w": guarded})
    for n in N_TOKENS:
        a = whole_numbers(n, k)
        found = run([Segment(n)], {x: a})
        limit = 3e-6 * (np.abs(a) @ np.abs(w).T)  # codes are biased by up to 128, which costs a few bits
        if type_ in TERNARY:  # and more in rows that are almost only zeros
            limit += 3e-6 * np.abs(a).sum(1, keepdims=True) * np.abs(w).max(1)
        error = np.abs(found - a.astype(np.float64) @ w.T)
        assert (error <= limit).all(), f"{n} tokens: {(error / (limit + 1e-30)).max():.1f} times the limit"
    check_rows_alone(type_, guarded, k, n_rows)


def check_rows_alone(type_: GGMLType, data: Array, k: int, n_rows: int) -> None:
    """In programs for generation a row does not depend on the others, to the last bit."""
    run = Harness(BATCH_INVARIANT_ROWS, 64, RULES, batch_invariant=True)
    x = run.input("x", k)
    run.compile(run.graph.mul_mat(Weight("w", type_, (k, n_rows)), x, "y"), 1, {"w": data})
    a = np.random.default_rng(k).standard_normal((7, k)).astype(np.float32)
    alone = np.concatenate([run([Segment(1)], {x: row[None]}) for row in a])
    for n in (2, 5, 7):
        np.testing.assert_array_equal(run([Segment(n)], {x: a[:n]}), alone[:n])


@pytest.mark.parametrize("type_", params(QUANTIZED))
def test_exact_activations(type_: GGMLType) -> None:
    block = get_format(type_).block_size
    for k in (256, 768) if block == 256 else (max(64, block), 256, 256 + max(64, block)):
        n_rows = fitting(type_, 44)
        check_products(type_, stored(type_, n_rows, k), k, n_rows)


@pytest.mark.parametrize("type_", params(QUANTIZED))
def test_bytes_of_the_reference(type_: GGMLType, shared_dir: Path) -> None:
    path = shared_dir / "golden" / "quant" / f"{type_.name}.npz"
    if not path.exists():
        pytest.skip(f"no stored bytes of {type_.name}")
    found, source = np.load(path), np.load(shared_dir / "golden" / "quant" / "source.npz")
    names = [key.removesuffix("/f32") for key in source.files if key.endswith("/f32")]
    assert names
    for name in names:
        key = next(f"{name}/{kind}" for kind in ("plain", "imatrix") if f"{name}/{kind}" in found.files)
        n_rows, k = source[f"{name}/f32"].shape[-2:]
        data = np.ascontiguousarray(found[key]).view(np.uint8).reshape(-1)[: tensor_size(type_, (k, n_rows))]
        check_products(type_, data, k, n_rows)


def test_groups_are_never_cut() -> None:
    w = Weight("w", GGMLType.Q4_K_R4, (256, 64))
    for part in (w.rows(2, 8), w.rows(4, 6)):
        run = Harness(1, 64, RULES)
        with pytest.raises(UnsupportedError, match="groups of 4 rows"):
            run.compile(run.graph.mul_mat(part, run.input("x", 256), "y"), 1, {"w": np.zeros(1)})


@pytest.mark.parametrize("type_", params(TWINS))
def test_compiled_repacking(type_: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves every bit where the table of moves says."""
    base, rows = TYPES[type_].base, TYPES[type_].rows
    assert base is not None
    for k, n_rows in ((256, rows), (768, 5 * rows)):
        data = np.random.default_rng(rows).integers(0, 256, (n_rows, row_size(base, k)), dtype=np.uint8)
        before = data.copy()
        monkeypatch.setattr(repack, "_COMPILED_BYTES", 1 << 60)
        wanted = repack.repack_rows(data, type_, k)
        monkeypatch.setattr(repack, "_COMPILED_BYTES", 0)
        np.testing.assert_array_equal(repack.repack_rows(data, type_, k), wanted)
        np.testing.assert_array_equal(data, before)


# --- -rtr -------------------------------------------------------------------------------------------------------------
def with_q8_0(model: MemoryModel) -> MemoryModel:
    """Matrices of layers as Q8_0."""
    for name, t in list(model.tensors.items()):
        if name.startswith("blk.") and len(t.shape) > 1 and t.shape[0] % 32 == 0:
            model.set(name, model.values(name), GGMLType.Q8_0)
    return model


MODELS = {
    "llama": lambda: tiny_model("llama", type_=GGMLType.Q8_0),
    "tied": lambda: tiny_model("llama", tied=True, type_=GGMLType.Q4_0),
    "qwen2": lambda: tiny_model("qwen2", type_=GGMLType.BF16),
    "qwen3moe": lambda: tiny_model(
        "qwen3moe", type_=GGMLType.Q8_0, expert_feed_forward_length=64, expert_count=8, expert_used_count=3
    ),
    "deepseek2": lambda: with_q8_0(tiny_deepseek2()),
}


def logits(path: Path, run_time_repack: bool) -> tuple[Array, Session]:
    config = RunConfig(
        model=path, command="bench", n_ctx=64, n_threads=2, n_threads_batch=2, warmup=False, mmap=False,
        run_time_repack=run_time_repack, type_k="f32", type_v="f32",
    )  # fmt: skip
    session = Session.open(config)
    prompt, more = (np.arange(n, n + 9, dtype=np.int32) for n in (0, 20))
    rows = [np.array(session.decode(Batch.single(prompt, logits="all")))]
    rows += [np.array(session.decode(Batch.single(more[i : i + 1], 9 + i))) for i in range(3)]
    return np.concatenate(rows), session


@pytest.mark.parametrize("name", MODELS)
def test_run_time_repack(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: MemoryModel = MODELS[name]()
    path = write_model(made, tmp_path / "model.gguf")
    plain, first = logits(path, False)
    with closing(first):
        assert "Repacked" not in capsys.readouterr().err
    found, session = logits(path, True)
    with closing(session):
        specs = session.model.specs
        assert specs["token_embd.weight"].type == made.tensors["token_embd.weight"].type
        new = {
            n
            for n, t in made.tensors.items()
            if TYPES[specs[n].type].is_interleaved and not TYPES[t.type].is_interleaved
        }
        assert new == {
            n for n, t in made.tensors.items() if n.endswith(".weight") and repack.can_repack(t.type, t.shape, n)
        }
        assert f"Repacked {len(new)} tensors" in capsys.readouterr().err
    assert new
    # Sums are formed in another order, and now and then an activation is rounded to the other side.
    error = np.abs(found - plain).max(axis=1) / plain.std()
    assert np.median(error) <= 2e-3 and error.max() <= 3e-2


@pytest.mark.parametrize("multiplies_bf16", [True, False])
def test_run_time_repack_of_f16(
    multiplies_bf16: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repacking, "rounds_activations", lambda: multiplies_bf16)
    path = write_model(tiny_model("llama", type_=GGMLType.F16), tmp_path / "model.gguf")
    plain, first = logits(path, False)
    first.close()
    found, session = logits(path, True)
    with closing(session):
        types = {t.type for name, t in session.model.specs.items() if "ffn" in name and len(t.shape) > 1}
    assert types == {GGMLType.BF16_R16 if multiplies_bf16 else GGMLType.F16}
    assert ("f16 tensors were rounded to bf16_r16" in capsys.readouterr().err) == multiplies_bf16
    error = np.abs(found - plain).max(axis=1) / plain.std()
    # 8 significant bits: 1/512 of each weight and activation, through all layers
    assert np.median(error) <= (4e-2 if multiplies_bf16 else 1e-5) and error.max() <= (
        1.5e-1 if multiplies_bf16 else 1e-4
    )


@pytest.mark.parametrize("n_parts", [1, 2, 4, 8])
@pytest.mark.parametrize("step_bytes", [840, 2176])
def test_a_step_prefetches_each_of_its_lines_once(n_parts: int, step_bytes: int) -> None:
    done: list[int | str] = []
    emitter = SimpleNamespace(
        offset=lambda base, *terms: base + sum(terms), prefetch=done.append, barrier=lambda: done.append("barrier")
    )
    for part in range(n_parts):
        prefetch_step(emitter, SimpleNamespace(step_bytes=step_bytes), 1000, part=part, n_parts=n_parts)
    first = 1000 + PREFETCH_BYTES
    assert [line for line in done if line != "barrier"] == list(range(first, first + step_bytes, 64))
    # a core cannot wait for 34 lines at once
    assert done.count("barrier") == (n_parts if n_parts > 1 and step_bytes == 2176 else 0)


def test_the_distance_of_prefetches_fits_the_first_cache() -> None:
    assert isa.first_level_bytes() // 6 >= PREFETCH_BYTES


def test_first_caches_of_packed_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for name in ("avx512", "avx512vnni", "avxvnni", "avx2", "i8mm", "dotprod"):
        monkeypatch.setenv("IK_BUILD_ISA", name)
        sizes[name] = isa.first_level_bytes() >> 10
    assert sizes == {"avx512": 48, "avx512vnni": 32, "avxvnni": 48, "avx2": 32, "i8mm": 48, "dotprod": 48}
    monkeypatch.delenv("IK_BUILD_ISA")
    monkeypatch.setattr(isa.hostinfo, "first_level_bytes", lambda: None)
    assert isa.first_level_bytes() == 48 << 10
