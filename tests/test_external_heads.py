"""Heads in files of other architectures: against NumPy, drafts that change no token, files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from draft_answers import check_answers, check_stages
from external_heads import (
    Seen,
    assistant,
    assistant_logits,
    dflash,
    dflash_logits,
    eagle3,
    eagle3_rows,
    eagle3_states,
    written,
)
from factories import MemoryModel, MemoryTensor, tiny_deepseek2, tiny_model
from tiny_architectures import tiny

from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.head_rows import HeadRows
from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.settings import drafts
from ikcli.settings.records import SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_spec_type

TOKENS = np.random.default_rng(1).integers(0, 96, 40).astype(np.int32)
CPU: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "n_ctx": 256, "type_k": "f32",
                       "type_v": "f32"}  # fmt: skip


def opened(model: Path, head: Path, kind: str = "mtp", **changes: Any) -> Session:
    server = ServerConfig(spec_type=(SpecStage(kind),), model_draft=head)
    return Session.open(RunConfig(model=model, server=server, **(CPU | changes)), n_step=1)


def test_rows_of_an_assistant(tmp_path: Path) -> None:
    """As `ik perplexity --mtp` computes them: of all positions of a text, each from the states before."""
    model = tiny("gemma4")
    head = assistant("gemma4-assistant", model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    seen, window = Seen(files[0], TOKENS), model.metadata["gemma4.attention.sliding_window"]
    with opened(*files, n_ubatch=16) as session:
        assert session.heads is not None
        for first in (0, 16, 32):
            session.decode(Batch.single(TOKENS[first : first + 16], first))
            n = session.sequences.n_past[0]
            rows = session.heads.logits(0, int(TOKENS[n % 40]))
            for p in range(n - len(rows), n):
                token, state = int(TOKENS[(p + 1) % 40]), seen.values["result_norm"][p]
                wanted, _ = assistant_logits(head, model, seen, token, state, p + 1, window)
                assert np.abs(rows[p - n] - wanted).max() < 1e-3 * wanted.std(), p


@pytest.mark.parametrize("arch", ["gemma4_mtp", "gemma4-assistant"])
def test_assistant_against_numpy(arch: str, tmp_path: Path) -> None:
    """Its drafts, each from the state that the last one left, after prompts within and beyond the window."""
    model = tiny("gemma4")
    head = assistant(arch, model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    seen, window = Seen(files[0], TOKENS), model.metadata["gemma4.attention.sliding_window"]
    with opened(*files) as session:
        assert session.heads is not None
        for n_past in (3, 30):
            session.clear()
            session.decode(Batch.single(TOKENS[:n_past]))
            wanted, state = [], seen.values["result_norm"][n_past - 1]
            token = int(TOKENS[n_past])
            for _ in range(4):
                logits, state = assistant_logits(head, model, seen, token, state, n_past, window)
                token = int(logits.argmax())
                wanted.append((token, float(1 / np.exp(logits - logits.max()).sum())))
            draft = Draft(0, TOKENS[: n_past + 1], 4, 0.0, [], [])
            session.heads.draft([draft])
            assert draft.found == [token for token, _ in wanted]
            assert np.allclose(draft.probabilities, [p for _, p in wanted], rtol=1e-3)


def test_answers_are_the_same_with_an_assistant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slots, in whose caches windows move, and which go back."""
    model = tiny("gemma4", context_length=2048)
    path, head = written(model, tmp_path, "m.gguf"), written(assistant("gemma4_mtp", model), tmp_path, "head.gguf")
    spec = {"spec_type": parse_spec_type("mtp:p_min=0"), "model_draft": head, "spec_autotune": False}
    settings: dict[str, Any] = {"model": path, "n_ctx": 2048, "n_ubatch": 32}
    plain = check_answers(spec, settings, monkeypatch, windows=True)
    check_stages(spec, settings, plain, monkeypatch)  # there it is with the layers whose cache it reads


