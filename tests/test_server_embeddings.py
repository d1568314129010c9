"""Embeddings and reranking of the server: forms of requests and answers, and the engine's slots behind them."""

from __future__ import annotations

import base64
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from engine_client import ENDLESS, GREEDY, Call, ask, request, serving, stop, until
from factories import MemoryModel, MemoryTensor
from fake_engine import FakeEngine, fake_tokenizer
from gguf_files import write_model
from server_client import Client
from test_server_http import error_of

from ikcli import main
from ikcli.engine.run import embedder
from ikcli.engine.run.pooling import Pooling
from ikcli.errors import NonFiniteError
from ikcli.gguf.reader import open_gguf
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Embedded, EmbeddingRequest, Event, Failure
from ikcli.settings.embed import EmbedConfig
from ikcli.settings.run import RunConfig


# --- forms --------------------------------------------------------------------------------------------------------
def client(pooling: str = "last", metadata: dict[str, Any] | None = None, **keys: Any) -> Client:
    engine = FakeEngine(fake_tokenizer(**keys))
    engine.model = replace(engine.model, pooling=pooling, metadata=engine.model.metadata | (metadata or {}))
    return Client(engine=engine)


def unit(first: float, n: float) -> list[float]:
    return [x / (first**2 + n**2) ** 0.5 for x in (first, n)]


def test_openai_form() -> None:
    c = client()
    bos = c.engine.tokenizer.bos_id
    assert bos is not None
    found = c.post("/v1/embeddings", {"input": ["ab", [7, 8, 9]]}).json()
    assert [(x["object"], x["index"]) for x in found["data"]] == [("embedding", 0), ("embedding", 1)]
    assert found["data"][0]["embedding"][:2] == pytest.approx(unit(bos, 3))
    assert found["data"][1]["embedding"][:2] == pytest.approx(unit(7, 3))
    assert found["model"] == "m" and found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert len(c.engine.embedded) == 1
    for value in ("ab", [7, 8, 9], [[7, 8], [9]]):
        assert c.post("/v1/embeddings", {"input": value}).status_code == 200
    assert c.engine.embedded[2].texts == ((7, 8, 9),) and c.engine.embedded[3].texts == ((7, 8), (9,))


def test_texts_in_parts() -> None:
    c = client()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for value in ({"content": parts}, [{"content": parts}, "ab"], [[7, 8], {"content": parts}]):
        assert c.post("/v1/embeddings", {"input": value}).status_code == 200
    plain = c.engine.embedded[1].texts
    assert plain[0] == plain[1] == c.engine.embedded[0].texts[0] == c.engine.embedded[2].texts[1]
    for wrong in ([{"type": "image_url"}], [7], [{"type": "text"}], [{"type": "text", "text": 5}]):
        assert "input[0].content[0]" in error_of(c.post("/v1/embeddings", {"input": [{"content": wrong}]}), 400)


def test_encodings_and_dimensions() -> None:
    c = client()
    body = {"input": [7, 8, 9]}
    plain = c.post("/v1/embeddings", body | {"encoding_format": "float"}).json()["data"][0]["embedding"]
    text = c.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), plain, atol=1e-9)
    assert c.post("/v1/embeddings", body | {"dimensions": 1}).json()["data"][0]["embedding"] == [1]
    problem = error_of(c.post("/v1/embeddings", body | {"encoding_format": "int8"}), 400)
    assert problem == 'encoding_format must be float or base64, not "int8"'
    for wrong in ({"dimensions": 9}, {"dimensions": 0}, {"embd_normalize": -2},
                  {"input": []}, {"input": [1 << 20]}, {"input": None}, {"input": {"a": 1}}, {"lora": [{"id": 0}]},
                  {"input": ["a"] * 2049}):  # fmt: skip
        assert c.post("/v1/embeddings", body | wrong).status_code == 400, wrong


def test_legacy_form() -> None:
    c = client()
    for path, body in (("/embedding", {"content": [7, 8]}), ("/embeddings", {"input": [7, 8]}),
                       ("/v1/embeddings", {"content": [7, 8]})):  # fmt: skip
        (found,) = c.post(path, body | {"embd_normalize": 1}).json()
        assert found["index"] == 0 and found["embedding"][0][:2] == pytest.approx([7 / 9, 2 / 9])


def test_without_pooling() -> None:
    c = client("none")
    (found,) = c.post("/embeddings", {"input": [7, 8]}).json()
    assert [row[:2] for row in found["embedding"]] == [[7, 2], [7, 2]]
    assert "Pooling type 'none'" in c.post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]
    assert c.post("/api/embed", {"model": "m", "input": "a"}).status_code == 400


