"""Heads that predict further tokens: their logits, and drafts that change no token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from gguf_files import write_model
from head_models import HEAD_MODELS
from tiers import some
from tiny_architectures import tiny

from ikcli.engine.plan import sizes
from ikcli.engine.plan.devices import described_machine
from ikcli.engine.plan.fit import fit
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import gpus, sequences
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Per
from ikcli.measure.kld_file import BaseReader, split_rows
from ikcli.models import GraphConfig
from ikcli.settings.records import SpecStage
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_device_spec

MTP = ServerConfig(spec_type=(SpecStage("mtp"),))
TOKENS = np.random.default_rng(1).integers(0, 96, 40).astype(np.int32)
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
CPU: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "n_ctx": 256}


@pytest.fixture(params=some(list(HEAD_MODELS), ["qwen35", "deepseek2", "mimo2"]))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(HEAD_MODELS[request.param](), tmp_path / f"{request.param}.gguf")


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
    """Greedy tokens after each prompt, with drafts if the session has heads; the accepted ones; logits of all tokens.

    `wanted`: the tokens that are right; of every second draft the first guesses are replaced by these.
    """
    texts = [list(map(int, p)) for p in prompts]
    bits: list[list[np.ndarray]] = [[] for _ in prompts]
    for seq, prompt in enumerate(prompts):
        for at in range(0, len(prompt), 16):
            last = session.decode(Batch.single(prompt[at : at + 16], at, seq))
        bits[seq].append(np.array(last[0]))
        texts[seq].append(int(last.argmax()))
    ends, accepted, step = [len(p) + n for p in prompts], 0, 0
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
                    right = wanted[d.seq][len(texts[d.seq]) :][: min(step % 4, d.n_max)]
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
                bits[s].append(np.array(logits[at + i]))
                if guess != best[at + i]:
                    break
                accepted += 1
            at += 1 + len(drafts[s])
        for s in going:
            n_past = len(texts[s]) - 1
            kept = session.truncate(s, n_past)
            if kept < n_past:
                session.step(Batch.single(texts[s][kept:n_past], kept, s))
    return texts, accepted, bits


def opened(path: Path, n_seq: int, mtp: bool, **changes: Any) -> Session:
    config = RunConfig(model=path, n_ubatch=16, server=MTP if mtp else ServerConfig(), **CPU | changes)
    return Session.open(config, n_ctx=320 * n_seq, n_seq_max=n_seq, n_step=8)


def same_with_and_without_drafts(path: Path, n_seq: int, n: int, **changes: Any) -> None:
    prompts = [TOKENS[i : i + 20 + 3 * i] for i in range(n_seq)]
    with opened(path, n_seq, False, **changes) as session:
        wanted, _, bits = generate(session, prompts, n)
    with opened(path, n_seq, True, **changes) as session:
        found, accepted, same = generate(session, prompts, n, wanted)
    assert accepted > n_seq * n // 10
    for seq in range(n_seq):
        assert found[seq][: len(wanted[seq])] == wanted[seq]
        assert all(map(np.array_equal, bits[seq], same[seq]))


def test_drafts_change_no_token(path: Path) -> None:
    same_with_and_without_drafts(path, 1, 40)


@pytest.mark.slow("long answers of every architecture")
@pytest.mark.parametrize("n_seq", [1, 4])
def test_drafts_change_no_token_of_long_answers(path: Path, n_seq: int) -> None:
    same_with_and_without_drafts(path, n_seq, 256)


# --- windows, other caches, sequences that are not continued ----------------------------------------------------------
@pytest.mark.parametrize("name", ["mimo2", "step35"])
def test_windows_that_move(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SPARE", 8)
    monkeypatch.setattr(sequences, "SPARE", 10)
    path = write_model(HEAD_MODELS[name](), tmp_path / "model.gguf")
    with opened(path, 2, True) as session:
        window = [c for c in session.run_plan.caches if c.per is Per.WINDOW]
        assert {c.il for c in window} >= {4, 6} and session.graph_config.n_window < 40
    same_with_and_without_drafts(path, 2, 60)


@pytest.mark.parametrize(
    "changes", [{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": False}], ids=["q8_0", "no-fa"]
)
def test_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    same_with_and_without_drafts(write_model(HEAD_MODELS["glm4moe"](), tmp_path / "model.gguf"), 2, 40, **changes)


def drafted(session: Session, tokens: np.ndarray, seq: int = 0) -> list[int]:
    """What follows tokens, of which all but the last are computed."""
    draft = Draft(seq, tokens, 3, 0.0, [], [])
    assert session.heads is not None
    session.heads.draft([draft])
    return draft.found


def test_caches_of_heads_follow_sequences(path: Path, tmp_path: Path) -> None:
    """Saved, loaded and copied sequences draft as the first one, once the state of their last position is known."""
    with opened(path, 2, True) as session, opened(path, 2, True) as other:
        session.decode(Batch.single(TOKENS[:30], logits="none"))
        saved = session.sequences.save(0, 30)
        assert session.sequences.copy(0, 1, 0, 30) == 30 and other.sequences.load(1, saved) == 30
        assert len(drafted(other, TOKENS[:31], 1)) == 3  # the state of position 29 is not known there
        for one, seq in ((session, 0), (session, 1), (other, 1)):
            one.decode(Batch.single(TOKENS[30:32], 30, seq, logits="none"))
        wanted = drafted(session, TOKENS[:33])
        assert len(wanted) == 3
        rows = [kept(session, 0, 28), kept(session, 1, 28), kept(other, 1, 28)]
        assert rows[0] == rows[1] == rows[2]
        assert len(drafted(session, TOKENS[:33], 1)) == len(drafted(other, TOKENS[:33], 1)) == 3


def test_a_sequence_that_was_asleep_drafts_again(tmp_path: Path) -> None:
    """Nothing is kept meanwhile, and another sequence drafts as ever."""
    with opened(write_model(HEAD_MODELS["deepseek2"](), tmp_path / "m.gguf"), 2, True) as session:
        session.decode(Batch.single(TOKENS[:30], logits="none"))
        wanted = drafted(session, TOKENS[:31])
        assert session.heads is not None and len(wanted) == 3
        session.sequences.truncate(0, 0)
        for seq in range(2):
            session.decode(Batch.single(TOKENS[:20], 0, seq, logits="none"))
        session.heads.asleep.add(1)
        n_steps = session.heads.n_steps
        for i in range(20, 30):
            session.step_each([int(TOKENS[i])], [i], [1])
        assert session.heads.n_steps == n_steps
        for i in range(20, 29):  # with one that is awake
            session.step_each([int(TOKENS[i]), int(TOKENS[i + 10])], [i, i + 10], [0, 1])
        assert session.heads.n_steps == n_steps + 9
        session.heads.asleep.clear()
        session.step_each([int(TOKENS[29])], [29], [0])
        assert drafted(session, TOKENS[:31]) == wanted
        assert len(drafted(session, TOKENS[:40], 1)) == 3


def kept(session: Session, seq: int, n: int) -> list[bytes]:
    """The first n rows of a sequence in the caches of heads."""
    n_layer = session.model.hp.n_layer
    caches = [c for c in session.run_plan.caches if c.il >= n_layer and c.per is Per.CELL]
    return [session.runner.read_cells(c, seq * session.n_ctx_seq, n).tobytes() for c in caches]


def test_a_sequence_that_is_truncated_drafts_as_a_new_one(path: Path) -> None:
    def other_end(session: Session) -> list[int]:
        tokens = np.append(TOKENS[:20], TOKENS[:5])
        session.decode(Batch.single(tokens[20:24], 20, logits="none"))
        return drafted(session, tokens)

    with opened(path, 1, True) as session:
        session.decode(Batch.single(TOKENS[:20], logits="none"))
        session.checkpoint(0)
        wanted = other_end(session)
        for first in (TOKENS[:33], TOKENS[5:39]):
            assert session.truncate(0, 20) == 20
            session.decode(Batch.single(first[20:-1], 20, logits="none"))
            drafted(session, np.append(TOKENS[:20], first[20:]))
        assert session.truncate(0, 20) == 20
        assert other_end(session) == wanted
        session.clear()
        assert drafted(session, TOKENS[:1]) == []
        session.decode(Batch.single(TOKENS[:20], logits="none"))
        assert other_end(session) == wanted


def test_drafts_are_probable(path: Path) -> None:
    with opened(path, 1, True) as session:
        session.decode(Batch.single(TOKENS[:20], logits="none"))
        sure, all_ = Draft(0, TOKENS[:21], 4, 1.1, [], []), Draft(0, TOKENS[:21], 4, 0.0, [], [])
        assert session.heads is not None
        session.heads.draft([sure])
        session.heads.draft([all_])
        assert not sure.found and len(all_.found) == 4 and all(0 < p <= 1 for p in all_.probabilities)
        least = np.partition(all_.probabilities, 1)[1]
        some = Draft(0, TOKENS[:21], 4, float(least), [], [])
        session.heads.draft([some])
        n = next((i for i, p in enumerate(all_.probabilities) if p < least), 4)
        assert some.found == all_.found[:n]


# --- plans, GPUs, errors ----------------------------------------------------------------------------------------------
def test_heads_take_memory_only_where_they_run(path: Path) -> None:
    config = RunConfig(model=path, **CPU)
    planner = Planner.of_file(config)
    without, with_heads = (planner.plan(replace(config, server=s)) for s in (ServerConfig(), MTP))
    n_layer = planner.hp.n_layer
    assert all(c.il < n_layer for c in without.caches) and any(c.il >= n_layer for c in with_heads.caches)
    tensors = {
        n: t for n, t in planner.file.tensors.items() if n.startswith("blk.") and int(n.split(".")[1]) >= n_layer
    }
    more = with_heads.memory.parts["CPU"]["weights"] - without.memory.parts["CPU"]["weights"]
    assert more >= sum(t.n_bytes for t in tensors.values()) > 0


@pytest.mark.slow("whole texts through emulated kernels")
@pytest.mark.parametrize("name", ["qwen35-mtp", "glm4moe-mtp"])
@needs_emulation
def test_golden_heads_on_an_emulated_gpu(name: str, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "open_devices", Opener())
    base = BaseReader(shared_dir / "golden" / "arch" / f"{name}.mtp.kld")
    path = shared_dir / "golden" / "arch" / f"{name}.gguf"
    with Session.open(cuda_sessions.config(path, n_ubatch=64, server=MTP)) as session:
        buffers = session.run_plan.placement.buffer_of
        assert buffers["blk.2.nextn.eh_proj.weight"] == "CUDA0"
        kld = np.sort(_kld(session, base, 0))[:-2]  # a choice of experts that was a tie may come out otherwise
    assert np.median(kld) <= 5e-6 and np.quantile(kld, 0.99) <= 6e-5


@pytest.mark.slow("emulated kernels for two sessions")
@needs_emulation
@pytest.mark.parametrize("rules", [(), (r"blk\.4\.=CPU",)], ids=["all", "head-in-ram"])
def test_drafts_on_an_emulated_gpu(rules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "open_devices", Opener())
    path = write_model(HEAD_MODELS["qwen35"](), tmp_path / "model.gguf")
    same_with_and_without_drafts(path, 1, 12, n_gpu_layers=99, override_tensor=rules)


def test_refusals(tmp_path: Path) -> None:
    plain = write_model(tiny("qwen35"), tmp_path / "plain.gguf")
    with pytest.raises(UnsupportedError, match=r"plain.gguf: the file has no layers that predict further"):
        Session.open(RunConfig(model=plain, server=MTP, **CPU))
    other = write_model(tiny("olmo2"), tmp_path / "other.gguf")
    with pytest.raises(UnsupportedError, match="no layers that predict"):
        Session.open(RunConfig(model=other, server=MTP, **CPU))
    model = HEAD_MODELS["glm4moe"]()
    del model.tensors["blk.3.nextn.hnorm.weight"]
    broken = write_model(model, tmp_path / "broken.gguf")
    with pytest.raises(FormatError, match=r"broken.gguf: tensor 'blk.3.nextn.hnorm.weight' is missing"):
        Session.open(RunConfig(model=broken, server=MTP, **CPU))
    Session.open(RunConfig(model=broken, **CPU)).close()


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


@pytest.mark.slow("kernels of other attention modes")
@pytest.mark.parametrize("mla", [0, 1, 2])
def test_modes_of_latent_attention(mla: int, tmp_path: Path) -> None:
    same_with_and_without_drafts(write_model(HEAD_MODELS["deepseek2"](), tmp_path / "model.gguf"), 2, 40, mla=mla)


def test_fit_counts_heads(tmp_path: Path) -> None:
    path = write_model(HEAD_MODELS["glm4moe"](), tmp_path / "model.gguf")
    config = RunConfig(command="plan", model=path, fit=True, **CPU)
    planner = Planner.of_file(config).on(described_machine(parse_device_spec("cuda:24GiB"), None))
    without, with_heads = (fit(planner, replace(config, server=s)) for s in (ServerConfig(), MTP))
    assert without.options == with_heads.options == "-ngl 99"
    buffers = with_heads.plan.placement.buffer_of
    assert {buffers[n] for n in buffers if n.startswith("blk.3.") and "embed_tokens" not in n} == {"CUDA0"}
    assert buffers["blk.3.nextn.embed_tokens.weight"] == "CPU"  # single rows are read from it
    more = {
        part: with_heads.plan.memory.parts["CUDA0"][part] - without.plan.memory.parts["CUDA0"][part]
        for part in ("weights", "KV")
    }
    tensors = planner.file.tensors.values()
    own = sum(t.n_bytes for t in tensors if buffers[t.name] == "CUDA0" and t.name.startswith("blk.3."))
    assert own <= more["weights"] < 1.5 * own and more["KV"] > 0