def test_assistants_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny("gemma4")
    path, head = written(model, tmp_path, "m.gguf"), assistant("gemma4_mtp", model)
    with pytest.raises(UnsupportedError, match=r"head.gguf holds a head that reads .*-md"):
        Planner.of_file(RunConfig(model=written(head, tmp_path, "head.gguf")))
    with pytest.raises(UsageError, match="importance matrices cover heads of the model's own architecture"):
        Planner.of_file(
            RunConfig(model=path, command="imatrix", server=ServerConfig(model_draft=tmp_path / "head.gguf"))
        )
    other = written(tiny_model("llama"), tmp_path, "llama.gguf")
    with pytest.raises(FormatError, match="one for Gemma 4, but this is a model of llama"):
        opened(other, tmp_path / "head.gguf")
    for key, value, message in (
        ("backbone_embedding_length", 80, "of another model: its gemma4_mtp.backbone_embedding_length is 80"),
        ("attention.key_length", 64, "layer 2 has 4 heads of 64, which do not fit"),
    ):
        wrong = MemoryModel(head.metadata | {f"gemma4_mtp.{key}": value}, head.tensors)
        with pytest.raises(FormatError, match=message):
            opened(path, written(wrong, tmp_path, "wrong.gguf"))
    cut = MemoryModel(head.metadata, {n: t for n, t in head.tensors.items() if n != "mtp_post_proj.weight"})
    with pytest.raises(FormatError, match=r"mtp_post_proj.weight.*missing"):
        opened(path, written(cut, tmp_path, "cut.gguf"))


def test_an_assistant_is_planned(tmp_path: Path) -> None:
    """Its weights count, but for three factors that become part of the graph; its cache is the model's."""
    model = tiny("gemma4")
    path, head = written(model, tmp_path, "m.gguf"), written(assistant("gemma4_mtp", model), tmp_path, "head.gguf")
    server = ServerConfig(spec_type=(SpecStage("mtp"),), model_draft=head)
    plain = RunConfig(model=path, command="serve", n_parallel=1, **CPU)
    config = replace(plain, server=server)
    plans = [Planner.of_file(c).plan(c) for c in (plain, config)]
    weights = [sum(parts["weights"] for parts in plan.memory.parts.values()) for plan in plans]
    caches = [sum(plan.caches.values()) for plan in plans]
    size = sum(t.n_bytes for t in open_gguf(head).tensors.values())
    assert caches[0] == caches[1] and weights[1] - weights[0] == size - 3 * 4


EAGLE3: dict[str, Callable[[MemoryModel], MemoryModel]] = {
    "whole": eagle3,
    "part": lambda model: eagle3(
        model, 40, ("token_embd.weight", "output.weight", "rope_freqs.weight"), norm_before_residual=True,
        norm_before_fc=True, extract_layers=np.int32([3, 1]),
    ),
    "narrow": lambda model: eagle3(model, 40, embedding_length=64),
}  # fmt: skip
"""With the model's vocabulary and matrices; with a part of it, and matrices of its own; of another width."""


