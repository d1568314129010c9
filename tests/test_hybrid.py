"""Graphs divided between devices: places of nodes, turns, hand-over memory; sessions on two CPU parts, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.backends.cpu.backend import CpuBackend
from ikcli.config import RunConfig
from ikcli.engine import gpus
from ikcli.engine.batch import Batch
from ikcli.engine.hybrid import HybridBackend
from ikcli.engine.kv_rows import copy_rows, export_rows, import_rows
from ikcli.engine.parts import CPU, CpuOnly, CpuPart
from ikcli.engine.session import Session
from ikcli.errors import NonFiniteError
from ikcli.graph import Graph, Node, Weight
from ikcli.graph.split import Places, assign, layer_of, schedule

EXPERTS = {"expert_count": 8, "expert_used_count": 3}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "llama-tied": lambda: tiny_model("llama", tied=True),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
    "deepseek3": lambda: tiny_deepseek2(
        expert_gating_func=2, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2
    ),
}
OTHER = "CPU1"


def by(test: Callable[[str], bool]) -> Callable[[str], str]:
    return lambda name: OTHER if test(name) else CPU


def scattered(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


# Where weights, caches and sums of a layer are.
PLACES = {
    "experts": (by(lambda n: "_exps" not in n and n != "token_embd.weight"), OTHER, OTHER),
    "attention": (by(lambda n: "attn" in n), OTHER, CPU),
    "no-kv": (by(lambda n: n != "token_embd.weight"), CPU, OTHER),
    "last-layer": (by(lambda n: "blk.1" in n or n.startswith("output")), "", ""),
    "scattered": (by(scattered), OTHER, CPU),
    "scattered-back": (by(lambda n: not scattered(n)), CPU, OTHER),
}


def places(kind: str) -> Places:
    weight, cache, home = PLACES[kind]
    block = by(lambda n: n == "1")
    return Places(
        weight=lambda node, w: weight(w.name),
        cache=lambda il: cache or block(str(il)),
        home=lambda il: home or block(str(il)),
    )


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_model(MODELS[name](), path)

    return get


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"command": "bench", "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "warmup": False}
    return RunConfig(model=path, **(settings | changes))


class Pretender(CpuPart):
    """A CPU part that is cut like a GPU, and whose memory is poisoned before every run."""

    asynchronous = True


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(kind: str, part: type[CpuPart] = Pretender) -> None:
        def make(config: RunConfig, model: Any, n_threads: int, cpus: Any) -> HybridBackend:
            other = part(CpuBackend(n_threads))
            other.backend.prepare([])
            backend = HybridBackend(CpuBackend(n_threads), {OTHER: other}, places(kind))
            backend.allocate = poisoned
            return backend

        monkeypatch.setattr(gpus, "make_backend", make)

    return use


def poisoned(n_bytes: int) -> Any:
    return np.full(n_bytes + 64, 0xFF, np.uint8)[:n_bytes]


def tokens(n: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.int32)


def transcript(session: Session) -> Any:
    """Logits of prompts, single tokens and a batch of two sequences."""
    rows = []
    for n in (40, 140):
        session.kv_seq_rm(-1)
        ids = tokens(n + 2, n)
        rows.append(np.array(session.decode(Batch.single(ids[:n], logits="all"))))
        rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in (n, n + 1)]
    return np.concatenate(rows)


def modes() -> Iterator[Any]:
    for kind in PLACES:
        yield "deepseek2", kind, {}
        yield "qwen3moe", kind, {"fmoe": kind == "experts"}
        yield "llama", kind, {"flash_attn": kind == "scattered"}
    yield "deepseek3", "experts", {"mla": 1, "flash_attn": False}
    yield "deepseek3", "scattered", {"mla": 2, "type_k": "q8_0", "n_threads": 2, "n_threads_batch": 2}
    yield "deepseek3", "experts", {"mla": 3, "k_hadamard": True, "ser": (2, 0.4)}
    yield "deepseek2", "no-kv", {"mla": 0, "amb": 1}
    yield "llama-tied", "last-layer", {}


@pytest.mark.parametrize(("name", "kind", "changes"), list(modes()))
def test_a_divided_session_gives_the_same_bits(name, kind, changes, model_file, divided) -> None:
    c = config(model_file(name), **changes)
    with Session.open(c) as session:
        wanted = transcript(session)
    divided(kind)
    with Session.open(c) as session:
        assert len(session.programs["decode"].turns) > 1
        np.testing.assert_array_equal(transcript(session), wanted)
