"""Heads that predict further tokens: their logits, and drafts that change no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, add_heads, tiny_deepseek2
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.measure.kld_file import BaseReader, split_rows
from ikcli.models import GraphConfig
from ikcli.settings.records import SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

MTP = ServerConfig(spec_type=(SpecStage("mtp"),))
V3 = {"expert_gating_func": 2, "expert_weights_norm": True}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "glm4moe": lambda: add_heads(tiny("glm4moe"), own=True),
    "glm-dsa": lambda: add_heads(tiny_glm_dsa()),
    "deepseek2": lambda: add_heads(tiny_deepseek2(**V3), own=True),
    "qwen35": lambda: add_heads(tiny("qwen35")),
    "qwen35moe": lambda: add_heads(tiny("qwen35moe")),
    "qwen3next": lambda: add_heads(tiny("qwen3next")),
    "step35": lambda: add_heads(tiny("step35"), 3, dense=True),
    "mimo2": lambda: add_heads(tiny("mimo2"), 3, dense=True),
    "bailingmoe2": lambda: add_heads(tiny("bailingmoe2")),
    "bailingmoe3": lambda: add_heads(tiny("bailingmoe3")),
}
TOKENS = np.random.default_rng(1).integers(0, 96, 40).astype(np.int32)
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
CPU: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "n_ctx": 256}


def tiny_glm_dsa() -> MemoryModel:
    """A DeepSeek-V3-like model under the name of GLM-5."""
    model = tiny_deepseek2(**V3)
    model.metadata = {k.replace("deepseek2.", "glm-dsa."): v for k, v in model.metadata.items()}
    model.metadata["general.architecture"] = "glm-dsa"
    return model


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(MODELS[request.param](), tmp_path / f"{request.param}.gguf")


def head_logits(session: Session, tokens: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """The first head's logits after every position but the last, from micro-batches of these sizes."""
    found, at = [], 0
    while at < len(tokens) - 1:
        n = min(sizes[len(found) % len(sizes)], len(tokens) - 1 - at)
        session.decode(Batch.single(tokens[at : at + n], at, logits="none"))
        assert session.heads is not None
        found.append(session.heads.logits(0, int(tokens[at + n])))
        at += n
    return np.concatenate(found)


def reference(path: Path, tokens: np.ndarray) -> np.ndarray:
    cfg = GraphConfig(n_ctx=256, type_k=GGMLType.F32, type_v=GGMLType.F32, n_heads=1)
    session = ReferenceSession(path, cfg)
    session.decode(Batch.single(tokens))
    return session.head(0, Batch.single(tokens[1:], logits="all"), session.states[:-1])


def test_head_against_the_numpy_reference(path: Path) -> None:
    wanted = reference(path, TOKENS)
    with Session.open(RunConfig(model=path, server=MTP, **CPU, **F32)) as session:
        for sizes in ((40,), (7, 1, 1, 3), (1,)):
            session.clear()
            found = head_logits(session, TOKENS, sizes)
            assert np.abs(found - wanted).max() < 1e-3 * wanted.std(), sizes


# --- drafts -----------------------------------------------------------------------------------------------------------
def generate(session: Session, prompts: list[np.ndarray], n: int, wanted: list[list[int]] | None = None) -> Any:
    """Greedy tokens after each prompt, with drafts if the session has heads; and the number of accepted ones.

    `wanted`: the tokens that are right; of every second draft the first guesses are replaced by these.
    """
    texts, rows = [list(map(int, p)) for p in prompts], []
    for seq, prompt in enumerate(prompts):
        for at in range(0, len(prompt), 16):
            rows_ = session.decode(Batch.single(prompt[at : at + 16], at, seq))
        rows.append(np.array(rows_[-1]))
        texts[seq].append(int(rows[seq].argmax()))
    ends, accepted, step, bits = [len(p) + n for p in prompts], 0, 0, list(rows)
    while True:
        going = [s for s in range(len(texts)) if len(texts[s]) < ends[s]]
        if not going:
            break
        drafts: dict[int, list[int]] = {s: [] for s in going}
        if session.heads is not None:
            most = 8 // len(going) - 1
            asked = [Draft(s, np.array(texts[s], np.int32), min(most, ends[s] - len(texts[s])), 0.0, [], [])
                     for s in going]  # fmt: skip
            session.heads.draft(asked)
            for d in asked:
                assert len(d.found) == len(d.probabilities) == d.n_max
                if wanted is not None and (step + d.seq) % 2:
                    right = wanted[d.seq][len(texts[d.seq]) :][: step % 4]
                    d.found[: len(right)] = right
                drafts[d.seq] = d.found
        step += 1
        tokens, pos, seqs = [], [], []
        for s in going:
            session.sequences.checkpoint(s, passing=True)
            tokens += [texts[s][-1], *drafts[s]]
            pos += range(len(texts[s]) - 1, len(texts[s]) + len(drafts[s]))
            seqs += [s] * (1 + len(drafts[s]))
        ones = np.ones(len(tokens), np.bool_)
        logits = session.step(Batch(np.int32(tokens), np.int32(pos), np.int32(seqs), ones))
        best, at = logits.argmax(axis=1).tolist(), 0
        for s in going:
            for i, guess in enumerate([*drafts[s], -1]):
                texts[s].append(best[at + i])
                bits.append(np.array(logits[at + i]))
                if guess != best[at + i]:
                    break
                accepted += 1
            at += 1 + len(drafts[s])
        for s in going:
            n_past = len(texts[s]) - 1
            kept = session.truncate(s, n_past)
            if kept < n_past:
                session.decode(Batch.single(texts[s][kept:n_past], kept, s, logits="none"))
    return texts, accepted, bits