@pytest.mark.parametrize("name", list(EAGLE3))
def test_eagle3_against_numpy(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", block_count=4)
    head = EAGLE3[name](model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    given = eagle3_states(head, Seen(files[0], TOKENS))
    ids = head.data("d2t").view(np.int64) if "d2t" in head.tensors else np.arange(96)
    with opened(*files, "eagle3", n_ubatch=16) as session:
        assert session.heads is not None
        for n_past in (3, 30):
            session.clear()
            for at in range(0, n_past, 16):
                session.decode(Batch.single(TOKENS[at : min(at + 16, n_past)], at))
            text, states, wanted = TOKENS[1 : n_past + 1].tolist(), given[:n_past], []
            for _ in range(4):
                logits, after = eagle3_rows(head, model, text, states)
                best = int(logits[-1].argmax())
                wanted.append((int(ids[best]), float(1 / np.exp(logits[-1] - logits[-1, best]).sum())))
                text, states = [*text, int(ids[best])], np.concatenate([states, after[-1:]])
            draft = Draft(0, TOKENS[: n_past + 1], 4, 0.0, [], [])
            session.heads.draft([draft])
            assert draft.found == [token for token, _ in wanted]
            assert np.allclose(draft.probabilities, [p for _, p in wanted], rtol=1e-3)


DFLASH: dict[str, Callable[[MemoryModel], MemoryModel]] = {
    "shared": dflash,
    "own": lambda model: dflash(
        model, ("token_embd.weight", "output.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        **{"attention.value_scale": 0.7, "dflash.backbone_rotary_base": 300.0},
    ),
    "chain": lambda model: dflash(model, ("markov_w1.weight",)),
}  # fmt: skip
"""With the model's embeddings and matrix, or its own; with those of DSpark."""


@pytest.mark.parametrize("name", list(DFLASH))
def test_dflash_against_numpy(name: str, tmp_path: Path) -> None:
    """Blocks whose rows see each other, also after a longer one that was not accepted."""
    model = tiny_model("llama", block_count=4)
    head = DFLASH[name](model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    seen = Seen(files[0], TOKENS)
    with opened(*files, "dspark" if name == "chain" else "dflash", n_ubatch=16) as session:
        assert session.heads is not None
        for n_past, n in ((3, 4), (4, 2), (30, 9)):
            for at in range(session.sequences.n_past[0], n_past, 16):
                session.decode(Batch.single(TOKENS[at : min(at + 16, n_past)], at))
            wanted = dflash_logits(head, model, seen, int(TOKENS[n_past]), n_past, min(n, 5 + (name == "chain")))
            draft = Draft(0, TOKENS[: n_past + 1], n, 0.0, [], [])
            session.heads.draft([draft])
            assert draft.found == wanted.argmax(1).tolist()
            best = np.exp(wanted - wanted.max(1, keepdims=True)).sum(1)
            assert np.allclose(draft.probabilities, 1 / best, rtol=1e-3)


@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-dflash", "draft-dspark"])
@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        *(pytest.param(a, marks=pytest.mark.slow("as llama")) for a in ("deepseek2", "qwen35moe", "gemma4", "kimi-k3")),
    ],
)
def test_answers_are_the_same(arch: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slots, in one process and in stages, whose values the head gathers."""
    keys = {"context_length": 2048}
    model = tiny_model("llama", block_count=4, **keys) if arch == "llama" else (
        tiny_deepseek2(**keys) if arch == "deepseek2" else tiny(arch, **keys)
    )  # fmt: skip
    n_layer = model.metadata[f"{arch}.block_count"] - model.metadata.get(f"{arch}.nextn_predict_layers", 0)
    layers = np.int32([0, n_layer - 2])
    markov = ("markov_w1.weight",) if kind == "draft-dspark" else ()
    head = eagle3(model, 40, extract_layers=layers + 1) if kind == "draft-eagle3" else (
        dflash(model, markov, **{"dflash.target_layer_ids": layers})
    )  # fmt: skip
    path, file = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    spec = {"spec_type": parse_spec_type(f"{kind}:p_min=0"), "model_draft": file, "spec_autotune": False}
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 32}
    plain = check_answers(spec, settings, monkeypatch)
    check_stages(spec, settings, plain, monkeypatch)


def test_dflash_heads_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama", block_count=4)
    path, head = written(model, tmp_path, "m.gguf"), dflash(model)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"dflash.n_target_features": 80}, "of another model: its dflash-draft.dflash.n_target_features is 80, not 2"),
        ({"dflash.target_layer_ids": np.int32([0, 3])}, r"\[0, 3\]; it can read the outputs of layers 0 to 2"),
        ({"dflash.mask_token_id": 96}, "with the mask 96 cannot be drafted"),
        ({"dflash.block_size": None}, "dflash.block_size is missing"),
        ({"dflash.laguna": True}, "DFlash heads with windows, such as Laguna's, are not supported"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([True, False])}, "with windows"),
    ]
    for keys, message in changes:
        found = head.metadata | {f"dflash-draft.{k}": v for k, v in keys.items()}
        wrong = MemoryModel({k: v for k, v in found.items() if v is not None}, head.tensors)
        with pytest.raises((FormatError, UnsupportedError), match=message):
            opened(path, written(wrong, tmp_path, "wrong.gguf"), "dflash")
    with pytest.raises(UsageError, match="a file of architecture llama; those of dflash-draft are read"):
        opened(path, path, "dflash")
    with opened(path, written(head, tmp_path, "head.gguf"), "dflash") as session:
        assert session.heads is not None
        with pytest.raises(UnsupportedError, match=r"drafts blocks \(DFlash\) cannot be measured"):
            HeadRows(session.heads)
    with opened(path, written(eagle3(model, 40), tmp_path, "part.gguf"), "eagle3") as session:
        assert session.heads is not None
        with pytest.raises(UnsupportedError, match="part of the vocabulary cannot be measured"):
            HeadRows(session.heads)
    chain = written(dflash(model, ("markov_w1.weight",)), tmp_path, "chain.gguf")
    with pytest.raises(UsageError, match="this file is for --spec-type dspark"):
        opened(path, chain, "dflash")


def test_eagle3_heads_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama", block_count=4)
    path, head = written(model, tmp_path, "m.gguf"), eagle3(model, 40)
    file = written(head, tmp_path, "head.gguf")
    with pytest.raises(UsageError, match=r"--spec-type mtp -md .*head.gguf: this file is for --spec-type eagle3"):
        opened(path, file)
    with pytest.raises(UnsupportedError, match="with --spec-type eagle3 -md"):
        Planner.of_file(RunConfig(model=file))
    for key, value, message in (
        ("target_hidden_size", 80, "of another model: its eagle3.target_hidden_size is 80"),
        ("extract_layers", np.int32([1, 4]), r"\[1, 4\]; it can read the inputs of layers 1 to 3"),
        ("extract_layers", None, "extract_layers is missing"),
        ("block_count", 2, "it has 2 layers; EAGLE-3 heads of one layer are supported"),
    ):
        keys = {k: v for k, v in (head.metadata | {f"eagle3.{key}": value}).items() if v is not None}
        with pytest.raises((FormatError, UnsupportedError), match=message):
            opened(path, written(MemoryModel(keys, head.tensors), tmp_path, "wrong.gguf"), "eagle3")
    ids = MemoryTensor(GGMLType.I64, (40,), (np.arange(40) + 90).astype(np.int64).view(np.uint8))
    wrong = written(MemoryModel(head.metadata, head.tensors | {"d2t": ids}), tmp_path, "ids.gguf")
    with pytest.raises(FormatError, match=r"'blk.4.draft.d2t' has ids outside the vocabulary of 96"):
        opened(path, wrong, "eagle3")
    for kinds, message in ((("eagle3",), "needs the file of the head"), (("mtp", "eagle3"), "cannot be combined")):
        server = ServerConfig(spec_type=tuple(map(SpecStage, kinds)), model_draft=file if len(kinds) > 1 else None)
        with pytest.raises(UsageError, match=message):
            drafts.stages(RunConfig(model=path, server=server))


@pytest.mark.slow("emulated kernels")
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("rules", [(), (r"blk\.\d+\.draft\.=CPU",)], ids=["all", "head-in-ram"])
@needs_emulation
def test_drafts_on_an_emulated_gpu(
    kind: str, rules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As likely as on the CPU, at positions within and beyond the windows."""
    model = tiny("gemma4") if kind == "mtp" else tiny_model("llama", block_count=4)
    head = assistant("gemma4_mtp", model) if kind == "mtp" else EAGLE3["part"](model)
    files = written(model, tmp_path, "m.gguf"), written(head, tmp_path, "head.gguf")
    found: list[list[Draft]] = []
    for n_gpu_layers in (0, 99):
        if n_gpu_layers:
            monkeypatch.setattr(gpus, "open_devices", Opener())
        settings = {"n_gpu_layers": n_gpu_layers, "override_tensor": rules if n_gpu_layers else (), "n_ubatch": 32}
        with opened(*files, kind, type_k="f16", type_v="f16", **settings) as session:
            assert session.heads is not None
            found.append([])
            for n_past in (3, 30):
                session.clear()
                session.decode(Batch.single(TOKENS[:n_past]))
                draft = Draft(0, TOKENS[: n_past + 1], 4, 0.0, [], [])
                session.heads.draft([draft])
                found[-1].append(draft)
    for cpu, gpu in zip(*found, strict=True):
        assert cpu.found == gpu.found and np.allclose(cpu.probabilities, gpu.probabilities, rtol=0.05)
