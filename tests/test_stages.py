"""Pipeline stages: the same bits as in one process, whatever crosses the split points; refusals; lost stages."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_control_vector
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model
from stage_threads import Threads
from tiers import some_architectures
from tiny_architectures import TINY, tiny

from ikcli.engine.pipeline import supervisor
from ikcli.engine.pipeline.driver import PipelineRunner, StageLostError
from ikcli.engine.pipeline.part import StageRunner
from ikcli.engine.pipeline.split_points import find_split_points
from ikcli.engine.pipeline.wire import LostLinkError, MessageKind, StageListener, connect
from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run.adapters import Added
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, NonFiniteError, UnsupportedError, UsageError
from ikcli.graph.stages import LayerGraph, best_cuts
from ikcli.main import main
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.run import RunConfig

MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", tied=True),
    "deepseek2": lambda: tiny_deepseek2(),
}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_model(MODELS[name]() if name in MODELS else tiny(name), path)

    return get


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)


def config(path: Path, n_stages: int = 1, **changes: Any) -> RunConfig:
    """With one thread per stage."""
    settings = {"command": "bench", "n_ctx": 512, "n_threads": n_stages, "n_threads_batch": n_stages, "warmup": False}
    made = RunConfig(model=path, **(settings | {"n_ubatch": 32, "n_batch": 256} | changes))
    return replace(made, fleet=replace(made.fleet, stages=n_stages))


def tokens(n: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.int32)


def transcript(session: Session, *lengths: int) -> Any:
    """Logits of prompts of several micro-batches, of single tokens, and after going back."""
    rows = []
    for n in lengths:
        session.clear()
        ids = tokens(n + 2, n)
        rows.append(np.array(session.decode(Batch.single(ids[:n], logits="all"))))
        session.checkpoint(0)
        rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in (n, n + 1)]
        kept = session.truncate(0, n)
        rows.append(np.array(session.decode(Batch.single(ids[kept : n + 2], kept, logits="all"))))
    return np.concatenate(rows)


CASES: list[Any] = [
    ("llama", 2, {}),
    ("deepseek2", 2, {"n_ubatch": 128}),  # with a program of its own for prompts
    ("deepseek2", 2, {"mla": 1, "flash_attn": False}),
    ("qwen35moe", 4, {}),  # states
    ("gemma3", 3, {"n_ctx": 1024}),  # windows, which move
    ("kimi-linear", 3, {}),
    ("kimi-k3", 4, {}),  # layers that attend to outputs of earlier stages
    ("gpt-oss", 2, {"type_k": "q8_0", "type_v": "q8_0"}),
]


@pytest.mark.parametrize(("name", "n_stages", "changes"), CASES)
def test_stages_give_the_same_bits(name, n_stages, changes, model_file, threads) -> None:
    path = model_file(name)
    lengths = (40, 150) if name != "gemma3" else (40, 700)
    with Session.open(config(path, **changes)) as session:
        wanted = transcript(session, *lengths)
        assert session.sequences.has_windows == (name == "gemma3")
    with Session.open(config(path, n_stages, **changes)) as session:
        assert session.runner.depth == n_stages + 1
        np.testing.assert_array_equal(transcript(session, *lengths), wanted)


def test_what_is_large_goes_beside_the_computation(model_file, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and the same end when the chain breaks while some of it is under way."""
    monkeypatch.setattr("ikcli.engine.pipeline.process.LARGE", 1)
    path = model_file("qwen35moe")
    with Session.open(config(path)) as session:
        wanted = transcript(session, 40, 150)
    with Session.open(config(path, 4)) as session:
        np.testing.assert_array_equal(transcript(session, 40, 150), wanted)
        runner = session.runner
        assert isinstance(runner, PipelineRunner)
        runner.disconnect()
        with pytest.raises(StageLostError, match="the connection between two stages was lost"):
            session.clear()
            session.decode(Batch.single(tokens(150)))
        session.restart()
        np.testing.assert_array_equal(transcript(session, 40, 150), wanted)


