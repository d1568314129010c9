"""`--self-test`: devices that compute what ops say pass; faults of a pretended GPU are found, by device and op."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, as_array, emulation_only, needs_emulation
from cuda_sessions import Opener, config, written

from ikcli.backends.cuda.backend import CudaBackend, CudaProgram, Span
from ikcli.backends.cuda.device import Launch
from ikcli.engine.run import gpus
from ikcli.engine.run.opening import open_session
from ikcli.engine.run.self_test import SelfTestError

pytestmark = [needs_emulation, emulation_only]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    return opener


def open_tested(path: Path, **changes: Any) -> None:
    open_session(config(path, self_test=True, **changes)).close()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"n_gpu_layers": 0}),
        ("llama", {"n_gpu_layers": 1, "type_k": "q8_0", "type_v": "q8_0"}),
        ("qwen3moe", {"cpu_moe": True}),
        ("deepseek3", {}),
    ],
)
def test_what_is_right_passes(name, changes, folder, capsys) -> None:
    open_tested(written(folder, name), **changes)
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("self-test: ")]
    devices = {x.split()[1] for x in lines}
    assert devices == {"CPU:"} if changes.get("n_gpu_layers") == 0 else {"CUDA0:"} <= devices
    assert any(": mul_mat " in x for x in lines) and any(": flash_attn " in x for x in lines)


def after(kernel: str, fault: Callable[[EmulatedDevice, Launch, Callable[[], None]], None]) -> Callable[..., None]:
    """EmulatedDevice._run, with a fault in the launches of a kernel."""
    run = EmulatedDevice._run

    def broken(self: EmulatedDevice, launch: Launch, entry: Any) -> None:
        def whole() -> None:
            run(self, launch, entry)

        fault(self, launch, whole) if launch.kernel == kernel else whole()

    return broken


def wrong_scale(self: EmulatedDevice, launch: Launch, run: Callable[[], None]) -> None:
    """The result of layer_swiglu is a tenth too large."""
    run()
    rows = launch.grid[0]
    as_array(launch.args[5], 4 * rows * int(launch.args[6])).view(np.float32)[:] *= 1.1


def stale_buffer(self: EmulatedDevice, launch: Launch, run: Callable[[], None]) -> None:
    """The result is what was there before."""


@pytest.mark.parametrize(
    ("kernel", "fault", "op"),
    [("layer_swiglu", wrong_scale, "swiglu"), ("layer_swiglu", stale_buffer, "swiglu"),
     ("attn_any", stale_buffer, "flash_attn"), ("layer_heads", stale_buffer, "add")],
)  # fmt: skip
def test_a_wrong_kernel_is_named(kernel, fault, op, folder, monkeypatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "_run", after(kernel, fault))
    with pytest.raises(SelfTestError, match=rf"self-test: {op} of \S+ is wrong on CUDA0 "):
        open_tested(written(folder, "llama"))


def test_a_copy_that_was_dropped_is_named(folder, monkeypatch) -> None:
    """What the CPU made does not reach the GPU: the op that reads it there is wrong."""
    take_in, seen = CudaBackend.take_in, []

    def lossy(self: CudaBackend, program: CudaProgram, span: Span) -> None:
        seen.extend(node.name for node in span.imports)
        if "ffn_out-0" not in seen:
            take_in(self, program, span)

    monkeypatch.setattr(CudaBackend, "take_in", lossy)
    with pytest.raises(SelfTestError, match=r"self-test: add of \S+-0 is wrong on CUDA0 "):
        open_tested(written(folder, "qwen3moe"), cpu_moe=True)
    assert "ffn_out-0" in seen
