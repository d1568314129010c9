"""The emulation itself: it computes what the GPU would, and notices what the GPU would punish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, emulation_only, needs_emulation, run_kernel
from emulated_kernels import KernelError

from ikcli.backends.cuda.device import Launch

pytestmark = needs_emulation


def test_row_sum(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 777), dtype=np.float32)
    y = np.full(5, np.nan, np.float32)
    run_kernel("util_row_sum", 5, 256, x, y, np.int32(777))
    np.testing.assert_allclose(y, x.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-4)


@emulation_only
def test_wrong_arguments_are_refused() -> None:
    y = np.zeros(4, np.float32)
    with pytest.raises(KernelError, match=r"takes 3 arguments"):
        run_kernel("util_fill", 1, 256, y, 4)
    with pytest.raises(KernelError, match=r"argument 2 of util_fill must be float32, got int"):
        run_kernel("util_fill", 1, 256, y, 4, 1)
    with pytest.raises(KernelError, match=r"multiple of 32 up to 256"):
        run_kernel("util_fill", 1, 512, y, 4, np.float32(1))


@emulation_only
def test_writes_outside_an_array_are_found() -> None:
    with pytest.raises(KernelError, match=r"memory around an allocation"):
        run_kernel("util_fill", 1, 256, np.zeros(4, np.float32), 5, np.float32(1))
    with pytest.raises(KernelError, match=r"outside of memory"):
        run_kernel("util_fill", 1, 256, np.zeros(4, np.float32), 256, np.float32(1))


@emulation_only
def test_device_runs_work_only_when_waited_for() -> None:
    device = EmulatedDevice()
    stream, copies, event = device.stream(), device.stream(), device.event()
    a = device.alloc(4 * 300, "test")
    host = device.pinned(4 * 300, "test")
    values = host.array.view(np.float32)
    device.launch(stream, Launch("util_fill", (2, 1, 1), 256, 0, (a.address, 300, np.float32(2.5))))
    device.record(stream, event)
    device.wait(copies, event)
    device.download(copies, values, a.address)
    assert np.isnan(values).all()
    device.synchronize(copies)
    assert (values == 2.5).all()
    graph = device.capture(stream, lambda: device.fill(stream, a.address, 0, a.n_bytes))
    device.replay(stream, graph)
    device.replay(stream, graph)
    device.download(stream, values, a.address)
    device.synchronize()
    assert (values == 0).all() and device.launches == {"util_fill": 1} and device.owners() == {"test": 1200}
    device.close()


FAULTS = {  # kernel: its body, what the emulation says
    "fault_divergent": (
        "if (threadIdx.x < 32) __syncthreads();",
        r"after threads left|left the kernel while others wait",
    ),
    "fault_mixed": ("if (threadIdx.x < 32) __syncthreads();\n else __syncthreads();", r"barriers of lines"),
    "fault_warp": ("if (threadIdx.x & 1) y[0] = shx(1.f, 1);", r"left the kernel while lanes|lanes that never come"),
    "fault_overrun": ("SMEM_DECL\n smem_raw[64 + threadIdx.x] = 1;", r"wrote past the 64 bytes"),
    "fault_static": ("IK_SHARED(int, a, 4)\n a[4] = 1;", r"wrote past a static shared array"),
    "fault_vector": (
        "SMEM_DECL\n *(float4*)(smem_raw + 4) = make_float4(0, 0, 0, 0);",
        r"misaligned vector access \(faults\.cu:\d+\)",
    ),
    "fault_cp16": ("SMEM_DECL\n cp16(smem_raw + 56, y, true);", r"shared address out of range"),
    "fault_null": ("y = nullptr; y[threadIdx.x] = 1;", r"outside of memory at .*\(faults\.cu:\d+\)"),
    "fault_stack": ("volatile char a[300000]; a[0] = a[threadIdx.x];", r"outside of memory"),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with a kernel per fault."""
    source = tmp_path_factory.mktemp("kernels") / "faults.cu"
    kernels = [f'extern "C" __global__ void {name}(float* y) {{\n{body}\n}}\n' for name, (body, _) in FAULTS.items()]
    source.write_text('#include "common.cuh"\n' + "".join([*kernels, POISON]))
    return source