def test_sequences_are_saved_and_come_back(model_file, threads, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of caches go through the chain, in order with micro-batches. The log says where the layers are."""
    path = model_file("qwen35moe")
    ids = tokens(70)
    for n_stages in (1, 2):
        with Session.open(config(path, n_stages), n_seq_max=2, n_ctx=512) as session:
            assert ("stages: layers 0-" in capsys.readouterr().err) == (n_stages == 2)
            session.decode(Batch.single(ids))
            saved = session.sequences.save(0, 70)
            assert session.sequences.load(1, saved) == 70
            session.sequences.copy(1, 0, 0, 70)
            rows = [np.array(session.decode(Batch.single([3], 70, seq))) for seq in (0, 1)]
            np.testing.assert_array_equal(*rows)
            if n_stages == 1:
                wanted, parts = rows, saved.parts
        np.testing.assert_array_equal(rows, wanted)
        assert all(np.array_equal(a, b) for a, b in zip(saved.parts, parts, strict=True))


# --- cuts -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", some_architectures(sorted(TINY)))
def test_parts_have_what_they_need(name: str, model_file) -> None:
    """For every architecture, wherever it can be cut: every node once, after all that it reads."""
    prepared = Planner.of_file(config(model_file(name))).prepare(config(model_file(name)), Sizes(128))
    for graph, result in prepared.graphs.values():
        layers = LayerGraph(graph)
        cuts = [0, *(set(range(1, layers.n_layer)) - layers.impossible_cuts()), layers.n_layer]
        seen: list[Any] = []
        caches: set[Any] = set()
        leaving: tuple[Any, ...] = ()
        for i in range(len(cuts) - 1):
            part = layers.part(cuts, i)
            assert part.arriving == leaving
            there = set(part.arriving)
            for node in part.nodes:
                assert set(node.nodes()) <= there
                there.add(node)
            assert set(part.leaving) <= there
            own = {c for node in part.nodes for c in node.caches()}
            assert not own & caches
            caches |= own
            leaving = part.leaving
            seen += [node for node in part.nodes if node in dict(layers.owned())]
        assert not leaving and result in seen
        assert len(seen) == len(set(seen)) == len(list(layers.owned()))


def test_what_cannot_be_cut_is_refused(model_file) -> None:
    path = model_file("gemma4")  # whose last layers use the caches of others
    with pytest.raises(UnsupportedError, match=r"gemma4 cannot be cut so often.*possible before layers"):
        Session.plan(config(path, 6))
    with pytest.raises(UsageError, match="only 2 layers"):
        Session.plan(config(model_file("llama"), 3))


def test_cuts_make_the_largest_share_small() -> None:
    sizes = [10] * 12
    assert best_cuts(sizes, 0, 0, (1, 1, 1), frozenset()) == (0, 4, 8, 12)
    assert best_cuts(sizes, 40, 0, (1, 1), frozenset()) == (0, 4, 12)
    assert best_cuts(sizes, 0, 0, (2, 1), frozenset()) == (0, 8, 12)
    assert best_cuts(sizes, 0, 0, (1, 1), frozenset({6})) in ((0, 5, 12), (0, 7, 12))
    assert best_cuts([10] * 3, 0, 0, (1, 1, 1), frozenset({1})) is None
    assert best_cuts(sizes, 0, 40, (1, 1), frozenset()) == (0, 8, 12) == best_cuts(sizes, 0, 20, (3, 2), frozenset())


def test_where_layers_use_what_others_have_there_is_no_cut(model_file) -> None:
    """Layers 4 and 5 attend to the caches of layers 2 and 3: with those, so their queries have to be there as well."""
    prepared = Planner.of_file(config(model_file("gemma4"))).prepare(config(model_file("gemma4")), Sizes(128))
    for graph, _ in prepared.graphs.values():
        assert LayerGraph(graph).impossible_cuts() == {3, 4, 5}


def test_caches_count_among_what_a_stage_has(model_file) -> None:
    one = config(model_file("gemma3"), 2)
    prepared = Planner.of_file(config(model_file("gemma3"))).prepare(config(model_file("gemma3")), Sizes(128))
    n_layer = prepared.model.hp.n_layer
    for heavy, wanted in ((0, 1), (n_layer - 1, n_layer - 1)):
        found = find_split_points(one, prepared.model, prepared.graphs, lambda c, il=heavy: (c.il == il) << 40)
        assert found == (0, wanted, n_layer)


def test_stages_of_one_machine_share_its_memory(model_file) -> None:
    """On machines of their own they do not; of a cluster the plan knows nothing."""
    staged = replace(config(model_file("llama"), 2), command="plan")
    planner = Planner.of_file(staged)
    sizes = {name: sum(p.values()) for name, p in planner.plan(staged).memory.parts.items()}
    both, large = sizes["stage 1"] + sizes["stage 2"], max(sizes.values())
    assert planner.on(Machine((), both)).plan(staged).memory.fits()
    assert not planner.on(Machine((), both - 1)).plan(staged).memory.fits()
    assert planner.on(Machine((), large, described=True)).plan(staged).memory.fits()
    assert not planner.on(Machine((), large - 1, described=True)).plan(staged).memory.fits()
    cluster = replace(staged, fleet=replace(staged.fleet, ray="10.0.0.1:6379"))
    assert planner.on(Machine((), large)).plan(cluster).memory.fits()


# --- what goes wrong --------------------------------------------------------------------------------------------------
def test_processes_and_a_lost_one(model_file) -> None:
    """The real thing, killed in the middle: an error that names the stage; what is left ends."""
    path = model_file("llama")
    ids = tokens(100)
    with Session.open(config(path)) as session:
        wanted = np.array(session.decode(Batch.single(ids, logits="all")))
    with Session.open(config(path, 2)) as session:
        np.testing.assert_array_equal(session.decode(Batch.single(ids, logits="all")), wanted)
        runner = session.runner
        assert isinstance(runner, PipelineRunner) and isinstance(runner.supervisor, supervisor.LocalSupervisor)
        pids = runner.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(StageLostError, match=r"stage 2 \(layers 1-1\) was lost: its process was ended by signal 9"):
            for _ in range(100):
                session.clear()
                session.decode(Batch.single(ids))
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        session.clear()
        with pytest.raises(StageLostError, match="stage 2"):
            session.decode(Batch.single(ids))
        session.restart()
        np.testing.assert_array_equal(session.decode(Batch.single(ids, logits="all")), wanted)


def test_nan_is_traced_through_stages(tmp_path: Path, threads) -> None:
    model = tiny_model("llama")
    shape = tuple(model.tensors["blk.1.ffn_down.weight"].shape)[::-1]
    model.set("blk.1.ffn_down.weight", np.full(shape, np.nan, np.float32))
    path = write_model(model, tmp_path / "nan.gguf")
    with Session.open(config(path, 2)) as session:
        with pytest.raises(NonFiniteError, match="ffn_out-1"):
            session.decode(Batch.single(tokens(100), logits="all"))
        with pytest.raises(NonFiniteError, match="ffn_out-1"):  # the chain goes on
            session.clear()
            session.decode(Batch.single(tokens(3)))


def test_a_stage_that_cannot_load_says_why(model_file, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikcli.engine.pipeline.driver.of_model", lambda file: "other")
    with pytest.raises(IkError, match=r"stage 1 \(layers 0-0\): .*llama.gguf on this node is another file"):
        Session.open(config(model_file("llama"), 2))


def in_time(work: Callable[[], Any]) -> list[Any]:
    """What some work gives or raises; fails if it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except IkError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "not within 60 seconds"
    return found


def test_errors_of_stages_reach_who_asked(model_file, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of caches while micro-batches are under way as well, whose logits are not mixed up with them."""
    ids = tokens(40)
    with Session.open(config(model_file("llama"), 2)) as session:
        session.decode(Batch.single(ids[:20], logits="none"))
        wanted = np.array(session.decode(Batch.single(ids[20:], 20)))
        session.clear()

        def fail(self: StageRunner, *args: Any) -> Any:
            raise IkError("this cache cannot be read")

        session.submit(Batch.single(ids[:20], logits="none"))
        with monkeypatch.context() as patched:
            patched.setattr(StageRunner, "read_cells", fail)
            (error,) = in_time(lambda: session.sequences.save(0, 20))
        assert "this cache cannot be read" in str(error)
        session.submit(Batch.single(ids[20:], 20))
        session.collect()
        np.testing.assert_array_equal(session.collect(), wanted)


def test_what_is_lost_twice_comes_back_twice(model_file, threads) -> None:
    ids = tokens(40)
    with Session.open(config(model_file("llama"), 2)) as session:
        runner = session.runner
        assert isinstance(runner, PipelineRunner)
        wanted = np.array(session.decode(Batch.single(ids)))
        for _ in range(2):
            runner.disconnect()
            (error,) = in_time(lambda: session.decode(Batch.single([1], 40)))
            assert isinstance(error, StageLostError) and runner.supervisor is None
            session.restart()
            assert session.sequences.n_past == [0] and session.n_in_flight == 0
            np.testing.assert_array_equal(session.decode(Batch.single(ids)), wanted)


def test_stages_of_another_version_are_named(model_file) -> None:
    """Before anything is sent to them."""
    runner = PipelineRunner(config(model_file("llama"), 2), Sizes(128), (0, 1, 2), supervisor.supervise_here)
    listener = StageListener("127.0.0.1", "secret")
    try:
        hello = {"secret": "secret", "index": 1, "version": "0.0.1", "host": "127.0.0.1", "port": 1, "pid": 1}
        link = connect(listener.address, hello)
        (error,) = in_time(lambda: runner._gather(listener))
        assert str(error).startswith("stage 2 runs ik 0.0.1, and this is ")
        runner._end()
        with pytest.raises(LostLinkError):
            link.receive(timeout=30)
        link.close()
    finally:
        listener.close()


def test_scales_of_all_that_is_added_reach_all_stages(model_file, threads, tmp_path: Path) -> None:
    """A direction of every layer, each of which is in another stage."""
    rng = np.random.default_rng(2)
    width = Planner.of_file(config(model_file("llama"))).hp.n_embd
    vector = write_control_vector(tmp_path / "v.gguf", {"direction.1": rng.normal(0, 1, width)})
    adapters = AdapterConfig(control_vector=(vector,))
    ids, found = tokens(20), []
    for n in (1, 2):
        with Session.open(config(model_file("llama"), n, adapters=adapters)) as session:
            (use,) = session.model.adapters.added.vectors
            rows = []
            for scale in (1.0, 0.25, 0.0, 1.0):
                session.apply(Added((), (use._replace(scale=scale),)))
                session.clear()
                rows.append(np.array(session.decode(Batch.single(ids))))
            found.append(rows)
    np.testing.assert_array_equal(found[0], found[1])
    assert np.array_equal(found[1][0], found[1][3])
    assert min(np.abs(found[1][a] - found[1][b]).max() for a, b in ((0, 1), (1, 2), (0, 2))) > 0


def test_messages_that_are_none_end_a_connection() -> None:
    """Without room being made for what they promise."""
    listener = StageListener("127.0.0.1", "secret")
    try:
        for head, text in (
            (struct.pack("<IIQ", 10, (1 << 20) + 1, 0), "what arrived is not a message"),
            (struct.pack("<IIQ", 99, 2, 0) + b"{}", "what arrived is not a message"),
            (struct.pack("<IIQ", 10, 1, 0) + b"{", "what arrived is not a message"),
            (struct.pack("<IIQ", 10, 2, 5) + b"{}abcd", "closed by the other end"),
        ):
            right = connect(listener.address, {"secret": "secret"})
            found = listener.accept(5)
            assert found is not None
            right._sock.sendall(head)
            right._sock.shutdown(socket.SHUT_WR)
            with pytest.raises(LostLinkError, match=text):
                found[0].receive(timeout=30)
            right.close()
            found[0].close()
        words = b'{"secret": "secret"}'
        for n_words, n_bytes in ((len(words), 1), (5000, 0), (len(words), 0)):
            with socket.create_connection(listener.address) as other:
                other.sendall(struct.pack("<IIQ", MessageKind.HELLO, n_words, n_bytes) + words.ljust(n_words))
                taken = listener.accept(5)
                assert (taken is not None) == (n_words < 4096 and n_bytes == 0)
                if taken is not None:
                    taken[0].close()
    finally:
        listener.close()


def test_a_message_in_many_parts_arrives_whole() -> None:
    """More parts than one call takes, some of them cut in the middle."""
    listener = StageListener("127.0.0.1", "secret")
    try:
        link = connect(listener.address, {"secret": "secret"})
        found = listener.accept(5)
        assert found is not None
        parts = [np.full(n, n % 251, np.uint8) for n in range(1, 3000, 7)]
        real, taken = link._sock, itertools.cycle((1, 300, 4096, 7))

        class Slow:
            """Takes a little of what it is given."""

            def sendmsg(self, buffers: Any) -> int:
                assert len(buffers) <= 1024, "more than the system takes"
                data = b"".join(buffers)[: next(taken)]
                real.sendall(data)
                return len(data)

        link._sock = Slow()  # type: ignore[assignment]
        sender = threading.Thread(target=link.send, args=(MessageKind.RUN, {}, parts), daemon=True)
        sender.start()
        _, _, data = found[0].receive(timeout=30)
        sender.join(30)
        assert not sender.is_alive() and bytes(data) == np.concatenate(parts).tobytes()
        real.close()
        found[0].close()
    finally:
        listener.close()


def test_strangers_are_sent_away() -> None:
    listener = StageListener("127.0.0.1", "secret")
    try:
        for hello in (b"GET / HTTP/1.1\r\n\r\n\r\n\r\n", b"\1\0\0\0\xff\xff\xff\xff" + bytes(8)):
            with socket.create_connection(listener.address) as stranger:
                stranger.sendall(hello)
                assert listener.accept(5) is None
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        wrong = connect(listener.address, {"secret": "guess"})
        assert listener.accept(5) is None
        with pytest.raises(LostLinkError):
            wrong.receive()
        right = connect(listener.address, {"secret": "secret", "index": 3})
        found = listener.accept(5)
        assert found is not None and found[1]["index"] == 3
        data = np.arange(1 << 20, dtype=np.int32)
        sender = threading.Thread(target=right.send, args=(MessageKind.RUN, {"a": 1}, [b"x", data, b""]), daemon=True)
        sender.start()
        kind, words, payload = found[0].receive(timeout=30)
        sender.join(30)
        assert not sender.is_alive(), "the message was not taken within 30 seconds"
        assert (kind, words) == (MessageKind.RUN, {"a": 1})
        np.testing.assert_array_equal(np.frombuffer(payload[1:], np.int32), data)
        right.close()
        with pytest.raises(LostLinkError):
            found[0].receive()
        found[0].close()
        wrong.close()
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["imatrix", "--stages", "2"], "ik imatrix cannot be used with --stages"),
        (["chat", "--ray", "auto"], "add --stages N to ik chat"),
        (["perplexity", "--stages", "2", "--workers", "2"], "use one of them"),
        (["perplexity", "--stages", "2", "--journal", "x"], "--journal divides the work"),
        (["serve", "--stages", "2", "--replicas", "2"], "--replicas divides the work"),
        (["bench", "--stages", "2", "--profile"], "--profile cannot be used with --stages"),
        (["plan", "--stages", "2", "-ngl", "9"], "-ngl cannot be used with --stages"),
        (["plan", "--stages", "2", "--stage-split", "1,2,3"], "needs 2 shares"),
        (["plan", "--stage-split", "1,2"], "needs --stages N"),
        (["plan", "--stages", "9"], "only 3 layers"),
    ],
)
def test_what_stages_cannot_do(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert text in capsys.readouterr().err
