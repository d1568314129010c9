"""The cache of compiled kernels: loading without Numba, damaged files, folders that cannot be written, two at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ikcli import system_files
from ikcli.backends.cpu.threads import LAUNCH
from ikcli.errors import IkError
from ikcli.native import compile_pool, kernel_cache, kernel_library
from ikcli.native.kernel_cache import KernelKey, cache_dir, is_cached
from ikcli.native.kernel_library import KernelLibrary, native_function
from ikcli.system_files import lock_byte

NOOP = KernelKey("executor", "make_noop")
LOAD = """
import sys
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import KernelLibrary, native_function
library = KernelLibrary()
library.require([KernelKey("executor", "make_noop")])
native_function(library[KernelKey("executor", "make_noop")], 3)(0, 0, 1)
print("numba" in sys.modules)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with one kernel, compiled once for all tests."""
    root = tmp_path_factory.mktemp("compiled")
    run = load_in_process(root)
    assert run.returncode == 0, run.stderr
    return root


@pytest.fixture
def cache(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file of NOOP in a private copy of the compiled cache."""
    shutil.copytree(compiled, tmp_path / "cache")
    use(tmp_path / "cache", monkeypatch)
    return cache_dir() / NOOP.file_name


def use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IK_CACHE_DIR", str(root))


def load_in_process(root: Path) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, IK_CACHE_DIR=str(root))
    command = [sys.executable, "-c", LOAD]
    folder = Path(kernel_cache.__file__).parents[2]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_cached_kernel_needs_no_numba(compiled: Path) -> None:
    run = load_in_process(compiled)
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stderr


def test_loading_does_not_write(cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in cache.parent.iterdir()}
    library = KernelLibrary()
    library.require([NOOP])
    assert native_function(library[NOOP], 3)(0, 0, 1) == 0
    assert {p: p.stat().st_mtime_ns for p in cache.parent.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "text", "no symbol", "folder"])
