"""Run Python against tests/fake_cuda.c in place of the NVIDIA driver: everything above it is the real thing."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.native.kernel_cache import cache_root

_SOURCE = Path(__file__).with_name("fake_cuda.c")
TESTS = Path(__file__).parent

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build the stand-in for libcuda")


@functools.cache
def library_folder() -> Path:
    """Folder with libcuda.so.1, compiled once."""
    folder = cache_root() / "fake-cuda" / hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = folder / "libcuda.so.1"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-w", "-o", name, str(_SOURCE)], check=True)
        os.replace(name, target)
    return folder


def run(arguments: list[str], **environment: object) -> subprocess.CompletedProcess[str]:
    """Run `python arguments`, with FAKE_CUDA_* and other variables set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "IK_CUDA", "FAKE_CUDA"))}
    path = os.pathsep.join(str(folder) for folder in (TESTS, TESTS.parent, TESTS.parent / "tools"))
    env |= {"LD_LIBRARY_PATH": str(library_folder()), "PYTHONPATH": path}
    env |= {k: str(v) for k, v in environment.items()}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=False, timeout=120
    )


def run_scenario(name: str, **environment: object) -> str:
    """Run a function of cuda_driver_scenarios.py; returns what it prints."""
    result = run([str(TESTS / "cuda_driver_scenarios.py"), name], **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


class Launcher:
    """Lets the stand-in run kernels by emulation; keeps what was launched and the first failure."""

    def __init__(self) -> None:
        from cuda_emulation import Launch, launch_now
        from emulated_kernels import kernel

        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_count.restype = ctypes.c_long
        self.launches: list[Launch] = []
        self.failure: Exception | None = None

        def run_kernel(name: bytes, gx: int, gy: int, gz: int, block: int, shared: int, params: Any) -> int:
            try:
                entry = kernel(name.decode())
                args: list[Any] = []
                for i, kind in enumerate(entry.types):
                    if kind == "q":
                        args.append(ctypes.c_int64.from_address(params[i]).value)
                    elif kind == "i":
                        args.append(np.int32(ctypes.c_int32.from_address(params[i]).value))
                    else:
                        args.append(np.float32(ctypes.c_float.from_address(params[i]).value))
                self.launches.append(Launch(entry.name, (gx, gy, gz), block, shared, tuple(args)))
                launch_now(self.launches[-1], len(self.launches), entry)
            except Exception as e:
                self.failure = self.failure or e
                return 719
            return 0

        kinds = [ctypes.c_char_p, *[ctypes.c_uint] * 5, ctypes.POINTER(ctypes.c_void_p)]
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(run_kernel)
        self.library.fake_set_launcher(self._callback)

    def live(self) -> list[int]:
        """Live memory, pinned memory, streams, events, modules, graphs, executable graphs, registered memory."""
        return [self.library.fake_count(i) for i in range(8)]