def test_ollama() -> None:
    c = client(add_eos_token=True)
    found = c.post("/api/embed", {"model": "m", "input": ["ab", "abc"]}).json()
    assert len(found["embeddings"]) == 2 and found["prompt_eval_count"] == 9 and found["total_duration"] > 0
    assert np.linalg.norm(found["embeddings"][0]) == pytest.approx(1)
    assert c.post("/api/embed", {"model": "m", "input": []}).json()["embeddings"] == []
    c.post("/api/embed", {"model": "m", "input": "a" * 300})
    tokens, ids = c.engine.embedded[-1].texts[0], c.engine.tokenizer
    assert len(tokens) == 256 and tokens[0] == ids.bos_id and tokens[-1] == ids.eos_id
    raw = c.post("/api/embeddings", {"model": "m", "prompt": "ab"}).json()["embedding"]
    assert raw[:2] == [ids.bos_id, 4]
    assert c.post("/api/show", {"model": "m"}).json()["capabilities"] == ["completion", "embedding"]


RERANK = {"query": "q", "documents": ["long text", {"text": "s"}, "text"]}


def test_rerank() -> None:
    template = "<|im_start|>{query} {document}<|im_end|>"
    c = client("rank", {"tokenizer.chat_template.rerank": template})
    found = c.post("/v1/rerank", RERANK | {"return_documents": True}).json()
    assert [r["index"] for r in found["results"]] == [1, 2, 0]
    assert found["results"][0]["document"] == {"text": "s"} and found["results"][0]["relevance_score"] > 0.1
    encode = c.engine.tokenizer.encode
    assert c.engine.embedded[0].texts[0] == tuple(encode("<|im_start|>q long text<|im_end|>", add_special=False))
    assert len(c.post("/rerank", RERANK | {"top_n": 2}).json()["results"]) == 2
    tei = c.post("/rerank", {"query": "q", "texts": ["long", "s"], "return_text": True}).json()
    assert [(x["index"], x["text"]) for x in tei] == [(1, "s"), (0, "long")]
    for wrong in ({"query": None}, {"documents": []}, {"documents": [1]}, {"documents": [{}]}, {"top_n": 0}):
        assert c.post("/rerank", RERANK | wrong).status_code == 400, wrong
    assert "/v1/rerank" in c.post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]
    assert "--reranking" in client().post("/v1/rerank", RERANK).json()["error"]["message"]


def test_query_and_document_without_a_template() -> None:
    c = client("rank", {"tokenizer.ggml.add_sep_token": True}, add_eos_token=True, seperator_token_id=5)
    c.post("/rerank", {"query": "q{document}", "documents": ["d"]})
    ids, encode = c.engine.tokenizer, c.engine.tokenizer.encode
    q, d = encode("q{document}", add_special=False), encode("d", add_special=False)
    assert c.engine.embedded[0].texts[0] == (ids.bos_id, *q, ids.eos_id, 5, *d, ids.eos_id)


# --- the engine ---------------------------------------------------------------------------------------------------
class Vectors:
    """A submitted request for embeddings."""

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        self.event: Event | None = None
        self._there = threading.Event()
        self.ticket = engine.submit(EmbeddingRequest(tuple(map(tuple, texts))), self._take)

    def _take(self, event: Event) -> None:
        self.event = event
        self._there.set()

    @property
    def rows(self) -> list[np.ndarray]:
        assert self._there.wait(60) and isinstance(self.event, Embedded), self.event
        return [rows[0] for rows in self.event.rows]

    @property
    def failure(self) -> Failure:
        assert self._there.wait(60) and isinstance(self.event, Failure), self.event
        return self.event


def texts(n: int, length: int = 4) -> list[list[int]]:
    return np.random.default_rng(n).integers(5, 200, (n, length)).tolist()


def test_many_texts_are_few_micro_batches_beside_generations() -> None:
    prompt = list(range(10, 60))
    with serving(2) as engine:
        assert engine.model.pooling == "last" and engine.model.generates
        wanted = ask(engine, prompt, 30).text
        before = engine.metrics().n_decode_total
        many = Vectors(engine, texts(64))
        assert len(many.rows) == 64
        assert engine.metrics().n_decode_total == before + 1
        call = Call(engine, request(prompt, 30))
        again = [Vectors(engine, texts(64)) for _ in range(3)]
        for one in again:
            assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(one.rows, many.rows, strict=True))
        assert call.final.text == wanted
        long = Vectors(engine, [*texts(1, 500), *texts(3, 300)])
        assert len(long.rows) == 4
        alone = Vectors(engine, texts(1, 500)).rows[0]
        assert np.abs(long.rows[0] - alone).max() < 1e-4
        assert [s.is_processing for s in engine.slots()] == [False, False]


