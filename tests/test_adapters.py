"""Low-rank adapters and control vectors against models with the same changes merged into float32 weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import low_rank, merged, write_adapter, write_control_vector
from cuda_emulation import needs_emulation
from cuda_sessions import Opener, transcript
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model
from tiers import some, some_architectures
from tiny_architectures import OPTIONAL, TINY, WINDOWED

from ikcli.cli.parser import parse
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import gpus
from ikcli.engine.run.adapters import Added
from ikcli.engine.run.control_vectors import ControlVector, VectorUse, in_use
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.graph.ops_rows import Product
from ikcli.imatrix.collect import watch
from ikcli.models import GraphConfig
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.records import ScaledFile
from ikcli.settings.run import RunConfig

EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "qwen3": lambda: tiny_model("qwen3"),
    "qwen3moe": lambda: tiny_model("qwen3moe", **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
}


def targets_of(model: MemoryModel, *, kv_b: bool = False) -> list[str]:
    """All matrices that an adapter may change."""
    names = [name for name, t in model.tensors.items() if len(t.shape) > 1 and name != "token_embd.weight"]
    return [name for name in names if kv_b or "attn_kv_b" not in name]


def config(path: Path, adapters: AdapterConfig | None = None, **changes: Any) -> RunConfig:
    settings = {"command": "bench", "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "warmup": False,
                "type_k": "f32", "type_v": "f32"}  # fmt: skip
    return RunConfig(model=path, adapters=adapters or AdapterConfig(), **(settings | changes))  # type: ignore[arg-type]


def logits(path: Path, adapters: AdapterConfig | None = None, **changes: Any) -> Any:
    with Session.open(config(path, adapters, **changes)) as session:
        return transcript(session, 40, 3)


def assert_same(found: Any, wanted: Any, tolerance: float = 2e-3) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("fmoe", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_as_merged_weights(tmp_path: Path, name: str, fmoe: bool) -> None:
    if name not in ("qwen3moe", "deepseek2") and not fmoe:
        pytest.skip("no experts")
    model = MODELS[name]()
    arch = model.metadata["general.architecture"]
    base = write_model(model, tmp_path / "base.gguf")
    first, second = low_rank(model, targets_of(model)), low_rank(model, targets_of(model)[:3], rank=33, seed=4)
    config = AdapterConfig(
        lora=(write_adapter(tmp_path / "first.gguf", arch, first),),
        lora_scaled=(ScaledFile(write_adapter(tmp_path / "second.gguf", arch, second), -0.7),),
    )
    both = merged(merged(model, first), second, -0.7)
    wanted = logits(write_model(both, tmp_path / "merged.gguf"), fmoe=fmoe)
    assert_same(logits(base, config, fmoe=fmoe), wanted)
    assert np.abs(logits(base, fmoe=fmoe) - wanted).max() > 0.5
    reference = ReferenceSession(both, GraphConfig(type_k=GGMLType.F32, type_v=GGMLType.F32, n_ctx=256))
    assert_same(logits(base, config, fmoe=fmoe)[:40], transcript(reference, 40, 0), 5e-3)  # type: ignore[arg-type]


_REFUSED = ("altup_proj.weight", "altup_unembd_proj.weight")  # of several streams in one tensor


@pytest.mark.parametrize("arch", some_architectures(sorted(WINDOWED | TINY)))
def test_every_architecture(tmp_path: Path, arch: str) -> None:
    """All that is multiplied with goes through `Graph.mul_mat`, and all layers through `layer_out`."""
    model = tiny_model(arch, optional=("kv_b.weight", *OPTIONAL.get(arch, ())), **(WINDOWED | TINY)[arch])
    base = write_model(model, tmp_path / "base.gguf")
    with Session.open(config(base, mla=0)) as session:
        ops = [node.op for graph, _ in session.graphs.values() for node in graph.nodes]
    used = {w.name for op in ops if isinstance(op, Product) for w in op.matrices}
    targets = [name for name in targets_of(model, kv_b=True) if name in used and name not in _REFUSED]
    assert len(targets) >= 7
    tensors = low_rank(model, targets, strength=0.1)
    path = write_adapter(tmp_path / "a.gguf", arch, tensors)
    wanted = logits(write_model(merged(model, tensors), tmp_path / "merged.gguf"), mla=0)
    error = np.abs(logits(base, AdapterConfig(lora=(path,)), mla=0) - wanted).max(axis=1) / wanted.std()
    assert np.median(error) < 2e-3 < np.median(np.abs(logits(base, mla=0) - wanted).max(axis=1)) / wanted.std()
    rng = np.random.default_rng(2)
    directions = {f"direction.{il}": rng.normal(0, 1, model.metadata[f"{arch}.embedding_length"]) for il in (1, 2)}
    vector = write_control_vector(tmp_path / "v.gguf", directions)
    assert np.abs(logits(base, AdapterConfig(control_vector=(vector,)), mla=0) - logits(base, mla=0)).max() > 0.1


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0])
def test_types_of_adapters(tmp_path: Path, type_: GGMLType) -> None:
    model = tiny_model("llama")
    tensors = low_rank(model, targets_of(model), rank=32)
    base = write_model(model, tmp_path / "base.gguf")
    path = write_adapter(tmp_path / "a.gguf", "llama", tensors, type_=type_)
    wanted = logits(write_model(merged(model, tensors), tmp_path / "merged.gguf"))
    found = logits(base, AdapterConfig(lora=(path,)))
    assert np.abs(found - wanted).std() < 0.02 < np.abs(logits(base) - wanted).std()


def test_adapters_of_quantized_models(tmp_path: Path) -> None:
    """The base weights stay as they are: with a scale of 0 nothing changes, to the last bit."""
    model = tiny_model("qwen3", embedding_length=256, feed_forward_length=256, type_=GGMLType.Q4_0)
    base = write_model(model, tmp_path / "base.gguf")
    tensors = low_rank(model, targets_of(model))
    path = write_adapter(tmp_path / "a.gguf", "qwen3", tensors)
    np.testing.assert_array_equal(logits(base, AdapterConfig(lora_scaled=(ScaledFile(path, 0.0),))), logits(base))
    wanted = logits(write_model(merged(model, tensors), tmp_path / "merged.gguf"))
    assert np.abs(logits(base, AdapterConfig(lora=(path,))) - wanted).std() < 0.1 * np.abs(logits(base) - wanted).std()
    assert_same(
        logits(base, AdapterConfig(lora=(path,)), run_time_repack=True), logits(base, AdapterConfig(lora=(path,))), 0.2
    )


def test_alpha_of_0_is_rank(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = low_rank(model, ["blk.0.attn_q.weight", "output.weight"])
    base = write_model(model, tmp_path / "base.gguf")
    wanted = logits(write_model(merged(model, tensors, alpha=0), tmp_path / "merged.gguf"))
    for alpha in (0.0, None):
        path = write_adapter(tmp_path / "a.gguf", "llama", tensors, adapter_lora_alpha=alpha)
        assert_same(logits(base, AdapterConfig(lora=(path,))), wanted)


def test_scales_change_while_the_model_runs(tmp_path: Path) -> None:
    model = tiny_model("qwen3moe", **EXPERTS)
    tensors = low_rank(model, targets_of(model))
    base = write_model(model, tmp_path / "base.gguf")
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", tensors)
    with Session.open(config(base, AdapterConfig(lora=(path,), lora_init_without_apply=True))) as session:
        plain = transcript(session, 40, 3)
        session.apply(Added((0.5,)))
        half = transcript(session, 40, 3)
        session.apply(Added((0.0,)))
        np.testing.assert_array_equal(transcript(session, 40, 3), plain)
        with pytest.raises(UsageError, match="2 scales for 1 adapters"):
            session.apply(Added((1.0, 2.0)))
    np.testing.assert_array_equal(plain, logits(base))
    assert_same(half, logits(write_model(merged(model, tensors, 0.5), tmp_path / "merged.gguf")))


def test_adapters_leave_no_trace_in_an_importance_matrix(tmp_path: Path) -> None:
    model = tiny_model("qwen3moe", **EXPERTS)
    base = write_model(model, tmp_path / "base.gguf")
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", low_rank(model, targets_of(model)))
    names = []
    for adapters in (AdapterConfig(), AdapterConfig(lora=(path,))):
        with Session.open(config(base, adapters)) as session:
            found = watch(graph for graph, _ in session.graphs.values())
            names.append({name for stream in found.all_streams() for name in stream.names})
    assert names[0] == names[1] and len(names[0]) > 10


def test_kv_b_needs_mla_0(tmp_path: Path) -> None:
    model = tiny_deepseek2()
    tensors = low_rank(model, targets_of(model, kv_b=True))
    base = write_model(model, tmp_path / "base.gguf")
    adapters = AdapterConfig(lora=(write_adapter(tmp_path / "a.gguf", "deepseek2", tensors),))
    wanted = logits(write_model(merged(model, tensors), tmp_path / "merged.gguf"), mla=0)
    assert_same(logits(base, adapters, mla=0), wanted)
    for mla in (1, 2, 3):
        with pytest.raises(
            UnsupportedError, match=r"a\.gguf: the adapter changes 'blk.0.attn_kv_b.weight'.*use -mla 0"
        ):
            logits(base, adapters, mla=mla)


def test_control_vectors(tmp_path: Path, rng: np.random.Generator) -> None:
    model = tiny_model("qwen3", block_count=4)
    base = write_model(model, tmp_path / "base.gguf")
    directions = {f"direction.{n}": rng.normal(0, 1, 64).astype(np.float32) for n in (1, 2, 3)}
    path = write_control_vector(tmp_path / "v.gguf", directions)
    found = {}
    for name, adapters in {
        "none": AdapterConfig(),
        "one": AdapterConfig(control_vector=(path,)),
        "sum": AdapterConfig(control_vector=(path,), control_vector_scaled=(ScaledFile(path, -1.0),)),
        "double": AdapterConfig(control_vector=(path, path)),
        "scaled": AdapterConfig(control_vector_scaled=(ScaledFile(path, 2.0),)),
        "outside": AdapterConfig(control_vector=(path,), control_vector_layer_range=(4, 9)),
    }.items():
        found[name] = logits(base, adapters)
    assert_same(found["sum"], found["none"], 1e-5)
    assert_same(found["outside"], found["none"], 0)
    assert_same(found["double"], found["scaled"], 1e-4)
    assert np.abs(found["one"] - found["none"]).max() > 0.5
    # What is added behind the last layer can be added in front of the output norm by hand.
    last = AdapterConfig(control_vector=(path,), control_vector_layer_range=(3, 3))
    rows: dict[str, Any] = {}
    with Session.open(config(base, last)) as session:
        session.observer = lambda node, value: rows.__setitem__(node.name, np.array(value))
        transcript(session, 8, 0)
    assert_same(rows["l_out_steered-3"], rows["l_out-3"] + directions["direction.3"], 1e-6)
    assert not any(name.startswith("l_out_steered") and not name.endswith("-3") for name in rows)


def test_control_vectors_change_while_the_model_runs(tmp_path: Path, rng: np.random.Generator) -> None:
    """With a folder for more of them all layers have a place for one."""
    model = tiny_model("qwen3", block_count=4)
    base = write_model(model, tmp_path / "base.gguf")
    path, other = (
        write_control_vector(tmp_path / name, {f"direction.{n}": rng.normal(0, 1, 64) for n in layers})
        for name, layers in (("v.gguf", (1, 2, 3)), ("w.gguf", (2, 3, 4, 9)))
    )
    both = AdapterConfig(control_vector=(path,), control_vector_scaled=(ScaledFile(other, -0.5),))
    with Session.open(config(base, AdapterConfig(control_vector_path=tmp_path))) as session:
        plain = transcript(session, 40, 3)
        vectors = session.model.adapters.vectors
        found = [ControlVector.open(p, session.model.hp) for p in (path, other)]
        vectors.known |= {v.digest: v for v in found}
        uses = [VectorUse(v.digest, scale, 1, 4) for v, scale in zip(found, (1.0, -0.5), strict=True)]
        session.apply(Added((), in_use(uses)))
        sum_of_both = transcript(session, 40, 3)
        session.apply(Added((), (uses[0]._replace(first=2, last=3),)))
        part = transcript(session, 40, 3)
        session.apply(Added())
        np.testing.assert_array_equal(transcript(session, 40, 3), plain)
    assert_same(plain, logits(base), 1e-6)
    assert_same(sum_of_both, logits(base, both), 1e-4)
    limited = AdapterConfig(control_vector=(path,), control_vector_layer_range=(2, 3))
    assert_same(part, logits(base, limited), 1e-4)
    assert np.abs(part - plain).max() > 0.5 < np.abs(sum_of_both - part).max()


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    yield opener


@needs_emulation
@pytest.mark.parametrize(
    "changes",
    some(
        [{}, {"n_gpu_layers": 1}, {"cpu_moe": True}, {"cpu_moe": True, "offload_min_batch": 4}],
        [{}, {"cpu_moe": True, "offload_min_batch": 4}],
    ),
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_on_a_gpu(tmp_path: Path, opener: Opener, rng: np.random.Generator, name: str, changes: dict[str, Any]) -> None:
    if name == "llama" and "cpu_moe" in changes:
        pytest.skip("no experts")
    model = MODELS[name]()
    tensors = low_rank(model, targets_of(model))
    base = write_model(model, tmp_path / "base.gguf")
    vector = write_control_vector(tmp_path / "v.gguf", {"direction.1": rng.normal(0, 1, 64).astype(np.float32)})
    path = write_adapter(tmp_path / "a.gguf", model.metadata["general.architecture"], tensors)
    adapters = AdapterConfig(lora=(path,), control_vector=(vector,))
    types = {"type_k": "f16", "type_v": "f16"}
    wanted = [logits(base, replace(adapters, lora=(), lora_scaled=(ScaledFile(path, s),)), n_gpu_layers=0, **types)
              for s in (1.0, 0.25)]  # fmt: skip
    with Session.open(config(base, adapters, **({"n_gpu_layers": 99} | types | changes))) as session:
        first = transcript(session, 40, 3)
        session.apply(replace(session.model.adapters.added, scales=(0.25,)))
        second = transcript(session, 40, 3)
    for found, expected in zip((first, second), wanted, strict=True):
        assert np.abs(found - expected).std() < 0.01 * expected.std()
    assert np.abs(first - second).std() > 0.1 * first.std()


def test_adapters_count_in_the_plan(tmp_path: Path) -> None:
    model = tiny_model("llama")
    base = write_model(model, tmp_path / "base.gguf")
    path = write_adapter(tmp_path / "a.gguf", "llama", low_rank(model, targets_of(model)))
    sizes = []
    for adapters in (AdapterConfig(), AdapterConfig(lora=(path,))):
        settings = config(base, adapters)
        sizes.append(Planner.of_file(settings).plan(settings).memory.parts["CPU"]["weights"])
    targets = [model.tensors[t].shape for t in targets_of(model)]
    assert sizes[1] - sizes[0] == sum(4 * 32 * (n_cols + n_rows + 32) for n_cols, n_rows in targets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general_type": "model"}, "general.type is model, not adapter"),
        ({"adapter_type": None}, "adapter.type is None, not lora"),
        ({"general_architecture": "qwen2"}, "the adapter is for qwen2, the model is llama"),
        ({"adapter_lora_alpha": "much"}, "adapter.lora.alpha is much"),
    ],
)
def test_files_that_are_no_adapter_of_this_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    base = write_model(model, tmp_path / "base.gguf")
    path = write_adapter(tmp_path / "a.gguf", "llama", low_rank(model, ["blk.0.attn_q.weight"]), **changes)
    with pytest.raises(FormatError, match=rf"a\.gguf: {message}"):
        Planner.of_file(config(base, AdapterConfig(lora=(path,))))


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama")
    base = write_model(model, tmp_path / "base.gguf")
    pair = low_rank(model, ["blk.0.attn_q.weight"])
    a, b = pair["blk.0.attn_q.weight.lora_a"], pair["blk.0.attn_q.weight.lora_b"]
    for tensors, message in (
        ({"blk.0.attn_q.weight.lora_a": a}, "has only one of .lora_a and .lora_b"),
        ({"blk.0.attn_q.weight": a}, "is neither a .lora_a nor a .lora_b"),
        ({"blk.9.attn_q.weight.lora_a": a, "blk.9.attn_q.weight.lora_b": b}, "the model has no tensor 'blk.9.attn_q"),
        ({"blk.0.ffn_up.weight.lora_a": a, "blk.0.ffn_up.weight.lora_b": b}, "of the model is 64 x 96, which"),
        ({"blk.0.attn_q.weight.lora_a": b, "blk.0.attn_q.weight.lora_b": a}, "does not fit"),
        ({"blk.0.attn_norm.weight.lora_a": a, "blk.0.attn_norm.weight.lora_b": b}, "has 1 dimensions"),
        ({"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": b}, "adapters of embeddings are not supported"),
        ({"blk.0.attn_q.weight.lora_a": a * np.nan, "blk.0.attn_q.weight.lora_b": b}, "holds NaN or Inf"),
    ):
        path = write_adapter(tmp_path / "a.gguf", "llama", tensors)
        with pytest.raises(IkError, match=message):
            logits(base, AdapterConfig(lora=(path,)))


def test_control_vectors_that_do_not_fit(tmp_path: Path) -> None:
    base = write_model(tiny_model("llama"), tmp_path / "base.gguf")
    for directions, type_, message in (
        ({"direction.1": np.zeros(32)}, GGMLType.F32, "should hold 64 float32 values"),
        ({"direction.1": np.zeros(64)}, GGMLType.F16, "should hold 64 float32 values"),
        ({"direction.0": np.zeros(64)}, GGMLType.F32, "is not named direction.N with N from 1 on"),
        ({"vector.1": np.zeros(64)}, GGMLType.F32, "is not named direction.N"),
        ({"direction.1": np.full(64, np.nan)}, GGMLType.F32, "tensor 'direction.1' holds NaN or Inf"),
    ):
        path = write_control_vector(tmp_path / "v.gguf", directions, type_)
        with pytest.raises(FormatError, match=message):
            Planner.of_file(config(base, AdapterConfig(control_vector=(path,))))


def test_command_line() -> None:
    line = "--lora a.gguf --lora-scaled b.gguf 0.5 --lora c.gguf --lora-scaled d.gguf:-2 -c 64"
    parsed = parse("perplexity", line.split())
    assert parsed.config.adapters.lora == (Path("a.gguf"), Path("c.gguf")) and parsed.config.n_ctx == 64
    assert parsed.config.adapters.lora_scaled == (ScaledFile(Path("b.gguf"), 0.5), ScaledFile(Path("d.gguf"), -2.0))
    assert parsed.unsupported == parsed.ignored == ()
    line = "--control-vector-scaled v.gguf -1.5 --control-vector w.gguf --control-vector-layer-range 3 9"
    found = parse("serve", line.split()).config.adapters
    assert found.control_vector_scaled == (ScaledFile(Path("v.gguf"), -1.5),)
    assert (found.control_vector, found.control_vector_layer_range) == ((Path("w.gguf"),), (3, 9))
    for bad, message in (
        ("--lora-scaled a.gguf", "is not a file and a scale; expected --lora-scaled FILE SCALE"),
        ("--lora-scaled a.gguf much", "is not a file and a scale"),
        ("--lora-scaled a.gguf -c 5", "is not a file and a scale"),
        ("--control-vector-layer-range 9 3", "is not a range"),
        ("--control-vector-layer-range 9", "is not two whole numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            parse("serve", bad.split())
