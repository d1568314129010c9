"""Graphs split between devices: places of nodes, splits, hand-over memory; sessions on two CPU parts, bit for bit."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.plan import planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.run_device import CPU
from ikcli.engine.run.runner import Runner
from ikcli.engine.run.session import Session
from ikcli.errors import NonFiniteError
from ikcli.graph import Cache, Graph, Node, Rows
from ikcli.graph.split import NodePlaces, assign, schedule
from ikcli.settings.run import RunConfig

EXPERTS = {"expert_count": 8, "expert_used_count": 3}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "llama-tied": lambda: tiny_model("llama", tied=True),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
    "deepseek3": lambda: tiny_deepseek2(
        expert_gating_func=2, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2
    ),
    "gemma4": lambda: tiny("gemma4"),
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


def places(kind: str) -> NodePlaces:
    weight, cache, home = PLACES[kind]
    block = by(lambda n: n == "1")
    return NodePlaces(
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


class Pretender(CpuDevice):
    """A CPU that is cut like a GPU, and whose memory is poisoned before every run."""

    asynchronous = True


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(kind: str, device: type[CpuDevice] = Pretender) -> None:
        def make(n_threads: int, gpus: Any, placement: Any, offload: Any, experts: Any) -> Runner:
            runner = Runner(CpuDevice(n_threads), {OTHER: device(n_threads)}, places(kind))
            runner.allocate = poisoned
            return runner

        monkeypatch.setattr(planner, "make_runner", make)

    return use


def poisoned(n_bytes: int) -> Any:
    return np.full(n_bytes + 64, 0xFF, np.uint8)[:n_bytes]


def tokens(n: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.int32)


def transcript(session: Session) -> Any:
    """Logits of prompts, single tokens and a batch of two sequences."""
    rows = []
    for n in (40, 140):
        session.clear()
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
    for kind in ("last-layer", "scattered"):  # layers that read the caches of others
        yield "gemma4", kind, {}


@pytest.mark.parametrize(("name", "kind", "changes"), list(modes()))
def test_a_divided_session_gives_the_same_bits(name, kind, changes, model_file, divided) -> None:
    c = config(model_file(name), **changes)
    with Session.open(c) as session:
        wanted = transcript(session)
    divided(kind)
    with Session.open(c) as session:
        assert len(session.programs["decode"].splits) > 1
        np.testing.assert_array_equal(transcript(session), wanted)


# --- splits -----------------------------------------------------------------------------------------------------------
def recorded(path: Path, **changes: Any) -> tuple[Graph, Node]:
    with closing(Session.plan(config(path, n_gpu_layers=0, **changes))) as session:
        return session.graphs["prefill" if "prefill" in session.graphs else "decode"]


def random_places(seed: int, devices: tuple[str, ...]) -> NodePlaces:
    def choose(*key: object) -> str:
        return devices[hashlib.sha256(repr((seed, *key)).encode()).digest()[0] % len(devices)]

    return NodePlaces(lambda node, w: choose(w.name), lambda il: choose("cache", il), lambda il: choose("home", il))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2"])
def test_splits_have_what_they_need(name, seed, model_file) -> None:
    """Every node once (repeated ones: where they are needed), after all it depends on, whatever the division."""
    graph, result = recorded(model_file(name), n_ubatch=256)
    devices = ("CPU", "A", "B")[: 2 + seed % 2]
    where = assign(graph, random_places(seed, devices))
    splits = schedule(graph, where, result, cut=devices[1:] if seed % 3 else ())
    there: dict[str, set[Node]] = {d: set() for d in devices}
    exported: dict[Node, int] = {}
    stored: dict[Any, Node] = {}
    for i, split in enumerate(splits):
        for node in split.imports:
            assert node in exported and exported[node] in split.after and splits[exported[node]].device != split.device
            there[split.device].add(node)
        for node in split.nodes:
            assert where.get(node, split.device) == split.device and node not in there[split.device]
            assert all(x in there[split.device] for x in node.inputs if isinstance(x, Node))
            for cache in (x for x in node.inputs if isinstance(x, Cache)):
                if node.op.name == "kv_store":
                    stored[cache] = node
                else:
                    assert cache in stored
            there[split.device].add(node)
        exported |= dict.fromkeys(split.exports, i)
    count = Counter(node for split in splits for node in split.nodes)
    assert set(count) == set(graph.nodes) and all(n == 1 for node, n in count.items() if node in where)
    assert result in exported


@pytest.mark.parametrize("seed", range(8))
def test_values_in_hand_over_memory_do_not_overlap(seed, model_file) -> None:
    """Neither while they are read in place, nor while a copy may be under way."""
    graph, result = recorded(model_file("deepseek2"), n_ubatch=256)
    runner = Runner(CpuDevice(1), {OTHER: Pretender(1)}, random_places(seed, (CPU, OTHER)))
    program = runner.plan(graph, result, 200, 200, 256)
    made = {n: i for i, t in enumerate(program.splits) for n in t.exports}
    used = dict(made) | {result: len(program.splits)}
    for i, split in enumerate(program.splits):
        for x in {x for node in split.nodes for x in node.inputs if isinstance(x, Node)} & made.keys():
            used[x] = max(used[x], i)
    nodes = list(made)
    assert len(nodes) > 10
    for k, a in enumerate(nodes):
        at, size = program.places[a]
        assert size >= 4 * a.cols * 200 * a.rows.factor or a.rows.symbol is Rows.KV
        for b in nodes[:k]:
            if made[a] <= used[b] and made[b] <= used[a]:
                other, n = program.places[b]
                assert at + size <= other or other + n <= at


def test_a_gpu_goes_on_while_the_cpu_has_the_experts(model_file) -> None:
    """The split that makes what the experts need ends there; shared experts are in the next, which nobody waits for."""
    graph, result = recorded(model_file("deepseek2"), mla=1)
    splits = schedule(graph, assign(graph, places("experts")), result, cut=[OTHER])
    for i, split in enumerate(splits):
        if any(node.op.name == "moe_up_gate" for node in split.nodes):
            assert split.device == CPU and split.after == (i - 2,)
            beside = splits[i - 1]
            assert beside.device == OTHER and not beside.exports
            assert any("shexp" in node.name or node.op.name == "swiglu" for node in beside.nodes)
    assert sum(t.device == CPU for t in splits) == 3  # embeddings, experts of two layers


# --- what sessions offer ----------------------------------------------------------------------------------------------
def test_observers_and_cache_rows_of_a_divided_session(model_file, divided) -> None:
    c = config(model_file("deepseek2"), type_k="q8_0")
    seen: list[dict[str, Any]] = []
    rows = []
    for use in (None, "scattered"):
        if use:
            divided(use)
        with Session.open(c, n_ctx=512, n_seq_max=2) as session:
            values: dict[str, Any] = {}
            session.observer = lambda node, value, values=values: values.setdefault(node.name, np.array(value))
            session.decode(Batch.single(tokens(9), logits="all"))
            session.observer = None
            session.sequences.load(1, session.sequences.save(0, 9))
            session.sequences.copy(1, 0, 2, 9)
            rows.append(session.sequences.save(0, 9).parts)
            seen.append(values)
    assert seen[0].keys() == seen[1].keys()
    for name, value in seen[0].items():
        if "plan" not in name:  # a table in a layout of its own
            np.testing.assert_array_equal(seen[1][name], value, name)
    for a, b in zip(*rows, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_node_that_is_not_finite_is_named(divided, tmp_path: Path) -> None:
    model = MODELS["llama"]()
    values = model.values("blk.1.ffn_down.weight").copy()
    values[0, 0] = np.inf
    model.set("blk.1.ffn_down.weight", values)
    divided("scattered")
    path = write_model(model, tmp_path / "m.gguf")
    with Session.open(config(path)) as session, pytest.raises(NonFiniteError, match=r"blk\.1\.ffn_down"):
        session.decode(Batch.single([1, 2]))
