"""The real driver module and the real cuda-bindings package, on top of a stand-in for libcuda."""

from __future__ import annotations

import pytest
from cuda_emulation import needs_emulation
from fake_cuda import TESTS, needs_gcc, run, run_scenario

pytestmark = [needs_gcc, needs_emulation]


@pytest.mark.parametrize("sync", [0, 1])
def test_work(sync: int) -> None:
    run_scenario("work", IK_CUDA_SYNC=sync)


def test_two_devices() -> None:
    run_scenario("two_devices", FAKE_CUDA_DEVICES=2)


REFUSALS = {
    "none": ({"FAKE_CUDA_DEVICES": 0}, "NoDevice the NVIDIA driver finds no GPU"),
    "hidden": (
        {"CUDA_VISIBLE_DEVICES": "-1"},
        "NoDevice the NVIDIA driver finds no GPU; CUDA_VISIBLE_DEVICES is set to '-1'",
    ),
    "driver": ({"FAKE_CUDA_VERSION": 11080}, "DriverTooOld the NVIDIA driver supports CUDA 11.8, "),
    "device": ({"FAKE_CUDA_CC": 75}, "DeviceTooOld Fake GPU 0 has compute capability 7.5; 8.0 or newer is needed"),
    "missing": ({"LD_LIBRARY_PATH": "/nonexistent"}, "DriverMissing no NVIDIA driver on this machine"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_why_there_is_no_gpu(name: str) -> None:
    environment, message = REFUSALS[name]
    if name == "missing" and _real_driver():
        pytest.skip("this machine has an NVIDIA driver")
    first, second = run_scenario("refuse", **environment).splitlines()
    assert first.startswith(message) and second == first.split(" ", 1)[1]


def _real_driver() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_out_of_memory_says_who_has_it() -> None:
    text = run_scenario("out_of_memory")
    assert text.splitlines() == [
        "OutOfMemory out of memory on Fake GPU 0: 1.00 GiB wanted for compute, 0.41 of 1.00 GiB are free",
        "      0.49 GiB weights",
        "      0.10 GiB KV cache",
        "needing less: a smaller micro-batch (-ub); fewer layers on the GPU (-ngl), or tensors elsewhere (-ot); "
        "a smaller context (-c) or cache type (-ctk, -ctv)",
    ]


def test_no_memory_for_graphs_is_an_error_of_its_own() -> None:
    text = run_scenario("no_memory_for_graphs", FAKE_CUDA_GRAPHS=1)
    assert text == "NoGraphMemory Fake GPU 0: no memory for a captured graph (cuGraphInstantiate)\n"


def test_host_memory_is_registered_or_not() -> None:
    assert run_scenario("registered") == "True 1\n"
    assert run_scenario("registered", FAKE_CUDA_REGISTER=0) == "False 0\n"


def test_failed_kernel_is_named() -> None:
    lines = run_scenario("failed_launch").splitlines()
    assert lines[0] == (
        "synchronise 3 LaunchFailed a kernel failed on Fake GPU 0: unspecified launch failure "
        "(CUDA_ERROR_LAUNCH_FAILED, 719); IK_CUDA_SYNC=1 shows which launch it was; the last launches, newest first:"
    )
    assert lines[1] == "  a captured graph"
    lines = run_scenario("failed_launch", IK_CUDA_SYNC=1).splitlines()
    assert lines[0].startswith("replay 2 LaunchFailed ") and "IK_CUDA_SYNC" not in lines[0]
    assert lines[1] == "  util_fill grid (1, 1, 1) block 256 shared 0 args [0, 1, 1.0]" and len(lines) == 3


def test_sessions_run_through_driver_and_package() -> None:
    """Tests of sessions with IK_TEST_GPU: packaged kernels by name, arguments as PTX declares them, real graphs."""
    tests = str(TESTS / "test_cuda_exec_sessions.py")
    chosen = "one_graph or (repetition and changes0) or given_back or too_little_memory"
    result = run(["-m", "pytest", "-p", "no:cacheprovider", "-n", "0", tests, "-k", chosen], IK_TEST_GPU=1)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_wrong_calls_are_refused() -> None:
    assert [line[:75] for line in run_scenario("wrong_calls").splitlines()] == [
        "TypeError kernel util_fill takes (int, int, float32), got (int, int32, float32)"[:75],
        "IkError internal error: kernel no_such_kernel is not in the package",
        "CudaError kernel util_fill needs 1048576 bytes of shared memory; Fake GPU 0 has 232448"[:75],
        "CudaError Fake GPU 0: cuMemsetD8Async failed: an error of the stand-in (CUDA_ERROR, 1)"[:75],
        "ValueError upload of an array that is not contiguous",
        "NoDevice there is no GPU 3; the driver shows 1",
    ]