@emulation_only
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, faults: Path) -> None:
    y = np.zeros(64, np.float32)
    with pytest.raises(KernelError, match=FAULTS[name][1]):
        run_kernel(name, 2, 64, y, shared=64, source=faults)
    run_kernel("util_fill", 1, 256, y, 64, np.float32(3))  # a failure leaves nothing behind
    assert (y == 3).all()


POISON = """
extern "C" __global__ void poison(float* y, int early) {
  SMEM_DECL
  IK_SHARED(float, s, 64)
  const float* d = (const float*)smem_raw;
  u8* mine = smem_raw + 1024 + threadIdx.x * 16;
  cp16(mine, y, true);
  cp_commit();
  if (!early) cp_wait<0>();
  y[8 + threadIdx.x] = s[threadIdx.x] + d[threadIdx.x];
  y[72 + threadIdx.x] = *(float*)mine;
}
"""


@emulation_only
@pytest.mark.parametrize("early", [0, 1])
def test_uninitialised_shared_memory_is_nan(early: int, faults: Path) -> None:
    y = np.ones(136, np.float32)
    run_kernel("poison", 1, 64, y, np.int32(early), shared=2048, source=faults)
    assert np.isnan(y[8:72]).all() and (np.isnan(y[72:]).all() if early else (y[72:] == 1).all())


def test_roof_kernels_do_the_work_they_count(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 32, 4 * 4099, dtype=np.uint32)
    y, nothing = np.zeros_like(x), np.zeros(1, np.uint32)
    run_kernel("roof_copy", 2, 512, x, y, 4099)
    run_kernel("roof_read", 1, 512, x, nothing, 4099)
    assert (x == y).all() and nothing[0] == 0
    x[0] ^= np.bitwise_xor.reduce(x) ^ np.uint32(0x9E3779B9)
    run_kernel("roof_read", 1, 512, x[:2048].copy(), nothing, 512)
    assert nothing[0] == 0

    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    words, out = np.zeros((6, 32), np.uint32), np.zeros(256, np.float32)
    for lane in range(32):
        row, col = lane // 4, lane % 4 * 2
        for i in range(4):
            words[i, lane] = a[row + 8 * (i & 1), col + 8 * (i >> 1) :][:2].copy().view(np.uint32)[0]
        for i in range(2):
            words[4 + i, lane] = np.ascontiguousarray(b[col + 8 * i :, row][:2]).view(np.uint32)[0]
    run_kernel("roof_mma_f16", 1, 256, words, out, np.int32(3))
    product = 3 * 8 * (a.astype(np.float64) @ b.astype(np.float64))
    assert out[:32].sum() == pytest.approx(product.sum(), rel=1e-4)
    run_kernel("roof_mma_s8", 1, 256, words, out, np.int32(2))
    bytes_a = words[:4].copy().view(np.int8).reshape(4, 8, 4, 4)  # fragment, row, thread of the row, byte
    bytes_b = words[4:].copy().view(np.int8).reshape(2, 8, 4, 4)  # fragment, column, thread, byte
    whole = sum(
        int(bytes_a[i, :, t, e].astype(int).sum()) * int(bytes_b[i >> 1, :, t, e].astype(int).sum())
        for i in range(4) for t in range(4) for e in range(4)
    )  # fmt: skip
    assert out[:32].astype(np.float64).sum() == pytest.approx(2 * 8 * whole, rel=1e-5)
    run_kernel("roof_dp4a", 1, 256, words, out, np.int32(1))
    va, vb = words[0], words[1].view(np.int8).reshape(32, 4).astype(int)
    wanted = [
        sum(i + int((np.array([va[n] + np.uint32(i)]).view(np.int8) * vb[n]).sum()) for i in range(16))
        for n in range(32)
    ]
    np.testing.assert_array_equal(out[:32], np.array(wanted, np.float32))
