#!/usr/bin/env python3
"""KL divergence of answers after a prompt that rested in the prompt cache with 8 bits (`--cache-rest q8_0`).

The first half of each chunk of a text is computed, stored, and given back to another sequence; the tokens of the second
half then follow there. Their probabilities are compared with those after the rows as they were computed. The last line
is a cache whose rows are Q8_0 all the time (`-ctk q8_0 -ctv q8_0`). The last column is the time to store rows and to
give them back.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.adapters import NOTHING
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.server.prefix.store import PrefixStore
from ikcli.settings.run import RunConfig

DEMO = Path(__file__).resolve().parents[1] / "ikcli" / "data"
Floats = npt.NDArray[np.float64]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=DEMO / "demo.gguf")
    parser.add_argument("-f", "--file", type=Path, default=DEMO / "demo.txt", help="text")
    parser.add_argument("-c", "--ctx", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=16)
    args = parser.parse_args()
    wanted = answers(args, "cache")
    print("| rows at rest | mean KLD | 99 % KLD | same top token | bytes per token | ms per 1000 tokens |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, rest, types in (
        ("as computed (f16)", "cache", {}),
        ("q8_0", "q8_0", {}),
        ("(cache q8_0)", "cache", {"type_k": "q8_0", "type_v": "q8_0"}),
    ):
        found = answers(args, rest, **types)
        logs, seconds, n_bytes = found
        p = np.exp(wanted[0])
        kld = (p * (wanted[0] - logs)).sum(axis=1)
        same = (wanted[0].argmax(axis=1) == logs.argmax(axis=1)).mean()
        print(f"| {name} | {kld.mean():.2e} | {np.quantile(kld, 0.99):.2e} | {100 * same:.2f} % | {n_bytes:.0f} | "
              f"{1e6 * seconds:.1f} |", flush=True)  # fmt: skip


def answers(args: argparse.Namespace, rest: str, **types: str) -> tuple[Floats, float, float]:
    """Return log-probabilities after each token of second halves, seconds and bytes per token of first halves."""
    n_ctx, half = args.ctx, args.ctx // 2
    config = RunConfig(command="serve", model=args.model, n_ctx=2 * n_ctx, warmup=False, **types)
    rows: list[Floats] = []
    seconds = n_bytes = 0.0
    with Session.open(config, n_seq_max=2, n_step=2) as session:
        ids = np.array(session.tokenizer.encode(args.file.read_text()), np.int32)
        n_chunks = min(args.chunks, len(ids) // n_ctx)
        if not n_chunks:
            sys.exit(f"{args.file} has {len(ids)} tokens, fewer than one chunk of {n_ctx}")
        for i in range(n_chunks):
            chunk = ids[i * n_ctx : (i + 1) * n_ctx]
            for seq in (0, 1):
                session.truncate(seq, 0)
            store = PrefixStore(session.sequences, 1 << 34, rest=rest)
            session.decode(Batch.single(chunk[:half], 0, 0))
            start = time.perf_counter()
            store.keep(0, chunk[:half], NOTHING)
            n, _ = store.load(1, store.find(chunk[:half], NOTHING), 0)
            seconds += time.perf_counter() - start
            n_bytes += store.n_bytes
            assert n == half, n
            logits = session.decode(Batch.single(chunk[half:], half, 1, logits="all")).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.concatenate(rows), seconds / (n_chunks * half), n_bytes / (n_chunks * half)


if __name__ == "__main__":
    main()
