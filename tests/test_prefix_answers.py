"""Answers with the prompt cache are those without it, bit by bit, whatever else the server did before.

Tokens are computed one by one (-ub 1), since a micro-batch of another size may round differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_client import GREEDY, Call, request, serving, until
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.server.slots.messages import Final

N_CTX = 256  # a multiple of what sessions round to
CACHES = {"q8_0": {"type_k": "q8_0", "type_v": "q8_0"}, "f16": {}}
GOLDEN = (
    "llama-rope3", "gemma2", "gemma3", "gemma4", "gpt-oss", "mimo2", "llama4", "cohere2",  # windows
    "mamba", "qwen3next", "bailingmoe3", "qwen35",  # states
    "kimi-k2", "mistral4", "glm-dsa-sparse", "glm4moe", "phi3", "qwen35moe",  # latent attention, and others
)  # fmt: skip


def answer(final: Final) -> tuple[Any, ...]:
    """Tokens with the log-probabilities of the likeliest ones."""
    return (final.text, final.stop_type, final.truncated, final.tokens)


def mixed(path: Path, n_slots: int, n_steps: int, folder: Path, **changes: Any) -> tuple[int, int]:
    """Random requests, many at once, some cancelled, some that shift the context; slots saved and restored.

    Returns the prompt tokens that came from slots and from RAM.
    """
    rng = random.Random(n_slots)
    settings = {"model": path, "n_ubatch": 1, "n_batch": 1, "n_threads": 1, "n_threads_batch": 1} | changes
    texts = [[rng.randrange(3, 96) for _ in range(220)] for _ in range(3)]

    def prompt() -> list[int]:
        at = rng.choice((20, 80, 150))
        return rng.choice(texts)[:at] + rng.choice(texts)[at : rng.randrange(at + 1, 220)]

    fields: dict[str, Any] = {"sampling": replace(GREEDY, n_probs=3)}
    known: dict[tuple[tuple[int, ...], int], Any] = {}
    with (
        serving(1, server={"cache_ram": 0}, **settings | {"n_ctx": N_CTX}) as plain,
        serving(n_slots, server={"cache_ram": 1}, **settings | {"n_ctx": N_CTX * n_slots}) as cached,
    ):
        assert cached._worker is not None
        store = cached._worker._reuse.store
        sequences = cached._worker.session.sequences
        per_token, checkpoint = (
            sum(a * b for a, b in shapes) for shapes in (sequences.shapes(1, 1), sequences.checkpoint_shapes(80, 0))
        )
        store.limit = 700 * (per_token + 4) + 8 * checkpoint
        for _ in range(n_steps):
            what = rng.random()
            if what < 0.1:
                slot, file = rng.randrange(n_slots), folder / "slot.bin"
                if not file.exists() or rng.random() < 0.5:
                    cached.slot_action(slot, "save", file).result(60)
                else:
                    cached.slot_action(slot, "restore", file).result(60)
                continue
            wanted = [(tuple(prompt()), rng.choice((1, 4, 4, 60))) for _ in range(rng.randint(1, n_slots))]
            calls = [Call(cached, request(p, n, **fields)) for p, n in wanted]
            if what < 0.25:
                calls[0].ticket.cancel()
                calls, wanted = calls[1:], wanted[1:]
            for call, one in zip(calls, wanted, strict=True):
                if one not in known:
                    known[one] = answer(Call(plain, request(*one, cache_prompt=False, **fields)).final)
                assert answer(call.final) == known[one], one
            assert store.n_bytes <= store.limit
        until(lambda: not any(s.is_processing for s in cached.slots()))
        found = cached.metrics(reset=False)
        return found.prompt_tokens_slot_total, found.prompt_tokens_ram_total


TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model("llama", context_length=1024),
    "gemma2": lambda: tiny_model("gemma2", context_length=1024, **{"attention.sliding_window": 24}),
    "deepseek2": lambda: tiny_deepseek2(context_length=1024),
}


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, n_slots: int, tmp_path: Path) -> None:
    model = TINY[name]()
    metadata: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    path = write_model(model, tmp_path / "model.gguf", metadata)
    from_slots, from_ram = mixed(path, n_slots, 12, tmp_path, warmup=False)
    assert from_slots > 0 and from_ram > 0


@pytest.mark.slow("golden architectures with two types of caches")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_architectures(name: str, n_slots: int, cache: str, shared_dir: Path, tmp_path: Path) -> None:
    path = shared_dir / "golden" / "arch" / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    from_slots, from_ram = mixed(path, n_slots, 40, tmp_path, **CACHES[cache])
    assert from_slots > 0 and from_ram > 0
