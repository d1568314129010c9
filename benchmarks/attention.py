"""Attention on the CPU backend: GFLOP/s, share of the measured f32 FMA peak, and cache bytes read per second.

    python benchmarks/attention.py [--threads 2] [--repeat 5] [--filter decode]

FLOPs are those of the causal mask (positions that a token may see), not of the tiles computed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_harness import Harness, Segment, team

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.backends.cpu.peaks import product_peak
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import row_n_bytes
from ikcli.graph import HeadSlice, Node, Rows, Weight


@dataclass(frozen=True, slots=True)
class Case:
    """A shape: kind "gqa" (separate K and V caches), "expanded" (MLA 192/128) or "absorbed" (MLA 576/512)."""

    name: str
    kind: str
    n_head: int
    n_head_kv: int
    n_tokens: int
    n_kv: int
    type: GGMLType = GGMLType.F16
    head: int = 128
    window: int = 0  # with sinks
    softcap: float = 0.0

    @property
    def widths(self) -> tuple[int, int]:
        return {"gqa": (self.head, self.head), "expanded": (192, 128), "absorbed": (576, 512)}[self.kind]

    @property
    def flops(self) -> float:
        seen = sum(min(self.n_kv - self.n_tokens + i + 1, self.window or self.n_kv) for i in range(self.n_tokens))
        return 2.0 * seen * self.n_head * sum(self.widths)

    @property
    def cache_bytes(self) -> float:
        row = row_n_bytes(self.type, self.head * self.n_head_kv) * 2 if self.kind == "gqa" else 0
        if self.kind == "absorbed":
            row = row_n_bytes(self.type, 576)
        if self.kind == "expanded":
            row = row_n_bytes(self.type, 64) + 4 * 256 * self.n_head
        return float(row * min(self.n_kv, self.window - 1 + self.n_tokens if self.window else self.n_kv))


def build(case: Case, flash: bool = True) -> tuple[Harness, Node, list[tuple[Node, int]]]:
    """Return (harness, result, leaves and their columns)."""
    run = Harness(case.n_tokens, case.n_kv, RULES)
    g, n = run.graph, case.n_head
    g.il = 0
    dk, dv = case.widths
    q = run.input("q", n * dk)
    leaves = [(q, n * dk)]
    parts = [HeadSlice(q, 0, dk, dk)]
    if case.kind == "gqa":
        cols = case.n_head_kv * dk
        k = [HeadSlice(g.cache("k", cols, case.type), 0, dk, dk)]
        v = HeadSlice(g.cache("v", cols, case.type), 0, dv, dv)
    elif case.kind == "absorbed":
        cache = g.cache("kv", 576, case.type)
        k, v = [HeadSlice(cache, 0, 576, 0)], HeadSlice(cache, 64, 512, 0)
    else:
        kv = run.input("kv", n * 256, Rows.KV)
        leaves.append((kv, n * 256))
        parts = [HeadSlice(q, 128, 64, 192), HeadSlice(q, 0, 128, 192)]
        k = [HeadSlice(g.cache("kv", 576, case.type), 0, 64, 0), HeadSlice(kv, 0, 128, 256)]
        v = HeadSlice(kv, 128, 128, 256)
    out = g.attention(parts, k, v, "kqv", n_head=n, n_head_kv=case.n_head_kv, scale=dk**-0.5, flash=flash,
                      window=case.window, softcap=case.softcap,
                      sinks=Weight("sinks", GGMLType.F32, (n,)) if case.window else None)  # fmt: skip
    return run, out, leaves


def measure(case: Case, threads: int, repeat: int, clock: Callable[[], float], flash: bool = True) -> float:
    """Return the best time of one attention node, in seconds."""
    rng = np.random.default_rng(0)
    run, out, leaves = build(case, flash)
    run.compile(out, threads, {"sinks": np.zeros(case.n_head, np.float32)})
    for data in run.caches.values():  # any small finite numbers: 0x2E2E is 0.097 as f16
        data[:] = 0x2E
    segment = Segment(case.n_tokens, 0, case.n_kv - case.n_tokens)
    values = {
        node: rng.standard_normal((case.n_kv if node.rows.symbol is Rows.KV else case.n_tokens, cols), dtype=np.float32)
        for node, cols in leaves
    }
    best = float("inf")
    for _ in range(repeat):
        run.prepare([segment], values)
        start = clock()
        run.execute()
        best = min(best, clock() - start)
    assert np.isfinite(run.program.view(run.arena, out, case.n_tokens)).all()
    return best


CASES = [
    *(Case(f"pp512 gqa 16/4x128 @{n}", "gqa", 16, 4, 512, n) for n in (512, 1024, 4096)),
    *(Case(f"pp512 mha 16x128 @{n}", "gqa", 16, 16, 512, n) for n in (512, 4096)),
    Case("pp512 gqa 14/2x64 @2048", "gqa", 14, 2, 512, 2048, head=64),
    *(Case(f"pp512 mla expanded 16x192/128 @{n}", "expanded", 16, 16, 512, n) for n in (512, 4096)),
    Case("pp512 mla absorbed 16x576/512 @4096", "absorbed", 16, 1, 512, 4096),
    Case("pp512 gqa 16/4x128 @4096 q8_0", "gqa", 16, 4, 512, 4096, GGMLType.Q8_0),
    Case("pp512 gqa 14/2x64 @2048 q8_0", "gqa", 14, 2, 512, 2048, GGMLType.Q8_0, head=64),
    Case("pp512 mla expanded 16x192/128 @4096 q8_0", "expanded", 16, 16, 512, 4096, GGMLType.Q8_0),
    Case("pp512 mla absorbed 16x576/512 @4096 q8_0", "absorbed", 16, 1, 512, 4096, GGMLType.Q8_0),
    Case("decode gqa 16/4x128 @4096", "gqa", 16, 4, 1, 4096),
    Case("decode gqa 16/4x128 @512", "gqa", 16, 4, 1, 512),
    Case("decode gqa 16/4x128 @4096 q8_0", "gqa", 16, 4, 1, 4096, GGMLType.Q8_0),
    Case("decode mha 16x128 @4096", "gqa", 16, 16, 1, 4096),
    Case("decode gqa 32/8x128 @32768", "gqa", 32, 8, 1, 32768),
    Case("decode gqa 32/8x128 @32768 q8_0", "gqa", 32, 8, 1, 32768, GGMLType.Q8_0),
    Case("decode mla 16x576/512 @4096", "absorbed", 16, 1, 1, 4096),
    Case("decode mla 16x576/512 @4096 q8_0", "absorbed", 16, 1, 1, 4096, GGMLType.Q8_0),
    Case("decode mla 16x576/512 @4096 bf16", "absorbed", 16, 1, 1, 4096, GGMLType.BF16),
    Case("decode mla 16x576/512 @4096 q4_0", "absorbed", 16, 1, 1, 4096, GGMLType.Q4_0),
    Case("decode mla 16x576/512 @16384", "absorbed", 16, 1, 1, 16384),
    Case("decode mla 16x576/512 @16384 q8_0", "absorbed", 16, 1, 1, 16384, GGMLType.Q8_0),
    Case("decode mla 128x576/512 @4096", "absorbed", 128, 1, 1, 4096),
    *(Case(f"pp512 gqa 64/8x64 window 128 @{n}", "gqa", 64, 8, 512, n, head=64, window=128) for n in (1024, 32768)),
    *(Case(f"decode gqa 64/8x64 window 128 @{n}", "gqa", 64, 8, 1, n, head=64, window=128) for n in (1024, 32768)),
    *(Case(f"decode gqa 64/8x64 @{n}", "gqa", 64, 8, 1, n, head=64) for n in (128, 1024)),
    Case("pp512 gqa 8/4x256 softcap @4096", "gqa", 8, 4, 512, 4096, head=256, softcap=50.0),
    Case("decode gqa 8/4x256 softcap @4096", "gqa", 8, 4, 1, 4096, head=256, softcap=50.0),
]


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--filter", default="")
    parser.add_argument("--full", action="store_true", help="without flash attention")
    args = parser.parse_args()
    # With one thread processor time counts, so that other work on the machine disturbs less.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    top = product_peak("f32", args.threads, clock)
    print(f"FMA peak, {args.threads} threads: {top / 1e9:.0f} GFLOP/s")
    for case in CASES:
        if args.filter not in case.name:
            continue
        repeat = args.repeat if case.n_tokens > 1 else 5 * args.repeat
        seconds = measure(case, args.threads, repeat, clock, not args.full)
        print(f"{case.name:40} {1e6 * seconds:9.0f} us {case.flops / seconds / 1e9:7.1f} GFLOP/s "
              f"{100 * case.flops / seconds / top:5.1f}% {case.cache_bytes / seconds / 1e9:6.1f} GB/s")  # fmt: skip
    team(args.threads).close()


if __name__ == "__main__":
    main()
