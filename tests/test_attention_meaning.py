"""What windows, chunks, sinks and soft caps of attention mean in NumPy, against sums written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from leaves import leaf

from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Graph, HeadSlice, Per, Weight
from ikcli.graph.micro_batch import MicroBatch, Segment

WIDTH, N_HEAD, N_KV, PAST = 4, 2, 9, 6
SINKS = Weight("attn_sinks", GGMLType.F32, (N_HEAD,))


@pytest.mark.parametrize(
    ("per", "settings", "sees"),
    [
        (Per.CELL, {}, lambda p, t: t <= p),
        (Per.CELL, {"window": 3}, lambda p, t: p - 3 < t <= p),
        (Per.WINDOW, {"window": 3}, lambda p, t: p - 3 < t <= p),
        (Per.CELL, {"chunk": 4}, lambda p, t: t <= p and t // 4 == p // 4),
        (Per.WINDOW, {"chunk": 4}, lambda p, t: t <= p and t // 4 == p // 4),
        (Per.CELL, {"sinks": SINKS}, lambda p, t: t <= p),
        (Per.CELL, {"softcap": 0.5}, lambda p, t: t <= p),
        (Per.WINDOW, {"window": 2, "sinks": SINKS, "softcap": 2.0}, lambda p, t: p - 2 < t <= p),
    ],
)
def test_attention(per: Per, settings: dict, sees, rng: np.random.Generator) -> None:
    g = Graph()
    q, kv = leaf(g, "q", N_HEAD * WIDTH), leaf(g, "kv", WIDTH)
    cache = g.cache("k", WIDTH, GGMLType.F32, per=per)
    g.kv_store(cache, kv, "store")
    part = HeadSlice(cache, 0, WIDTH, 0)
    g.attention([HeadSlice(q, 0, WIDTH, WIDTH)], [part], part, "kqv", n_head=N_HEAD, n_head_kv=1, scale=0.7,
                flash=True, **settings)  # fmt: skip
    sinks = rng.standard_normal(N_HEAD).astype(np.float32)
    store = CacheStore(16, 1, 8)
    run = ReferenceExecutor(lambda name: sinks, store, np.float64)
    rows = rng.standard_normal((N_KV, WIDTH)).astype(np.float32)
    queries = rng.standard_normal((N_KV - PAST, N_HEAD * WIDTH))
    # In a cache of windows positions begin at cell -2: the first two are gone.
    first = 5 if per is Per.CELL else -2
    kept = np.arange(max(0, -first), PAST)
    store.rows(cache)[first + kept] = rows[kept]
    pos = np.arange(PAST, N_KV, dtype=np.int32)
    segment = Segment(0, len(pos), 5, PAST, 0, -2)
    state = MicroBatch(np.zeros(len(pos), np.int32), pos, pos + 5, np.arange(0), (segment,))
    run.state = state
    run._values = {q.index: queries, kv.index: rows[PAST:]}
    for node in g.nodes[2:]:
        run._values[node.index] = node.op.compute(run)
    for i, p in enumerate(pos):
        for h in range(N_HEAD):
            x = queries[i, h * WIDTH : (h + 1) * WIDTH]
            scores = {t: 0.7 * float(x @ rows[t]) for t in range(N_KV) if sees(p, t)}
            if cap := settings.get("softcap"):
                scores = {t: cap * math.tanh(s / cap) for t, s in scores.items()}
            total = sum(math.exp(s) for s in scores.values()) + (math.exp(sinks[h]) if "sinks" in settings else 0)
            want = sum(math.exp(s) / total * rows[t].astype(np.float64) for t, s in scores.items())
            np.testing.assert_allclose(run._values[g.nodes[-1].index][i, h * WIDTH : (h + 1) * WIDTH], want, rtol=1e-6)