def opened(path: Path, n_seq: int, mtp: bool, **changes: Any) -> Session:
    config = RunConfig(model=path, n_ubatch=16, server=MTP if mtp else ServerConfig(), **CPU | changes)
    return Session.open(config, n_ctx=320 * n_seq, n_seq_max=n_seq, n_step=8)


def same_with_and_without_drafts(path: Path, n_seq: int, n: int, **changes: Any) -> None:
    prompts = [TOKENS[i : i + 20 + 3 * i] for i in range(n_seq)]
    with opened(path, n_seq, False, **changes) as session:
        wanted, _, _ = generate(session, prompts, n)
    with opened(path, n_seq, True, **changes) as session:
        found, accepted, _ = generate(session, prompts, n, wanted)
        for f, w in zip(found, wanted, strict=True):
            assert f[: len(w)] == w
        assert accepted > n_seq * n // 10, accepted


def test_drafts_change_no_token(path: Path) -> None:
    same_with_and_without_drafts(path, 1, 40)


@pytest.mark.slow("long answers of every architecture")
@pytest.mark.parametrize("n_seq", [1, 4])
def test_drafts_change_no_token_of_long_answers(path: Path, n_seq: int) -> None:
    same_with_and_without_drafts(path, n_seq, 256)


# --- golden models ----------------------------------------------------------------------------------------------------
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"n_ubatch": 256}, "small batches": {"n_ubatch": 64}, "odd batches": {"n_ubatch": 37},
    "q8_0 cache": {"n_ubatch": 128, "type_k": "q8_0", "type_v": "q8_0"}, "repacked": {"run_time_repack": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen35-mtp", "glm4moe-mtp"])
def test_golden_heads(name: str, shared_dir: Path) -> None:
    folder = shared_dir / "golden" / "arch"
    bounds = json.loads((folder / "expected.json").read_text())[name]["bounds"]
    base = BaseReader(folder / f"{name}.mtp.kld")
    for setting, changes in SETTINGS.items():
        config = RunConfig(model=folder / f"{name}.gguf", server=MTP, **CPU | {"n_ctx": 256} | changes)
        with Session.open(config) as session:
            kld = np.concatenate([_kld(session, base, chunk) for chunk in range(base.n_chunk)])
        found = {"median": np.median(kld), "mean": kld.mean(), "p99": np.quantile(kld, 0.99)}
        kind = "q8_0" if setting == "q8_0 cache" else "f16"
        rounded = setting == "repacked"  # to bf16
        for what, most in bounds[kind].items():
            assert found[what] <= (1e-2 if rounded else most), (setting, what, found)


def _kld(session: Session, base: BaseReader, chunk: int) -> np.ndarray:
    tokens = np.append(base.tokens[chunk], 0)
    tokens[0] = 1
    session.clear()
    rows = head_logits(session, tokens, (session.n_ubatch,))
    scale, minimum, codes = split_rows(base.rows(chunk), base.n_vocab)
    first = base.n_ctx // 2
    log_p = (codes * scale[:, None] + minimum[:, None]).astype(np.float64)
    rows = rows[first : first + len(log_p)].astype(np.float64)
    log_q = rows - rows.max(axis=1, keepdims=True)
    log_q -= np.log(np.exp(log_q).sum(axis=1, keepdims=True))
    kld: np.ndarray = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)[:-1]
    return kld
