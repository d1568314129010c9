"""Kernels that a package brings along: which machines use which, and what does not fit is not loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import build_kernels
import llvmlite.binding as llvm
import pytest

from ikcli.native import isa, kernel_cache, kernel_pack
from ikcli.native.isa import ISA
from ikcli.native.kernel_cache import KernelKey, find_entry, is_cached, pack_digest, pack_entry
from ikcli.native.kernel_pack import KernelPack, write_pack

NOOP = KernelKey("executor", "make_noop")
OTHER = KernelKey("executor", "make_launch")
SKYLAKE_X = "avx avx2 fma f16c bmi bmi2 avx512f avx512cd avx512bw avx512dq avx512vl"
CASCADE_LAKE = f"{SKYLAKE_X} avx512vnni"
ICE_LAKE = f"{CASCADE_LAKE} avx512vbmi avx512vbmi2 avx512ifma avx512bitalg avx512vpopcntdq gfni vaes vpclmulqdq"
ZEN_4 = f"{ICE_LAKE} avx512bf16 sse4a"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx512bf16 avxvnni avx512fp16 amx-int8"
HASWELL = "avx avx2 fma f16c bmi bmi2"


@pytest.mark.parametrize(
    ("features", "level"),
    [
        pytest.param(ZEN_4, "avx512", id="zen4"),
        pytest.param(SAPPHIRE_RAPIDS, "avx512", id="sapphire-rapids"),
        pytest.param(ICE_LAKE, None, id="ice-lake"),
        pytest.param(CASCADE_LAKE, "avx512vnni", id="cascade-lake"),
        pytest.param(SKYLAKE_X, None, id="skylake-x"),
        pytest.param(f"{HASWELL} avxvnni gfni", "avxvnni", id="alder-lake"),
        pytest.param(f"{HASWELL} sse4a", "avx2", id="zen3"),
        pytest.param("avx f16c", None, id="ivy-bridge"),
    ],
)
def test_level_of_a_machine(features: str, level: str | None) -> None:
    assert isa.packed_level(ISA("any", "any", "", frozenset(features.split()))) == level
    assert isa.packed_level(ISA("neon", "any", "", frozenset(features.split()), isa.ARM64)) is None


@pytest.mark.parametrize("level", [level for levels in isa.PACKED.values() for level in levels])
def test_level_of_a_level(level: str) -> None:
    assert isa.packed_level(isa.level(level)) == level


def test_levels_differ_in_every_feature_that_kernels_ask_for() -> None:
    """Packed kernels would else compute something that the machine's own would not."""
    known = set(llvm.get_host_cpu_features()) | isa.level("avx512").features
    asked = set[str]()
    for folder in ("native/simd", "backends/cpu"):
        for path in (kernel_cache.PACKAGE_DIR / folder).rglob("*.py"):
            asked |= set(re.findall(r'"([\w.-]+)"', path.read_text(encoding="utf-8"))) & known
    x86 = {name for name in asked if name[:3] in ("avx", "gfn", "fma", "f16", "amx", "bmi", "sse")}
    assert "gfni" in x86 and x86 <= isa._DECISIVE | isa._DECISIVE_512


def test_pack(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.pack"
    kernels = {"b-1.kernel": b"second" * 99, "a-1.kernel": b"", "ab-1.kernel": b"third"}
    write_pack(path, "d1", kernels)
    pack = KernelPack(path, "d1")
    assert len(pack) == 3 and {name: pack.find(name) for name in kernels} == kernels
    assert pack.find("b-1") is None and pack.find("1.kernel") is None and pack.find("") is None
    other = KernelPack(path, "d2")
    assert len(other) == 0 and other.find("b-1.kernel") is None
    whole = path.read_bytes()
    for damaged in (whole[:10], whole[: len(whole) - 20], b"", b"\xff" * 300, whole[:-20] + b"\0" * 20):
        path.write_bytes(damaged)
        assert KernelPack(path, "d1").find("b-1.kernel") is None
    path.unlink()
    assert KernelPack(path, "d1").find("b-1.kernel") is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of this machine's pack in a package, with an empty cache."""
    level = isa.packed_level(isa.current())
    if level is None:
        pytest.skip("no level of packed kernels suits this machine")
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_pack, "FOLDER", tmp_path)
    forget()
    yield tmp_path / kernel_pack.pack_name(level)
    forget()


def forget() -> None:
    kernel_cache._pack.cache_clear()


def test_kernels_of_the_package_are_found_if_all_fits(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = isa.level(isa.packed_level(isa.current()) or "")
    assert find_entry(NOOP) is None
    contents = pack_entry("symbol", b"code")
    write_pack(package, pack_digest(level), {NOOP.file_name: contents, OTHER.file_name: contents[:-1]})
    forget()
    assert find_entry(NOOP) == ("symbol", b"code") and is_cached(NOOP)
    assert not is_cached(OTHER)  # damaged
    assert not kernel_cache.cache_dir().exists()
    kernel_cache.cache_dir().mkdir(parents=True)
    (kernel_cache.cache_dir() / NOOP.file_name).write_bytes(pack_entry("own", b"code"))
    assert find_entry(NOOP) == ("own", b"code")
    (kernel_cache.cache_dir() / NOOP.file_name).unlink()
    monkeypatch.setattr(kernel_cache, "_MAGIC", "other sources")  # stands for any change of what names are made of
    assert not is_cached(NOOP)
    monkeypatch.undo()


def test_kernels_of_other_versions_are_not_found(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = isa.level(isa.packed_level(isa.current()) or "")
    write_pack(package, pack_digest(level), {NOOP.file_name: pack_entry("symbol", b"code")})
    version = kernel_cache._version
    monkeypatch.setattr(kernel_cache, "_version", lambda name: version(name) + "1")
    forget()
    assert not is_cached(NOOP)


def test_kernels_that_are_packed(tmp_path: Path) -> None:
    assert len(set(build_kernels.models())) == len(list(build_kernels.models()))
    wanted: dict[KernelKey, None] = {}
    for arch, mix in (("qwen3moe", "Q4_K_M"), ("gpt-oss", "MXFP4")):
        build_kernels.write_header(tmp_path / "model.gguf", arch, mix)
        build_kernels.planned(tmp_path / "model.gguf", wanted)
    texts = {key.text for key in wanted}
    assert {"matmul.make_mul_mat(q4_K)", "matmul.make_mul_mat_id(q6_K)", "matmul.make_mul_mat_id(mxfp4)"} <= texts
    assert {"kv.make_kv_store(q8_0)", "kv.make_kv_store(f16)", "moe.make_route()", "embed.make_embed(q8_0)"} <= texts
