"""Images in batches of tiny models, and the ops of towers against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from factories import tiny_model
from gguf_files import write_model
from tiny_architectures import TINY, tiny

from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Media
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.graph import Graph, HeadSlice, Node
from ikcli.graph.micro_batch import AXES, MEDIA_AT, PLACE_WORDS, SEEN, MicroBatch, Segment
from ikcli.imatrix.collect import watch
from ikcli.models import MediaConfig
from ikcli.settings.run import RunConfig
from ikcli.vision.encoder import Encoder, tower_runner
from ikcli.vision.tower import Inputs

SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
KINDS: dict[str, tuple[str, dict[str, Any], MediaConfig]] = {
    "llama": ("llama", {}, MediaConfig()),
    "qwen2vl": ("qwen2vl", SECTIONS, MediaConfig()),
    "deepstack": ("qwen3vl", SECTIONS, MediaConfig(n_deep=1)),
    "visual experts": ("cogvlm", {}, MediaConfig(framed=True)),
    "recurrent": ("qwen35", SECTIONS, MediaConfig()),
}


def opened(folder: Path, arch: str, keys: dict[str, Any], media: MediaConfig | None, **changed: Any) -> Session:
    path = folder / f"{arch}.gguf"
    if not path.exists():
        write_model(tiny(arch, **keys) if arch in TINY else tiny_model(arch, **keys), path)
    config = RunConfig(model=path, n_ctx=256, n_threads=1, n_threads_batch=1, warmup=False, **changed)
    return Session.open(config, media=media)


def picture(session: Session, n: int, grid: tuple[int, int] = (0, 0), seed: int = 3, *, both: bool = False) -> Media:
    media = session.graph_config.media
    assert media is not None
    shape = n, media.cols(session.model.hp.n_embd)
    rows = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Media(rows, f"{seed:08x}", grid, both, media.framed)


EXPERTS = pytest.param("visual experts", marks=pytest.mark.slow("compiles a kernel for a single kind"))


@pytest.mark.parametrize("kind", [EXPERTS if kind == "visual experts" else kind for kind in KINDS])
def test_micro_batches_smaller_than_an_image(tmp_path: Path, kind: str) -> None:
    arch, keys, media = KINDS[kind]
    grid = (2, 5) if keys else (0, 0)
    found = []
    for n_ubatch in (512, 3):
        with opened(tmp_path, arch, keys, media, n_ubatch=n_ubatch, type_k="f32", type_v="f32") as session:
            image = picture(session, 10, grid)
            batch = Batch.mixed([[1, 2, 3], image, [4, 5], picture(session, 10, grid, 4), [6]], logits="all")
            rows = np.array(session.decode(batch))
            last = session.decode(Batch.single([7], len(batch)))
            found.append(np.concatenate([rows, last]))
            assert session.sequences.shift(0) == 2 * (image.advance - 10)
            assert image.advance == (3 if media.framed else 5 if keys else 10)
    assert np.allclose(found[0], found[1], atol=2e-4 * found[0].std())


def test_rows_of_tokens_are_tokens(tmp_path: Path) -> None:
    """An image that holds the embeddings of tokens gives their logits."""
    ids = [5, 9, 2, 7]
    with opened(tmp_path, "llama", {}, MediaConfig()) as session:
        embd = session.model.values("token_embd.weight")[ids]
        truth = np.array(session.decode(Batch.single([1, *ids, 8], logits="all")))
        session.clear()
        found = session.decode(Batch.mixed([[1], Media(embd, "ab" * 8), [8]], logits="all"))
        assert np.array_equal(found, truth)


@pytest.mark.parametrize("kind", ["qwen2vl", "deepstack", EXPERTS])
def test_text_is_as_without_images(tmp_path: Path, kind: str) -> None:
    arch, keys, media = KINDS[kind]
    ids = list(range(1, 20))
    with opened(tmp_path, arch, keys, None) as session:
        truth = np.array(session.decode(Batch.single(ids, logits="all")))
    with opened(tmp_path, arch, keys, media) as session:
        assert np.array_equal(session.decode(Batch.single(ids, logits="all")), truth)


@pytest.mark.slow("compiles a kernel for a single kind")
def test_importance_of_both_sets_of_matrices(tmp_path: Path) -> None:
    """Of an image of ten tokens, visual experts compute nine."""
    with opened(tmp_path, "cogvlm", {}, MediaConfig(framed=True)) as session:
        session.observer = collector = watch([graph for graph, _ in session.graphs.values()])
        session.decode(Batch.mixed([[1, 2, 3], picture(session, 10), [4, 5]]))
        counts = {name: s.counts.tolist() for s in collector.take().streams for name in s.names}
    inner = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert all(counts[f"blk.0.{name}.weight"] == [6] for name in inner)
    assert all(counts[f"blk.0.vis_{name.removeprefix('ffn_')}.weight"] == [9] for name in inner)


def test_a_session_says_what_it_cannot_take(tmp_path: Path) -> None:
    with opened(tmp_path, "llama", {}, MediaConfig()) as session:
        image = picture(session, 4)
        wrong = Media(image.rows[:, :-1], "ab" * 8)
        with pytest.raises(IkError, match="rows of"):
            session.decode(Batch.mixed([[1], wrong]))
    with pytest.raises(IkError, match="lacks the visual experts"):
        opened(tmp_path, "llama", {}, MediaConfig(framed=True))
    with opened(tmp_path, "llama", {}, None) as session, pytest.raises(IkError, match="without a projector"):
        session.decode(Batch.mixed([[1], image]))


class Tower:
    """Every op that towers add to those of text models; `half` as in attention."""

    def __init__(self, half: bool = False) -> None:
        self.half = half

    def stages(self) -> list[tuple[Any, int]]:
        return [(self.record, 0)]

    def record(self, g: Graph) -> Node:
        x = g.media_rows(None, 0, 32, "pixels")
        x = g.add(x, g.media_rows(x, 32, 32, "replaced"), "sum")
        table = g.axis_rope_table([1.0, 0.5, 0.25, 0.1], [1, 2, 1, 0], 1.0)
        x = g.rope(x, table, 2, 16, "rotated", neox=True)
        parts = [HeadSlice(x, 0, 16, 16)]
        settings = {"n_head": 2, "n_head_kv": 2, "scale": 0.25, "flash": True, "half": self.half}
        seen = g.attention(parts, parts, parts[0], "window", window=1, ranged=True, **settings)  # type: ignore[arg-type]
        whole = g.attention(parts, parts, parts[0], "whole", both=True, **settings)  # type: ignore[arg-type]
        x = g.add(seen, g.scale(whole, 0.5, "half"), "both")
        return g.concat([g.merge_rows(x, 2, "merged"), g.mean_rows(x, 2, "mean")], "out")


class NoTensors:
    def n_bytes(self, names: object) -> int:
        return 0

    def load(self, names: object, *, mmap: bool) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("n", [2, 16, 130])
def test_ops_of_towers(n: int) -> None:
    check_ops(n, half=False)


@pytest.mark.slow("compiles attention over rounded rows")
@pytest.mark.parametrize("n", [16, 145, 300])
def test_attention_over_rounded_rows(n: int) -> None:
    check_ops(n, half=True)


def check_ops(n: int, *, half: bool) -> None:
    rng = np.random.default_rng(n)
    rows, at = rng.standard_normal((n, 64)).astype(np.float32), rng.integers(0, 30, (n, 2)).astype(np.int32)
    first = np.arange(n) // 6 * 6
    ranges = np.stack([first, np.minimum(first + 6, n)], axis=1).astype(np.int32)
    tower, tensors = cast(Any, Tower(half)), cast(Any, NoTensors())
    encoder = Encoder(tower, tensors, tower_runner(2))
    found = encoder.run(Inputs(rows, at, ranges, n // 2))
    encoder.close()
    graph = Graph()
    result = Tower().record(graph)
    places = np.zeros((n, PLACE_WORDS), np.int32)
    places[:, MEDIA_AT], places[:, AXES + 1 : AXES + 3], places[:, SEEN : SEEN + 2] = 64 * np.arange(n), at, ranges
    state = MicroBatch(np.zeros(n, np.int32), np.arange(n, dtype=np.int32), np.arange(n), np.arange(n // 2),
                       (Segment(0, n, 0, 0),), media=rows, places=places)  # fmt: skip
    truth = ReferenceExecutor(no_weight, CacheStore(8)).run(graph, state)
    assert result is graph.nodes[-1]
    assert np.allclose(found, truth, atol=1e-3 if half else 1e-5)


def no_weight(name: str) -> npt.NDArray[np.float32]:
    raise AssertionError(f"{name} is not a weight")