def test_what_the_slot_held_is_kept() -> None:
    prompt = list(range(10, 110))
    with serving(1) as engine:
        ask(engine, prompt, 4)
        assert len(Vectors(engine, texts(2)).rows) == 2
        assert engine.slots()[0].n_past == 0
        found = ask(engine, prompt, 4)
        assert found.timings.cache_n == 99


def test_requests_that_cannot_be_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(1) as engine:
        too_long = Vectors(engine, [[5], [5] * 2000]).failure
        assert too_long.status == 400 and too_long.type == "exceed_context_size_error" and "text 1" in too_long.message
        assert Vectors(engine, [[1 << 20]]).failure.status == 400
        states = embedder.states

        def failing(session: Any, seq: int, texts: Any, *more: Any) -> Any:
            if any(7 in t for t in texts):
                raise NonFiniteError("NaN")
            return states(session, seq, texts, *more)

        monkeypatch.setattr(embedder, "states", failing)
        call = Call(engine, request(list(range(10, 60)), 60))
        good, bad, better = (Vectors(engine, [[i, i + 1]] * 3) for i in (50, 6, 60))
        assert len(good.rows) == len(better.rows) == 3
        assert bad.failure.status == 500 and bad.failure.message == "NaN"
        assert call.final.stop_type == "limit" or call.final.text


def test_cancelled_and_left_requests() -> None:
    with serving(1) as engine:
        call = Call(engine, request(list(range(10, 60)), ENDLESS, sampling=replace(GREEDY, ignore_eos=True)))
        waiting = Vectors(engine, texts(2))
        until(lambda: engine.metrics().requests_deferred == 1)
        waiting.ticket.cancel()
        until(lambda: engine.metrics().requests_deferred == 0)
        assert waiting.event is None
        left = Vectors(engine, texts(2))
        until(lambda: engine.metrics().requests_deferred == 1)
        stop(engine)
        assert left.failure.status == 503 and call.failure.status == 503


def test_a_request_under_way_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, states, n_steps = threading.Event(), threading.Event(), embedder.states, [0]

    def waiting(*args: Any) -> Any:
        n_steps[0] += 1
        began.set()
        assert go.wait(60)
        return states(*args)

    with serving(1, n_ctx=128) as engine:
        monkeypatch.setattr(embedder, "states", waiting)
        left = Vectors(engine, [[5] * 100] * 40)
        assert began.wait(60)
        left.ticket.cancel()
        go.set()
        ask(engine, [5, 6], 1)  # in the slot that was lent
        assert left.event is None and n_steps[0] <= 2


def test_a_server_that_only_embeds() -> None:
    with serving(1, server={"embeddings": True}) as engine:
        assert not engine.model.generates
        assert len(Vectors(engine, texts(3)).rows) == 3
        refused = Call(engine, request([5])).failure
        assert refused.status == 501 and "`--embeddings`" in refused.message
    with serving(1, embed=EmbedConfig(pooling="mean")) as engine:
        assert engine.model.pooling == "mean"


def reranker(folder: Path) -> Path:
    """A tiny Qwen3 with a vocabulary, a classification head and a template."""
    config = checkpoints.LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}
    tensors = checkpoints.llama_tensors(config)
    norms = {f"model.layers.{il}.self_attn.{x}_norm.weight": np.ones(64, np.float32) for il in (0, 1) for x in "qk"}
    directory = checkpoints.write_checkpoint(folder / "hf", config, tensors | norms)
    assert main.main(["convert", str(directory), "--outtype", "f32", "--outfile", str(folder / "plain.gguf")]) == 0
    file = open_gguf(folder / "plain.gguf")
    found = {name: MemoryTensor(t.type, tuple(t.shape), file.data(name)) for name, t in file.tensors.items()}
    keys = {"qwen3.pooling_type": 4, "tokenizer.chat_template.rerank": "Q: {query} D: {document}"}
    model = MemoryModel(dict(file.metadata) | keys, found)
    model.set("cls.output.weight", np.random.default_rng(0).normal(0, 1, (2, 256)))
    return write_model(model, folder / "rank.gguf")


def test_a_reranker(tmp_path: Path) -> None:
    path = reranker(tmp_path)
    with serving(1, model=path, n_ctx=256) as engine:
        assert engine.model.pooling == "rank"
        one, other = Vectors(engine, [[5, 6], [7]]).rows
        assert one.sum() == pytest.approx(1) and 0 < other[0] < 1
    plain = tmp_path / "plain.gguf"
    config = RunConfig(command="serve", model=plain, n_ctx=256, embed=EmbedConfig(pooling="rank"))
    engine = Engine(config, n_slots=1)
    engine.start()
    assert not engine.wait_loaded(60) and "cannot rank" in str(engine.load_error)
    stop(engine)
    assert Pooling.names()[4] == "rank"