def test_damaged_files_are_compiled_again(cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = cache.read_bytes()
    head, _, code = good.partition(b"\n")
    flipped = code[:700] + bytes([code[700] ^ 1]) + code[701:]
    cache.unlink()
    if damage == "folder":
        cache.mkdir()
        with pytest.raises(IkError, match="compiling kernels failed"):
            KernelLibrary().require([NOOP])
        return
    cache.write_bytes(
        {
            "truncated": good[: len(good) // 2],
            "empty": b"",
            "flipped": head + b"\n" + flipped,
            "text": b"not a kernel",
            "no symbol": head.split(b" ")[0] + b"\n" + code,
        }[damage]
    )
    assert not is_cached(NOOP)
    compiled: list[KernelKey] = []

    def compile_kernels(keys: list[KernelKey], progress: object) -> None:
        compiled.extend(keys)
        cache.write_bytes(good)

    monkeypatch.setattr(kernel_library, "compile_kernels", compile_kernels)
    library = KernelLibrary()
    library.require([NOOP])
    assert compiled == [NOOP] and library[NOOP] and is_cached(NOOP)


def test_a_file_that_stays_damaged_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_bytes(b"ik-kernel-1")
    monkeypatch.setattr(kernel_library, "compile_kernels", lambda keys, progress: None)
    with pytest.raises(IkError, match=f"{cache.name}: the kernel just compiled cannot be read; set IK_CACHE_DIR"):
        KernelLibrary().require([NOOP])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    use(tmp_path / "file", monkeypatch)
    with pytest.raises(IkError, match=r"file/kernels/.*cannot be written \(.*\); set IK_CACHE_DIR to a folder"):
        KernelLibrary().require([NOOP])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_read_only_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached can be used; what is not is an error."""
    cache.parent.chmod(0o500)
    KernelLibrary().require([NOOP])
    with pytest.raises(IkError, match="cannot be written"):
        KernelLibrary().require([LAUNCH])
    cache.parent.chmod(0o700)


def test_two_processes_compile_the_same_kernel(tmp_path: Path) -> None:
    env = dict(os.environ, IK_CACHE_DIR=str(tmp_path))
    folder = Path(kernel_cache.__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", LOAD], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate(timeout=120)[0] for p in runs] == ["False\n"] * 2
    names = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(names) == sorted(["lock", NOOP.file_name, NOOP.code_name])  # no temporary files


def test_the_worker_ignores_the_current_folder(tmp_path: Path) -> None:
    """A module of the user's that is called like one of ours must not be imported."""
    (tmp_path / "numba.py").write_text("raise SystemExit('wrong numba')")
    script = tmp_path / "load.py"
    script.write_text("import sys\nsys.path.remove(sys.path[0])\n" + LOAD)
    folder = str(Path(kernel_cache.__file__).parents[2])
    env = dict(os.environ, IK_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=folder)
    run = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stderr


def test_every_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a kernel's module or of anything it imports gives another file, so nothing stale is ever loaded."""
    package = tmp_path / "ikcli"
    shutil.copytree(Path(kernel_cache.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_cache, "PACKAGE_DIR", package)
    cpu = package / "backends" / "cpu"
    key, other = KernelKey("matmul", "make_mul_mat", ("q8_0",)), KernelKey("executor", "make_noop")
    names, others = [], []
    native = [package / "native" / name for name in ("jit.py", "isa.py", "simd/vec.py", "simd/emit.py")]
    for path in (None, *native, *(cpu / "kernels" / name for name in ("common.py", "formats.py", "matmul.py"))):
        if path:
            path.write_text(path.read_text() + "\n# edited\n")
        kernel_cache.source_digest.cache_clear()
        kernel_cache._source.cache_clear()
        names.append(key.file_name)
        others.append(other.file_name)
    kernel_cache.source_digest.cache_clear()
    kernel_cache._source.cache_clear()
    assert len(set(names)) == len(names)
    assert others[-3:] == [others[-1]] * 3 and len(set(others)) > 1  # what it does not use does not matter


def test_keys_have_their_own_files() -> None:
    keys = [KernelKey("a", "f"), KernelKey("b", "f"), KernelKey("a", "f", (1,)), KernelKey("a", "f", (1, 2)),
            KernelKey("a", "f", ("x" * 200,)), KernelKey("a", "f", ("x" * 201,))]  # fmt: skip
    names = [k.file_name for k in keys]
    assert len(set(names)) == len(keys)
    assert all(len(n) < 120 for n in names)


def test_progress_counts_every_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    seen: list[tuple[int, int]] = []
    compile_pool.compile_kernels([NOOP, LAUNCH], lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)] and is_cached(NOOP) and is_cached(LAUNCH)
    compile_pool.compile_kernels([NOOP], lambda done, total: seen.append((done, total)))
    assert seen[2:] == [(1, 1)]


def test_workers_that_stay_and_workers_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    kept: dict[tuple[str, ...], list[compile_pool._Worker]] = {}
    monkeypatch.setattr(compile_pool, "_kept", kept)
    compile_pool.compile_kernels([NOOP])
    ((first,),) = kept.values()
    compile_pool.compile_kernels([LAUNCH])
    ((again,),) = kept.values()
    assert again is first and first.process.poll() is None
    with pytest.raises(IkError, match=r"(?s)compiling kernels failed: .*make_nothing"):
        compile_pool.compile_kernels([KernelKey("executor", "make_nothing")])
    assert list(kept.values()) == [[]] and first.process.poll() is not None


def test_workers_start_early_where_no_kernel_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    early: dict[tuple[str, ...], list[compile_pool._Worker]] = {}
    monkeypatch.setattr(compile_pool, "_early", early)
    monkeypatch.setattr(compile_pool, "_kept", None)
    monkeypatch.setattr(compile_pool, "_most", 2)
    compile_pool.start_early()
    compile_pool.start_early()
    ((first, second),) = early.values()
    monkeypatch.setattr(compile_pool, "_Worker", None)  # no further one
    compile_pool.compile_kernels([NOOP])
    assert early == {} and is_cached(NOOP) and (first.process.poll(), second.process.poll()) == (0, 0)
    compile_pool.start_early()
    assert early == {}


def test_workers_share_kernels_by_module_and_begin_with_those_that_take_long() -> None:
    small = [KernelKey("basic", f"make_{name}") for name in "abcdefgh"]
    long = [KernelKey("attention_few", "f"), KernelKey("matmul", "f"), KernelKey("matmul", "g")]
    first, second = compile_pool._shares([*small, *long], 2)
    assert list(first) == long[:1] and list(second) == [*long[1:], *small]
    assert [len(share) for share in compile_pool._shares(long, 3)] == [1, 2, 0]


@pytest.mark.skipif(system_files.fcntl is None, reason="no locks on files")
def test_a_process_that_dies_while_it_compiles_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    cache_dir().mkdir(parents=True)
    script = """
import sys, time
from ikcli.native import compile_pool
from ikcli.native.kernel_cache import KernelKey, cache_dir
from ikcli.system_files import lock_byte
lock = open(cache_dir() / "lock", "ab")
print(lock_byte(lock, compile_pool._place(KernelKey("executor", "make_noop"))), flush=True)
time.sleep(60)
"""
    folder = Path(kernel_cache.__file__).parents[2]
    env = dict(os.environ, IK_CACHE_DIR=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", script], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    with (cache_dir() / "lock").open("ab") as lock:
        assert not lock_byte(lock, compile_pool._place(NOOP)) and lock_byte(lock, compile_pool._place(LAUNCH))
    waiter = threading.Thread(target=compile_pool.compile_kernels, args=([NOOP],))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive() and not is_cached(NOOP)
    holder.kill()
    holder.communicate()
    waiter.join(60)
    assert is_cached(NOOP)


def test_a_kernel_whose_code_is_known_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cache_dir() / NOOP.code_name).read_bytes() == cache.read_bytes()
    cache.unlink()

    def refuse(*args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compile_pool, "_Worker", refuse)
    compile_pool.compile_kernels([NOOP])
    assert is_cached(NOOP)
    cache.unlink()
    (cache_dir() / NOOP.code_name).write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="compiled"):
        compile_pool.compile_kernels([NOOP])
