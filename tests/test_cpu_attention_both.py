"""Attention in both directions, perhaps weakened by distance, against float64 NumPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from attention_cases import check, gqa, has_kernel, whole_texts
from kernel_harness import Segment

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph.core import Run
from ikcli.graph.ops_attention import Attention
from ikcli.models.alibi import slopes

SLOPES = {4: slopes(4, 8.0), 3: slopes(3, 8.0), 12: slopes(12, 8.0)}
LENGTHS = [1, 2, 9, 15, 16, 17, 63, 64, 127, 128, 129, 144, 145, 300]


def texts(*lengths: int) -> list[Segment]:
    return [Segment(n, cell=7 * i) for i, n in enumerate(lengths)]  # cells are not looked at


@pytest.mark.parametrize("weakened", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths_of_texts(n: int, weakened: bool) -> None:
    built = whole_texts(4, 4, 32, tokens=512, slopes=SLOPES[4] if weakened else ())
    check(built, texts(n), 2)
    assert has_kernel(built, "attention")


@pytest.mark.parametrize("weakened", [False, True])
@pytest.mark.parametrize("lengths", [(8,), (3, 5), (1, 1, 6)])
def test_few_tokens(lengths: tuple[int, ...], weakened: bool) -> None:
    built = whole_texts(4, 4, 32, tokens=8, slopes=SLOPES[4] if weakened else ())
    check(built, texts(*lengths), 2)
    assert has_kernel(built, "attention_few")


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_texts_side_by_side(n_threads: int) -> None:
    """With parts of tasks too."""
    check(whole_texts(12, 12, 32, tokens=400, slopes=SLOPES[12]), texts(3, 40, 1, 17, 130, 2), n_threads)
    check(whole_texts(1, 1, 64, tokens=900), texts(900), n_threads)
    check(whole_texts(3, 1, 64, tokens=900, slopes=SLOPES[3]), texts(700, 90), n_threads)


@pytest.mark.parametrize(("n_head", "n_head_kv", "width", "v_width"), [(3, 3, 20, 20), (12, 4, 64, 32), (4, 4, 96, 96)])
def test_shapes_of_heads(n_head: int, n_head_kv: int, width: int, v_width: int) -> None:
    check(whole_texts(n_head, n_head_kv, width, tokens=64, v_width=v_width, slopes=SLOPES[n_head]), texts(33, 4), 1)


@pytest.mark.slow("compiles attention kernels with biases")
@pytest.mark.parametrize("most", [0, 3, 128])
def test_biases_of_distances(most: int, rng: np.random.Generator) -> None:
    biases = tuple(map(tuple, rng.normal(0, 2, (4, 2 * most + 1)).tolist()))
    for n in (1, 15, 17, 128, 129, 300):
        check(whole_texts(4, 4, 32, tokens=512, biases=biases), texts(n), 2)
    check(whole_texts(4, 4, 24, tokens=400, biases=biases), texts(3, 40, 1, 17, 130, 2), 3)
    for lengths in ((8,), (3, 5), (1, 1, 6)):
        check(whole_texts(4, 4, 32, tokens=8, biases=biases), texts(*lengths), 2)
    with pytest.raises(ValueError, match="every head"):
        whole_texts(4, 2, 32, tokens=8, biases=biases)


@pytest.mark.slow("compiles attention kernels with windows on both sides")
@pytest.mark.parametrize("window", [1, 5, 64, 200])
def test_windows_on_both_sides(window: int) -> None:
    for n in (1, 16, 17, 128, 129, 300):
        check(whole_texts(4, 4, 32, tokens=512, window=window), texts(n), 2)
    check(whole_texts(12, 4, 32, tokens=400, window=window), texts(3, 40, 1, 17, 130, 2), 3)
    for lengths in ((8,), (3, 5), (1, 1, 6)):
        check(whole_texts(4, 2, 32, tokens=8, window=window), texts(*lengths), 2)


def test_windows_hide_what_is_far_on_either_side() -> None:
    built = whole_texts(1, 1, 16, tokens=16, window=3)
    op = built.node.op
    run = cast(Run, SimpleNamespace(state=SimpleNamespace(pos=np.arange(6))))
    assert isinstance(op, Attention)
    hidden = op.hidden(run, cast(Any, SimpleNamespace(start=0, n_tokens=6, pos=0, n_kv=6)), np.arange(6))
    assert (hidden == (np.abs(np.subtract.outer(np.arange(6), np.arange(6))) >= 3)).all()


@pytest.mark.parametrize("changes", [{"both": True}, {"slopes": SLOPES[4]}])
def test_refused(changes: dict[str, object]) -> None:
    """By what stores scores; and slopes beside windows by everything."""
    f16 = (GGMLType.F16, GGMLType.F16)
    node = gqa(4, 4, 32, f16, tokens=4, cells=64, flash=False, **changes).node
    with pytest.raises(UnsupportedError, match=f"attn with {next(iter(changes))}"):
        RULES.check([node])
    with pytest.raises(ValueError, match="without windows"):
        whole_texts(4, 4, 32, tokens=4, slopes=SLOPES[4], window=8)
    with pytest.raises(ValueError, match="one per head"):
        whole_texts(4, 4, 32, tokens=4, slopes=SLOPES[3])


def test_nan_reaches_the_whole_text(rng: np.random.Generator) -> None:
    built = whole_texts(4, 4, 32, tokens=64)
    run = built.run.compile(built.node, 1, {})
    values = {x: rng.standard_normal((30, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    k = next(x for x in values if x.name.startswith("k"))
    values[k][29] = np.nan
    found = run(texts(10, 20), values)
    assert np.isfinite(found[:10]).all() and np.isnan(found[10:]).all()
