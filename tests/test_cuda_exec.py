"""Logits of sessions with emulated GPUs against those of the CPU, for every architecture, mode and division."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener, assert_close, config, transcript, written

from ikcli.engine.run import gpus
from ikcli.engine.run.session import Session
from ikcli.measure.kl_divergence import KlParams
from ikcli.measure.kl_divergence import run as run_kl
from ikcli.measure.kld_file import BaseReader

pytestmark = needs_emulation
EXACT = {"type_k": "f32", "type_v": "f32"}
# As in test_session.py, of the standard deviation of the logits. Attention on the device multiplies in f16 or bf16, and
# so do products of f16 weights.
TOLERANCE = {"f32": 2e-2, "f16": 3e-2, "bf16": 8e-2, "q8_0": 1e-1}
PLACEMENT = (
    "n_gpu_layers", "override_tensor", "tensor_split", "cpu_moe", "no_kv_offload", "offload_min_batch", "offload_policy"
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    return opener


def modes() -> Iterator[Any]:
    """(model, prompt tokens, changes)."""
    for name in ("llama", "llama-tied", "qwen2", "qwen3moe"):
        yield name, 9, EXACT
    yield "llama", 9, {"flash_attn": False, **EXACT}
    for mla in range(4):
        for fa in (True, False):
            marks = (
                () if mla in (1, 3) else pytest.mark.slow
            )  # with and without expanded prompts; the others repeat that
            yield pytest.param("deepseek2", 9, {"mla": mla, "flash_attn": fa, **EXACT}, marks=marks)
    for type_ in ("f16", "q8_0"):
        yield "deepseek2", 9, {"type_k": type_}
    # the CPU compiles attention of its own for these
    yield pytest.param("qwen3moe", 9, {"type_k": "q8_0", "type_v": "f16"}, marks=pytest.mark.slow)
    yield pytest.param("deepseek2", 9, {"type_k": "bf16"}, marks=pytest.mark.slow)
    yield "deepseek2", 9, {"fmoe": False, "ser": (2, 0.5), **EXACT}
    yield "deepseek2", 9, {"k_hadamard": True, **EXACT}


def divisions() -> Iterator[Any]:
    """The same, for divisions between CPU and GPUs."""
    yield "llama", 9, {"n_gpu_layers": 1, **EXACT}
    # From 3 tokens on (1 * 8 experts / 3 used) weights in RAM are copied to the GPU in every step.
    yield "qwen3moe", 9, {"cpu_moe": True, "offload_min_batch": 1, **EXACT}
    yield "deepseek3", 9, {"n_gpu_layers": 1, "offload_min_batch": 1, **EXACT}
    yield "qwen3moe", 9, {"cpu_moe": True, **EXACT}
    yield "deepseek3", 9, {"n_gpu_layers": 2, "no_kv_offload": True, **EXACT}
    yield "llama", 9, {"override_tensor": ("attn=CPU", r"blk\.1\.ffn=CPU"), **EXACT}
    yield "llama", 9, {"override_tensor": (r"blk\.0\.ffn=CUDA0",), "n_gpu_layers": 1, **EXACT}
    yield "deepseek3", 9, {"tensor_split": (1.0, 2.0), "override_tensor": (r"blk\.2\..*exps=CUDA0",), **EXACT}


def check(folder: Path, opener: Opener, name: str, n: int, changes: dict[str, Any]) -> None:
    path = written(folder, name)
    plain = {k: v for k, v in changes.items() if k not in PLACEMENT} | {"n_gpu_layers": 0}
    with Session.open(config(path, **plain)) as session:
        wanted = transcript(session, n)
    assert not opener.devices
    with Session.open(config(path, **changes)) as session:
        found = transcript(session, n)
        for device in opener.devices.values():
            device.check()
            assert sum(device.launches.values()) > 0
    kinds = (changes.get("type_k", "f16"), changes.get("type_v", "f16"))
    assert_close(found, wanted, max(TOLERANCE[k] for k in kinds))


@pytest.mark.parametrize(("name", "n", "changes"), [*modes(), *divisions()])
def test_logits_are_those_of_the_cpu(name, n, changes, folder, opener) -> None:
    check(folder, opener, name, n, changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"mla": 2, "amb": 1}, {"override_tensor": ("exps=CPU",)}, {"type_k": "q8_0"}])
@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_long_prompts_are_those_of_the_cpu(name, changes, folder, opener) -> None:
    check(folder, opener, name, 140, changes)


def golden_divergences(folder: Path, name: str, **changes: Any) -> Any:
    """KL divergence at every position of the first chunk."""
    base = BaseReader(folder / f"{name}.kld")
    n = base.n_ctx
    settings = {"n_ctx": n, "n_ubatch": n, "n_batch": n, "command": "perplexity"}
    with Session.open(config(folder / f"{name}.gguf", **(settings | changes))) as session:
        return run_kl(session, base, KlParams(n_batch=n, chunks=1)).positions.kld


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"flash_attn": False}, {"cpu_moe": True}, {"n_gpu_layers": 1}, {"n_ubatch": 100}], ids=str
)
@pytest.mark.parametrize(
    "name", ["stories260K-d256.f32", "tiny-llama.f16", "tiny-qwen3.f16", "tiny-qwen3moe.f16", "tiny-deepseek2.f16",
             "tiny-deepseek2-mainline.f16", "tiny-deepseek3.f16"],
)  # fmt: skip
def test_golden_log_probabilities(name, changes, shared_dir, opener) -> None:
    kld = golden_divergences(shared_dir / "golden" / "models", name, **changes)
    assert opener.devices["CUDA0"].launches
    assert np.median(kld) <= 5e-6
    assert np.percentile(kld, 99) <= (2e-4 if name.startswith("stories") else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mla", [0, 1, 2])
@pytest.mark.parametrize("flash", [True, False])
def test_golden_modes_of_latent_attention(mla, flash, shared_dir, opener) -> None:
    folder = shared_dir / "golden" / "models"
    kld = golden_divergences(folder, "tiny-deepseek2.f16", mla=mla, flash_attn=flash)
    assert np.median(kld) <= 5e-6 and np.percentile(kld, 99) <= 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["q8_KV", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
def test_small_cache_types(type_, folder, opener) -> None:
    """Codes near a limit fall to either side, so only the size of the error is held against that of the type."""
    path = written(folder, "qwen3moe")
    changes = {"type_k": type_, "type_v": type_, "k_hadamard": False}
    with Session.open(config(path, n_gpu_layers=0)) as session:
        exact = transcript(session, 9)
    with Session.open(config(path, n_gpu_layers=0, **changes)) as session:
        wanted = transcript(session, 9)
    with Session.open(config(path, **changes)) as session:
        found = transcript(session, 9)
    assert abs(found - wanted).mean() < 0.3 * abs(wanted - exact).mean() + 1e-3
