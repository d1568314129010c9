"""Replicas: which one a request goes to, what each gets of the machine, and what their counters say together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ikcli.cli.front_options import passed_on
from ikcli.cli.parser import parse
from ikcli.errors import UsageError
from ikcli.hostinfo import shares
from ikcli.server.front.metrics import metrics_text
from ikcli.server.front.placement import gpu_shares
from ikcli.server.front.prefixes import BLOCK, PrefixIndex, blocks_of
from ikcli.server.front.replica import Replica, choose
from ikcli.server.front.replicas_counters import ReplicaCounters
from ikcli.server.front.replicas_metrics import families
from ikcli.server.front.supervisor import READY
from ikcli.server.http.metrics import DECISION, PER_POSITION, POSITION, STEPS
from ikcli.server.http.users import User, Users


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]} | fields


def test_a_longer_request_shares_all_blocks_of_its_beginning() -> None:
    first = blocks_of(chat("x" * 1000))
    later = blocks_of(chat("x" * 1000, "yes", "and then?" * 50, temperature=0.5))
    assert len(first) >= 1000 // BLOCK and later[: len(first)] == first and len(later) > len(first)
    assert blocks_of(chat("x" * 1000, tools=[{"name": "f" * 200}]))[0] != first[0]
    assert blocks_of({"system": "s" * 200, **chat("x" * 1000)})[1:] != first[1:]
    assert blocks_of({"prompt": "a" * (BLOCK - 1)}) == () and len(blocks_of({"prompt": "a" * BLOCK})) == 1
    ids = list(range(1000))
    assert blocks_of({"prompt": [*ids, 5]})[: len(blocks_of({"prompt": ids}))] == blocks_of({"prompt": ids})
    assert blocks_of({"messages": "no list", "prompt": None, "input": 5, "tools": {}}) == ()


def test_what_is_held_is_forgotten_from_its_end() -> None:
    held = PrefixIndex(most=6)
    a, b, c = (1, 2, 3), (4, 5, 6), (1, 2, 7)
    held.add(a)
    held.add(b)
    assert (held.shared(a), held.shared(b), held.shared((1, 9, 3)), held.shared(())) == (3, 3, 1, 0)
    held.add(c)  # 3 was not asked for since the beginning
    assert (held.shared(a), held.shared(c), held.shared(b)) == (2, 3, 3)
    held.add((8,))
    assert (held.shared(b), held.shared(c)) == (2, 3)
    held.clear()
    assert held.shared(c) == 0


def test_blocks_of_different_beginnings_are_different() -> None:
    """Though their texts are the same: what was computed for them is not."""
    held = PrefixIndex()
    for first, then in ("ab", "cd"):
        held.add(blocks_of({"prompt": first * BLOCK + then * BLOCK}))
    found = {text: held.shared(blocks_of({"prompt": text[0] * BLOCK + text[1] * BLOCK})) for text in ("ab", "ad", "bd")}
    assert found == {"ab": 2, "ad": 1, "bd": 0}


def replicas_of(*running: int) -> list[Replica]:
    return [Replica(i, 2, state=READY, n_running=n) for i, n in enumerate(running)]


def test_the_replica_that_holds_most_unless_it_is_busy() -> None:
    blocks = tuple(range(10))
    replicas = replicas_of(1, 0, 0)
    assert choose(replicas, blocks, 0.5) is replicas[1]
    replicas[1].used = 5
    assert choose(replicas, (), 0.5) is replicas[2]
    replicas[0].held.add(blocks[:6])
    replicas[2].held.add(blocks[:5])
    assert choose(replicas, blocks, 0.5) is replicas[0]
    assert choose(replicas, blocks, 0.9) is replicas[2], (
        "too little to wait behind another one, but better than nothing"
    )
    replicas[0].n_running = 2
    assert choose(replicas, blocks, 0.5) is replicas[2]
    replicas[0].n_running, replicas[1].n_running, replicas[2].n_running = 2, 5, 4
    assert choose(replicas, blocks, 0.5) is replicas[0], "all are busy"
    replicas = replicas_of(1, 0)
    replicas[0].held.add(blocks[:5])
    assert choose(replicas, blocks, 0.5) is replicas[0], "just enough"
    assert choose(replicas, blocks, 0.51) is replicas[1]
    replicas[0].n_running = 2
    assert choose(replicas, blocks, 0.5) is replicas[1], "both slots are busy"
    replicas = replicas_of(1, 0)
    for one in replicas:
        one.held.add(blocks)
    assert choose(replicas, blocks, 0.5) is replicas[1], "both hold it"


def topology(root: Path, cores: list[tuple[int, int]]) -> None:
    for cpu, (package, core) in enumerate(cores):
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")


def test_processors_are_dealt_out_by_whole_cores(tmp_path: Path) -> None:
    """Two packages of two cores with two threads each, numbered as Linux does."""
    topology(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    cpus = set(range(8))
    assert shares(2, cpus, tmp_path) == [frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})]
    assert shares(4, cpus, tmp_path) == [frozenset({i, i + 4}) for i in range(4)]
    assert shares(3, cpus, tmp_path) == [frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 3, 6, 7})]
    assert shares(2, {0, 4, 3}, tmp_path) == [frozenset({0, 4}), frozenset({3})]
    assert shares(5, cpus, tmp_path) == [frozenset()] * 5
    assert shares(2, {0, 1}, tmp_path / "nothing") == [frozenset({0}), frozenset({1})]


def test_gpus_are_dealt_out() -> None:
    assert gpu_shares(2, 0, {}) == ()
    assert gpu_shares(2, 2, {}) == ["0,1", "2,3"]
    assert gpu_shares(2, 1, {"CUDA_VISIBLE_DEVICES": "3,GPU-5,7"}) == ["3", "GPU-5"]
    for visible in ("", "0"):
        with pytest.raises(UsageError, match="--replica-gpus 1 times 2"):
            gpu_shares(2, 1, {"CUDA_VISIBLE_DEVICES": visible})


class Said:
    """A process that says these numbers."""

    def __init__(self, **values: float) -> None:
        kinds = {"tokens_predicted_total": "counter"}
        self.text = "".join(
            f"# HELP llamacpp:{name} Text.\n"
            f"# TYPE llamacpp:{name} {kinds.get(name, 'gauge')}\n"
            f"llamacpp:{name} {value}\n"
            for name, value in values.items()
        )

    async def ask(self, method: str, target: bytes) -> tuple[int, bytes]:
        return 200, self.text.encode()


def test_counters_go_on_when_a_replica_is_started_again() -> None:
    replicas = replicas_of(0, 0)

    async def read(one: Replica, **values: float) -> None:
        await one.counters.read(Said(**values))

    more = {"n_tokens_max": 5, "kv_cache_usage_ratio": 0.5, "requests_processing": 1}
    asyncio.run(read(replicas[0], tokens_predicted_total=10, **more))
    asyncio.run(
        read(replicas[1], tokens_predicted_total=3, n_tokens_max=9, kv_cache_usage_ratio=0, requests_processing=2)
    )
    text = metrics_text(families(replicas), Users([User("anna", b"")])).decode()
    for line in (
        "tokens_predicted_total 13.0", 'replica_tokens_predicted_total{replica="0"} 10.0', "n_tokens_max 9.0",
        "kv_cache_usage_ratio 0.25", "requests_processing 3.0", 'replica_requests_processing{replica="1"} 2.0',
        'replica_up{replica="1"} 1.0', 'user_requests_total{user="anna"} 0.0',
    ):  # fmt: skip
        assert f"llamacpp:{line}\n" in text, line
    replicas[0].counters.carry_over()
    text = metrics_text(families(replicas), Users()).decode()
    assert "llamacpp:tokens_predicted_total 13.0\n" in text and "llamacpp:requests_processing 2.0\n" in text
    asyncio.run(read(replicas[0], tokens_predicted_total=2))
    assert "llamacpp:tokens_predicted_total 15.0\n" in metrics_text(families(replicas), Users()).decode()


def test_counters_of_drafts_by_position_and_decision() -> None:
    replicas = replicas_of(0, 0)
    for one, values in zip(replicas, ({0: 5, 1: 2}, {0: 1}), strict=True):
        said = Said(spec_decode_num_drafts_total=6)
        said.text += generate(PER_POSITION, POSITION, values) + generate(STEPS, DECISION, {"pays": 3})
        asyncio.run(one.counters.read(said))
    replicas[0].counters.carry_over()
    text = metrics_text(families(replicas), Users()).decode()
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6.0\n' in text
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0\n' in text
    assert 'llamacpp:spec_decode_num_steps_total{decision="pays"} 6.0\n' in text


def generate(name: str, label: str, values: Mapping[Any, float]) -> str:
    """As a process tells it."""
    lines = "".join(f'llamacpp:{name}_total{{{label}="{i}"}} {n}\n' for i, n in values.items())
    return f"# TYPE llamacpp:{name}_total counter\n{lines}"


def test_counters_of_a_process_that_says_nothing() -> None:
    counters = ReplicaCounters()
    process = Said()
    process.text = "no metrics"

    asyncio.run(counters.read(process))
    assert counters.values() == {}


def test_options_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they come from, and as they were: those of the process have the same meaning."""
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1024")
    lines = tmp_path / "options"
    lines.write_text("--temp 0.25\n-ot a=CPU\n--port 99\n", encoding="utf-8")
    template = "{{ a }}\u00a0-x"
    argv = ["-np", "3", f"@{lines}", "--chat-template", template, "-ot", "b=CPU", "--api-key", "secret"]
    argv += ["--lora-scaled", "a.gguf", "0.5", "--no-context-shift", "-ub=64", "--jinja", "off", "-r", "-x"]
    argv += ["--ppl-stride", "5"]
    found = passed_on("serve", argv, lambda path: path in ("server.port", "server.api_key"))
    assert not any("secret" in token or "99" in token for token in found)
    monkeypatch.delenv("LLAMA_ARG_CTX_SIZE")
    config = parse("serve", found).config
    assert (config.n_parallel, config.n_ctx, config.sampling.temperature, config.n_ubatch) == (3, 1024, 0.25, 64)
    assert config.server.chat_template == template and config.server.context_shift is False and not config.server.jinja
    assert config.prompt.reverse_prompt == ("-x",) and config.server.port == 8080
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1024")
    whole = parse("serve", argv).config
    assert config.override_tensor == whole.override_tensor and len(config.override_tensor) == 2
    assert config.adapters == whole.adapters and config.adapters.lora_scaled
