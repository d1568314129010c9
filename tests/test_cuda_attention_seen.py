"""Attention of queries that see later positions on the emulated device: images in texts, patches of images."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_attention import Run, Segment
from cuda_emulation import needs_emulation
from test_cuda_attention import T, check, grouped

from ikcli.backends.cuda.lower import DeviceLimits
from ikcli.graph import HeadSlice, Node

pytestmark = [needs_emulation, pytest.mark.slow("compiles and emulates large kernels")]
F16, BF16 = (T.F16, T.F16), (T.BF16, T.BF16)
ONE_SM = DeviceLimits((9, 0), 1, 232448, 233472, 1 << 20, "one SM")
LARGE = DeviceLimits((9, 0), 132, 232448, 233472, 1 << 20, "132 SMs")


def images(segments: list[Segment], spans: list[tuple[int, int, int]]) -> np.ndarray:
    """The ranges of tokens: their own position, and all of it inside an image (segment, first position, tokens)."""
    found = []
    for i, s in enumerate(segments):
        pos = s.pos + np.arange(s.n_tokens)
        ranges = np.stack([pos, pos + 1], axis=1)
        for _, first, n in (span for span in spans if span[0] == i):
            ranges[(pos >= first) & (pos < first + n)] = first, first + n
        found.append(ranges)
    return np.concatenate(found).astype(np.int32)


@pytest.mark.parametrize(
    ("heads", "width", "types", "limits", "window", "kernel"),
    [
        ((6, 2), 128, F16, ONE_SM, 0, "prefill_128_f16_r128w_seen"),
        ((6, 2), 128, F16, LARGE, 24, "prefill_128_f16_r64_seen"),
        ((2, 1), 128, BF16, LARGE, 0, "prefill_128_bf16_r64_seen"),
        ((4, 1), 256, (T.Q8_0, T.Q8_0), LARGE, 16, "prefill_256_f16_r64_seen"),
        ((4, 1), 256, F16, ONE_SM, 0, "prefill_256_f16_r128_seen"),
        ((4, 2), 64, F16, ONE_SM, 5, "prefill_64_f16_r128w_seen"),
        ((4, 2), 48, F16, LARGE, 7, "any"),
        ((4, 2), 80, BF16, LARGE, 0, "any"),
    ],
)
def test_images_in_texts(heads: tuple[int, int], width: int, types: tuple[T, T], limits: DeviceLimits, window: int,
                         kernel: str) -> None:  # fmt: skip
    """Two sequences with images behind, before and between texts; one image has more tokens than a window."""
    segments = [Segment(70, 3, 61), Segment(41, 150, 0)]
    run = Run(128, 256, limits)
    node = grouped(run, *heads, width, types, window=window, ranged=True)
    run.ranges = images(segments, [(0, 64, 33), (0, 110, 21), (1, 0, 40)])
    check(run, node, segments)
    assert f"attn_{kernel}" in run.kernels()
    run.ranges = None
    check(run, node, segments)
    assert not any(name.endswith("_seen") for name in run.kernels())


@pytest.mark.parametrize(("width", "n"), [(72, 200), (16, 9), (80, 130), (64, 1), (200, 20), (264, 20)])
@pytest.mark.parametrize("window", [0, 1])
def test_patches(width: int, n: int, window: int) -> None:
    """Keys and values of the micro-batch itself: all of them, or (with a window) ranges of them."""
    run = Run(256, 256)
    heads = 3
    parts = [HeadSlice(run.input(name, heads * width), 0, width, width) for name in "qkv"]
    node: Node = run.graph.attention(
        parts[:1], parts[1:2], parts[2], "kqv", n_head=heads, n_head_kv=heads, scale=width**-0.5, flash=True,
        window=window, both=not window, ranged=bool(window), half=True,
    )  # fmt: skip
    first = np.arange(n) // 48 * 48
    if window:
        run.ranges = np.stack([first, np.minimum(first + 48, n)], axis=1)
    check(run, node, [Segment(n)])
    seen = [name for name in run.kernels() if name.endswith("_seen")]
    assert bool(seen) == (width <= 256) and (width <= 256 or "attn_any" in run.kernels())


def test_several_texts_of_an_encoder() -> None:
    run = Run(64, 64)
    parts = [HeadSlice(run.input(name, 2 * 64), 0, 64, 64) for name in "qkv"]
    node = run.graph.attention(parts[:1], parts[1:2], parts[2], "kqv", n_head=2, n_head_kv=2, scale=0.125, flash=True,
                               both=True)  # fmt: skip
    check(run, node, [Segment(7), Segment(20, 7), Segment(1, 27)])
